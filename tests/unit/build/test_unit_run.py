"""Running tasks: what the end of a compiler says of its input, and what it does not."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hatch_cuda_aot.compile import run as run_module
from hatch_cuda_aot.compile.parts import Parts
from hatch_cuda_aot.compile.run import run
from hatch_cuda_aot.compile.tasks import AssembleTask, Compiler, FloorResult, FloorTask
from hatch_cuda_aot.errors import BuildError, CompileError, WorkerCrashError
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.toolchain import Needs, line_named

needs_a_shell = pytest.mark.skipif(os.name != "posix", reason="a stand-in for ptxas is a shell script")

PTX = b".version 8.8\n.target sm_90\n.address_size 64\n"
FLOOR = FloorTask(Compiler("12.9"), "k", Arch(90, virtual=True), PTX, ())
ASSEMBLE = AssembleTask(Compiler("12.9"), "k", Arch(90), PTX, ())


@pytest.fixture
def ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets what ptxas does."""
    program = tmp_path / "ptxas"
    parts = Parts(line_named("12.9"), Needs(), str(program), ())
    monkeypatch.setattr(run_module, "_parts", lambda _: parts)
    monkeypatch.setattr(run_module, "_minimum_driver", lambda *_: 12090)

    def use(body: str) -> None:
        program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        program.chmod(0o755)

    return use


@needs_a_shell
@pytest.mark.parametrize("body", ["echo 'fatal : Unsupported .version'; exit 255", "kill -SEGV $$", "kill -ABRT $$"])
def test_floor_of_what_ptxas_refuses(ptxas: Callable[[str], None], body: str) -> None:
    """Versions that ptxas refuses, or on which it crashes by itself, are below the floor."""
    ptxas(body)
    assert run(FLOOR) == FloorResult("8.8", 12090)


@needs_a_shell
@pytest.mark.parametrize("name", ["KILL", "TERM", "INT", "HUP"])
def test_floor_when_ptxas_is_killed(ptxas: Callable[[str], None], name: str) -> None:
    """If ptxas is killed from outside, for lack of memory for one, that is no answer: a wrong floor would be kept."""
    ptxas(f"kill -{name} $$")
    with pytest.raises(WorkerCrashError) as caught:
        run(FLOOR)
    assert caught.value.log == f"SIG{name}" == signal.Signals[f"SIG{name}"].name


@needs_a_shell
@pytest.mark.parametrize("task", [FLOOR, ASSEMBLE], ids=["floor", "assemble"])
def test_full_disk(ptxas: Callable[[str], None], task: FloorTask | AssembleTask) -> None:
    """A full disk is no answer either; it is said once, with advice, and as no compiler's fault."""
    ptxas('for last; do :; done; : > "$last"')
    with pytest.raises(
        BuildError, match=r"^cannot write temporary files below .*: No space left on device\."
    ) as caught:
        run(task)
    assert str(caught.value).endswith("Free some space, or set TMPDIR")
    assert not isinstance(caught.value, CompileError)


def test_other_errors_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system that has another cause is shown as it is."""

    def fail(_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(run_module, "_parts", fail)
    with pytest.raises(OSError, match="Bad file descriptor"):
        run(ASSEMBLE)
