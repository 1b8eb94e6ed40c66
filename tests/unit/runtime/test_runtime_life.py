"""Background loading, variables, and what a process does besides: over the fake driver, and in processes of their own."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hatch_cuda_aot.runtime
from hatch_cuda_aot.runtime import background
from hatch_cuda_aot.runtime.background import in_background
from hatch_cuda_aot.runtime.errors import (
    CorruptImageError,
    CudaUnavailableError,
    KernelNotFoundError,
    ManifestError,
    NoCompatibleImageError,
    VariableNotFoundError,
)
from hatch_cuda_aot.runtime.info import GlobalAddress

if TYPE_CHECKING:
    from collections.abc import Callable

    from hatch_cuda_aot.runtime.loader import Loader

    from .conftest import FakeApi, FakePackage, Status

    OpenLoader = Callable[[Path, FakeApi], Loader]
    MakeApi = Callable[..., FakeApi]

ARCHS = {"sm_80": 12000, "sm_90": 12000, "compute_75": 12090}
SECONDS = 30


@pytest.fixture
def folder(package: FakePackage) -> Path:
    """Three modules: one of two kernels, one of another, one that only runs on 10.0."""
    package.add("axpy", {"axpy<float>": "axpy_f", "axpy<double>": "axpy_double"}, ARCHS)
    package.add("sum", {"sum": "sum"}, ARCHS)
    package.add("tma", {"tma": "tma"}, {"sm_100a": 12000})
    package.modules["sum"]["globals"] = {
        "ns::scale": {"symbol": "_ZN2ns5scaleE", "space": "global", "size": 4, "align": 4},
        "bias": {"symbol": "bias", "space": "const", "size": 16, "align": 4},
    }
    package.modules["tma"]["globals"] = {}
    return package.write()


# ---- preload


def test_preload_some(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """The images of the named kernels are loaded, each once, and nothing else is."""
    api = fake_api([90])
    loader = open_loader(folder, api)
    assert loader.preload(["axpy<float>", "axpy< double >"]).result(SECONDS) is None
    assert api.loads == ["axpy for sm_90"]
    loader.get_handle("axpy<double>")
    assert len(api.loads) == 1
    loader.preload("sum").result(SECONDS)
    assert api.loads == ["axpy for sm_90", "sum for sm_90"]


def test_preload_all(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """Without names every kernel is loaded that runs on the device; asked for by name, one that does not is an error."""
    api = fake_api([90])
    loader = open_loader(folder, api)
    assert loader.preload().result(SECONDS) is None
    assert sorted(api.loads) == ["axpy for sm_90", "sum for sm_90"]
    with pytest.raises(NoCompatibleImageError):
        loader.preload(["tma"]).result(SECONDS)


def test_preload_for_a_device(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """The device is the one named, or the current one of the thread that asks, which starts no CUDA for that."""
    api = fake_api([90, 80, 75])
    starts = []
    start = api.cuInit

    def init(flags: int) -> tuple[Any, ...]:
        starts.append(threading.get_ident())
        return start(flags)

    api.cuInit = init  # type: ignore[method-assign]
    api.current = 1
    loader = open_loader(folder, api)
    loader.preload("sum").result(SECONDS)
    loader.preload("sum", 2).result(SECONDS)
    assert api.loads == ["sum for sm_80", "jit 75: sum for compute_75"]
    assert starts not in ([], [threading.get_ident()])


def test_get_waits_for_a_preload(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """A kernel that is being loaded in the background is waited for, and loaded once."""
    api = fake_api([90])
    begun, go_on = threading.Event(), threading.Event()
    load = api.cuLibraryLoadData

    def slow_load(*arguments: Any) -> tuple[Any, ...]:
        begun.set()
        assert go_on.wait(SECONDS)
        return load(*arguments)

    api.cuLibraryLoadData = slow_load  # type: ignore[assignment,method-assign]
    loader = open_loader(folder, api)
    future = loader.preload(["axpy<float>"])
    assert begun.wait(SECONDS)
    assert not future.done()
    threading.Timer(0.05, go_on.set).start()
    assert loader.get_handle("axpy<double>")
    future.result(SECONDS)
    assert api.loads == ["axpy for sm_90"]


def test_await_a_preload(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """asyncio waits for the future like for any other, result or error."""
    loader = open_loader(folder, fake_api([90]))

    async def main() -> None:
        await asyncio.wrap_future(loader.preload(["sum"]))
        with pytest.raises(KernelNotFoundError):
            await asyncio.wrap_future(loader.preload(["some"]))

    asyncio.run(main())


def test_errors_of_a_preload(
    folder: Path, open_loader: OpenLoader, fake_api: MakeApi, status: type[Status], tmp_path: Path
) -> None:
    """Whatever goes wrong comes out of the future, and the other kernels are loaded all the same."""
    (folder / "axpy.sm_90.cubin").write_bytes(b"")
    api = fake_api([90])
    loader = open_loader(folder, api)
    with pytest.raises(KernelNotFoundError, match="'axpi'"):
        loader.preload(["axpi", "sum"]).result(SECONDS)
    with pytest.raises(CorruptImageError):
        loader.preload().result(SECONDS)
    assert api.loads == ["sum for sm_90"]
    api = fake_api([90])
    api.init = status.CUDA_ERROR_NO_DEVICE
    with pytest.raises(CudaUnavailableError):
        open_loader(folder, api).preload().result(SECONDS)
    with pytest.raises(ManifestError):
        open_loader(tmp_path, fake_api([90])).preload().result(SECONDS)
    with pytest.raises(TypeError, match="device is 'cuda'"):
        loader.preload(device="cuda")


def test_background_order_of_errors() -> None:
    """Of several errors the one of the first function is handed on, whichever thread was faster."""

    def fail(number: int) -> Callable[[], None]:
        def call() -> None:
            time.sleep(0.02 * (3 - number))
            raise ValueError(number)

        return call

    with pytest.raises(ValueError, match="0"):
        in_background(lambda: [fail(number) for number in range(3)]).result(SECONDS)


def test_background_runs_all_and_leaves_no_thread() -> None:
    """Every function is called exactly once, and the threads are gone afterwards."""
    calls: list[int] = []
    in_background(lambda: [partial(calls.append, number) for number in range(100)]).result(SECONDS)
    assert sorted(calls) == list(range(100))
    end = time.monotonic() + SECONDS
    while background._threads and time.monotonic() < end:
        time.sleep(0.001)
    assert not background._threads


# ---- variables


class Contexts:
    """Adds the calls about contexts and variables to a fake driver: addresses are per device and context."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.active: set[int] = set()
        self.retained: list[int] = []
        self.released: list[int] = []
        for name in ("PrimaryCtxRetain", "PrimaryCtxRelease", "PrimaryCtxGetState"):
            setattr(api, f"cuDevice{name}", getattr(self, name))
        api.cuCtxPushCurrent, api.cuCtxPopCurrent = self.push, self.pop
        api.cuLibraryGetGlobal = self.find
        self.stack: list[int | None] = []

    def PrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        self.retained.append(device)
        return 0, device

    def PrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        self.released.append(device)
        return (0,)

    def PrimaryCtxGetState(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, 0, int(device in self.active)

    def push(self, context: int) -> tuple[Any, ...]:
        self.stack.append(self.api.current)
        self.api.current = context
        return (0,)

    def pop(self) -> tuple[Any, ...]:
        popped, self.api.current = self.api.current, self.stack.pop()
        return 0, popped

    def find(self, library: int, symbol: bytes) -> tuple[Any, ...]:
        from .conftest import Status

        if symbol == b"gone":
            return Status.CUDA_ERROR_NOT_FOUND, None, None
        assert self.api.current is not None
        return Status.CUDA_SUCCESS, library * 1000 + self.api.current, 16


@pytest.mark.parametrize("name", ["bias", "sum:bias", "sum: bias"])
def test_variable(folder: Path, open_loader: OpenLoader, fake_api: MakeApi, name: str) -> None:
    """A variable has an address on each device; contexts stay as they were, but for one that is kept for the address."""
    api = fake_api([90, 90])
    contexts = Contexts(api)
    loader = open_loader(folder, api)
    assert loader.get_global(name, 1) == GlobalAddress(1001, 16)
    assert (api.current, contexts.retained, contexts.released) == (None, [1], [])
    api.current = 0
    assert loader.get_global(name) == GlobalAddress(1000, 16)
    assert (api.current, contexts.retained) == (0, [1])
    contexts.active.add(1)
    assert loader.get_global(name, 1).address == 1001
    assert (api.current, contexts.retained, contexts.released) == (0, [1, 1], [1])
    assert api.loads == ["sum for sm_90"]


def test_variable_in_a_namespace(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """Its name with the namespace and its symbol both lead to it."""
    api = fake_api([90])
    Contexts(api)
    loader = open_loader(folder, api)
    assert loader.get_global("ns :: scale") == loader.get_global("_ZN2ns5scaleE") == loader.get_global("sum:ns::scale")


def test_variable_that_is_not_there(
    folder: Path, package: FakePackage, open_loader: OpenLoader, fake_api: MakeApi
) -> None:
    """The error has close matches, or says what there is; an unknown module is said as such."""
    api = fake_api([90])
    Contexts(api)
    loader = open_loader(folder, api)
    with pytest.raises(VariableNotFoundError, match="demo has no variable 'bais'; did you mean 'bias'") as caught:
        loader.get_global("bais")
    assert isinstance(caught.value, KeyError)
    assert caught.value.candidates == ("bias",)
    with pytest.raises(VariableNotFoundError, match=r"'zzz'; there are bias, ns::scale, table$"):
        loader.get_global("zzz")
    with pytest.raises(VariableNotFoundError, match="module 'tma' has no variable 'bias': it has none at all"):
        loader.get_global("tma:bias")
    with pytest.raises(KernelNotFoundError, match="there is no module 'sun'; did you mean 'sum'"):
        loader.get_global("sun:bias")
    package.modules["axpy"]["globals"]["bias"] = package.modules["sum"]["globals"]["bias"]
    with pytest.raises(VariableNotFoundError, match="say which one with 'axpy:bias' or 'sum:bias'") as caught:
        open_loader(package.write(), api).get_global("bias")
    assert caught.value.ambiguous


def test_variable_in_no_image_that_fits(
    package: FakePackage, open_loader: OpenLoader, fake_api: MakeApi, status: type[Status]
) -> None:
    """Refused images are passed over as they are for kernels, and in the end there is the table."""
    folder = package.add("m", {"k": "k"}, ARCHS).write()
    api: Any = fake_api([90])
    find = Contexts(api).find

    def refuse(library: int, symbol: bytes) -> tuple[Any, ...]:
        if "sm_90" in api.loads[library - 1]:
            return status.CUDA_ERROR_NO_BINARY_FOR_GPU, None, None
        return find(library, symbol)

    api.cuLibraryGetGlobal = refuse
    assert open_loader(folder, api).get_global("table").size == 16
    assert api.loads == ["m for sm_90", "jit 90: m for compute_75"]
    with pytest.raises(NoCompatibleImageError, match="the module with the variable 'table' runs on device 0"):
        open_loader(folder, fake_api([70])).get_global("table")


def test_variable_that_the_image_lacks(package: FakePackage, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """A symbol that the driver does not find is the manifest's fault."""
    package.add("m", {"k": "k"}, ARCHS)
    package.modules["m"]["globals"]["table"]["symbol"] = "gone"
    api = fake_api([90])
    Contexts(api)
    with pytest.raises(ManifestError, match=r"m\.sm_90\.cubin holds 'table' as gone"):
        open_loader(package.write(), api).get_global("table")


# ---- kernel_info, explain


def test_info_of_a_device(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """With a device the image is said, and nothing is loaded for that; without one no driver is needed."""
    api = fake_api([90, 80, 75])
    loader = open_loader(folder, api)
    images = [loader.kernel_info("sum", device).image for device in (0, 1, 2)]
    assert [str(image.arch) for image in images if image] == ["sm_90", "sm_80", "compute_75"]
    info = loader.kernel_info("sum", 0)
    assert info.image is not None
    assert info.resources[str(info.image.arch)] == {"registers": 16}
    assert api.loads == []
    assert loader.kernel_info("sum").image is None
    with pytest.raises(NoCompatibleImageError):
        loader.kernel_info("tma", 0)


def test_report_of_long_names_fits(package: FakePackage, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """Tables stay within 100 columns whatever modules and kernels are called, and the data has the whole names."""
    module, kernel = "m" * 120, f"ns::{'k' * 90}<{', '.join(['unsigned long long'] * 9)}>"
    package.add(module, {kernel.replace(", ", ","): "k"}, ARCHS)
    loader = open_loader(package.write(), fake_api([]))
    report = loader.explain(kernel, cc=90)
    assert max(map(len, str(report).splitlines())) <= 100
    assert report.to_dict()["kernel"] == kernel.replace(", ", ",")
    assert {image["module"] for image in report.to_dict()["images"]} == {module}


# ---- processes


@pytest.fixture
def run(package: FakePackage, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that runs code beside a package ``demo`` whose driver is a fake one; stderr must stay empty."""
    package.add("axpy", {"axpy<float>": "axpy_f"}, {"sm_90": 12000})
    package.add("sum", {"sum": "sum"}, {"sm_90": 12000}).write()
    runtime = Path(hatch_cuda_aot.runtime.__file__).parent
    for source in runtime.glob("*.py"):
        shutil.copy(source, package.folder)
    (tmp_path / "demo" / "__init__.py").touch()
    prelude = f"""
import sys, time, threading
sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parents[3])!r}]
from tests.unit.runtime.conftest import FakeApi
import demo._cuda_aot as kernels
from demo._cuda_aot import device
api = FakeApi([90])
device._import_bindings = lambda package: api
load = api.cuLibraryLoadData
"""

    def run_code(code: str) -> str:
        result = subprocess.run(
            [sys.executable, "-c", prelude + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    return run_code


def test_exit_during_a_preload(run: Callable[[str], str]) -> None:
    """A process that ends waits for the load under way, drops the others, and says nothing."""
    output = run(
        """
        begun = threading.Event()
        def slow(*arguments):
            begun.set()
            time.sleep(0.3)
            print("loaded", flush=True)
            return load(*arguments)
        api.cuLibraryLoadData = slow
        from demo._cuda_aot import background
        background._THREADS = 1
        kernels.preload()
        begun.wait()
        """
    )
    assert output == "loaded\n"


def test_exit_does_not_wait_for_ever(run: Callable[[str], str]) -> None:
    """A load that does not return holds nobody up."""
    output = run(
        """
        begun = threading.Event()
        def hang(*arguments):
            begun.set()
            time.sleep(1000)
        api.cuLibraryLoadData = hang
        from demo._cuda_aot import background
        background._PATIENCE = 0.1
        kernels.preload()
        begun.wait()
        print("over")
        """
    )
    assert output == "over\n"


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_fork(run: Callable[[str], str]) -> None:
    """A forked process gets no handle of its parent's, cached or not, but the error; it ends silently too."""
    output = run(
        """
        import os, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        assert kernels.get_handle("sum") and kernels.get_handle("sum", device=0)
        kernels.preload().result()
        if os.fork() == 0:
            api.init = type("Status", (int,), {"name": "CUDA_ERROR_NOT_INITIALIZED"})(3)
            for call in (lambda: kernels.get_handle("sum"), lambda: kernels.get_handle("sum", device=0),
                         lambda: kernels.preload("sum").result(), lambda: kernels.get_global("axpy:table")):
                try:
                    call()
                except kernels.CudaUnavailableError as error:
                    print(error.reason, flush=True)
            sys.exit()
        os.wait()
        print(kernels.get_handle("sum") > 0)
        """
    )
    assert output == "forked\n" * 4 + "True\n"
