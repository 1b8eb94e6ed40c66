"""The loader's own logic over a fake driver: what is loaded how often, what is tried next, what is raised.

What a real driver does with an image is proven in tests/gpu.
"""

from __future__ import annotations

import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hatch_cuda_aot.runtime.device import ordinal_of
from hatch_cuda_aot.runtime.errors import (
    CorruptImageError,
    CudaUnavailableError,
    KernelNotFoundError,
    ManifestError,
    NoCompatibleImageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hatch_cuda_aot.runtime.loader import Loader

    from .conftest import FakeApi, FakePackage, Status

    OpenLoader = Callable[[Path, FakeApi], Loader]
    MakeApi = Callable[..., FakeApi]

ARCHS = {"sm_80": 12000, "sm_90": 12000, "compute_75": 12090}


@pytest.fixture
def folder(package: FakePackage) -> Path:
    """A package with one module of two kernels."""
    return package.add("axpy", {"axpy<float>": "axpy_f", "axpy<double>": "axpy_double"}, ARCHS).write()


def test_best_image_is_loaded_once(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """Two kernels of one image, asked for again and again, load one library."""
    api = fake_api([90])
    loader = open_loader(folder, api)
    for _ in range(3):
        assert loader.get_handle("axpy<float>") != loader.get_handle("axpy< double >")
    assert api.loads == ["axpy for sm_90"]
    assert loader.load("axpy<float>").image.file == "axpy.sm_90.cubin"


def test_devices_share_what_fits_both(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """A second device of the same compute capability loads nothing; one of another gets its own image."""
    api = fake_api([90, 90, 80, 75])
    loader = open_loader(folder, api)
    assert loader.get_handle("axpy<float>", 0) == loader.get_handle("axpy<float>", 1)
    loader.get_handle("axpy<float>", 2)
    loader.get_handle("axpy<float>", 3)
    assert api.loads == ["axpy for sm_90", "axpy for sm_80", "jit 75: axpy for compute_75"]


def test_current_device_is_the_default(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """Without `device` each call follows the current context; without a context it is device 0."""
    api = fake_api([90, 80])
    loader = open_loader(folder, api)
    assert loader.load("axpy<float>").device == 0
    api.current = 1
    assert loader.load("axpy<float>").device == 1
    assert loader.get_handle("axpy<float>") == loader.get_handle("axpy<float>", 1)
    api.current = 0
    assert loader.get_handle("axpy<float>") == loader.get_handle("axpy<float>", 0)


def test_one_load_under_many_threads(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """32 threads that start at once load each image once and get the same kernel."""
    api = fake_api([90])
    slow = threading.Event()
    load = api.cuLibraryLoadData

    def slow_load(*arguments: Any) -> tuple[Any, ...]:
        slow.wait(0.05)
        return load(*arguments)

    api.cuLibraryLoadData = slow_load  # type: ignore[assignment,method-assign]
    loader = open_loader(folder, api)
    start = threading.Barrier(32)

    def ask(number: int) -> int:
        start.wait()
        return loader.get_handle("axpy<float>" if number % 2 else "axpy<double>")

    with ThreadPoolExecutor(32) as pool:
        handles = list(pool.map(ask, range(32)))
    assert len(set(handles)) == 2
    assert len(api.loads) == 1


@pytest.mark.parametrize("code", [200, 209, 218, 221, 222, 223])
def test_refused_image_is_passed_over(
    folder: Path,
    open_loader: OpenLoader,
    fake_api: MakeApi,
    code: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the driver refuses is recorded, said once in the log, and the next image is taken."""
    api = fake_api([90])
    api.refuse["sm_90"] = SimpleStatus(code)  # type: ignore[assignment]
    loader = open_loader(folder, api)
    with caplog.at_level(logging.INFO, logger="demo.cuda_aot"):
        assert loader.load("axpy<float>").image.kind == "ptx"
        assert loader.load("axpy<double>").image.kind == "ptx"
    assert [record.name for record in caplog.records] == ["demo.cuda_aot"]
    assert "the driver refused axpy.sm_90.cubin" in caplog.text
    refused, chosen = (next(row for row in loader.explain("axpy<float>").rows if row.kind == kind)
                       for kind in ("cubin", "ptx"))  # fmt: skip
    assert (refused.verdict, chosen.verdict) == ("refused", "chosen")
    assert "the driver refused it: REFUSED" in refused.reason


def test_refusal_by_one_device_alone(
    folder: Path, open_loader: OpenLoader, fake_api: MakeApi, status: type[Status]
) -> None:
    """An image may resolve and still be refused when it is bound to a device: that one goes on, the others stay."""
    api = fake_api([90, 90])
    api.refuse_on["sm_90", 1] = status.CUDA_ERROR_NO_BINARY_FOR_GPU
    loader = open_loader(folder, api)
    assert loader.load("axpy<float>", 0).image.kind == "cubin"
    assert loader.load("axpy<float>", 1).image.kind == "ptx"


def test_nothing_fits(package: FakePackage, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """The error names the device, shows every image with its reason, and says what to change."""
    folder = package.add("axpy", {"axpy<float>": "s"}, {"sm_80": 12000, "compute_75": 13050}).write()
    with pytest.raises(NoCompatibleImageError) as caught:
        open_loader(folder, fake_api([90], 13000)).get_handle("axpy<float>")
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert str(error).splitlines() == [
        "no image of the kernel 'axpy<float>' runs on device 0 (GPU 0, compute capability 9.0, driver of CUDA 13.0):",
        "image                kind   verdict   reason",
        "axpy.sm_80.cubin     cubin  rejected  machine code for 8.0 runs on 8.x devices only",
        "axpy.compute_75.ptx  ptx    rejected  PTX 9.5 needs a driver of CUDA 13.5; this one is of 13.0",
        "Upgrade the NVIDIA driver to one of CUDA 13.5 or newer, which takes PTX 9.5 of compute_75.",
        (
            "Or install nvJitLink, which compiles it in the driver's place: "
            'pip install "cuda-bindings==13.*" "nvidia-nvjitlink==13.*,>=13.5"'
        ),
        'Or ask the authors of demo to add "sm_90" to archs under [tool.cuda-aot].',
    ]
    assert error.report is not None
    assert [row.verdict for row in error.report.rows] == ["rejected", "rejected"]


def test_driver_refuses_everything(
    folder: Path, open_loader: OpenLoader, fake_api: MakeApi, status: type[Status]
) -> None:
    """Where the driver refuses each image, the error comes with its words for each."""
    api = fake_api([90])
    api.refuse["axpy"] = status.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(NoCompatibleImageError, match="CUDA_ERROR_NO_BINARY_FOR_GPU") as caught:
        open_loader(folder, api).get_handle("axpy<float>")
    assert caught.value.report is not None
    assert [row.verdict for row in caught.value.report.rows] == ["refused", "refused", "rejected"]


def test_force_ptx(folder: Path, open_loader: OpenLoader, fake_api: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_AOT_FORCE_PTX=1 passes over machine code; 0 and empty do not."""
    loader = open_loader(folder, fake_api([90]))
    for value, kind in [("1", "ptx"), ("0", "cubin"), ("", "cubin")]:
        monkeypatch.setenv("CUDA_AOT_FORCE_PTX", value)
        assert loader.explain("axpy<float>").chosen[0].kind == kind
    monkeypatch.setenv("CUDA_AOT_FORCE_PTX", "1")
    assert loader.load("axpy<float>").image.kind == "ptx"


def test_every_damage_to_an_image_is_caught(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """Missing, cut at any length or with any byte flipped, an image raises at once: no driver sees it, nor any PTX."""
    path = folder / "axpy.sm_90.cubin"
    whole = path.read_bytes()
    damaged = [whole[:cut] for cut in range(len(whole))]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    api = fake_api([90])
    loader = open_loader(folder, api)
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(CorruptImageError, match=r"axpy\.sm_90\.cubin is damaged: expected .*reinstall demo"):
            loader.get_handle("axpy<float>")
    path.unlink()
    with pytest.raises(CorruptImageError, match="found No such file") as caught:
        loader.get_handle("axpy<float>")
    assert caught.value.path == str(path)
    assert api.loads == []
    path.write_bytes(whole)
    assert loader.get_handle("axpy<float>")


def test_image_without_the_kernel_it_promises(package: FakePackage, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """A symbol that the driver does not find is the manifest's fault, and no other image hides it."""
    folder = package.add("axpy", {"k": "missing"}, ARCHS).write()
    with pytest.raises(ManifestError, match=r"axpy\.json says that axpy\.sm_90\.cubin holds 'k' as missing"):
        open_loader(folder, fake_api([90])).get_handle("k")


def test_kernel_that_only_some_images_hold(package: FakePackage, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """A kernel comes from the best image that holds it, its neighbours from the best of theirs."""
    package.add("m", {"a": "a", "b": "b"}, ARCHS, holds={"sm_90": ["a"], "sm_80": ["a", "b"], "compute_75": ["a", "b"]})
    loader = open_loader(package.write(), fake_api([90]))
    assert loader.load("a").image.file == "m.sm_90.cubin"
    assert loader.load("b").image.file == "m.compute_75.ptx"
    assert set(loader.kernel_info("b").resources) == {"sm_80", "compute_75"}


def test_other_driver_failures(folder: Path, open_loader: OpenLoader, fake_api: MakeApi, status: type[Status]) -> None:
    """What is not about the image, such as memory, is raised and leads to no other image."""
    api = fake_api([90])
    api.refuse["sm_90"] = status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CudaUnavailableError, match=r"axpy.sm_90.cubin was loaded: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        open_loader(folder, api).get_handle("axpy<float>")


def test_the_name_comes_first(folder: Path, open_loader: OpenLoader, fake_api: MakeApi, status: type[Status]) -> None:
    """A misspelt name is said as such also where CUDA cannot be used."""
    api = fake_api([90])
    api.init = status.CUDA_ERROR_NO_DEVICE
    with pytest.raises(KernelNotFoundError):
        open_loader(folder, api).get_handle("axpi")


@pytest.mark.parametrize(
    ("init", "version", "device", "reason", "message"),
    [
        (100, 13000, None, "no-device", "sees no GPU; CUDA_VISIBLE_DEVICES is ''"),
        (3, 13000, None, "forked", "forked from one that had initialised CUDA"),
        (0, 11080, None, "driver-too-old", "is of CUDA 11.8: kernels need one of CUDA 12.0 or newer"),
        (0, 13000, 2, "device-out-of-range", "no CUDA device 2: this process sees devices 0 to 1"),
        (0, 13000, -1, "device-out-of-range", "no CUDA device -1"),
    ],
)
def test_cuda_unavailable(
    folder: Path,
    open_loader: OpenLoader,
    fake_api: MakeApi,
    monkeypatch: pytest.MonkeyPatch,
    init: int,
    version: int,
    device: int | None,
    reason: str,
    message: str,
) -> None:
    """Each way in which CUDA can be missing has its own words and its own `reason`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    api = fake_api([90, 90], version)
    api.init = SimpleStatus(init)  # type: ignore[assignment]
    loader = open_loader(folder, api)
    with pytest.raises(CudaUnavailableError) as caught:
        loader.get_handle("axpy<float>", device)
    assert caught.value.reason == reason
    assert message in str(caught.value)


def test_missing_cuda_core(
    folder: Path, open_loader: OpenLoader, fake_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without cuda.core get_kernel names the package and the call that does without it."""
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    loader = open_loader(folder, fake_api([90]))
    with pytest.raises(CudaUnavailableError, match="get_handle does without it") as caught:
        loader.get_kernel("axpy<float>")
    assert caught.value.reason == "core-missing"
    assert 'pip install "cuda-bindings" "cuda-core"' in str(caught.value)
    assert loader.get_handle("axpy<float>")


def test_cuda_starts_while_core_is_imported(
    folder: Path, open_loader: OpenLoader, fake_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first get_kernel of a process has another thread start CUDA and imports cuda.core meanwhile."""
    api = fake_api([90])
    started = threading.Event()
    starters: list[int] = []

    def start(flags: int) -> tuple[int, ...]:
        assert flags == 0
        starters.append(threading.get_ident())
        started.set()
        return (0,)

    def import_module(name: str) -> SimpleNamespace:
        assert name == "cuda.core"
        assert started.wait(30)
        return SimpleNamespace(Kernel=SimpleNamespace(from_handle=lambda handle: [handle]))

    monkeypatch.setattr(api, "cuInit", start)
    loader = open_loader(folder, api)
    monkeypatch.delitem(sys.modules, "cuda.core", raising=False)
    monkeypatch.setattr("importlib.import_module", import_module)
    with pytest.raises(KernelNotFoundError):
        loader.get_kernel("axpi<float>")
    assert not starters
    assert loader.get_kernel("axpy<float>") == [loader.get_handle("axpy<float>")]
    assert len(starters) == 2
    assert starters[0] != starters[1] == threading.get_ident()


def test_kernel_objects_are_kept(
    folder: Path, open_loader: OpenLoader, fake_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """get_kernel wraps a handle once per device and returns the same object ever after, however the device is named."""
    core = SimpleNamespace(Kernel=SimpleNamespace(from_handle=lambda handle: [handle]))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    loader = open_loader(folder, fake_api([90, 80]))
    kernel = loader.get_kernel("axpy<float>")
    assert kernel == [loader.get_handle("axpy<float>")]
    assert loader.get_kernel("axpy<float>") is kernel
    assert loader.get_kernel("axpy<float>", 0) is kernel
    assert loader.get_kernel("axpy<float>", SimpleNamespace(device_id=0)) is kernel
    assert loader.get_kernel("axpy<float>", 1) is not kernel


@pytest.mark.parametrize(
    ("device", "ordinal"),
    [
        (None, None),
        (3, 3),
        (SimpleNamespace(device_id=2), 2),
        (SimpleNamespace(type="cuda", index=1), 1),
        (SimpleNamespace(type="cuda", index=None), None),
        (SimpleNamespace(id=4), 4),
    ],
)
def test_ways_to_name_a_device(device: object, ordinal: int | None) -> None:
    """A device may be an int, or an object of cuda.core, PyTorch or CuPy."""
    assert ordinal_of(device) == ordinal


def test_what_is_no_device() -> None:
    """Anything else is an error that names what is allowed."""
    with pytest.raises(TypeError, match=r"expected an int, cuda.core.Device, torch.device, cupy.cuda.Device or None"):
        ordinal_of("cuda:0")
    with pytest.raises(ValueError, match="is no CUDA device"):
        ordinal_of(SimpleNamespace(type="cpu", index=None))


def test_explain_other_devices(folder: Path, open_loader: OpenLoader, fake_api: MakeApi, status: type[Status]) -> None:
    """explain() needs no CUDA for a device that is given in figures, and covers every module without a name."""
    api = fake_api([])
    api.init = status.CUDA_ERROR_NO_DEVICE
    loader = open_loader(folder, api)
    report = loader.explain(cc=(8, 7), driver="12.4", tegra=True)
    assert str(report.device) == "compute capability 8.7, Tegra, driver of CUDA 12.4"
    assert report.chosen == ()
    assert loader.explain("axpy<float>", cc="8.7", driver=12090).chosen[0].arch == "compute_75"
    assert loader.explain(cc=90).chosen[0].arch == "sm_90"
    with pytest.raises(TypeError, match="device or cc, not both"):
        loader.explain(device=0, cc=90)
    with pytest.raises(ValueError, match="is not a CUDA version"):
        loader.explain(cc=90, driver="new")
    with pytest.raises(CudaUnavailableError):
        loader.explain()


def test_explain_this_device_with_another_driver(folder: Path, open_loader: OpenLoader, fake_api: MakeApi) -> None:
    """The driver's version can be replaced for a device that is there."""
    loader = open_loader(folder, fake_api([75], 13000))
    assert loader.explain().chosen[0].arch == "compute_75"
    assert loader.explain(driver="12.4").chosen == ()


class SimpleStatus(int):
    """A CUresult of any number."""

    name = "REFUSED"
