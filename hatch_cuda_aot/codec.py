"""Results as bytes, and back: what the build cache keeps, on this machine and on shared storage.

An entry is a mark, the SHA-256 of all that follows it, the length of a header, the header as JSON, and blobs.  The header
holds the entry's key, so that no entry passes under the name of another.  Reading one runs nothing of it and raises nothing:
what is damaged, or of another layout, is no entry.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from hatch_cuda_aot.compile.tasks import AssembleResult, FloorResult, FrontResult, ImageResult, Resources

__all__ = ["decode", "encode"]

_MARK = b"cuda-aot"
_LENGTH = struct.Struct("<I")
_DIGEST_END = len(_MARK) + hashlib.sha256().digest_size
_HEADER = _DIGEST_END + _LENGTH.size


def encode(key: str, result: FrontResult | ImageResult) -> bytes:
    """Return the entry that keeps `result` under `key`."""
    kind, layout = next((kind, layout) for kind, layout in _KINDS.items() if layout.type is type(result))
    blobs: list[bytes] = []
    fields = {name: field.pack(getattr(result, name), blobs) for name, field in layout.fields.items()}
    header = json.dumps({"key": key, "kind": kind, "fields": fields}, separators=(",", ":")).encode()
    content = b"".join([_LENGTH.pack(len(header)), header, *blobs])
    return _MARK + hashlib.sha256(content).digest() + content


def decode(key: str, entry: bytes) -> FrontResult | ImageResult | None:
    """Return the result that an entry keeps under `key`; None if it is damaged, another's, or of another layout."""
    if not entry.startswith(_MARK) or len(entry) < _HEADER:
        return None
    if hashlib.sha256(memoryview(entry)[_DIGEST_END:]).digest() != entry[len(_MARK) : _DIGEST_END]:
        return None
    try:
        return _read(key, entry)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _read(key: str, entry: bytes) -> FrontResult | ImageResult:
    (length,) = _LENGTH.unpack_from(entry, _DIGEST_END)
    header = json.loads(entry[_HEADER : _HEADER + length])
    _expect(header.keys() == {"key", "kind", "fields"} and header["key"] == key)
    layout = _KINDS[header["kind"]]
    fields = header["fields"]
    _expect(fields.keys() == layout.fields.keys())
    blobs = _Blobs(entry, _HEADER + length)
    values = {name: field.unpack(fields[name], blobs) for name, field in layout.fields.items()}
    _expect(blobs.position == len(entry))
    return layout.type(**values)  # type: ignore[no-any-return]


class _Blobs:
    """Hands out the bytes behind the header, one after the other."""

    def __init__(self, entry: bytes, position: int) -> None:
        self._entry = entry
        self.position = position

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        start, self.position = self.position, self.position + size
        _expect(size >= 0 and self.position <= len(self._entry))
        return self._entry[start : self.position]


class _Field(NamedTuple):
    """How a field of a result is written and read; a value of another type is a ValueError."""

    pack: Callable[[Any, list[bytes]], Any]
    unpack: Callable[[Any, _Blobs], Any]


def _pack_blob(value: bytes, blobs: list[bytes]) -> int:
    blobs.append(value)
    return len(value)


def _as_is(value: Any, _: object) -> Any:
    return value


def _number(value: Any, _: object = None) -> int:
    _expect(type(value) is int)
    return int(value)


def _text(value: Any, _: object = None) -> str:
    _expect(type(value) is str)
    return str(value)


def _texts(value: Any, _: object) -> dict[str, str]:
    _expect(type(value) is dict)
    return {name: _text(text) for name, text in value.items()}


_RESOURCES = tuple(field.name for field in dataclasses.fields(Resources))


def _pack_resources(value: dict[str, Resources], _: object) -> dict[str, dict[str, int]]:
    return {symbol: {name: getattr(taken, name) for name in _RESOURCES} for symbol, taken in value.items()}


def _resources(value: Any, _: object) -> dict[str, Resources]:
    _expect(type(value) is dict)
    found = {}
    for symbol, taken in value.items():
        _expect(taken.keys() == set(_RESOURCES))
        found[symbol] = Resources(*[_number(taken[name]) for name in _RESOURCES])
    return found


def _expect(condition: object) -> None:
    if not condition:
        raise ValueError


class _Layout(NamedTuple):
    """A result's type, and how each of its fields is kept."""

    type: type[Any]
    fields: dict[str, _Field]


_BLOB = _Field(_pack_blob, lambda size, blobs: blobs.take(_number(size)))
_NUMBER = _Field(_as_is, _number)
_TEXT = _Field(_as_is, _text)
_TEXTS = _Field(_as_is, _texts)

_KINDS = {
    "front": _Layout(FrontResult, {"ptx": _BLOB, "symbols": _TEXTS, "ptx_driver": _NUMBER, "log": _TEXT}),
    "assemble": _Layout(
        AssembleResult, {"cubin": _BLOB, "resources": _Field(_pack_resources, _resources), "log": _TEXT}
    ),
    "floor": _Layout(FloorResult, {"version": _TEXT, "driver": _NUMBER}),
}
