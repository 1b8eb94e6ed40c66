"""Variables that the host sets by name keep their meaning through the compiler, the cubin and the PTX."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest

np = pytest.importorskip("numpy")
cupy = pytest.importorskip("cupy")

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

#: What the kernel reads before the host has set anything, by the initialisers in vars.cu.
INITIAL = [2, 1, 2, 3, 0, 3, 7, 10, 0, 3, 20, 4, 5]

#: Part of each variable's name -> the bytes that the host writes, and what the kernel then reads where.
WRITES: dict[str, tuple[bytes, dict[int, float]]] = {
    "scale": (struct.pack("f", 42.5), {0: 42.5}),
    "params": (struct.pack("fxxxxdixxxx", 1.5, -2.25, 7), {1: 1.5, 2: -2.25, 3: 7}),
    "weights": (struct.pack("8f", *range(100, 108)), {4: 100, 5: 103, 6: 107}),
    "offset": (struct.pack("i", -5), {7: -5}),
    "unset": (struct.pack("i", 77), {8: 77}),
    "hidden_scale": (struct.pack("f", 0.125), {9: 0.125}),
    "hidden_offset": (struct.pack("i", 99), {10: 99}),
    "inner": (struct.pack("d", 1e300), {11: 1e300}),
    "named": (struct.pack("i", 6), {12: 6}),
}


@pytest.mark.parametrize("force_ptx", ["0", "1"], ids=["cubin", "ptx"])
@pytest.mark.parametrize("variant", ["vars-12.9", "vars-13.0"])
def test_host_set_variables(
    install: Callable[[str], ModuleType], variant: str, force_ptx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scalar, struct, constant-indexed array, static and anonymous: each is there by name and read when it was set."""
    kernels = install(variant)._cuda_aot
    monkeypatch.setenv("CUDA_AOT_FORCE_PTX", force_ptx)
    loader = kernels._loader()
    loaded = loader.load("read_all")
    assert loaded.image.kind == ("ptx" if force_ptx == "1" else "cubin")
    assert read(kernels) == INITIAL
    expected: list[float] = list(INITIAL)
    symbols = {entry["symbol"] for entry in loader.manifest.module("vars").globals.values()}
    for name, (content, read_as) in WRITES.items():
        write(loaded.library, symbol_of(name, symbols), content)
        for position, value in read_as.items():
            expected[position] = value
        assert read(kernels) == expected


def read(kernels: Any) -> list[float]:
    """Run the kernel and return what it read."""
    from cuda.core import LEGACY_DEFAULT_STREAM, Device, LaunchConfig, launch

    out = cupy.zeros(len(INITIAL))
    Device(0).set_current()
    launch(LEGACY_DEFAULT_STREAM, LaunchConfig(grid=1, block=1), kernels.get_kernel("read_all"), out.data.ptr)
    return [float(value) for value in out.tolist()]


def write(library: int, symbol: str, content: bytes) -> None:
    from cuda.bindings import driver

    status, address, size = driver.cuLibraryGetGlobal(driver.CUlibrary(library), symbol.encode())
    assert (status, size) == (0, len(content)), symbol
    assert driver.cuMemcpyHtoD(address, content, size)[0] == 0


def symbol_of(name: str, symbols: set[str]) -> str:
    """Return the symbol of a variable: the name itself, or mangled with its length before it."""
    (symbol,) = (symbol for symbol in symbols if symbol == name or symbol.endswith((f"{len(name)}{name}", f"{name}E")))
    return symbol
