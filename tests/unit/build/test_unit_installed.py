"""What is remembered of the installed compiler: only of wheels, and only as long as they are the same."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from hatch_cuda_aot.installed import Identity, identify, recall, remember
from hatch_cuda_aot.toolchain import Needs, Toolchain, line_named, requirements

LINE = line_named("13.0")
NVRTC = "nvidia/cu13/lib/libnvrtc.so.13"
PTXAS = "nvidia/cu13/bin/ptxas"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with the wheels of a compiler, as far as their records go."""
    site = tmp_path / "site"
    for requirement in requirements(LINE, Needs()):
        install(site, requirement.partition("==")[0])
    monkeypatch.setattr(sys, "path", [str(site)])
    return site


def install(site: Path, name: str, version: str = "1.0") -> None:
    files = {"nvidia-cuda-nvrtc": [NVRTC], "nvidia-cuda-nvcc": [PTXAS], "nvidia-cuda-cccl": ["nvidia/cu13/include/a.h"]}
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{file},sha256=abc,5" for file in files.get(name, [])]
    (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,", ""]))
    for file in files.get(name, []):
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text("a file")


def toolchain(site: Path) -> Toolchain:
    return Toolchain(
        "13.0",
        "13.0.88",
        "13.0.88",
        str(site / PTXAS),
        "3000000",
        (("include", str(site / "nvidia/cu13/include")),),
        (75,),
    )


def identity(needs: Needs | None = None) -> Identity:
    found = identify(LINE, needs or Needs())
    assert found is not None
    return found


def test_what_was_remembered(site: Path, tmp_path: Path) -> None:
    """The same wheels give the same answer again, equal in every field."""
    assert recall(tmp_path, identity()) is None
    remember(tmp_path, identity(), toolchain(site))
    assert recall(tmp_path, identity()) == toolchain(site)
    assert identity().programs == {str(site / NVRTC), str(site / PTXAS)}


@pytest.mark.parametrize("change", ["record", "time", "size", "version", "place", "line", "needs"])
def test_another_compiler(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Whatever could mean another compiler is another identity."""
    before = identity()
    after = None
    if change == "record":
        record = next(site.glob("nvidia_cuda_cccl*/RECORD"))
        record.write_text(record.read_text().replace("abc", "abd"))
    elif change == "time":
        os.utime(site / NVRTC, (1, 1))
    elif change == "size":
        stat = (site / PTXAS).stat()
        (site / PTXAS).write_text("another file")
        os.utime(site / PTXAS, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "version":
        next(site.glob("nvidia_cuda_nvcc*")).rename(site / "elsewhere")
        install(site, "nvidia-cuda-nvcc", "1.1")
    elif change == "place":
        site.rename(tmp_path / "moved")
        monkeypatch.setattr(sys, "path", [str(tmp_path / "moved")])
    elif change == "line":
        after = identify(line_named("13.1"), Needs())
    else:
        install(site, "nvidia-curand")
        after = identify(LINE, Needs(curand=True))
    assert after is None or after.digest != before.digest
    assert identity().digest != before.digest or change in {"line", "needs"}


@pytest.mark.parametrize("gone", ["nvidia_cuda_nvrtc-1.0.dist-info", NVRTC, "nvidia_cuda_cccl-1.0.dist-info/RECORD"])
def test_nothing_without_its_wheels(site: Path, gone: str) -> None:
    """A part that is missing, or was not installed from a wheel, is found out by asking the compiler."""
    (site / gone).rename(site / "gone")
    assert identify(LINE, Needs()) is None


@pytest.mark.parametrize("foreign", [{"ptxas_path": "/usr/bin/ptxas"}, {"include_dirs": (("cccl", "/usr/include"),)}])
def test_parts_from_elsewhere(site: Path, tmp_path: Path, foreign: dict[str, str]) -> None:
    """A compiler with a part that is of none of its wheels is not remembered."""
    remember(tmp_path, identity(), dataclasses.replace(toolchain(site), **foreign))  # type: ignore[arg-type]
    assert recall(tmp_path, identity()) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"line": "13.0", "digest": ""}'])
def test_damaged(site: Path, tmp_path: Path, content: str) -> None:
    """What is damaged, or was written by another version of this program, is not believed."""
    remember(tmp_path, identity(), toolchain(site))
    (file,) = (tmp_path / "compilers").iterdir()
    for damaged in (content, file.read_text().replace("13.0.88", "13.0.89", 1)):
        file.write_text(damaged)
        assert recall(tmp_path, identity()) is None


def test_fewer_fields(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lacks a field, as another version of this program wrote it, is not filled up with a default."""

    @dataclasses.dataclass(frozen=True)
    class Newer(Toolchain):
        more: str = ""

    remember(tmp_path, identity(), toolchain(site))
    monkeypatch.setattr("hatch_cuda_aot.installed.Toolchain", Newer)
    assert recall(tmp_path, identity()) is None


def test_unwritable(site: Path, tmp_path: Path) -> None:
    """Where nothing can be kept, the compiler is asked every time."""
    (tmp_path / "file").write_text("")
    remember(tmp_path / "file", identity(), toolchain(site))
    assert recall(tmp_path / "file", identity()) is None


def test_few_are_kept(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments that are gone do not fill the folder."""
    monkeypatch.setattr("hatch_cuda_aot.installed.LIMIT", 3)
    for number in range(5):
        os.utime(site / NVRTC, (number, number))
        remember(tmp_path, identity(), toolchain(site))
    assert len(list((tmp_path / "compilers").iterdir())) == 3
    assert recall(tmp_path, identity()) is not None
