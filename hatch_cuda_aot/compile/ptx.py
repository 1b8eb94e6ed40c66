"""Reads and prunes the PTX text that NVRTC and nvJitLink write.

Both write one definition a line, so lines are read, not a grammar.  Pure text in, values out; nothing is compiled here.

Source for the directives: NVIDIA, Parallel Thread Execution ISA.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = [
    "Param",
    "PtxModule",
    "Variable",
    "is_toolkit_symbol",
    "opened_toolkit_namespaces",
    "parse",
    "prune",
    "release_of",
    "retarget",
    "versions_up_to",
    "with_version",
    "without_folder",
]


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a kernel.

    Attributes:
        kind: PTX type without the dot (``"f32"``, ``"u64"``), or ``"struct"`` for an array of bytes.
        size: in bytes.
        offset: from the start of the parameter buffer, in bytes.

    """

    kind: str
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class Variable:
    """One ``__device__`` or ``__constant__`` variable; `size` and `align` in bytes, `space` is ``global`` or ``const``."""

    symbol: str
    space: str
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class PtxModule:
    """What a PTX text declares: its version and target, the kernels by symbol, and the variables."""

    version: str
    target: str
    kernels: dict[str, tuple[Param, ...]]
    variables: dict[str, Variable]


def parse(text: str) -> PtxModule:
    """Read the declarations of a PTX text."""
    version = _VERSION.search(text)
    target = _TARGET.search(text)
    variables = (_variable(match) for match in _VARIABLE.finditer(text))
    return PtxModule(
        version[1] if version else "",
        target[1] if target else "",
        {match["name"]: _params(match["params"] or "") for match in _ENTRY.finditer(text)},
        {variable.symbol: variable for variable in variables},
    )


def prune(text: str, *, own: Iterable[str] = ()) -> str:
    """Drop the toolkit's variables that nothing in `text` mentions.

    Every constant of CUB, cuda::std and their kin becomes a symbol of the cubin otherwise, hundreds of them; nvcc drops
    them in its own front end.  A variable of the project is never dropped, mentioned or not: the host may set it by name.

    Args:
        text: PTX as NVRTC wrote it.
        own: toolkit namespaces that the project's own files open (``cub``, ``cuda``, ...); nothing is dropped there.

    """
    namespaces = _TOOLKIT_NAMESPACES.difference(own)
    mentions = Counter(_WORD.findall(text))
    while True:
        dropped: list[str] = []

        def keep(match: re.Match[str], dropped: list[str] = dropped) -> str:
            name = match["name"]
            if match["linkage"] == ".extern" or mentions[name] != 1 or not is_toolkit_symbol(name, namespaces):
                return match[0]
            dropped.append(match[0])
            return ""

        text = _VARIABLE.sub(keep, text)
        if not dropped:
            return text
        for definition in dropped:  # an initialiser may have been the last mention of another one
            mentions.subtract(_WORD.findall(definition))


def is_toolkit_symbol(symbol: str, namespaces: Collection[str | None] | None = None) -> bool:
    """Tell whether a mangled name lies in a namespace of the CUDA toolkit's headers (of `namespaces`, where given)."""
    return _outer_namespace(symbol) in (_TOOLKIT_NAMESPACES if namespaces is None else namespaces)


def opened_toolkit_namespaces(sources: Iterable[str]) -> frozenset[str]:
    """Return the toolkit's namespaces that project sources open themselves, for instance to specialise a template."""
    opened = {
        match["name"] or (match["macro"] or match["cuda"]).lower()
        for text in sources
        for match in _NAMESPACE.finditer(text)
        if not match["using"]
    }
    return frozenset(opened & _TOOLKIT_NAMESPACES)


def with_version(text: str, version: str) -> str:
    """Return `text` with another version of the PTX ISA in its ``.version`` line."""
    return _VERSION.sub(f".version {version}", text, count=1)


def release_of(text: str) -> str:
    """Return the full version of the compiler that wrote a text, as ``"12.9.86"``; empty if it does not say."""
    match = re.search(r"Cuda compilation tools, release [0-9.]+, V([0-9.]+)", text)
    return match[1] if match else ""


def without_folder(text: str, folder: str) -> str:
    """Take the folder of a compilation out of its line and debug information.

    File names become relative to it.  The compilation directory of debug information, which stands there as bytes, gets a
    name of the same length that means the current folder, as other places in that section are told by their distance.
    """
    for separator in ("/", "\\"):
        text = text.replace(f'"{_quoted(folder + separator)}', '"')
    name = os.fsencode(folder)
    if len(name) > 1:
        between = r"(?:,|\n\.b8 )"
        text = re.sub(rf"(?<=\n\.b8 ){between.join(map(str, name))}(?=\n\.b8 0\n)", _here, text)
    return text


def _here(match: re.Match[str]) -> str:
    here = itertools.cycle(b"./")
    return re.sub(r"(?<![a-z0-9])[0-9]+", lambda _: str(next(here)), match[0])


def _quoted(name: str) -> str:
    """Write a file name as LLVM does in ``.file``."""
    return "".join(
        f"\\{chr(byte)}" if byte in b'"\\' else chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}"
        for byte in os.fsencode(name)
    )


def versions_up_to(version: str) -> tuple[str, ...]:
    """Return the versions of the PTX ISA that compilers of CUDA 10.0 and newer wrote, up to `version`, oldest first."""
    number = _number(version)
    return (*(known for known in _ISA_VERSIONS if _number(known) < number), version)


def retarget(text: str, target: str) -> str:
    """Return `text` with another ``.target``; its further fields, such as ``debug``, stay."""
    return _TARGET.sub(lambda match: match[0].replace(match[1], target, 1), text, count=1)


#: Source: NVIDIA, Parallel Thread Execution ISA, "Release Notes", from the first version that knows sm_75.
_ISA_VERSIONS = (
    *("6.3", "6.4", "6.5", "7.0", "7.1", "7.2", "7.3", "7.4", "7.5", "7.6", "7.7", "7.8"),
    *("8.0", "8.1", "8.2", "8.3", "8.4", "8.5", "8.6", "8.7", "8.8", "9.0", "9.1", "9.2", "9.3", "9.4", "9.5"),
)

_VERSION = re.compile(r"^\.version\s+([0-9.]+)", re.MULTILINE)
_TARGET = re.compile(r"^\.target\s+(\w+)", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_$][\w$]*")
_NAMESPACE = re.compile(
    r"\b(?P<using>using\s+)?namespace\s+(?P<name>\w+)"
    r"|\b(?P<macro>CUB|THRUST)_NAMESPACE_BEGIN\b|\b_\w+_BEGIN_NAMESPACE_(?P<cuda>CUDA)"  # CCCL's own macros for it
)
_ENTRY = re.compile(r"^(?:\.visible |\.weak )?\.entry (?P<name>[\w$]+)\s*\((?P<params>[^)]*)\)", re.MULTILINE)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]+\d+)\s+(?:\.ptr\s+(?:\.\w+\s+)*?(?:\.align\s+\d+\s+)?)?"
    r"(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?"
)
_VARIABLE = re.compile(
    r"^(?P<linkage>\.visible|\.weak|\.extern|\.common|) ?\.(?P<space>global|const) (?:\.attribute\([^)]*\) )?"
    r"(?:\.align (?P<align>\d+) )?\.(?P<type>[a-z]+\d+) (?P<name>[\w$]+)(?P<dims>(?:\[\d*\])*)[^\n;]*;[^\n]*\n",
    re.MULTILINE,
)

#: The outermost namespaces of the headers that ship with the toolkit.
_TOOLKIT_NAMESPACES: frozenset[str | None] = frozenset(
    {"cub", "cuda", "thrust", "cooperative_groups", "nvcuda", "std", "__gnu_cxx", "nv"}
)


def _variable(match: re.Match[str]) -> Variable:
    count = 1
    for dimension in re.findall(r"\[(\d*)\]", match["dims"]):
        count *= int(dimension or 0)
    size = _size_of(match["type"])
    return Variable(match["name"], match["space"], size * count, int(match["align"] or size))


def _params(text: str) -> tuple[Param, ...]:
    found: list[Param] = []
    end = 0
    for match in _PARAM.finditer(text):
        element = _size_of(match["type"])
        size = element * int(match["count"] or 1)
        align = int(match["align"] or element)
        offset = -(-end // align) * align
        found.append(Param("struct" if match["count"] else match["type"], size, offset))
        end = offset + size
    return tuple(found)


def _size_of(kind: str) -> int:
    return int(kind.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _outer_namespace(symbol: str) -> str | None:
    """Return the outermost named namespace of an Itanium-mangled nested name; None for any other symbol."""
    match = re.match(r"_Z(?:GV|T[VIS])?Z*N[rVK]*(?:St)?", symbol)
    if match is None:
        return "std" if re.match(r"_Z(?:GV)?Z*(?:NK?)?St", symbol) else None
    if match[0].endswith("St"):
        return "std"
    position = match.end()
    while length := re.match(r"[0-9]+", symbol[position:]):
        start = position + length.end()
        name = symbol[start : start + int(length[0])]
        if not name.startswith(("_INTERNAL_", "_GLOBAL__N_")):
            return name
        position = start + int(length[0])
    return None
