"""Gives kernels and variables the names of the source, from the symbols that compilers write.  Pure.

A symbol (``_Z4axpyIfEvPT_``) always works as a name; this module finds the one that people wrote (``axpy<float>``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from hatch_cuda_aot.runtime.manifest import canonical_name

__all__ = ["kernel_names", "source_name"]


def kernel_names(symbols: Iterable[str], expressions: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the canonical names of each kernel symbol.

    Args:
        symbols: the kernels of one module, over all its architectures.
        expressions: name expression -> symbol, for the instantiations that were asked for; their spellings win.

    Where several symbols would share a name (overloads), each is named by its symbol.  One symbol has several names where
    it was asked for in several ways, such as ``f<half>`` and ``f<__half>``.

    """
    asked: dict[str, list[str]] = {}
    for expression, symbol in expressions.items():
        asked.setdefault(symbol, []).append(canonical_name(expression))
    names = {symbol: tuple(dict.fromkeys(asked.get(symbol) or [source_name(symbol)])) for symbol in symbols}
    counts = Counter(name for group in names.values() for name in group)
    return {
        symbol: tuple(dict.fromkeys(symbol if counts[name] > 1 else name for name in group))
        for symbol, group in names.items()
    }


def source_name(symbol: str) -> str:
    """Return the name in the source of a function or variable, without parameters; the symbol itself if it has none."""
    if not symbol.startswith("_Z"):
        return symbol
    local = re.fullmatch(r"_ZZ(.+)E(\d+)(.+?)(?:_\d+)?", symbol)  # a static variable in a function
    if local is not None and len(local[3]) == int(local[2]):
        function = source_name(f"_Z{local[1]}")
        return symbol if function.startswith("_Z") else f"{function}::{local[3]}"
    demangled = _demangle(symbol)
    return canonical_name(demangled) if demangled else symbol


def _demangle(symbol: str) -> str | None:
    import itanium_demangler

    try:
        node = itanium_demangler.parse(symbol)
    except (NotImplementedError, ValueError, IndexError, AttributeError):
        return None
    if node is None:
        return None
    name = str(node.name) if node.kind == "func" else str(node)
    name = re.sub(r"\b_(?:GLOBAL__N_|INTERNAL_)\w*::", "", name)  # anonymous namespaces have no name in the source
    return _LITERAL.sub(_literal, name) if "<Node" not in name else None


_LITERAL = re.compile(
    r"\((bool|char|signed char|unsigned char|short|unsigned short|int|unsigned int|long|unsigned long"
    r"|long long|unsigned long long)\)(n?)(\d+)"
)


def _literal(match: re.Match[str]) -> str:
    if match[1] == "bool":
        return "true" if match[3] == "1" else "false"
    return f"{'-' if match[2] else ''}{match[3]}"
