"""The manifest that builds write is the one that the loader reads, byte for byte the same for the same results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from hatch_cuda_aot.compile.ptx import Param, Variable
from hatch_cuda_aot.compile.tasks import Resources
from hatch_cuda_aot.manifest import MANY_MODULES, image_file, manifest_files
from hatch_cuda_aot.results import Image, Kernel, ModuleResult, PtxIsa
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.runtime.errors import KernelNotFoundError, ManifestError
from hatch_cuda_aot.runtime.files import read_verified
from hatch_cuda_aot.runtime.manifest import Manifest
from hatch_cuda_aot.toolchain import Toolchain

TOOLCHAIN = Toolchain(
    "12.9", "12.9.86", "12.9.41", "/venv/bin/ptxas", "3000003", (("include", "/venv/include"),), (90,)
)

AXPY = ModuleResult(
    name="axpy",
    kernels=(
        Kernel("axpy<float>", "_Z4axpyIfEvPT_S0_", (Param("u64", 8, 0), Param("f32", 4, 8), Param("struct", 24, 16))),
        Kernel("noop", "noop", ()),
    ),
    variables={
        "table": Variable("table", "const", 1024, 4),
        "ours::params": Variable("_ZN4ours6paramsE", "global", 24, 8),
    },
    images=(
        Image(
            Arch(90, "a"),
            Arch(90, "a", virtual=True),
            b"cubin 90a",
            12000,
            None,
            {"axpy<float>": Resources(32, 1024, 16, 8, 4), "noop": Resources(4)},
        ),
        Image(Arch(86), Arch(80, virtual=True), b"cubin 86", 12000, None, {"noop": Resources(4)}),
        Image(
            Arch(75, virtual=True),
            Arch(75, virtual=True),
            b"ptx 75",
            12090,
            PtxIsa("8.8", "6.3", 10000),
            {"axpy<float>": None, "noop": None},
        ),
    ),
    warnings=(),
)
OTHER = ModuleResult(
    name="other",
    kernels=(Kernel("noop", "noop", ()), Kernel("größe", "_Z6grxxe", ())),
    variables={},
    images=(Image(Arch(90), Arch(90, virtual=True), b"other", 12000, None, {"noop": Resources(8)}),),
    warnings=(("other for sm_90", "a warning"),),
)


def files(*modules: ModuleResult) -> dict[str, bytes]:
    """Return the files of a package with these modules."""
    return manifest_files("example_pkg", modules, TOOLCHAIN, "1.2.3")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Both modules, written down and read by the loader's own reader."""
    for name, content in files(AXPY, OTHER).items():
        (tmp_path / name).write_bytes(content)
    return Manifest.read(str(tmp_path))


def test_file_names() -> None:
    """There is an index, a file per module, and one per image, named after module, architecture and kind."""
    assert list(files(AXPY, OTHER)) == [
        "axpy.compute_75.ptx",
        "axpy.json",
        "axpy.sm_86.cubin",
        "axpy.sm_90a.cubin",
        "manifest.json",
        "other.json",
        "other.sm_90.cubin",
    ]
    assert image_file("axpy", AXPY.images[0]) == "axpy.sm_90a.cubin"


def test_many_modules(tmp_path: Path) -> None:
    """What more than a hundred modules have lies in a folder of its own, not beside the loader, and is found there."""
    modules = [dataclasses.replace(OTHER, name=f"m{number:03}") for number in range(MANY_MODULES + 1)]
    made = files(*modules)
    assert [name for name in made if "/" not in name] == ["manifest.json"]
    assert all("/" not in name for name in files(*modules[1:]))
    for name, content in made.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (image,) = Manifest.read(str(tmp_path)).module("m007").images
    assert image.file == "modules/m007.sm_90.cubin"
    assert read_verified(str(tmp_path / image.file), image.size, image.sha256) == b"other"


def test_large_image(tmp_path: Path) -> None:
    """An image of 2 MiB or more has the digest of each MiB, by which the loader reads it."""
    data = bytes(range(256)) * (10 * 1024) + b"the rest"
    images = (Image(Arch(90), Arch(90, virtual=True), data, 12000, None, {"noop": Resources(8)}),)
    for name, content in files(dataclasses.replace(OTHER, images=images)).items():
        (tmp_path / name).write_bytes(content)
    (image,) = Manifest.read(str(tmp_path)).module("other").images
    mib = 1024 * 1024
    assert image.parts == [hashlib.sha256(data[start : start + mib]).hexdigest() for start in (0, mib, 2 * mib)]
    assert read_verified(str(tmp_path / image.file), image.size, image.sha256, image.parts) == data


def test_index() -> None:
    """The index has the format, who made it with what, and each kernel's module; of a shared name all of them."""
    made = files(AXPY, OTHER)
    assert json.loads(made["manifest.json"]) == {
        "format": 1,
        "generator": {"name": "hatch-cuda-aot", "version": "1.2.3"},
        "package": "example_pkg",
        "toolchain": {"cuda": "12.9", "nvrtc": "12.9.86", "ptxas": "12.9.41"},
        "modules": {
            name: {
                "file": f"{name}.json",
                "size": len(made[f"{name}.json"]),
                "sha256": hashlib.sha256(made[f"{name}.json"]).hexdigest(),
            }
            for name in ("axpy", "other")
        },
        "kernels": {"axpy<float>": "axpy", "noop": ["axpy", "other"], "größe": "other"},
    }


def test_module() -> None:
    """A module's file has its kernels, variables and images, each with everything that the loader and people ask."""
    table = json.loads(files(AXPY)["axpy.json"])
    assert table["format"] == 1
    assert table["module"] == "axpy"
    assert table["kernels"]["axpy<float>"] == {
        "symbol": "_Z4axpyIfEvPT_S0_",
        "params": [
            {"kind": "u64", "size": 8, "offset": 0},
            {"kind": "f32", "size": 4, "offset": 8},
            {"kind": "struct", "size": 24, "offset": 16},
        ],
        "policy": {},
    }
    assert table["globals"]["ours::params"] == {"symbol": "_ZN4ours6paramsE", "space": "global", "size": 24, "align": 8}
    cubin, _, text = table["images"]
    assert cubin == {
        "arch": "sm_90a",
        "kind": "cubin",
        "file": "axpy.sm_90a.cubin",
        "size": 9,
        "sha256": hashlib.sha256(b"cubin 90a").hexdigest(),
        "min_driver": 12000,
        "virtual": "compute_90a",
        "ptx_version": None,
        "ptx_floor": None,
        "floor_driver": None,
        "kernels": {
            "axpy<float>": {"registers": 32, "shared": 1024, "local": 16, "spill_stores": 8, "spill_loads": 4},
            "noop": {"registers": 4, "shared": 0, "local": 0, "spill_stores": 0, "spill_loads": 0},
        },
    }
    assert (text["kind"], text["ptx_version"], text["min_driver"]) == ("ptx", "8.8", 12090)
    assert (text["ptx_floor"], text["floor_driver"]) == ("6.3", 10000)
    assert text["kernels"] == {"axpy<float>": {}, "noop": {}}


def test_canonical_json() -> None:
    """The JSON is sorted, without blanks, in UTF-8, and ends in one newline."""
    for name, content in files(AXPY, OTHER).items():
        if name.endswith(".json"):
            again = json.dumps(json.loads(content), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            assert content == f"{again}\n".encode()
    assert "größe".encode() in files(OTHER)["manifest.json"]


def test_same_results_same_bytes() -> None:
    """In whichever order modules were built, the files are the same, and they name no path of this machine."""
    assert files(AXPY, OTHER) == files(OTHER, AXPY)
    assert list(files(AXPY, OTHER)) == list(files(OTHER, AXPY))
    assert b"venv" not in b"".join(files(AXPY, OTHER).values())


def test_read_back_kernels(manifest: Manifest) -> None:
    """The loader finds every kernel with its symbol and parameters, by name, by module and by symbol."""
    assert manifest.package == "example_pkg"
    assert manifest.kernel_names() == ["axpy:noop", "axpy<float>", "größe", "other:noop"]
    for name in ("axpy< float >", "axpy:axpy<float>", "_Z4axpyIfEvPT_S0_"):
        module, kernel = manifest.find(name)
        assert (module.name, kernel.name, kernel.symbol) == ("axpy", "axpy<float>", "_Z4axpyIfEvPT_S0_")
        assert [tuple(param) for param in kernel.params] == [("u64", 8, 0), ("f32", 4, 8), ("struct", 24, 16)]
    assert manifest.find("other:noop")[0].name == "other"
    with pytest.raises(KernelNotFoundError, match="2 modules define the kernel 'noop'"):
        manifest.find("noop")


def test_read_back_images(manifest: Manifest, tmp_path: Path) -> None:
    """The loader sees every image as it was built, with the file that holds its bytes."""
    images = {str(image.arch): image for image in manifest.module("axpy").images}
    assert set(images) == {"sm_90a", "sm_86", "compute_75"}
    for built in AXPY.images:
        image = images[str(built.arch)]
        assert (image.kind, image.min_driver) == (built.kind, built.min_driver)
        assert image.ptx_version == (built.isa.version if built.isa else None)
        assert image.ptx_floor == (built.isa.floor if built.isa else None)
        assert image.virtual == str(built.front)
        assert (tmp_path / image.file).read_bytes() == built.data
        assert (image.size, image.sha256) == (len(built.data), hashlib.sha256(built.data).hexdigest())
        assert set(image.kernels) == set(built.kernels)
    assert images["sm_90a"].kernels["noop"]["registers"] == 4


def test_read_back_variables(manifest: Manifest) -> None:
    """The loader finds variables by the name of the source."""
    variable = manifest.module("axpy").variable("ours::params")
    assert variable is not None
    assert (variable.symbol, variable.space, variable.size, variable.align) == ("_ZN4ours6paramsE", "global", 24, 8)
    assert manifest.module("axpy").variable("nothing") is None


def test_files_of_two_builds_do_not_mix(manifest: Manifest, tmp_path: Path) -> None:
    """A module's file of another build is noticed, even one that differs in a digit."""
    path = tmp_path / "other.json"
    path.write_bytes(path.read_bytes().replace(b'"registers":8', b'"registers":9'))
    with pytest.raises(ManifestError, match="SHA-256"):
        manifest.module("other")
