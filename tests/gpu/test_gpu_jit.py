"""PTX under a real driver: compiled, cached, lowered, linked through nvJitLink; and every damage caught."""

from __future__ import annotations

import importlib
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

np = pytest.importorskip("numpy")
cupy = pytest.importorskip("cupy")

from .test_gpu_loader import KERNEL, check_axpy  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from .conftest import Installed

    Unpack = Callable[[str], Installed]
    Load = Callable[[Installed], ModuleType]

#: Loads one kernel and prints what was logged and which calls were made of those that a hit must not need.
PROCESS = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from example_pkg._cuda_aot import device, get_handle
calls, call = [], device.Driver.call
device.Driver.call = lambda self, function, *arguments: (calls.append(function), call(self, function, *arguments))[1]
assert get_handle("axpy<float>")
print([function for function in calls if "Link" in function or "Ctx" in function])
"""

WITHOUT_NVJITLINK = "import sys; sys.modules['cuda.bindings.nvjitlink'] = None\n"


@pytest.fixture
def newer_than_driver() -> None:
    """Skip where the driver reads PTX 9.5."""
    from cuda.bindings import driver

    if driver.cuDriverGetVersion()[1] >= 13050:
        pytest.skip("this driver reads PTX 9.5")


@pytest.mark.parametrize("variant", ["ptx-12.9", "ptx-13.0"])
def test_new_process_takes_it_from_the_cache(unpack: Unpack, variant: str) -> None:
    """The first process compiles; the next neither links nor makes a context, and both say what they did."""
    installed = unpack(variant)
    for _ in range(2):
        compiled, calls = installed.run(PROCESS, CUDA_AOT_CACHE="0").splitlines()
        assert compiled.startswith("compiled axpy.compute_75.ptx")
    assert not installed.cache.exists()
    compiled, calls = installed.run(PROCESS).splitlines()
    assert re.fullmatch(r"compiled axpy.compute_75.ptx for .* 9.0 in \d+ ms \(driver of CUDA \d+\.\d\)", compiled)
    assert "cuLinkComplete" in calls
    assert "cuDevicePrimaryCtxRetain" in calls
    for _ in range(2):
        message, calls = installed.run(PROCESS).splitlines()
        assert re.fullmatch(
            r"took axpy.compute_75.ptx, compiled for compute capability 9.0, from the cache \(driver of CUDA \d+\.\d\)",
            message,
        )
        assert calls == "[]"
    assert len(entries(installed)) == 1


def test_results_from_the_cache(unpack: Unpack, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel from the cache computes what the one that was just compiled does."""
    installed = unpack("ptx-13.0")
    for _ in range(2):
        check_axpy(load(installed))
    with caplog.at_level(logging.INFO, logger="example_pkg.cuda_aot"):
        load(installed)._cuda_aot.get_handle(KERNEL)
    assert ["from the cache" in message for message in caplog.messages] == [True]


def test_many_processes(unpack: Unpack) -> None:
    """16 processes that start at once leave one good entry and say nothing."""
    installed = unpack("ptx-13.0")
    code = "from example_pkg._cuda_aot import get_handle; assert get_handle('axpy<float>')"
    env = {**os.environ, **installed.environment}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(16)
    ]
    assert [(process.communicate()[0], process.returncode) for process in processes] == [(b"", 0)] * 16
    assert len(entries(installed)) == 1
    assert installed.run(PROCESS).startswith("took ")


@pytest.mark.parametrize(("version", "min_driver"), [("9.5", 13050), ("99.0", 99000)])
def test_ptx_newer_than_the_driver_is_lowered(
    unpack: Unpack, load: Load, monkeypatch: pytest.MonkeyPatch, version: str, min_driver: int, request: Any
) -> None:
    """All kernels of the example run from PTX that this driver cannot read, with the lowest version line instead."""
    if min_driver == 13050:
        request.getfixturevalue("newer_than_driver")
    installed = unpack("default-13.0")
    declare_version(installed, version, min_driver, ptx_floor="6.3", floor_driver=10000)
    package = load(installed)
    monkeypatch.setenv("CUDA_AOT_FORCE_PTX", "1")
    kernels = package._cuda_aot
    for name in kernels.kernel_names():
        assert kernels.get_handle(name)
    (row,) = (row for row in kernels.explain(KERNEL).chosen)
    assert (row.way, row.reason) == ("jit-lowered", f"PTX {version}, its version line lowered to 6.3 for this driver")
    check_axpy(package)
    output = installed.run(PROCESS, CUDA_AOT_FORCE_PTX="1").splitlines()
    assert re.search(r"from the cache \(driver of CUDA \d+\.\d, \.version lowered to 6\.3\)$", output[0])


@pytest.mark.usefixtures("newer_than_driver")
def test_nvjitlink_where_no_floor_is_known(unpack: Unpack, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    """nvJitLink compiles what the driver cannot read, if it is new enough; else the error says what to install."""
    installed = unpack("ptx-13.0")
    declare_version(installed, "9.5", 13050, ptx_floor=None, floor_driver=None)
    package = load(installed)
    kernels = package._cuda_aot
    version = part(kernels, "jit").nvjitlink_version()
    if version is None or version < 13050:
        with pytest.raises(kernels.NoCompatibleImageError, match="Or install nvJitLink"):
            kernels.get_handle(KERNEL)
        pytest.skip(f"nvJitLink is {version}: the error was tested, the link was not")
    with caplog.at_level(logging.INFO, logger="example_pkg.cuda_aot"):
        check_axpy(package)
    assert re.fullmatch(r"compiled axpy.compute_75.ptx for .* in \d+ ms \(nvJitLink 13\.\d\)", caplog.messages[0])
    assert {row.way for row in kernels.explain().chosen} == {"nvjitlink"}
    for name in kernels.kernel_names():
        assert kernels.get_handle(name)
    assert installed.run(PROCESS).startswith("took axpy.compute_75.ptx")


@pytest.mark.usefixtures("newer_than_driver")
def test_neither_floor_nor_nvjitlink(unpack: Unpack) -> None:
    """Then the error has the table, and says what would help."""
    installed = unpack("ptx-13.0")
    declare_version(installed, "9.5", 13050, ptx_floor=None, floor_driver=None)
    output = installed.run(
        WITHOUT_NVJITLINK
        + """
from example_pkg import _cuda_aot as kernels
try:
    kernels.get_handle("axpy<float>")
except kernels.NoCompatibleImageError as error:
    print(error)
"""
    )
    assert "PTX 9.5 needs a driver of CUDA 13.5; this one is of" in output
    assert 'pip install "cuda-bindings==13.*" "nvidia-nvjitlink==13.*,>=13.5"' in output


@pytest.mark.parametrize("content", ["other architecture", "garbage"])
def test_entry_that_the_driver_refuses(unpack: Unpack, content: str) -> None:
    """It is compiled again once, in silence; the process after that takes the new entry."""
    installed = unpack("default-13.0")
    installed.run(PROCESS, CUDA_AOT_FORCE_PTX="1")
    (entry,) = entries(installed)
    good = entry.read_bytes()
    code = (installed.folder / "axpy.sm_100.cubin").read_bytes() if content != "garbage" else b"garbage" * 100
    replace_payload(installed, entry, code)
    assert installed.run(PROCESS, CUDA_AOT_FORCE_PTX="1").startswith("compiled ")
    assert entry.read_bytes() == good
    assert installed.run(PROCESS, CUDA_AOT_FORCE_PTX="1").startswith("took ")


def test_every_damage_to_an_entry_is_caught(unpack: Unpack, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut at or flipped in every 64th byte, an entry is never loaded: the PTX is compiled, and the entry whole again."""
    installed = unpack("ptx-13.0")
    kernels = load(installed)._cuda_aot
    kernels.get_handle(KERNEL)
    (entry,) = entries(installed)
    whole = entry.read_bytes()
    loader_module = part(kernels, "loader")
    cubin: bytes = part(kernels, "jit").compile_ptx(
        kernels._loader().driver, *compilation(kernels), label="axpy", logger="test"
    )
    assert whole.endswith(cubin)
    compiled: list[str] = []

    def compile_ptx(*_: object, label: str, **__: object) -> bytes:
        compiled.append(label)
        return cubin

    monkeypatch.setattr(part(kernels, "jit"), "compile_ptx", compile_ptx)  # it takes 50 ms, and was tested above
    count = 0
    for content in damaged(whole):
        entry.write_bytes(content)
        assert loader_module.Loader(str(installed.folder), "example_pkg").get_handle(KERNEL)
        count += 1
        assert len(compiled) == count
        assert entry.read_bytes() == whole
    assert count > 2 * len(whole) // 64
    loader_module.Loader(str(installed.folder), "example_pkg").get_handle(KERNEL)
    assert len(compiled) == count


@pytest.mark.parametrize("variant", ["default-12.9", "ptx-12.9"])
def test_every_damage_to_an_image_is_caught(unpack: Unpack, load: Load, variant: str) -> None:
    """Cut at or flipped in every 64th byte, an image raises every time and never reaches the driver; whole, it loads."""
    installed = unpack(variant)
    kernels = load(installed)._cuda_aot
    path = installed.folder / next(row.image for row in kernels.explain(KERNEL).chosen)
    driver = kernels._loader().driver
    calls: list[str] = []
    call = driver.call

    def note(function: str, *arguments: object) -> Any:
        calls.append(function)
        return call(function, *arguments)

    driver.call = note
    whole = path.read_bytes()
    count = 0
    for content in damaged(whole):
        path.write_bytes(content)
        with pytest.raises(kernels.CorruptImageError, match=r"is damaged: expected .* found"):
            kernels.get_handle(KERNEL)
        count += 1
    assert count > 2 * len(whole) // 64
    assert [function for function in calls if "Library" in function or "Link" in function] == []
    path.write_bytes(whole)
    assert kernels.get_handle(KERNEL)


def damaged(whole: bytes) -> Iterator[bytes]:
    """Yield `whole` cut at, and with a bit flipped in, every 64th byte."""
    for at in range(0, len(whole), 64):
        yield whole[:at]
        yield whole[:at] + bytes([whole[at] ^ 1 << at // 64 % 8]) + whole[at + 1 :]


def entries(installed: Installed) -> list[Path]:
    """Return the files in the cache, all of them entries."""
    files = sorted(installed.cache.iterdir())
    assert all(file.suffix == ".jit" for file in files)
    return files


def compilation(kernels: ModuleType) -> tuple[bytes, Any, Any]:
    """Return the text, the device and the recipe with which the loader compiles the example's first module."""
    loader = kernels._loader()
    module, _ = loader.manifest.find(KERNEL)
    device = loader.driver.facts(0)
    (candidate,) = part(kernels, "select").rank(module.images, device)
    recipe = part(kernels, "jit").Recipe.of(candidate.image, candidate.way, device, loader.driver)
    return Path(loader.folder, candidate.image.file).read_bytes(), device, recipe


def part(kernels: ModuleType, name: str) -> Any:
    """Return a module of the loader that the package brings."""
    return importlib.import_module(f"{kernels.__name__}.{name}")


def replace_payload(installed: Installed, entry: Path, payload: bytes) -> None:
    """Store `payload` under the key of `entry`."""
    installed.run(
        f"""
from example_pkg._cuda_aot.jit_cache import JitCache
JitCache({str(installed.cache)!r}, "test").put({entry.stem!r}, bytes.fromhex({payload.hex()!r}))
"""
    )


def declare_version(installed: Installed, version: str, min_driver: int, **floor: Any) -> None:
    """Write another version into all PTX of the package, and what the manifest says of such PTX."""
    for path in sorted(installed.folder.glob("*.ptx")):
        text = path.read_bytes()
        path.write_bytes(re.sub(rb"(?m)^\.version \S+", b".version " + version.encode(), text, count=1))

    def change(module: dict[str, Any]) -> None:
        for image in module["images"]:
            if image["kind"] == "ptx":
                image.update(ptx_version=version, min_driver=min_driver, **floor)

    for path in sorted(installed.folder.glob("*.json")):
        if path.name != "manifest.json":
            installed.edit_module(path.stem, change)
