"""Entries of the cache: what is written is read, and whatever else the bytes are, they are no entry and no exception."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import struct
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatch_cuda_aot import codec
from hatch_cuda_aot.codec import decode, encode
from hatch_cuda_aot.compile.tasks import AssembleResult, FloorResult, FrontResult, ImageResult, Resources

KEY = hashlib.sha256(b"a task").hexdigest()
OTHER = hashlib.sha256(b"another task").hexdigest()

RESULTS = [
    FrontResult(b".version 8.8\n", {"f<int>": "_Z1fIiEvv"}, 12090, "a warning: \udcff \u2028 ä"),
    FrontResult(b"", {}, 0, ""),
    AssembleResult(bytes(range(256)) * 40, {"_Z1fIiEvv": Resources(8, 1024, 2, 3, 4), "g": Resources()}, ""),
    AssembleResult(b"\x7fELF", {}, "warning"),
    FloorResult("7.8", 11080),
]


@pytest.mark.parametrize("result", RESULTS)
def test_round_trip(result: Any) -> None:
    """A result is read as it was written, in every type; the same result is the same bytes."""
    entry = encode(KEY, result)
    assert decode(KEY, entry) == result
    assert encode(KEY, decode(KEY, entry)) == entry  # type: ignore[arg-type]


def test_every_field_is_kept() -> None:
    """A field that is added to a result must be added to its layout, or the cache would lose it."""
    kinds = {layout.type: layout for layout in codec._KINDS.values()}
    assert set(kinds) == {FrontResult, *get_args(ImageResult)}
    for kind, layout in kinds.items():
        assert list(layout.fields) == [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("result", RESULTS)
def test_another_key(result: Any) -> None:
    """An entry does not pass under another key than its own."""
    assert decode(OTHER, encode(KEY, result)) is None


def test_every_byte_counts() -> None:
    """A flipped bit anywhere, and a cut anywhere, make it no entry."""
    entry = encode(KEY, AssembleResult(b"\x7fELF", {"f": Resources(1)}, "log"))
    for position in range(len(entry)):
        damaged = bytearray(entry)
        damaged[position] ^= 1
        assert decode(KEY, bytes(damaged)) is None
        assert decode(KEY, entry[:position]) is None
    assert decode(KEY, entry + b"\0") is None


def entry_of(header: object, blobs: bytes = b"", length: int | None = None) -> bytes:
    """Return an entry with a good digest around any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<I", len(text) if length is None else length) + text + blobs
    return b"cuda-aot" + hashlib.sha256(content).digest() + content


FLOOR = {"version": "7.8", "driver": 11080}
ASSEMBLE = {"cubin": 2, "resources": {"f": dataclasses.asdict(Resources(1, 2, 3, 4, 5))}, "log": ""}


def floor(**changes: object) -> dict[str, Any]:
    """Return the header of a floor with some fields changed."""
    return {"key": KEY, "kind": "floor", "fields": {**FLOOR, **changes}}


def assemble(**changes: object) -> dict[str, Any]:
    """Return the header of an assembly with some fields changed."""
    return {"key": KEY, "kind": "assemble", "fields": {**ASSEMBLE, **changes}}


def test_what_the_next_test_starts_from() -> None:
    """Unchanged, the headers of the next test are good."""
    assert decode(KEY, entry_of(floor())) == FloorResult("7.8", 11080)
    assert decode(KEY, entry_of(assemble(), b"ab")) == AssembleResult(b"ab", {"f": Resources(1, 2, 3, 4, 5)}, "")


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"cuda-aot",
        hashlib.sha256(b"old").digest() + b"old",
        entry_of(b""),
        entry_of(b"{"),
        entry_of(b"\xff"),
        entry_of(b"[" * 100_000),
        entry_of(b"9" * 10_000),
        entry_of(floor(), length=2**32 - 1),
        entry_of(floor(), length=3),
        entry_of(floor(), b"more"),
        entry_of([]),
        entry_of(None),
        entry_of({}),
        entry_of({**floor(), "more": 1}),
        entry_of({**floor(), "key": None}),
        entry_of({**floor(), "kind": "unknown"}),
        entry_of({**floor(), "kind": ["floor"]}),
        entry_of({**floor(), "kind": "front"}),
        entry_of({**floor(), "fields": None}),
        entry_of({**floor(), "fields": {"version": "7.8"}}),
        entry_of(floor(more=1)),
        entry_of(floor(version=7.8)),
        entry_of(floor(driver="11080")),
        entry_of(floor(driver=True)),
        entry_of(floor(driver=1.0)),
        entry_of(assemble(), b"a"),
        entry_of(assemble(), b"abc"),
        entry_of(assemble(cubin=-1)),
        entry_of(assemble(cubin=2**70)),
        entry_of(assemble(cubin="ab"), b"ab"),
        entry_of(assemble(resources=[]), b"ab"),
        entry_of(assemble(resources={"f": None}), b"ab"),
        entry_of(assemble(resources={"f": {"registers": 1}}), b"ab"),
        entry_of(assemble(resources={"f": {**ASSEMBLE["resources"]["f"], "more": 1}}), b"ab"),  # type: ignore[index]
        entry_of(assemble(resources={"f": {**ASSEMBLE["resources"]["f"], "local": "0"}}), b"ab"),  # type: ignore[index]
        entry_of({"key": KEY, "kind": "front", "fields": {"ptx": 0, "symbols": {"f": 1}, "ptx_driver": 0, "log": ""}}),
        entry_of({"key": KEY, "kind": "front", "fields": {"ptx": 0, "symbols": [], "ptx_driver": 0, "log": ""}}),
    ],
)
def test_another_layout(entry: bytes) -> None:
    """A good digest around another layout is still no entry: fields that lack, are unknown or have another type."""
    assert decode(KEY, entry) is None


class Exploit:
    """Says when it is unpickled."""

    unpickled = False

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return setattr, (Exploit, "unpickled", True)


@pytest.mark.parametrize("digest", [True, False])
def test_nothing_is_run(digest: bool) -> None:  # noqa: FBT001
    """A pickle is bytes like any other."""
    payload = pickle.dumps(Exploit())
    assert decode(KEY, hashlib.sha256(payload).digest() + payload if digest else payload) is None
    assert decode(KEY, entry_of(payload)) is None
    assert not Exploit.unpickled


@given(st.binary())
def test_any_bytes(content: bytes) -> None:
    """No bytes at all are an exception."""
    assert decode(KEY, content) is None
    assert decode(KEY, entry_of(content)) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda some: st.lists(some) | st.dictionaries(st.text(), some),
    )
)
def test_any_fields(value: object) -> None:
    """No value in any place of the header is an exception."""
    decode(KEY, entry_of(value))
    for name in FLOOR:
        decode(KEY, entry_of(floor(**{name: value})))
    for name in ASSEMBLE:
        decode(KEY, entry_of(assemble(**{name: value}), b"ab"))
