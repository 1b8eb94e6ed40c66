"""Reading files verified: small ones at once, large ones in parts."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from typing import TYPE_CHECKING

import pytest

from hatch_cuda_aot.runtime import files
from hatch_cuda_aot.runtime.files import DamagedError, read_verified

if TYPE_CHECKING:
    from pathlib import Path


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digests(content: bytes) -> list[str]:
    """Return the digest of each part of `content`."""
    return [digest(content[at : at + files.PART_BYTES]) for at in range(0, len(content), files.PART_BYTES)]


@pytest.fixture(params=[1, 6], ids=["one CPU", "six CPUs"])
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 bytes, so that a small file has many, read by as many threads as the parameter says."""
    monkeypatch.setattr(files, "PART_BYTES", 64)
    monkeypatch.setattr(files, "_cpus", lambda: request.param)


CONTENT = random.Random(0).randbytes(1000)


def test_whole(tmp_path: Path) -> None:
    """A file that is as it was written is returned."""
    path = tmp_path / "image"
    path.write_bytes(CONTENT)
    assert read_verified(str(path), len(CONTENT), digest(CONTENT)) == CONTENT


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("size", [65, 128, 129, 1000])
def test_parts(tmp_path: Path, size: int) -> None:
    """So is one that is read in parts, whatever is left for the last."""
    path = tmp_path / "image"
    content = CONTENT[:size]
    path.write_bytes(content)
    threads = threading.active_count()
    assert read_verified(str(path), size, digest(content), digests(content)) == content
    assert threading.active_count() == threads


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("in_parts", [False, True])
def test_every_damage(tmp_path: Path, *, in_parts: bool) -> None:
    """With any byte flipped, cut at any length or longer, it is an error that names path, expectation and finding."""
    path = tmp_path / "image"
    parts = digests(CONTENT) if in_parts else []
    damaged = [CONTENT[:at] + bytes([CONTENT[at] ^ 1]) + CONTENT[at + 1 :] for at in range(0, len(CONTENT), 7)]
    damaged += [CONTENT[:at] for at in range(0, len(CONTENT), 7)] + [CONTENT + b"\0"]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(DamagedError, match=r"image is damaged: expected .*, found ") as caught:
            read_verified(str(path), len(CONTENT), digest(CONTENT), parts)
        assert caught.value.path == str(path)


@pytest.mark.usefixtures("small_parts")
def test_names_the_part(tmp_path: Path) -> None:
    """Of a large file the error says which bytes."""
    path = tmp_path / "image"
    path.write_bytes(CONTENT[:200] + b"x" + CONTENT[201:])
    with pytest.raises(
        DamagedError, match=r"expected SHA-256 [0-9a-f]{64} of bytes 192 to 255, found SHA-256 [0-9a-f]{64}"
    ):
        read_verified(str(path), len(CONTENT), digest(CONTENT), digests(CONTENT))


@pytest.mark.usefixtures("small_parts")
def test_too_few_digests(tmp_path: Path) -> None:
    """A part without a digest is never taken on trust."""
    path = tmp_path / "image"
    path.write_bytes(CONTENT)
    with pytest.raises(DamagedError, match=r"expected 16 digests of parts, found 15 in the manifest"):
        read_verified(str(path), len(CONTENT), digest(CONTENT), digests(CONTENT)[:-1])


@pytest.mark.usefixtures("small_parts")
def test_no_more_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started the calling one reads everything."""
    path = tmp_path / "image"
    path.write_bytes(CONTENT)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert read_verified(str(path), len(CONTENT), digest(CONTENT), digests(CONTENT)) == CONTENT


def test_missing_and_unreadable(tmp_path: Path) -> None:
    """What cannot be read is damaged, in the system's words."""
    with pytest.raises(DamagedError, match="expected 7 bytes, found No such file or directory"):
        read_verified(str(tmp_path / "image"), 7, "")
    with pytest.raises(DamagedError, match="expected 7 bytes, found "):
        read_verified(str(tmp_path), 7, "")


@pytest.mark.usefixtures("small_parts")
def test_file_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced under the reader's eyes ends in the error, in parts or at once."""
    path = tmp_path / "image"
    path.write_bytes(CONTENT[:500])

    class Status:
        st_size = len(CONTENT)

    monkeypatch.setattr(os, "fstat", lambda _: Status)
    for parts in ([], digests(CONTENT)):
        with pytest.raises(DamagedError, match="bytes"):
            read_verified(str(path), len(CONTENT), digest(CONTENT), parts)


def test_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that returns less than was asked for is asked again."""
    path = tmp_path / "image"
    path.write_bytes(CONTENT)
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, size: read(descriptor, min(size, 100)))
    assert read_verified(str(path), len(CONTENT), digest(CONTENT)) == CONTENT
