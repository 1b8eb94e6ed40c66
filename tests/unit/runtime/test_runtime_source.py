"""Kernels from the source in the package, over an NVRTC that keeps books: when it is asked, for what, and what is said.

What the real NVRTC makes of it is proven in tests/build, and that the result runs in tests/gpu.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hatch_cuda_aot.runtime import source as source_module
from hatch_cuda_aot.runtime.errors import CorruptImageError, KernelNotFoundError, NoCompatibleImageError
from hatch_cuda_aot.runtime.manifest import Param
from hatch_cuda_aot.runtime.select import DeviceFacts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hatch_cuda_aot.runtime.loader import Loader

    from .conftest import FakeApi, FakePackage, Status

    OpenLoader = Callable[[Path, FakeApi], Loader]
    MakeApi = Callable[..., FakeApi]

MAIN = "src/demo/axpy.cu"
HEADER = "src/demo/device/a.cuh"


class FakeNvrtc(ModuleType):
    """Stands in for ``cuda.bindings.nvrtc``; `programs` are the compilations: text, name, expressions and options."""

    def __init__(self, version: tuple[int, int] = (13, 0), archs: tuple[int, ...] = (80, 90, 110)) -> None:
        super().__init__("cuda.bindings.nvrtc")
        self.version = version
        self.archs = list(archs)
        self.fails = ""
        self.programs: list[SimpleNamespace] = []

    def nvrtcVersion(self) -> tuple[int, ...]:  # noqa: N802
        return (0, *self.version)

    def nvrtcGetSupportedArchs(self) -> tuple[Any, ...]:  # noqa: N802
        return 0, self.archs

    def nvrtcCreateProgram(self, text: bytes, name: bytes, *_: object) -> tuple[Any, ...]:  # noqa: N802
        program = SimpleNamespace(text=text.decode(), name=name.decode(), expressions=[], options=[])
        self.programs.append(program)
        return 0, program

    def nvrtcAddNameExpression(self, program: Any, expression: bytes) -> tuple[Any, ...]:  # noqa: N802
        program.expressions.append(expression.decode())
        return (0,)

    def nvrtcCompileProgram(self, program: Any, _: int, options: list[bytes]) -> tuple[Any, ...]:  # noqa: N802
        program.options = [option.decode() for option in options]
        return (6 if self.fails else 0,)

    def nvrtcGetLoweredName(self, program: Any, expression: bytes) -> tuple[Any, ...]:  # noqa: N802, ARG002
        return 0, b"_Z" + hashlib.sha256(expression).hexdigest()[:8].encode()

    def nvrtcDestroyProgram(self, program: Any) -> tuple[Any, ...]:  # noqa: N802, ARG002
        return (0,)

    def __getattr__(self, name: str) -> Any:
        what, is_size = name.removeprefix("nvrtcGet").removesuffix("Size"), name.endswith("Size")
        if not name.startswith("nvrtcGet"):
            raise AttributeError(name)

        def answer(program: Any, buffer: bytearray | None = None) -> tuple[Any, ...]:
            symbols = [self.nvrtcGetLoweredName(program, each.encode())[1].decode() for each in program.expressions]
            entries = "".join(
                f".visible .entry {symbol}(\n\t.param .f32 {symbol}_param_0,\n\t.param .u64 {symbol}_param_1\n)\n"
                for symbol in [*symbols, "plain"]
            )
            content = {
                "PTX": f".version 9.0\n{entries}\0",
                "CUBIN": f"nvrtc {program.options[0]} {program.expressions}",
                "ProgramLog": f"{self.fails}\0",
            }[what].encode()
            if is_size:
                return 0, len(content)
            assert buffer is not None
            buffer[:] = content
            return (0,)

        return answer


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> FakeNvrtc:
    """An NVRTC 13.0 that is installed, without headers of the toolkit."""
    module = FakeNvrtc()
    install(monkeypatch, module)
    return module


def install(monkeypatch: pytest.MonkeyPatch, module: FakeNvrtc | None) -> None:
    bindings = SimpleNamespace(__version__="13.0.0", **({"nvrtc": module} if module else {}))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", module)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)


@pytest.fixture
def folder(package: FakePackage) -> Path:
    """A package with two modules; ``axpy`` carries its source."""
    package.add("axpy", {"axpy<float>": "axpy_f", "axpy<double>": "axpy_d", "plain": "plain"}, {"sm_90": 12000})
    package.add("other", {"ns::f<int>": "f_i"}, {"sm_90": 12000})
    embed(package, "axpy", {MAIN: "template …", HEADER: "#pragma once\n"}, ["axpy", "ns::deep::g"])
    return package.write()


def embed(package: FakePackage, module: str, files: dict[str, str], templates: list[str]) -> None:
    entries = {}
    for path, text in files.items():
        target = package.folder / "source" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())
        entries[path] = {"size": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    package.modules[module]["source"] = {
        "main": next(iter(files)),
        "options": ["--std=c++17", "--define-macro=N=1", "--include-path=src/demo/device", "--restrict"],
        "ptxas": ["--maxrregcount=32"],
        "folder": "source",
        "files": entries,
        "templates": templates,
        "cuda": "12.9",
    }


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_loader: OpenLoader) -> OpenLoader:
    """As `open_loader`, with a cache in a folder of the test's own."""

    def open_it(folder: Path, api: FakeApi) -> Loader:
        loader = open_loader(folder, api)
        monkeypatch.delenv("CUDA_AOT_CACHE")
        monkeypatch.setenv("CUDA_AOT_CACHE_DIR", str(tmp_path / "cache"))
        return loader

    return open_it


def test_instantiation(
    folder: Path, nvrtc: FakeNvrtc, cached: OpenLoader, fake_api: MakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    """An instantiation that was not built is compiled once, by any spelling, and found in the cache by the next process."""
    api = fake_api([90])
    loader = cached(folder, api)
    with caplog.at_level(logging.INFO, logger="demo.cuda_aot"):
        handle = loader.get_handle("axpy<int>")
        assert {loader.get_handle(name) for name in ("axpy< int >", "axpy:axpy<int>", "::axpy<int>")} == {handle}
        assert cached(folder, api).get_handle("axpy<int>")
    (program,) = nvrtc.programs
    assert program.expressions == ["axpy<int>"]
    assert program.text == f'#line 1 "{MAIN}"\ntemplate …'
    (root,) = {program.name.removesuffix(MAIN)}
    assert program.options == [
        "-arch=sm_90",
        "--std=c++17",
        "--define-macro=N=1",
        f"--include-path={root}src/demo/device",
        "--ptxas-options=--maxrregcount=32",
    ]
    assert api.loads == ["nvrtc -arch=sm_90 ['axpy<int>']"] * 2
    assert caplog.text.count(f"compiled axpy<int> from {MAIN} for compute capability 9.0 in") == 1
    assert len(caplog.records) == 1


def test_what_was_built_needs_no_nvrtc(
    folder: Path, nvrtc: FakeNvrtc, open_loader: OpenLoader, fake_api: MakeApi
) -> None:
    """A kernel with an image that fits never asks NVRTC."""
    loader = open_loader(folder, fake_api([90]))
    assert loader.get_handle("axpy<float>")
    assert loader.get_handle("plain")
    assert nvrtc.programs == []


def test_info_of_an_instantiation(folder: Path, nvrtc: FakeNvrtc, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """Symbol and parameters come from the compilation, the image says that it is the source."""
    loader = open_loader(folder, fake_api([90]))
    info = loader.kernel_info("axpy<int>", 0)
    assert info.name == "axpy<int>"
    assert info.symbol.startswith("_Z")
    assert info.params == (Param("f32", 4, 0), Param("u64", 8, 8))
    assert info.image is not None
    assert (str(info.image.arch), info.image.file) == ("sm_90", MAIN)
    assert len(nvrtc.programs) == 1


@pytest.mark.parametrize("name", ["axpi<int>", "other:axpy<int>", "axpy", "plain<int>", "ns::g<1>", "f<int>"])
def test_no_such_template(
    folder: Path, nvrtc: FakeNvrtc, open_loader: OpenLoader, fake_api: MakeApi, name: str
) -> None:
    """A name that no source has as a template is the ordinary error."""
    with pytest.raises(KernelNotFoundError, match="has no kernel"):
        open_loader(folder, fake_api([90])).get_handle(name)
    assert nvrtc.programs == []


def test_template_of_which_nothing_was_built(
    folder: Path, nvrtc: FakeNvrtc, open_loader: OpenLoader, fake_api: MakeApi
) -> None:
    """A template is found by its qualified name in whichever module has it."""
    assert open_loader(folder, fake_api([90])).load("ns::deep::g<3>").module == "axpy"
    assert nvrtc.programs[0].expressions == ["ns::deep::g<3>"]


def test_without_nvrtc(
    folder: Path, open_loader: OpenLoader, fake_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names what was built and the packages to install, and leaves the rest as it was."""
    install(monkeypatch, None)
    loader = open_loader(folder, fake_api([90]))
    with pytest.raises(KernelNotFoundError) as caught:
        loader.get_handle("axpy<int>")
    message = str(caught.value)
    assert "demo was built without 'axpy<int>' (there are axpy<double>, axpy<float>)" in message
    assert "NVRTC is not installed" in message
    assert 'pip install "nvidia-cuda-nvrtc==13.*" "nvidia-cuda-runtime==13.*" "nvidia-cuda-cccl==13.*"' in message
    assert caught.value.candidates == ("axpy<double>", "axpy<float>")
    assert loader.get_handle("axpy<float>")


def test_source_that_does_not_compile(
    folder: Path, nvrtc: FakeNvrtc, open_loader: OpenLoader, fake_api: MakeApi
) -> None:
    """The compiler's words come without its own bookkeeping; once it compiles, the kernel is there."""
    nvrtc.fails = (
        '__nv_name_map(2): error: identifier "nosuch" is undefined\n  #pragma\n\n'
        '2 errors detected in the compilation of "x".'
    )
    loader = open_loader(folder, fake_api([90]))
    with pytest.raises(KernelNotFoundError, match=r'cannot compile it:\n  identifier "nosuch" is undefined$'):
        loader.get_handle("axpy<nosuch>")
    nvrtc.fails = f'{MAIN}(3): error: bad\n\n1 error detected in the compilation of "x".'
    with pytest.raises(KernelNotFoundError, match=rf"cannot compile it:\n  {MAIN}\(3\): error: bad$"):
        loader.get_handle("axpy<nosuch>")
    nvrtc.fails = 'could not open source file "cuda_fp16.h"'
    with pytest.raises(KernelNotFoundError, match=r"header of the CUDA toolkit:\n    pip install"):
        loader.get_handle("axpy<nosuch>")
    nvrtc.fails = ""
    assert loader.get_handle("axpy<nosuch>")


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_damaged_source(
    folder: Path, nvrtc: FakeNvrtc, open_loader: OpenLoader, fake_api: MakeApi, damage: str
) -> None:
    """Source that is not what was built is never compiled, header or not."""
    path = folder / "source" / HEADER
    path.write_text("#pragma twice\n") if damage == "changed" else path.unlink()
    with pytest.raises(CorruptImageError, match=r"a\.cuh is damaged: expected 13 bytes, found .*reinstall the package"):
        open_loader(folder, fake_api([90])).get_handle("axpy<int>")
    assert nvrtc.programs == []


@pytest.mark.parametrize(
    ("name", "expressions"), [("axpy<float>", ["axpy<float>"]), ("plain", []), ("axpy_d", ["axpy<double>"])]
)
def test_device_that_no_image_fits(
    folder: Path,
    nvrtc: FakeNvrtc,
    open_loader: OpenLoader,
    fake_api: MakeApi,
    name: str,
    expressions: list[str],
) -> None:
    """A kernel that was built, for other devices, is compiled for this one; plain ones need no name expression."""
    api = fake_api([80])
    loaded = open_loader(folder, api).load(name)
    assert str(loaded.image.arch) == "sm_80"
    assert nvrtc.programs[0].expressions == expressions
    assert api.loads == [f"nvrtc -arch=sm_80 {expressions}"]


def test_device_that_nothing_fits(
    folder: Path, open_loader: OpenLoader, fake_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where compiling fails too, the table comes with the reason for that."""
    install(monkeypatch, None)
    with pytest.raises(NoCompatibleImageError) as caught:
        open_loader(folder, fake_api([80])).get_handle("plain")
    message = str(caught.value)
    assert "axpy.sm_90.cubin" in message
    assert "Its source is in the package, and compiling it here failed: NVRTC is not installed" in message
    assert caught.value.report is not None
    assert [(row.kind, row.verdict) for row in caught.value.report.rows] == [
        ("cubin", "rejected"),
        ("source", "chosen"),
    ]


def test_explain(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """The source is the last row of its module, for devices that are there and for others, and for instantiations."""
    loader = open_loader(folder, fake_api([90]))

    def verdicts(name: str | None, cc: int) -> dict[str, str]:
        return {row.kind: row.verdict for row in loader.explain(name, cc=cc).rows if row.module == "axpy"}

    assert verdicts("axpy<float>", 90) == {"cubin": "chosen", "source": "usable"}
    assert verdicts(None, 80) == {"cubin": "rejected", "source": "chosen"}
    assert verdicts("axpy<int>", 90) == {"cubin": "rejected", "source": "chosen"}
    assert "was built without axpy<int>" in str(loader.explain("axpy<int>", cc=90))
    assert all(row.module == "other" for row in loader.explain("ns::f<int>", cc=90).rows)


@pytest.mark.parametrize(
    ("device", "version", "archs", "images", "arch"),
    [
        (DeviceFacts(90, 13000), (13, 0), (80, 90), "sm_90", "sm_90"),
        (DeviceFacts(90, 13000), (13, 0), (80, 90), "sm_90 sm_90a", "sm_90a"),
        (DeviceFacts(90, 13000), (13, 0), (80, 90), "sm_80 sm_100a", "sm_90"),
        (DeviceFacts(103, 13000), (13, 0), (100, 103), "sm_103f compute_100", "sm_103f"),
        (DeviceFacts(90, 13000), (12, 9), (80, 90), "", "sm_90"),
        (DeviceFacts(90, 12090), (13, 0), (80, 90), "sm_90a", "compute_90"),
        (DeviceFacts(110, 13000), (12, 9), (90, 101, 120), "", "sm_101"),
        (DeviceFacts(101, 12090), (12, 9), (90, 101, 120), "", "sm_101"),
        (DeviceFacts(107, 13000), (13, 0), (90, 100, 110), "", "compute_100"),
        (DeviceFacts(87, 13000), (13, 0), (80, 86, 90), "", "compute_86"),
    ],
)
def test_what_is_compiled_for(
    monkeypatch: pytest.MonkeyPatch,
    device: DeviceFacts,
    version: tuple[int, int],
    archs: tuple[int, ...],
    images: str,
    arch: str,
) -> None:
    """Machine code for the very device, or PTX where NVRTC does not know it or is of a newer major release."""
    from hatch_cuda_aot.runtime.arch import Arch

    install(monkeypatch, FakeNvrtc(version, archs))
    module: Any = SimpleNamespace(images=[SimpleNamespace(arch=Arch.parse(image)) for image in images.split()])
    assert str(source_module._Nvrtc().arch_for(device, module)) == arch


def test_nvrtc_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NVRTC knows nothing that runs on the device, that is said."""
    install(monkeypatch, FakeNvrtc(archs=(90, 100)))
    with pytest.raises(source_module.SourceError, match=r"nothing that runs on compute capability 8\.0"):
        source_module._Nvrtc().arch_for(DeviceFacts(80, 13000), SimpleNamespace(images=[]))  # type: ignore[arg-type]


def test_ptx_goes_through_the_driver(
    folder: Path, nvrtc: FakeNvrtc, open_loader: OpenLoader, fake_api: MakeApi
) -> None:
    """PTX of NVRTC is compiled by the driver like any other, and ptxas's options stay away from it."""
    nvrtc.archs = [80]
    api = fake_api([90])
    loaded = open_loader(folder, api).load("axpy<int>")
    assert str(loaded.image.arch) == "compute_80"
    assert api.loads[0].startswith("jit 90: .version 9.0\n.visible .entry _Z")
    assert not any(option.startswith("--ptxas-options") for option in nvrtc.programs[0].options)


@pytest.mark.parametrize(
    "change", ["file", "main", "options", "ptxas", "nvrtc", "headers", "expression", "arch", "nothing"]
)
def test_each_input_is_in_the_key(
    package: FakePackage,
    nvrtc: FakeNvrtc,
    cached: OpenLoader,
    fake_api: MakeApi,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    """What was compiled from other input is never taken from the cache."""
    files = {MAIN: "a", HEADER: "b"}
    package.add("axpy", {"axpy<float>": "f"}, {"sm_90": 12000})
    embed(package, "axpy", files, ["axpy"])
    name = "axpy<int>"
    cached(package.write(), fake_api([90])).get_handle(name)
    source = package.modules["axpy"]["source"]
    api = fake_api([90])
    if change == "file":
        embed(package, "axpy", {**files, HEADER: "c"}, ["axpy"])
    elif change == "main":
        source["main"] = HEADER
    elif change in {"options", "ptxas"}:
        source[change] = [*source[change], "--fmad=false"]
    elif change == "nvrtc":
        nvrtc.version = (13, 1)
    elif change == "headers":
        monkeypatch.setattr(source_module, "_header_versions", lambda _: ("13010", "3001000"))
    elif change == "expression":
        name = "axpy<long>"
    elif change == "arch":
        api = fake_api([80])
    cached(package.write(), api).get_handle(name)
    assert len(nvrtc.programs) == (1 if change == "nothing" else 2)


def test_refused_by_the_driver(
    folder: Path, nvrtc: FakeNvrtc, open_loader: OpenLoader, fake_api: MakeApi, status: type[Status]
) -> None:
    """Machine code that the driver does not take is an error with the driver's words."""
    api = fake_api([90])
    api.refuse["nvrtc"] = status.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(KernelNotFoundError, match="failed: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        open_loader(folder, api).get_handle("axpy<int>")
    assert len(nvrtc.programs) == 1


def test_headers_of_another_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Header folders come from cuda.pathfinder, each with its proof, and only those of NVRTC's own major release."""
    for name in ("cuda_fp16.h", "cuda_runtime_api.h", "crt/mma.h", "cccl/cuda/std/cstdint"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#define CUDART_VERSION  13000\n")

    def find(name: str) -> str | None:
        if name == "nvcc":
            raise RuntimeError
        return {"cudart": str(tmp_path), "cccl": str(tmp_path / "cccl")}.get(name)

    monkeypatch.setitem(sys.modules, "cuda.pathfinder", SimpleNamespace(find_nvidia_header_directory=find))
    assert source_module._find_headers(13) == [str(tmp_path), str(tmp_path / "cccl")]
    assert source_module._find_headers(12) == []
    assert source_module._header_versions([str(tmp_path)]) == ("13000", "")
