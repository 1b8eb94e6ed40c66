"""Reading the manifest: names, modules, and every way in which its files can be wrong."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.runtime.errors import CudaAotError, KernelNotFoundError, ManifestError
from hatch_cuda_aot.runtime.manifest import Global, Manifest, Param, canonical_name

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import FakePackage


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("axpy<float>", "axpy<float>"),
        (" axpy < float > ", "axpy<float>"),
        ("f<unsigned   int>", "f<unsigned int>"),
        ("f<a<int> >", "f<a<int>>"),
        ("n :: scale", "n::scale"),
        ("f<const float *, 128>", "f<const float*,128>"),
        ("f<float\t*const>", "f<float*const>"),
        ("block_sum<float, 256>", "block_sum<float,256>"),
        ("_Z4axpyIfEvT_", "_Z4axpyIfEvT_"),
    ],
)
def test_canonical_name(written: str, canonical: str) -> None:
    """Blanks between tokens mean nothing, except between two words."""
    assert canonical_name(written) == canonical


@given(st.text("ab1_:<>,*& \t$", max_size=30))
def test_canonical_name_is_stable(name: str) -> None:
    """A canonical name is its own canonical name."""
    assert canonical_name(canonical_name(name)) == canonical_name(name)


@given(st.lists(st.sampled_from(["foo", "int", "unsigned", "1", "::", "<", ">", ",", "*"]), max_size=12), st.data())
def test_canonical_name_ignores_spacing(tokens: list[str], data: st.DataObject) -> None:
    """However much white space stands between the tokens, the name is the same."""
    gaps = data.draw(st.lists(st.sampled_from([" ", "\t", "   "]), min_size=len(tokens), max_size=len(tokens)))
    spaced = "".join(token + gap for token, gap in zip(tokens, gaps, strict=True))
    assert canonical_name(spaced) == canonical_name(" ".join(tokens))


@pytest.fixture
def manifest(package: FakePackage) -> Manifest:
    """Two modules that both define ``noop``."""
    archs = {"sm_90": 12000, "compute_75": 12090}
    package.add("axpy", {"axpy<float>": "_Z4axpyIfEvv", "axpy<double>": "_Z4axpyIdEvv", "noop": "noop"}, archs)
    package.add("other", {"ns::scale": "_ZN2ns5scaleEv", "noop": "noop", "_Z1fPf": "_Z1fPf"}, archs)
    return Manifest.read(str(package.write()))


@pytest.mark.parametrize(
    ("name", "module", "kernel"),
    [
        ("axpy<float>", "axpy", "axpy<float>"),
        ("axpy< float >", "axpy", "axpy<float>"),
        ("axpy:axpy<float>", "axpy", "axpy<float>"),
        ("axpy: axpy < float >", "axpy", "axpy<float>"),
        ("_Z4axpyIfEvv", "axpy", "axpy<float>"),
        ("axpy:_Z4axpyIfEvv", "axpy", "axpy<float>"),
        ("ns::scale", "other", "ns::scale"),
        ("other:ns::scale", "other", "ns::scale"),
        ("other:noop", "other", "noop"),
        ("_Z1fPf", "other", "_Z1fPf"),
    ],
)
def test_find(manifest: Manifest, name: str, module: str, kernel: str) -> None:
    """A kernel is found by its name, by ``module:name`` and by its symbol."""
    found_module, found_kernel = manifest.find(name)
    assert (found_module.name, found_kernel.name) == (module, kernel)


def test_values(manifest: Manifest) -> None:
    """A module's entries come as values with the manifest's words."""
    module, kernel = manifest.find("axpy<float>")
    assert kernel.symbol == "_Z4axpyIfEvv"
    assert kernel.params == (Param("f32", 4, 0),)
    assert module.variable("table") == Global("table", "table", "const", 1024, 4)
    assert module.variable("nothing") is None
    cubin, ptx = module.images
    assert (cubin.arch, cubin.kind, cubin.min_driver) == (Arch(90), "cubin", 12000)
    assert (ptx.arch, ptx.kind, ptx.ptx_version) == (Arch(75, virtual=True), "ptx", "8.9")
    assert manifest.kernel_names() == [
        "_Z1fPf",
        "axpy:noop",
        "axpy<double>",
        "axpy<float>",
        "ns::scale",
        "other:noop",
    ]


def test_ambiguous_name(manifest: Manifest) -> None:
    """A name that several modules define is refused, with the names that work."""
    with pytest.raises(KernelNotFoundError) as caught:
        manifest.find("noop")
    assert caught.value.ambiguous
    assert caught.value.candidates == ("axpy:noop", "other:noop")
    assert str(caught.value) == ("2 modules define the kernel 'noop': say which one with 'axpy:noop' or 'other:noop'")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("axpi<float>", "demo has no kernel 'axpi<float>'; did you mean 'axpy<float>'"),
        ("axpy<__half>", "demo has no kernel 'axpy<__half>'; did you mean"),
        ("zzz", "demo has no kernel 'zzz'; kernel_names() lists those there are"),
        ("_Z9nothing", "demo has no kernel '_Z9nothing'"),
        ("axpi:noop", "there is no module 'axpi'; did you mean 'axpy'?"),
        ("axpy:nothing", "demo has no kernel 'axpy:nothing'"),
        ("", "demo has no kernel ''"),
    ],
)
def test_unknown_name(manifest: Manifest, name: str, message: str) -> None:
    """An unknown name is an error that is a KeyError too, prints plainly and offers close ones."""
    with pytest.raises(KeyError) as caught:
        manifest.find(name)
    assert isinstance(caught.value, KernelNotFoundError)
    assert caught.value.code == "kernel-not-found"
    assert str(caught.value).startswith(message)


def test_no_manifest(tmp_path: Path) -> None:
    """Without the hook's table hatchling never runs the hook: the error shows the table and the editable way."""
    with pytest.raises(ManifestError) as caught:
        Manifest.read(str(tmp_path))
    message = str(caught.value)
    assert "[tool.hatch.build.targets.wheel.hooks.cuda-aot]" in message
    assert "hatch-cuda-aot build" in message
    assert caught.value.path == str(tmp_path / "manifest.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b'{"format": 1', "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[]", "not a manifest of hatch-cuda-aot"),
        (b"{}", "not a manifest of hatch-cuda-aot"),
        (b'{"format": 2}', "is of format 2, and the loader beside it reads format 1"),
        (b'{"format": 1, "kernels": []}', "it has no 'package'"),
    ],
)
def test_bad_index(tmp_path: Path, content: bytes, message: str) -> None:
    """A damaged or foreign index names the file, what is wrong and the way out."""
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ManifestError, match="reinstall the package") as caught:
        Manifest.read(str(tmp_path))
    assert message in str(caught.value)


def test_every_damage_to_a_module_file_is_caught(package: FakePackage) -> None:
    """Cut at any length, or with any byte flipped, a module's file is never read as if it were whole."""
    folder = package.add("axpy", {"axpy<float>": "s"}, {"sm_90": 12000}).write()
    path = folder / "axpy.json"
    whole = path.read_bytes()
    damaged = [whole[:cut] for cut in range(0, len(whole), 64)]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 64)]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ManifestError, match=r"axpy\.json is damaged: .*reinstall"):
            Manifest.read(str(folder)).find("axpy<float>")


def test_missing_module_file(package: FakePackage) -> None:
    """A missing module file is named, and modules beside it still work."""
    package.add("axpy", {"axpy<float>": "s"}, {"sm_90": 12000}).add("other", {"noop": "noop"}, {"sm_90": 12000})
    folder = package.write()
    (folder / "axpy.json").unlink()
    manifest = Manifest.read(str(folder))
    with pytest.raises(ManifestError, match=r"axpy\.json is damaged: expected \d+ bytes, found No such file"):
        manifest.find("axpy<float>")
    assert manifest.find("noop")[1].symbol == "noop"


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "sm_9x"},
        {"kind": "ptx"},
        {"size": None, "file": None},
        {"kernels": None},
    ],
)
def test_module_file_that_contradicts_itself(package: FakePackage, change: dict[str, object]) -> None:
    """A module file with a valid digest and wrong content is an error that names it, or damages nothing else."""
    package.add("axpy", {"axpy<float>": "s"}, {"sm_90": 12000})
    entry = package.modules["axpy"]["images"][0]
    for key, value in change.items():
        if value is None:
            del entry[key]
        else:
            entry[key] = value
    folder = package.write()
    with pytest.raises(ManifestError, match=r"axpy\.json is damaged"):
        Manifest.read(str(folder)).find("axpy<float>")


def test_index_that_promises_too_much(package: FakePackage) -> None:
    """A kernel that the index names and its module lacks is the manifest's fault, not an unknown name."""
    folder = package.add("axpy", {"axpy<float>": "s"}, {"sm_90": 12000}).write()
    index = json.loads((folder / "manifest.json").read_bytes())
    index["kernels"]["ghost"] = "axpy"
    (folder / "manifest.json").write_text(json.dumps(index))
    with pytest.raises(ManifestError, match="kernel 'ghost' is missing"):
        Manifest.read(str(folder)).find("ghost")


def test_many_names_are_looked_up_without_walking_them(package: FakePackage) -> None:
    """Looking up a name reads the one module that defines it, however many there are."""
    for number in range(50):
        package.add(f"m{number}", {f"k{number}": f"k{number}"}, {"sm_90": 12000})
    manifest = Manifest.read(str(package.write()))
    manifest.find("k7")
    assert list(manifest._read) == ["m7"]


def test_errors_survive_pickling() -> None:
    """An error crosses a process boundary with its data."""
    error = KernelNotFoundError("no kernel", "k", ["j"], ambiguous=True)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.name, copy.candidates, copy.ambiguous) == ("no kernel", "k", ("j",), True)


def test_codes_are_unique() -> None:
    """Each kind of error has its own stable code."""
    direct = CudaAotError.__subclasses__()
    kinds = [leaf for kind in direct for leaf in kind.__subclasses__() or [kind]]
    assert len({kind.code for kind in kinds}) == len(kinds) == 6
