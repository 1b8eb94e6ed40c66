"""The large index is looked up as if it were parsed, whatever the names are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatch_cuda_aot.runtime import index
from hatch_cuda_aot.runtime.errors import KernelNotFoundError, ManifestError
from hatch_cuda_aot.runtime.index import Table, scan
from hatch_cuda_aot.runtime.manifest import Manifest

if TYPE_CHECKING:
    from .conftest import FakePackage


def canonical(data: Any) -> bytes:
    return (json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


def index_of(kernels: dict[str, Any], modules: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": 1,
        "generator": {"name": "hatch-cuda-aot", "version": "0.1.0"},
        "package": "demo",
        "toolchain": {"cuda": "12.9"},
        "modules": modules,
        "kernels": kernels,
    }


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scan indexes of any size."""
    monkeypatch.setattr(index, "_LARGE", 0)


names = st.text('ab<>,:"\\{}[]é ', max_size=6) | st.sampled_from(
    ["name", "version", "kernels", "modules", "package", "format", '"modules":{', '},"modules":{', "f<'\"'>", 'a":"b']
)
module_names = st.text("abz019_.+-", min_size=1, max_size=5)


@given(
    st.dictionaries(names, module_names | st.lists(module_names, min_size=2, max_size=3), max_size=8),
    st.dictionaries(module_names, st.fixed_dictionaries({"file": module_names, "size": st.integers(0)}), max_size=5),
    st.lists(names, max_size=8),
)
def test_as_if_parsed(kernels: dict[str, Any], modules: dict[str, Any], others: list[str]) -> None:
    """Every key has its value, every other key is missing, and the whole is the same."""
    tree = {"root": "..", "rebuild": False, "files": {key: {"size": 1} for key in modules}}
    data = index_of(kernels, modules) | ({"tree": tree} if modules else {})
    found = scan(canonical(data), "manifest.json")
    assert found is not None
    assert found.get("tree") == data.get("tree")
    for table, expected in ((found["kernels"], kernels), (found["modules"], modules)):
        assert isinstance(table, Table)
        for key in [*expected, *others, *kernels, *modules]:
            assert table.get(key) == expected.get(key)
            assert (key in table) == (key in expected)
        assert dict(table) == expected
    assert (found["package"], found["toolchain"]) == ("demo", {"cuda": "12.9"})


def test_key_in_a_key() -> None:
    """A key is found behind a longer one that ends like it, and not in that one."""
    kernels = {'A"b': "other", "b": "own"}
    found = scan(canonical(index_of(kernels, {})), "manifest.json")
    assert found is not None
    assert found["kernels"]["b"] == "own"
    found = scan(canonical(index_of({'A"b': "other"}, {})), "manifest.json")
    assert found is not None
    assert "b" not in found["kernels"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        json.dumps(index_of({}, {})).encode(),
        canonical({**index_of({}, {}), "format": 2}),
        canonical(index_of({"a": "m"}, {}))[:-20],
        canonical(index_of({"a": "m"}, {})).replace(b'"modules"', b'"moduls"'),
    ],
    ids=["empty", "not canonical", "another format", "cut off", "table missing"],
)
def test_left_to_the_parser(content: bytes) -> None:
    """What is not written as the build writes it is not scanned."""
    assert scan(content, "manifest.json") is None


def test_manifest(package: FakePackage) -> None:
    """A manifest answers the same with its index scanned: names, spellings, symbols, close matches."""
    package.add("axpy", {"axpy<float>": "f", "axpy<double>": "d"}, {"sm_90": 12000})
    package.add("other", {"axpy<float>": "f", "noop": "noop_symbol"}, {"sm_90": 12000})
    manifest = Manifest.read(str(package.write()))
    assert isinstance(manifest.kernels, Table)
    assert manifest.find("axpy< double >")[0].name == "axpy"
    assert manifest.find("other:axpy<float>")[0].name == "other"
    assert manifest.find("noop_symbol")[1].name == "noop"
    with pytest.raises(KernelNotFoundError, match="2 modules define"):
        manifest.find("axpy<float>")
    with pytest.raises(KernelNotFoundError, match="did you mean 'noop'"):
        manifest.find("nop")
    assert manifest.kernel_names() == ["axpy:axpy<float>", "axpy<double>", "noop", "other:axpy<float>"]


def test_lookups_do_not_parse(package: FakePackage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding a kernel by its name reads its entries and no more."""
    monkeypatch.setattr(Table, "_parsed", None)
    folder = package.add("axpy", {"axpy<float>": "f"}, {"sm_90": 12000}).write()
    assert Manifest.read(str(folder)).find("axpy< float >")[1].symbol == "f"


def test_damage(package: FakePackage) -> None:
    """An index that is damaged inside is said to be, when all of it is asked for."""
    folder = package.add("axpy", {"a": "f", "b": "g"}, {"sm_90": 12000}).write()
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"b":', b'"b";'))
    with pytest.raises(ManifestError, match=r"manifest\.json is damaged: .*reinstall the package"):
        Manifest.read(str(folder)).kernel_names()
