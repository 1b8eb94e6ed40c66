"""Every kernel of the example against NumPy in float64, whatever image it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

np = pytest.importorskip("numpy")

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

#: Variant -> module -> the architecture of the image that an H200 (compute capability 9.0) must get.
CHOSEN = {
    "default-12.9": "sm_90a",
    "default-13.0": "sm_90a",
    "ptx-12.9": "compute_75",
    "ptx-13.0": "compute_75",
    "ptx-13.5": "compute_75",  # newer than a driver of CUDA 13.0 reads: its version line is lowered
    "sm80-12.9": "compute_80",
}
SIZES = (1, 31, 257, 100_003)
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}

variants = pytest.mark.parametrize("variant", CHOSEN)
libraries = pytest.mark.parametrize("library", ["cupy", "torch"])


@variants
def test_right_image(install: Callable[[str], ModuleType], variant: str) -> None:
    """Each module gets the image that the rules choose, and every kernel loads from it."""
    package = install(variant)
    kernels = package._cuda_aot
    assert {row.arch for row in kernels.explain().chosen} == {CHOSEN[variant]}
    for name in kernels.kernel_names():
        assert str(kernels._loader().load(name).image.arch) == CHOSEN[variant]


def test_every_kernel_is_tested(install: Callable[[str], ModuleType]) -> None:
    """The tests below reach each kernel that the example has."""
    package = install("default-12.9")
    tested = [*package.AXPY.values(), *package.BLOCK_SUM.values(), *package.SOFTMAX.values(), "histogram"]
    assert sorted(name.replace(", ", ",") for name in tested) == package._cuda_aot.kernel_names()


@variants
@libraries
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_axpy(install: Callable[[str], ModuleType], variant: str, library: str, dtype: str) -> None:
    """a * x + y."""
    package, gpu = install(variant), Gpu(library)
    for n in SIZES:
        x, y = random(2, n).astype(dtype)
        result = gpu.back(package.axpy(2.5, gpu.to(x), gpu.to(y)))
        assert_close(result, 2.5 * x.astype("float64") + y, 2 * EPS[dtype])


@variants
@libraries
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_block_sum(install: Callable[[str], ModuleType], variant: str, library: str, dtype: str) -> None:
    """The sum of all elements."""
    package, gpu = install(variant), Gpu(library)
    for n in (*SIZES, 1_000_003):
        x = (random(n) + 3).astype(dtype)
        total = gpu.back(package.block_sum(gpu.to(x), gpu.to(np.zeros(1, dtype))))
        assert_close(total, x.sum(dtype="float64"), 16 * EPS[dtype])


@variants
@libraries
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_softmax(install: Callable[[str], ModuleType], variant: str, library: str, dtype: str) -> None:
    """Softmax over each row, of one element and of odd lengths."""
    if (library, dtype) == ("cupy", "bfloat16"):
        pytest.skip("CuPy has no bfloat16")
    package, gpu = install(variant), Gpu(library)
    for shape in [(1, 1), (3, 31), (1003, 257), (7, 4099)]:
        x = gpu.to(10 * random(*shape), dtype)
        exact = np.exp(gpu.back(x) - gpu.back(x).max(axis=-1, keepdims=True))
        assert_close(
            gpu.back(package.softmax(x)), exact / exact.sum(axis=-1, keepdims=True), EPS[dtype] + 16 * EPS["float32"]
        )


@variants
@libraries
def test_histogram(install: Callable[[str], ModuleType], variant: str, library: str) -> None:
    """Counts of bytes; after the host has set the kernel's `__constant__` table, counts by that table."""
    package, gpu = install(variant), Gpu(library)
    for n in SIZES:
        data = np.random.default_rng(n).integers(0, 256, n, "uint8")
        counts = gpu.back(package.histogram(gpu.to(data), gpu.to(np.zeros(256, "uint32"))))
        assert (counts == np.bincount(data, minlength=256)).all()
    package.set_bins(byte % 7 for byte in range(256))
    counts = gpu.back(package.histogram(gpu.to(data), gpu.to(np.zeros(7, "uint32"))))
    assert (counts == np.bincount(data % 7, minlength=7)).all()


class Gpu:
    """Moves arrays of NumPy to the GPU and back, through CuPy or PyTorch."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.module: Any = pytest.importorskip(library)

    def to(self, host: Any, dtype: str | None = None) -> Any:
        """Copy to the GPU, as `dtype`."""
        if self.library == "cupy":
            return self.module.asarray(host.astype(dtype or host.dtype))
        tensor = self.module.from_numpy(host).cuda()
        return tensor if dtype is None else tensor.to(getattr(self.module, dtype))

    def back(self, array: Any) -> Any:
        """Copy to the host, floating-point numbers as float64."""
        if self.library == "cupy":
            host = self.module.asnumpy(array)
            return host.astype("float64") if host.dtype.kind == "f" else host
        return (array.double() if array.dtype.is_floating_point else array).cpu().numpy()


def random(*shape: int) -> Any:
    return np.random.default_rng(shape).standard_normal(shape)


def assert_close(result: Any, expected: Any, tolerance: float) -> None:
    """Compare with an error relative to the largest expected value."""
    error = np.max(np.abs(result - expected)) / np.max(np.abs(expected))
    assert error <= tolerance
