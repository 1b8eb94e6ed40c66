"""The cache of machine code compiled on this machine: what it hands out, and what it does where it cannot work."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hatch_cuda_aot.runtime import jit_cache
from hatch_cuda_aot.runtime.jit_cache import LIMIT, JitCache, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY, OTHER = key_of(name="one"), key_of(name="other")
LOGGER = "demo.cuda_aot"
PAYLOAD = bytes(range(256)) * 8

needs_posix = pytest.mark.skipif(os.name == "nt", reason="modes and owners are not looked at on Windows")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that does not exist yet."""
    return tmp_path / "home" / "cache"


@pytest.fixture
def other_user() -> Iterator[Path]:
    """Be a user who is not root, and get a folder that belongs to that one."""
    folder = Path(tempfile.mkdtemp(prefix="cuda-aot-test-"))
    try:
        with unprivileged(folder):
            yield folder
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)


@contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """Be a user who is not root, to whom `folder` belongs."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, 65534, 65534)
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_what_is_stored_comes_back(folder: Path) -> None:
    """Through another object too, as in another process; and only under its own key."""
    cache = JitCache(str(folder), LOGGER)
    assert cache.get(KEY) is None
    assert not folder.exists()
    cache.put(KEY, PAYLOAD)
    cache.put(KEY, PAYLOAD)
    for reader in (cache, JitCache(str(folder), LOGGER)):
        assert reader.get(KEY) == PAYLOAD
        assert reader.get(OTHER) is None
    assert len(entries(folder)) == 1
    cache.drop(KEY)
    cache.drop(OTHER)
    assert cache.get(KEY) is None
    assert entries(folder) == []


@needs_posix
def test_new_folder_is_closed(folder: Path) -> None:
    """The cache's own folder and files are for the user alone, whatever the umask is."""
    umask = os.umask(0)
    try:
        JitCache(str(folder), LOGGER).put(KEY, PAYLOAD)
    finally:
        os.umask(umask)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in entries(folder)] == [0o600]


@pytest.mark.parametrize("step", [1, 64])
def test_every_damage_is_caught(folder: Path, step: int) -> None:
    """Cut or with a byte flipped anywhere, an entry is not handed out; it is removed, and can be stored again."""
    cache = JitCache(str(folder), LOGGER)
    payload = PAYLOAD[: 256 * step]
    cache.put(KEY, payload)
    (path,) = entries(folder)
    whole = path.read_bytes()
    damaged = [whole[:cut] for cut in range(0, len(whole), step)]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), step)]
    damaged += [whole + b"\0", whole[:100] + whole]
    for content in damaged:
        path.write_bytes(content)
        assert cache.get(KEY) is None
        assert not path.exists()
    cache.put(KEY, payload)
    assert cache.get(KEY) == payload


def test_entry_under_another_key(folder: Path) -> None:
    """A whole entry that was renamed is damaged as well."""
    cache = JitCache(str(folder), LOGGER)
    cache.put(KEY, PAYLOAD)
    (path,) = entries(folder)
    path.rename(path.with_name(path.name.replace(KEY, OTHER)))
    assert cache.get(OTHER) is None


def test_keys() -> None:
    """Names and values of the fields make the key, their order does not; neighbours never run into each other."""
    keys = {
        key_of(a="1"),
        key_of(b="1"),
        key_of(a="2"),
        key_of(a=1),
        key_of(a=None),
        key_of(a=["1"]),
        key_of(a="1", b=""),
    }
    assert len(keys) == 7
    assert key_of(a="1", b="2") == key_of(b="2", a="1")
    assert key_of(a="1", b="23") != key_of(a="12", b="3")


def test_schema_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another layout of entries never meets old ones."""
    monkeypatch.setattr(jit_cache, "_SCHEMA", jit_cache._SCHEMA + 1)
    assert key_of(name="one") != KEY


def test_eviction_by_last_read(folder: Path) -> None:
    """Over the limit the entries go that were read longest ago, not those that were written first."""
    JitCache(str(folder), LOGGER).put(KEY, PAYLOAD)
    size = entries(folder)[0].stat().st_size
    cache = JitCache(str(folder), LOGGER, limit=3 * size)
    keys = [KEY, *(key_of(number=number) for number in range(3))]
    for age, key in zip((50, 40, 30), keys, strict=False):
        cache.put(key, PAYLOAD)
        os.utime(folder / f"{key}.jit", (time.time() - age,) * 2)
    assert cache.get(KEY) == PAYLOAD
    cache.put(keys[3], PAYLOAD)
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]
    assert LIMIT == 256 * 1024 * 1024


def test_what_is_not_ours_stays(folder: Path) -> None:
    """Other files in the folder are neither counted nor removed; what a killed process left goes after an hour."""
    folder.mkdir(parents=True, mode=0o700)
    for name, age in (("notes.txt", 9999), ("tmp-old", 9999), ("tmp-new", 5)):
        (folder / name).write_bytes(PAYLOAD)
        os.utime(folder / name, (time.time() - age,) * 2)
    JitCache(str(folder), LOGGER, limit=1).put(KEY, PAYLOAD)
    assert [path.name for path in entries(folder)] == ["notes.txt", "tmp-new"]


@pytest.mark.parametrize("limit", [LIMIT, 1])
def test_many_processes(folder: Path, tmp_path: Path, limit: int) -> None:
    """64 processes that start at once and share the folder leave one good entry, nothing else, and say nothing."""
    code = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from hatch_cuda_aot.runtime.jit_cache import JitCache
cache = JitCache({str(folder)!r}, "demo", limit={limit})
payload = bytes(200_000)
open(os.path.join({str(tmp_path)!r}, f"ready-{{os.getpid()}}"), "w").close()
while not os.path.exists({str(tmp_path / "go")!r}):
    time.sleep(0.001)
for _ in range(20):
    found = cache.get({KEY!r})
    assert found in (None, payload)
    cache.put({KEY!r}, payload)
"""
    processes = [
        subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(64)
    ]
    while len(list(tmp_path.glob("ready-*"))) < 64 and all(process.poll() is None for process in processes):
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert [(process.communicate()[0], process.returncode) for process in processes] == [(b"", 0)] * 64
    assert [path.name for path in entries(folder)] == ([f"{KEY}.jit"] if limit > 1 else [])
    assert JitCache(str(folder), "demo").get(KEY) == (bytes(200_000) if limit > 1 else None)


@needs_posix
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707, 0o770, 0o720])
def test_folder_that_others_may_write_to(folder: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused, what lies in it is not read, and the one warning says what to do."""
    JitCache(str(folder), LOGGER).put(KEY, PAYLOAD)
    folder.chmod(mode)
    cache = JitCache(str(folder), LOGGER)
    for _ in range(2):
        assert cache.get(KEY) is None
        cache.put(OTHER, PAYLOAD)
    assert len(entries(folder)) == 1
    (message,) = messages(caplog)
    assert message == (
        f"kernels that are compiled on this machine are not cached: others may write to {folder}, and could put code "
        f"there: chmod go-w {folder} (CUDA_AOT_CACHE=0 turns this off)"
    )
    folder.chmod(0o755)
    assert JitCache(str(folder), LOGGER).get(KEY) == PAYLOAD


@needs_posix
def test_folder_of_another_user(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused, also by root, to whom everything is open."""
    JitCache(str(folder), LOGGER).put(KEY, PAYLOAD)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        folder = Path("/")
    cache = JitCache(str(folder), LOGGER)
    assert cache.get(KEY) is None
    cache.put(OTHER, PAYLOAD)
    assert not (folder / f"{OTHER}.jit").exists()
    (message,) = messages(caplog)
    assert f"{folder} belongs to another user" in message


@needs_posix
def test_read_only_folder(other_user: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is there is read; what cannot be stored is said once."""
    JitCache(str(other_user), LOGGER).put(KEY, PAYLOAD)
    other_user.chmod(0o500)
    cache = JitCache(str(other_user), LOGGER)
    for key in (OTHER, key_of(name="third")):
        assert cache.get(KEY) == PAYLOAD
        assert cache.get(key) is None
        cache.put(key, PAYLOAD)
    (message,) = messages(caplog)
    assert f"{other_user} cannot be written to: Permission denied" in message


@needs_posix
def test_damage_in_a_read_only_folder(other_user: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An entry that is damaged and cannot be removed is not handed out either."""
    JitCache(str(other_user), LOGGER).put(KEY, PAYLOAD)
    (path,) = entries(other_user)
    path.write_bytes(path.read_bytes()[:-1])
    other_user.chmod(0o500)
    cache = JitCache(str(other_user), LOGGER)
    assert cache.get(KEY) is None
    assert cache.get(KEY) is None
    assert messages(caplog) == []


@needs_posix
def test_folder_that_cannot_be_made(other_user: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a container whose user has no home, say."""
    other_user.chmod(0o500)
    cache = JitCache(str(other_user / "home" / "cache"), LOGGER)
    for _ in range(2):
        assert cache.get(KEY) is None
        cache.put(KEY, PAYLOAD)
    (message,) = messages(caplog)
    assert "cannot be written to: Permission denied" in message


@pytest.mark.parametrize("depth", ["file", "file/cache"])
def test_file_in_the_way(tmp_path: Path, depth: str, caplog: pytest.LogCaptureFixture) -> None:
    """A file where the folder, or one above it, should be costs one warning, whichever comes first, reading or writing."""
    (tmp_path / "file").touch()
    for first in (JitCache.get, lambda cache, key: cache.put(key, PAYLOAD)):
        caplog.clear()
        cache = JitCache(str(tmp_path / depth), LOGGER)
        first(cache, KEY)
        cache.put(KEY, PAYLOAD)
        assert cache.get(KEY) is None
        (message,) = messages(caplog)
        assert str(tmp_path / depth) in message


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where there is no space left nothing half written stays, nobody tries again, and what is there is still read."""
    cache = JitCache(str(folder), LOGGER)
    cache.put(KEY, PAYLOAD)
    real, tried = tempfile.mkstemp, []

    def full(prefix: str, dir: str) -> tuple[int, str]:  # noqa: A002
        descriptor, path = real(prefix=prefix, dir=dir)
        os.close(descriptor)
        tried.append(path)
        return os.open("/dev/full", os.O_WRONLY), path

    monkeypatch.setattr(tempfile, "mkstemp", full)
    for key in (OTHER, key_of(name="third")):
        cache.put(key, PAYLOAD)
        assert cache.get(key) is None
    assert cache.get(KEY) == PAYLOAD
    assert len(entries(folder)) == len(tried) == 1
    (message,) = messages(caplog)
    assert f"cannot be written to: {os.strerror(errno.ENOSPC)}" in message


def test_folder_that_vanishes(folder: Path) -> None:
    """A folder that is removed while the process runs is made again."""
    cache = JitCache(str(folder), LOGGER)
    cache.put(KEY, PAYLOAD)
    shutil.rmtree(folder)
    assert cache.get(KEY) is None
    cache.put(KEY, PAYLOAD)
    assert cache.get(KEY) == PAYLOAD


def test_windows_keeps_a_file_that_is_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There, an entry that another process reads cannot be replaced; it is as good, so nothing is wrong."""
    cache = JitCache(str(folder), LOGGER)
    cache.put(KEY, PAYLOAD)

    def replace(_source: str, target: str) -> None:
        raise PermissionError(13, "in use", target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        patch.setattr(os, "name", "nt")
        cache.put(KEY, PAYLOAD)
        assert not caplog.records
        cache.put(OTHER, PAYLOAD)
    assert "in use" in caplog.text
    assert cache.get(KEY) == PAYLOAD
    assert len(entries(folder)) == 1


@pytest.mark.parametrize("value", ["0", "false", "No", " off "])
def test_off(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str, caplog: pytest.LogCaptureFixture) -> None:
    """CUDA_AOT_CACHE=0 turns the cache off without a word."""
    monkeypatch.setenv("CUDA_AOT_CACHE", value)
    monkeypatch.setenv("CUDA_AOT_CACHE_DIR", str(folder))
    cache = JitCache.from_environment(LOGGER)
    cache.put(KEY, PAYLOAD)
    assert cache.get(KEY) is None
    cache.drop(KEY)
    assert not folder.exists()
    assert not caplog.records


def test_folder_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_AOT_CACHE_DIR names the folder, from the current one or the user's home; else it is the platform's."""
    monkeypatch.delenv("CUDA_AOT_CACHE", raising=False)
    monkeypatch.setenv("CUDA_AOT_CACHE_DIR", str(folder))
    assert JitCache.from_environment(LOGGER).folder == str(folder)
    monkeypatch.setenv("CUDA_AOT_CACHE_DIR", "~/somewhere")
    assert JitCache.from_environment(LOGGER).folder == os.path.expanduser(os.path.join("~", "somewhere"))
    monkeypatch.setenv("CUDA_AOT_CACHE_DIR", "")
    platformdirs = pytest.importorskip("platformdirs")
    assert JitCache.from_environment(LOGGER).folder == platformdirs.user_cache_dir("cuda-aot", appauthor=False)


def test_platformdirs_is_missing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without platformdirs there is no cache, and the warning names it and the other way out."""
    monkeypatch.delenv("CUDA_AOT_CACHE", raising=False)
    monkeypatch.delenv("CUDA_AOT_CACHE_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    cache = JitCache.from_environment(LOGGER)
    cache.put(KEY, PAYLOAD)
    assert cache.get(KEY) is None
    (message,) = messages(caplog)
    assert "pip install platformdirs, or set CUDA_AOT_CACHE_DIR to a folder" in message


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged, all of it as warnings of the right logger."""
    assert {(record.name, record.levelno) for record in caplog.records} <= {(LOGGER, logging.WARNING)}
    return [record.getMessage() for record in caplog.records]
