"""A module's source travels in the package, and the real NVRTC makes there what the build makes here."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from hatch_cuda_aot.manifest import manifest_files
from hatch_cuda_aot.results import ModuleResult
from hatch_cuda_aot.runtime.manifest import Manifest
from hatch_cuda_aot.runtime.source import Compiled
from hatch_cuda_aot.stage import write_folder
from hatch_cuda_aot.toolchain import Toolchain
from tests.build import _embed, _functions
from tests.build.conftest import PACKAGES, Compiler

EMBED = PACKAGES / "embed"
DRIVER = 13050


@pytest.fixture(scope="module")
def module(compiler: Compiler) -> ModuleResult:
    """The module as it is built."""
    table = {**_functions.read_table(EMBED / "pyproject.toml"), "cuda": compiler.line}
    (built,) = compiler.call(_functions.build, EMBED, table, "src/embed_pkg")
    assert isinstance(built, ModuleResult)
    return built


@pytest.fixture(scope="module")
def folder(compiler: Compiler, module: ModuleResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``_cuda_aot/`` of the package."""
    folder = tmp_path_factory.mktemp("site") / "embed_pkg" / "_cuda_aot"
    toolchain = Toolchain(compiler.line, f"{compiler.line}.0", f"{compiler.line}.0", "", "", (), (90,))
    write_folder(folder, manifest_files("embed_pkg", [module], toolchain, "0"))
    return folder


def compile_from(compiler: Compiler, folder: Path, name: str, cc: int = 90, driver: int = DRIVER) -> Compiled:
    compiled = compiler.call(_embed.compile_from, str(folder), name, cc, driver)
    assert not isinstance(compiled, str), compiled
    return Compiled(*compiled)


def test_what_is_shipped(folder: Path) -> None:
    """The source and the headers that it includes lie beside the manifest, which names the templates and the options."""
    source = Manifest.read(str(folder)).module("embed").source
    assert source is not None
    files = {
        path.relative_to(folder / "source").as_posix() for path in (folder / "source").rglob("*") if path.is_file()
    }
    assert files == set(source["files"]) == {
        "src/embed_pkg/kernels/embed.cu",
        "src/embed_pkg/device/affine.cuh",
        "src/embed_pkg/device/detail/convert.cuh",
    }  # fmt: skip
    assert source["main"] == "src/embed_pkg/kernels/embed.cu"
    assert source["templates"] == ["file_name", "ours::axpy"]
    assert source["options"] == [
        "--std=c++17",
        "--define-macro=_CCCL_META_UNROLL_LIMIT=10",
        "--define-macro=SHIFT=3",
        "--include-path=src/embed_pkg/device",
        "--fmad=false",
    ]
    assert source["ptxas"] == ["--fmad=false", "-O2"]


@pytest.mark.parametrize("name", ["ours::axpy<float>", "file_name<0>", "read_variables"])
def test_same_as_built(compiler: Compiler, module: ModuleResult, folder: Path, name: str) -> None:
    """A kernel that was built is compiled to the same symbol and parameters, and to the same machine code.

    Code that reads variables has their addresses in it, and those change with the constants that the build prunes.
    """
    compiled = compile_from(compiler, folder, name)
    (kernel,) = (kernel for kernel in module.kernels if kernel.name == name)
    assert compiled.symbol == kernel.symbol
    assert [tuple(param) for param in compiled.params] == [(p.kind, p.size, p.offset) for p in kernel.params]
    (image,) = (image for image in module.images if str(image.arch) == "sm_90")
    assert str(compiled.arch) == "sm_90"
    if name == "ours::axpy<float>":
        assert machine_code(compiled.code, kernel.symbol) == machine_code(image.data, kernel.symbol)


def test_new_instantiation(compiler: Compiler, folder: Path) -> None:
    """An instantiation that was not built is compiled for whatever device asks."""
    compiled = compile_from(compiler, folder, "ours::axpy<__nv_bfloat16>", 80)
    assert str(compiled.arch) == "sm_80"
    assert compiled.symbol == "_ZN4ours4axpyI13__nv_bfloat16EEvfPKT_PS2_i"
    assert machine_code(compiled.code, compiled.symbol)
    text = compile_from(compiler, folder, "ours::axpy<int>", 150)
    assert text.arch.virtual
    assert f".entry {text.symbol}(".encode() in text.code


def test_no_trace_of_the_folder(compiler: Compiler, folder: Path) -> None:
    """``__FILE__`` is the path in the project, and the temporary folder shows nowhere."""
    code = compile_from(compiler, folder, "file_name<1>").code
    assert b"src/embed_pkg/kernels/embed.cu\0" in code
    assert tempfile.gettempdir().encode() not in code


def test_what_does_not_compile(compiler: Compiler, folder: Path) -> None:
    """The error is about the instantiation, and nothing of how it was asked for."""
    said = compiler.call(_embed.compile_from, str(folder), "ours::axpy<nosuch>", 90, DRIVER)
    assert said.splitlines()[1:] == ['  identifier "nosuch" is undefined']
    said = compiler.call(_embed.compile_from, str(folder), "ours::axpy<int*>", 90, DRIVER)
    assert "src/embed_pkg/device/detail/convert.cuh(" in said
    assert "static assertion failed" in said
    assert tempfile.gettempdir() not in said


def machine_code(cubin: bytes, symbol: str) -> bytes:
    section = ELFFile(io.BytesIO(cubin)).get_section_by_name(f".text.{symbol}")
    assert section is not None
    return bytes(section.data())
