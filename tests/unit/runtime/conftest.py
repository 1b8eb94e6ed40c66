"""A package folder as the build side writes it, and a driver that keeps books instead of driving a GPU."""

from __future__ import annotations

import hashlib
import json
from enum import IntEnum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hatch_cuda_aot.runtime import jit as jit_module
from hatch_cuda_aot.runtime.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hatch_cuda_aot.runtime.device import Driver


class FakePackage:
    """Writes `_cuda_aot` by the contract: canonical JSON, an index, one file per module, one per image."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.modules: dict[str, dict[str, Any]] = {}

    def add(
        self,
        module: str,
        kernels: Mapping[str, str],
        archs: Mapping[str, int],
        *,
        holds: Mapping[str, list[str]] | None = None,
    ) -> FakePackage:
        """Add a module: kernel name -> symbol, and arch -> lowest driver; `holds` limits an image's kernels."""
        images = []
        for arch, min_driver in archs.items():
            kind = "ptx" if arch.startswith("compute") else "cubin"
            file = f"{module}.{arch}.{kind}"
            content = f"{module} for {arch}".encode()
            (self.folder / file).write_bytes(content)
            held = (holds or {}).get(arch, list(kernels))
            images.append(
                {
                    "arch": arch,
                    "kind": kind,
                    "file": file,
                    "size": len(content),
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "min_driver": min_driver,
                    "virtual": arch.replace("sm", "compute"),
                    "ptx_version": f"{min_driver // 1000 - 4}.{min_driver % 1000 // 10}" if kind == "ptx" else None,
                    "ptx_floor": None,
                    "kernels": {name: {"registers": 16} if kind == "cubin" else {} for name in held},
                }
            )
        self.modules[module] = {
            "format": 1,
            "module": module,
            "kernels": {
                name: {"symbol": symbol, "params": [{"kind": "f32", "size": 4, "offset": 0}], "policy": {}}
                for name, symbol in kernels.items()
            },
            "globals": {"table": {"symbol": "table", "space": "const", "size": 1024, "align": 4}},
            "images": images,
        }
        return self

    def write(self) -> Path:
        """Write all JSON files and return the folder."""
        index: dict[str, Any] = {
            "format": 1,
            "generator": {"name": "hatch-cuda-aot", "version": "0.1.0"},
            "package": "demo",
            "toolchain": {"cuda": "12.9"},
            "modules": {},
            "kernels": {},
        }
        for module, data in self.modules.items():
            content = _dump(data)
            (self.folder / f"{module}.json").write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            index["modules"][module] = {"file": f"{module}.json", "size": len(content), "sha256": digest}
            for name in data["kernels"]:
                others = index["kernels"].get(name)
                if others is None:
                    index["kernels"][name] = module
                else:
                    index["kernels"][name] = sorted([*([others] if isinstance(others, str) else others), module])
        (self.folder / "manifest.json").write_bytes(_dump(index))
        return self.folder


class Status(IntEnum):
    """The CUresult values that the fake driver returns."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222
    CUDA_ERROR_NOT_FOUND = 500


class FakeApi:
    """Stands in for ``cuda.bindings.driver``: enough for the loader's own logic, and nothing about GPUs.

    `refuse` maps a fragment of an image's content to the status with which resolving a kernel in it fails; `refuse_on`
    does so for binding it to one device.
    """

    def __init__(self, devices: list[int], version: int = 13000) -> None:
        self.devices = devices
        self.version = version
        self.current: int | None = None
        self.init = Status.CUDA_SUCCESS
        self.refuse: dict[str, Status] = {}
        self.refuse_on: dict[tuple[str, int], Status] = {}
        self.loads: list[str] = []
        self.CUdevice_attribute = SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor"
        )
        self.CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_NUM_REGS="registers")

    def cuInit(self, flags: int) -> tuple[Any, ...]:  # noqa: N802, ARG002
        return (self.init,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:  # noqa: N802
        return Status.CUDA_SUCCESS, self.version

    def cuDeviceGetCount(self) -> tuple[Any, ...]:  # noqa: N802
        return Status.CUDA_SUCCESS, len(self.devices)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:  # noqa: N802
        return Status.CUDA_SUCCESS, ordinal

    def cuDeviceGetName(self, size: int, device: int) -> tuple[Any, ...]:  # noqa: N802
        return Status.CUDA_SUCCESS, f"GPU {device}".encode() + b"\0 not cleared" + bytes(size)

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Any, ...]:  # noqa: N802
        cc = self.devices[device]
        return Status.CUDA_SUCCESS, cc // 10 if attribute == "major" else cc % 10

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        return (self.init, None) if self.init else (Status.CUDA_SUCCESS, 0 if self.current is None else 0x1000)

    def cuCtxGetDevice(self) -> tuple[Any, ...]:  # noqa: N802
        if self.init:
            return self.init, None
        if self.current is None:
            return Status.CUDA_ERROR_INVALID_CONTEXT, None
        return Status.CUDA_SUCCESS, self.current

    def cuLibraryLoadData(self, code: bytes, *options: object) -> tuple[Any, ...]:  # noqa: N802, ARG002
        self.loads.append(code.decode())
        return Status.CUDA_SUCCESS, len(self.loads)

    def cuLibraryGetKernel(self, library: int, symbol: bytes) -> tuple[Any, ...]:  # noqa: N802
        if symbol == b"missing":
            return Status.CUDA_ERROR_NOT_FOUND, None
        status = self._refusal(library, {(text, None): status for text, status in self.refuse.items()}, None)
        return status, None if status else library * 1000 + len(symbol)

    def cuKernelGetAttribute(self, attribute: str, kernel: int, device: int) -> tuple[Any, ...]:  # noqa: N802, ARG002
        return self._refusal(kernel // 1000, self.refuse_on, device), 16

    def _refusal(self, library: int, refusals: Mapping[Any, Status], device: int | None) -> Status:
        content = self.loads[library - 1]
        for (text, where), status in refusals.items():
            if text in content and where == device:
                return status
        return Status.CUDA_SUCCESS


@pytest.fixture
def package(tmp_path: Path) -> FakePackage:
    """An empty package, to be filled and written by the test."""
    return FakePackage(tmp_path / "demo" / "_cuda_aot")


@pytest.fixture
def open_loader(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, FakeApi], Loader]:
    """Return a function that makes a Loader over a folder and a fake driver; JIT prefixes the PTX with ``jit:``."""

    def compile_ptx(driver: Driver, ptx: bytes, device: Any, recipe: object, **_: object) -> bytes:  # noqa: ARG001
        return f"jit {device.cc}: ".encode() + ptx

    def open_it(folder: Path, api: FakeApi) -> Loader:
        monkeypatch.setattr("hatch_cuda_aot.runtime.device._import_bindings", lambda _package: api)
        monkeypatch.setattr(jit_module, "compile_ptx", compile_ptx)
        monkeypatch.setattr(jit_module, "nvjitlink_version", lambda: None)
        monkeypatch.delenv("CUDA_AOT_FORCE_PTX", raising=False)
        monkeypatch.setenv("CUDA_AOT_CACHE", "0")
        return Loader(str(folder), "demo")

    return open_it


@pytest.fixture
def fake_api() -> Callable[..., FakeApi]:
    """Return the class of the fake driver, so that test modules need no import from here."""
    return FakeApi


@pytest.fixture
def status() -> type[Status]:
    """Return the fake driver's result codes."""
    return Status


def _dump(data: object) -> bytes:
    return (json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n").encode()
