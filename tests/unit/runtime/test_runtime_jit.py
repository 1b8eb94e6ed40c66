"""PTX on its way to machine code: which compiler gets which text, and when the cache saves the trip.

The driver's compiler itself is tested in tests/gpu; nvJitLink needs no GPU and is tested here where it is installed.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from hatch_cuda_aot.runtime import device as device_module
from hatch_cuda_aot.runtime import jit
from hatch_cuda_aot.runtime import jit as jit_module
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.runtime.device import Driver, DriverError
from hatch_cuda_aot.runtime.errors import CorruptImageError, NoCompatibleImageError
from hatch_cuda_aot.runtime.jit import LinkerError, Recipe, compile_ptx, nvjitlink_version
from hatch_cuda_aot.runtime.manifest import Image
from hatch_cuda_aot.runtime.select import DeviceFacts, rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hatch_cuda_aot.runtime.loader import Loader

    from .conftest import FakeApi, FakePackage, Status

KERNEL = "axpy<float>"

PTX = b"""// a comment with a .version 1.0 in it
\t.version\t9.0
.target sm_75
.address_size 64
.visible .entry noop() { ret; }
"""


class Installation:
    """A package with one module of PTX alone, its cache, and a compiler that says what it was asked to do.

    Attributes:
        recipes: one per compilation.
        compiler: makes the machine code from PTX.
        linker: the version of nvJitLink that is installed.
        asked: how often somebody asked for it.

    """

    def __init__(self, package: FakePackage, make_api: Callable[..., FakeApi], cache: Path) -> None:
        self.package = package
        self.make_api = make_api
        self.cache = cache
        self.recipes: list[Recipe] = []
        self.compiler: Callable[[bytes], bytes] = lambda ptx: b"good jit of " + ptx
        self.linker: int | None = None
        self.asked = 0

    def start(self, version: int = 13000, cc: int = 90) -> tuple[Loader, FakeApi]:
        """Return the loader of a new process, and the driver under it."""
        api = self.make_api([cc], version)
        return self.open_loader(self.package.folder, api), api

    def open_loader(self, folder: Path, api: FakeApi) -> Loader:
        raise NotImplementedError

    def entries(self) -> list[Path]:
        return sorted(self.cache.iterdir())


@pytest.fixture
def installation(
    package: FakePackage,
    open_loader: Callable[[Path, FakeApi], Loader],
    fake_api: Callable[..., FakeApi],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Installation:
    """An installation of PTX 9.0 for compute_75 under a driver of CUDA 13.0."""
    package.add("axpy", {KERNEL: "axpy_f"}, {"compute_75": 13000}).write()
    installation = Installation(package, fake_api, tmp_path / "cache")

    def compile_it(driver: Driver, ptx: bytes, device: DeviceFacts, recipe: Recipe, **_: object) -> bytes:  # noqa: ARG001
        installation.recipes.append(recipe)
        return installation.compiler(ptx)

    def ask() -> int | None:
        installation.asked += 1
        return installation.linker

    def open_it(folder: Path, api: FakeApi) -> Loader:
        loader = open_loader(folder, api)
        monkeypatch.setattr(jit_module, "compile_ptx", compile_it)
        monkeypatch.setattr(jit_module, "nvjitlink_version", ask)
        monkeypatch.setenv("CUDA_AOT_CACHE", "1")
        monkeypatch.setenv("CUDA_AOT_CACHE_DIR", str(installation.cache))
        return loader

    installation.open_loader = open_it  # type: ignore[method-assign]
    return installation


def test_hit_compiles_nothing(installation: Installation, caplog: pytest.LogCaptureFixture) -> None:
    """The next process takes what the first compiled, and says so."""
    with caplog.at_level(logging.INFO, logger="demo.cuda_aot"):
        for _ in range(3):
            loader, api = installation.start()
            loader.get_handle(KERNEL)
            assert api.loads == ["good jit of axpy for compute_75"]
    assert len(installation.recipes) == 1
    message = "took axpy.compute_75.ptx, compiled for compute capability 9.0, from the cache (driver of CUDA 13.0)"
    assert [record.getMessage() for record in caplog.records] == [message] * 2


def test_hit_imports_no_logging(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program does not use logging, nobody would read the line, and the import would cost more than the hit."""
    installation.start()[0].get_handle(KERNEL)
    loader, _ = installation.start()
    monkeypatch.delitem(sys.modules, "logging")
    loader.get_handle(KERNEL)
    assert "logging" not in sys.modules
    assert len(installation.recipes) == 1


def test_what_makes_another_entry(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device, another driver, another build of the driver, other PTX: each is compiled by itself."""
    installation.start()[0].get_handle(KERNEL)
    installation.start(cc=80)[0].get_handle(KERNEL)
    installation.start(version=13010)[0].get_handle(KERNEL)
    monkeypatch.setattr(Driver, "build", "580.65.06")
    installation.start()[0].get_handle(KERNEL)
    installation.package.modules.clear()
    installation.package.add("axpy2", {KERNEL: "axpy_f"}, {"compute_75": 13000}).write()
    installation.start()[0].get_handle(KERNEL)
    assert len(installation.recipes) == len(installation.entries()) == 5


def test_build_of_the_driver(installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what the kernel module says of itself, and nothing where there is none."""
    driver = installation.start()[0].driver
    monkeypatch.setattr(device_module, "_KERNEL_MODULE", str(tmp_path / "version"))
    assert driver.build == ""
    (tmp_path / "version").write_text("NVRM version: 580.159.04\nGCC version: 13\n", encoding="utf-8")
    assert driver.build == "NVRM version: 580.159.04"


def test_every_field_of_a_recipe_is_in_the_key() -> None:
    """Whatever differs in the recipe or the text gives another key."""
    recipe: Any = Recipe("driver of CUDA 13.0", "580", 90)
    others = [
        recipe._replace(**{field: value})
        for field, value in zip(Recipe._fields, ("nvJitLink 13.5", "581", 80, "7.0", ("-arch=sm_90",)), strict=True)
    ]
    keys = {recipe.key("ab"), recipe.key("ac"), *(other.key("ab") for other in others)}
    assert len(keys) == 2 + len(Recipe._fields)


@pytest.mark.parametrize("status_name", ["CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_NOT_FOUND"])
def test_entry_that_the_driver_refuses(installation: Installation, status: type[Status], status_name: str) -> None:
    """It is dropped and compiled again once, and the next process takes the new one."""
    installation.compiler = lambda _: b"stale"
    installation.start()[0].get_handle(KERNEL)
    installation.compiler = lambda _: b"fresh"
    loader, api = installation.start()
    api.refuse["stale"] = status[status_name]
    loader.get_handle(KERNEL)
    assert api.loads == ["stale", "fresh"]
    loader, api = installation.start()
    loader.get_handle(KERNEL)
    assert api.loads == ["fresh"]
    assert len(installation.recipes) == 2


def test_refused_entry_goes_even_if_nothing_replaces_it(installation: Installation, status: type[Status]) -> None:
    """A process that cannot compile does not leave the entry for the next one to trip over."""
    installation.start()[0].get_handle(KERNEL)

    def fail(_: bytes) -> bytes:
        raise DriverError("cuLinkComplete", 218, "CUDA_ERROR_INVALID_PTX")

    installation.compiler = fail
    loader, api = installation.start()
    api.refuse["good"] = status.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(NoCompatibleImageError, match="CUDA_ERROR_INVALID_PTX"):
        loader.get_handle(KERNEL)
    assert installation.entries() == []


def test_driver_that_refuses_all_it_makes(installation: Installation, status: type[Status]) -> None:
    """Machine code that is refused fresh as well is compiled once per process, not for ever."""
    for count in (1, 2):
        loader, api = installation.start()
        api.refuse["good"] = status.CUDA_ERROR_NO_BINARY_FOR_GPU
        with pytest.raises(NoCompatibleImageError, match="the driver refused it: CUDA_ERROR_NO_BINARY_FOR_GPU"):
            loader.get_handle(KERNEL)
        assert len(installation.recipes) == count


def test_every_damage_to_an_entry_is_caught(installation: Installation) -> None:
    """Cut at or with a flipped byte at every 64th place, no entry reaches the driver; the kernel is compiled anew."""
    installation.compiler = lambda _: b"machine code " * 200
    installation.start()[0].get_handle(KERNEL)
    (path,) = installation.entries()
    whole = path.read_bytes()
    damaged = [whole[:cut] for cut in range(0, len(whole), 64)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :] for at in range(0, len(whole), 64)]
    assert len(damaged) > 80
    for content in damaged:
        installation.recipes.clear()
        path.write_bytes(content)
        loader, api = installation.start()
        loader.get_handle(KERNEL)
        assert api.loads == ["machine code " * 200]
        assert len(installation.recipes) == 1
        assert path.read_bytes() == whole


def test_damaged_image_beside_a_good_entry(installation: Installation) -> None:
    """A damaged image raises whether or not the cache could hide it."""
    installation.start()[0].get_handle(KERNEL)
    path = installation.package.folder / "axpy.compute_75.ptx"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptImageError):
        installation.start()[0].get_handle(KERNEL)


def test_no_cache(installation: Installation, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the folder is of no use, each process compiles, and says why once for all its kernels."""
    installation.package.add("more", {"more": "more_f"}, {"compute_75": 13000}).write()
    (tmp_path / "cache").touch()
    for count in (2, 4):
        caplog.clear()
        loader, _ = installation.start()
        assert loader.get_handle(KERNEL)
        assert loader.get_handle("more")
        assert len(installation.recipes) == count
        (record,) = caplog.records
        assert record.levelname == "WARNING"


def test_version_line_is_lowered(installation: Installation) -> None:
    """PTX newer than the driver goes to it with the lowest version line, and explain() says so; else it stays as it is."""
    promise(installation, ptx_floor="7.0", floor_driver=11000)
    for version, lowered, way in ((13000, None, "jit"), (12090, "7.0", "jit-lowered"), (12000, "7.0", "jit-lowered")):
        loader, _ = installation.start(version)
        loader.get_handle(KERNEL)
        assert installation.recipes[-1] == Recipe(f"driver of CUDA {version // 1000}.{version % 1000 // 10}",
                                                  loader.driver.build, 90, lowered)  # fmt: skip
        (row,) = loader.explain(KERNEL).rows
        assert (row.verdict, row.way) == ("chosen", way)
    assert row.reason == "PTX 9.0, its version line lowered to 7.0 for this driver"
    assert installation.asked == 0


def test_nvjitlink_is_the_last_way(installation: Installation) -> None:
    """Without a floor that the driver reads, nvJitLink compiles; it is asked for once per process."""
    installation.package.add("axpy", {KERNEL: "axpy_f"}, {"compute_75": 13050}).write()
    installation.linker = 13050
    loader, _ = installation.start()
    assert [row.reason for row in loader.explain(KERNEL).rows] == [
        "PTX 9.5, compiled by nvJitLink 13.5 for this older driver"
    ]
    assert loader.load(KERNEL).image.kind == "ptx"
    assert installation.recipes == [Recipe("nvJitLink 13.5", "", 90, None, ("-arch=sm_90",))]
    assert installation.asked == 1
    installation.linker = None
    with pytest.raises(NoCompatibleImageError, match="Or install nvJitLink"):
        installation.start()[0].get_handle(KERNEL)


def test_nobody_asks_for_nvjitlink_in_vain(installation: Installation) -> None:
    """Where machine code is chosen, loading does not ask; only the table does, to be right in each line."""
    archs = {"sm_90": 13000, "compute_75": 13050}
    installation.package.add("axpy", {KERNEL: "axpy_f"}, archs).write()
    installation.linker = 13050
    loader, _ = installation.start()
    loader.get_handle(KERNEL)
    assert installation.asked == 0
    assert [row.way for row in loader.explain(KERNEL).rows] == ["load", "nvjitlink"]
    assert [row.way for row in loader.explain(KERNEL, cc=90, driver="13.0").rows] == ["load", ""]
    assert installation.asked == 1


def test_nvjitlink_that_fails(installation: Installation, caplog: pytest.LogCaptureFixture) -> None:
    """What nvJitLink cannot compile is recorded with its words, and the next image is tried."""
    archs = {"compute_80": 13050, "compute_75": 13000}
    installation.package.add("axpy", {KERNEL: "axpy_f"}, archs).write()
    installation.linker = 13050

    def fail(ptx: bytes) -> bytes:
        if b"compute_80" in ptx:
            raise LinkerError("nvJitLink", 4, "ERROR_PTX_COMPILE", "no such instruction")
        return ptx

    installation.compiler = fail
    loader, _ = installation.start()
    assert loader.load(KERNEL).image.file == "axpy.compute_75.ptx"
    words = "ERROR_PTX_COMPILE (4) from nvJitLink: no such instruction"
    assert caplog.messages == [f"nvJitLink refused axpy.compute_80.ptx, trying the next image: {words}"]
    assert loader.explain(KERNEL).rows[1].reason == f"nvJitLink refused it: {words}"


@pytest.mark.parametrize(
    ("arch", "cc", "target"),
    [("compute_75", 90, "sm_90"), ("compute_90a", 90, "sm_90a"), ("compute_100f", 103, "sm_103f")],
)
def test_target_of_nvjitlink(arch: str, cc: int, target: str) -> None:
    """nvJitLink is told the device's own architecture, with the suffix of the PTX, without which it refuses it."""
    image = Image(Arch.parse(arch), "m.ptx", min_driver=13050, ptx_version="9.5")
    device = DeviceFacts(cc, 13000, nvjitlink=13050)
    (candidate,) = rank([image], device)
    assert Recipe.of(candidate.image, candidate.way, device, None).options == (f"-arch={target}",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ptx", "lowered"),
    [
        (PTX, PTX.replace(b"\t9.0", b"\t6.3")),
        (b".version 9.0\r\n.version 9.0\r\n", b".version 6.3\r\n.version 9.0\r\n"),
        (b"// .version 9.0\n.target sm_90\n", b"// .version 9.0\n.target sm_90\n"),
    ],
)
def test_lower_version(ptx: bytes, lowered: bytes) -> None:
    """The first directive alone changes, and nothing else does."""
    assert jit.lower_version(ptx, "6.3") == lowered


def test_what_the_compilers_get(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The driver gets the text with a NUL and under a context, nvJitLink without both; each says how long it took."""
    contexts = []
    got: list[object] = []

    def link(_driver: object, ptx: bytes, _label: str) -> bytes:
        got.append(ptx)
        return b"A"

    def link_with_nvjitlink(ptx: bytes, options: tuple[str, ...], _label: str) -> bytes:
        got.append((ptx, options))
        return b"B"

    class NoDriver:
        @contextmanager
        def context(self, ordinal: int) -> Iterator[None]:
            contexts.append(ordinal)
            yield

    monkeypatch.setattr(jit, "_link", link)
    monkeypatch.setattr(jit, "_link_with_nvjitlink", link_with_nvjitlink)
    recipes = [
        Recipe("driver of CUDA 13.0", "", 90),
        Recipe("driver of CUDA 12.0", "", 90, "7.0"),
        Recipe("nvJitLink 13.5", "", 90, None, ("-arch=sm_90",)),
    ]
    device = DeviceFacts(90, 13000, ordinal=3)
    driver: Any = NoDriver()
    with caplog.at_level(logging.INFO, logger="demo"):
        cubins = [compile_ptx(driver, PTX, device, recipe, label="a.ptx", logger="demo") for recipe in recipes]
    assert cubins == [b"A", b"A", b"B"]
    assert got == [PTX + b"\0", PTX.replace(b"9.0", b"7.0") + b"\0", (PTX, ("-arch=sm_90",))]
    assert contexts == [3, 3]
    assert [message.partition(" ms ")[2] for message in caplog.messages] == [
        "(driver of CUDA 13.0)",
        "(driver of CUDA 12.0, .version lowered to 7.0)",
        "(nvJitLink 13.5)",
    ]


def test_nvjitlink_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither old bindings without it nor a missing library is an error."""

    class NoLibrary:
        @staticmethod
        def version() -> tuple[int, int]:
            raise RuntimeError("libnvJitLink.so is not there")

    for module in (None, NoLibrary):
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvjitlink", module)
        assert nvjitlink_version() is None


@pytest.mark.skipif(nvjitlink_version() is None, reason="nvJitLink is not installed")
def test_real_nvjitlink() -> None:
    """It makes machine code, and its error comes with its words, and it takes no architecture that it does not know."""
    version = nvjitlink_version()
    assert version is not None
    assert version >= 12000
    assert version % 10 == 0
    ptx = jit.lower_version(PTX, "7.0")
    assert jit._link_with_nvjitlink(ptx, ("-arch=sm_90",), "a.ptx").startswith(b"\x7fELF")
    with pytest.raises(
        LinkerError, match=r"(?s)ERROR_PTX_COMPILE .* from nvJitLink: .*Unsupported \.version 99\.9"
    ) as caught:
        jit._link_with_nvjitlink(jit.lower_version(PTX, "99.9"), ("-arch=sm_90",), "a.ptx")
    assert caught.value.refusal
    with pytest.raises(LinkerError, match=r"from nvJitLink: .*sm_30"):
        jit._link_with_nvjitlink(ptx, ("-arch=sm_30",), "a.ptx")


def promise(installation: Installation, **fields: object) -> None:
    """Change what the manifest says of the module's PTX."""
    for image in installation.package.modules["axpy"]["images"]:
        image.update(fields)
    installation.package.write()
