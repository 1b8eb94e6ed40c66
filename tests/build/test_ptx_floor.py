"""PTX whose version line is lowered to its floor assembles with the very assemblers of older drivers."""

from __future__ import annotations

import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from hatch_cuda_aot.compile.ptx import parse, with_version
from hatch_cuda_aot.compile.ptxas import PtxasCrashError, PtxasError, assemble
from hatch_cuda_aot.results import Image, ModuleResult
from hatch_cuda_aot.runtime.arch import Arch
from tests.build import _functions as remote
from tests.build.conftest import EXAMPLE, Compiler

#: Releases of ptxas on the package index, the newest of each toolkit, and the architectures that they know.
OLD = {
    "12.0.140": (75, 80, 86, 89, 90),
    "12.2.140": (75, 80, 86, 89, 90),
    "12.4.131": (75, 80, 86, 89, 90),
    "12.6.85": (75, 80, 86, 89, 90),
    "12.8.93": (75, 80, 86, 89, 90, 100, 120),
    "12.9.86": (75, 80, 86, 89, 90, 100, 103, 120, 121),
}


@pytest.fixture(scope="module")
def ptx_images(compiler: Compiler) -> list[Image]:
    """The PTX of every module of the example."""
    table = {**remote.read_table(EXAMPLE / "pyproject.toml"), "cuda": compiler.line}
    table["archs"] = ["compute_75", "compute_80", "compute_90", "compute_120"]
    modules: tuple[ModuleResult, ...] = compiler.call(remote.build, EXAMPLE, table, "src/example_pkg")
    return [image for module in modules for image in module.images]


@pytest.fixture(scope="module", params=OLD)
def old_ptxas(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Each of the old assemblers, as its version and its path."""
    version: str = request.param
    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir(f"ptxas-{version}"))
    program = folder / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
    with FileLock(folder.with_suffix(".lock")):  # tests run in several processes
        if not program.is_file():
            _fetch(version, folder)
            program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return version, str(program)


def _fetch(version: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, f"nvidia-cuda-nvcc-cu12=={version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract("nvidia/cuda_nvcc/bin/ptxas", folder)
    wheel.unlink()


def test_floors_of_the_example(ptx_images: list[Image]) -> None:
    """Every floor is the version that first knew the architecture: nothing in the example needs a newer one."""
    floors = {(str(image.arch), image.isa.floor, image.isa.floor_driver) for image in ptx_images if image.isa}
    assert floors == {
        ("compute_75", "6.3", 10000),
        ("compute_80", "7.0", 11000),
        ("compute_90", "7.8", 11080),
        ("compute_120", "8.7", 12080),
    }


def test_old_assemblers_take_the_lowered_text(ptx_images: list[Image], old_ptxas: tuple[str, str]) -> None:
    """Each of them compiles it for every architecture that it knows and the PTX serves."""
    version, program = old_ptxas
    taken = 0
    for image in ptx_images:
        assert image.isa is not None
        lowered = with_version(image.data.decode(), image.isa.floor).encode()
        for cc in OLD[version]:
            if cc in (image.arch.cc, max(OLD[version])) and image.arch.cc <= cc and image.arch.cc in OLD[version]:
                result = assemble(program, lowered, str(Arch(cc)), ())
                assert set(result.resources) == set(parse(image.data.decode()).kernels)
                taken += 1
    assert taken >= 4 * 3


def test_the_oldest_assembler_refuses_the_text_as_it_is(ptx_images: list[Image], old_ptxas: tuple[str, str]) -> None:
    """Without the lowering it would not (12.0 even crashes): that is what drivers of CUDA 12.0 to 12.8 have users see."""
    version, program = old_ptxas
    for image in ptx_images:
        assert image.isa is not None
        if version.startswith("12.9") and image.isa.version == "8.8":
            continue
        with pytest.raises((PtxasError, PtxasCrashError), match=r"Unsupported .version|is not defined|signal 11"):
            assemble(program, image.data, str(image.arch.as_real), ())
