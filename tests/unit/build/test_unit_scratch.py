"""Temporary folders: gone with their build, and those of killed builds gone with the next; never those of living ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hatch_cuda_aot import scratch
from hatch_cuda_aot.errors import BuildError
from hatch_cuda_aot.scratch import Scratch, is_abandoned, locked, try_lock

pytestmark = pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")

REPOSITORY = Path(__file__).parents[3]

#: Another process that makes a folder, tells its name, and waits.
OTHER = "import sys\nfrom hatch_cuda_aot.scratch import Scratch\ns = Scratch()\nprint(s.path, flush=True)\nsys.stdin.read()\n"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def other_build() -> tuple[subprocess.Popen[str], Path]:
    """Start another process that has a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_life(temporary: Path) -> None:
    """It is there until it is closed, with all that is in it; closing twice is no error."""
    made = Scratch()
    assert made.path.parent == temporary
    (made.path / "deep").mkdir()
    (made.path / "deep" / "file").write_bytes(b"x")
    made.close()
    made.close()
    assert list(temporary.iterdir()) == []


def test_end_of_the_process(temporary: Path) -> None:
    """A process that ends without closing it, as after an error, removes it."""
    process, folder = other_build()
    assert folder.parent == temporary
    process.communicate("")
    assert list(temporary.iterdir()) == []


def test_killed_build(temporary: Path) -> None:
    """What a killed build left goes with the next build; what a living one uses stays."""
    living, kept = other_build()
    killed, left = other_build()
    (left / "stage").mkdir()
    (left / "stage" / "k.cu").write_bytes(b"")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.is_dir()
    made = Scratch()
    assert sorted(temporary.iterdir()) == sorted([made.path, kept])
    living.communicate("")
    made.close()
    assert list(temporary.iterdir()) == []


def test_what_is_not_ours(temporary: Path) -> None:
    """Files, links and folders of other names stay, whatever is next to ours."""
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / "file").write_bytes(b"mine")
    (temporary / "hatch-cuda-aot-build-file").write_bytes(b"mine")
    (temporary / "hatch-cuda-aot-build-link").symlink_to(temporary / "elsewhere")
    before = sorted(path.name for path in temporary.rglob("*"))
    Scratch().close()
    assert sorted(path.name for path in temporary.rglob("*")) == before


def test_folder_swept_before_it_was_locked(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """If another build is faster than the lock, the next try gets a folder."""
    answers = [False, True]
    monkeypatch.setattr(scratch, "try_lock", lambda _: answers.pop(0))
    monkeypatch.setattr(scratch, "_sweep", lambda _: None)
    made = Scratch()
    assert list(temporary.iterdir()) == [made.path]
    made.close()


def test_without_locks(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """Where nothing can be locked, builds work, and nothing is taken for abandoned."""
    monkeypatch.setattr(scratch, "try_lock", lambda _: False)
    first, second = Scratch(), Scratch()
    assert sorted(temporary.iterdir()) == sorted([first.path, second.path])
    first.close()
    second.close()
    assert list(temporary.iterdir()) == []


def test_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a place for temporary files the error says what to do."""

    def full(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(BuildError) as caught:
        Scratch()
    assert str(caught.value) == (
        "cannot make a temporary folder: No space left on device. Set TMPDIR to a folder with free space"
    )


def test_locks(tmp_path: Path) -> None:
    """A lock is held as long as its file is open, and a name that is not there is nobody's."""
    path = tmp_path / "file"
    path.write_bytes(b"")
    with path.open("rb") as file:
        assert try_lock(file.fileno())
        assert not is_abandoned(path)
    assert is_abandoned(path)
    assert not is_abandoned(tmp_path / "none")


def test_waiting_for_each_other(tmp_path: Path) -> None:
    """One at a time is in the block, and a folder that cannot be opened is no reason to fail."""
    with locked(tmp_path) as alone:
        assert alone
        assert not is_abandoned(tmp_path)
    assert is_abandoned(tmp_path)
    with locked(tmp_path / "none") as alone:
        assert not alone


def test_many_at_once(tmp_path: Path) -> None:
    """Processes that make theirs at the same time, and sweep, leave each other's alone."""
    code = (
        "from hatch_cuda_aot.scratch import Scratch\n"
        "for _ in range(50):\n"
        "    scratch = Scratch()\n"
        "    (scratch.path / 'mine').touch()\n"
        "    assert (scratch.path / 'mine').exists()\n"
        "    scratch.close()\n"
    )
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE, text=True) for _ in range(6)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert errors == [""] * 6
    assert list(tmp_path.iterdir()) == []
