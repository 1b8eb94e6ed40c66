"""Which compiler option goes where.

A module is compiled by two programs, NVRTC and ptxas (three where sources are device-linked: nvJitLink), and each reads
options that the others ignore without a word.  This module knows for every option who must get it, so that each one
takes effect or is an error.  It runs nothing.

Sources: the option list of the NVRTC manual, ``ptxas --help``, and what ``nvcc --dryrun`` hands to each program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Routed", "route"]


@dataclass(frozen=True, slots=True)
class Routed:
    """A module's options, as each program gets them."""

    nvrtc: tuple[str, ...] = ()
    ptxas: tuple[str, ...] = ()
    nvjitlink: tuple[str, ...] = ()


def route(options: Sequence[str], *, linked: bool) -> tuple[Routed, list[str]]:
    """Distribute `options` over the programs.

    Args:
        options: as a user writes them for nvcc or NVRTC; a value may follow as ``--name=value`` or as the next item.
        linked: True where several sources are device-linked into one module.

    Returns:
        What each program gets, and a message for every option that cannot take effect.

    """
    nvrtc: list[str] = []
    ptxas: list[str] = []
    link: dict[str, str] = {}
    problems: list[str] = []
    for given in _parse(options):
        rule = _RULES.get(given.name)
        if rule is None:
            problems.append(f"{given.text!r} is not an option that can be passed on. {_advice(given.name)}")
            continue
        if problem := rule.check(given, linked=linked):
            problems.append(f"{given.text!r} {problem}")
            continue
        if rule.to_nvrtc:
            nvrtc.append(rule.spell(given))
        ptxas += rule.to_ptxas(given)
        for flag in rule.to_nvjitlink(given):
            name, _, value = flag.partition("=")
            if rule.implied:
                link.setdefault(name, value)
            else:
                link[name] = value
    return Routed(tuple(nvrtc), tuple(ptxas), tuple(f"{name}={value}" for name, value in link.items())), problems


@dataclass(frozen=True, slots=True)
class _Given:
    """One option as written: its full name with two dashes, its value if any, and the user's own text."""

    name: str
    value: str | None
    text: str


def _nowhere(_: _Given) -> Iterable[str]:
    return ()


@dataclass(frozen=True, slots=True)
class _Rule:
    """What is known of one option."""

    name: str
    short: str = ""
    values: str | None = None  # a pattern for the value; None where the option takes none
    expects: str = ""
    to_nvrtc: bool = True
    to_ptxas: Callable[[_Given], Iterable[str]] = _nowhere
    to_nvjitlink: Callable[[_Given], Iterable[str]] = _nowhere
    survives_linking: bool = True
    implied: bool = False  # an explicit option of the same name wins, wherever it stands
    refused: str = ""  # why it is not accepted at all, and what to use

    def check(self, given: _Given, *, linked: bool) -> str | None:
        if self.refused:
            return self.refused
        if self.values is None and given.value is not None:
            return "takes no value"
        if self.values is not None and (given.value is None or not re.fullmatch(self.values, given.value)):
            return f"needs {self.expects}"
        if linked and not self.survives_linking:
            return (
                "has no effect where several sources are device-linked into one module: "
                "remove it for this module, or put its sources into one file"
            )
        if self.name == "--ptxas-options":
            options = _split_commas(given.value or "")
            return next(filter(None, map(_check_ptxas, options)), None) if options else f"needs {self.expects}"
        return None

    def spell(self, given: _Given) -> str:
        return self.name if given.value is None else f"{self.name}={given.value}"


_BOOLEAN = "true|false"
_BOOLEAN_WORDS = "the value true or false"


def _number(given: _Given) -> str:
    return "1" if given.value == "true" else "0"


def _as_is(name: str) -> Callable[[_Given], Iterable[str]]:
    return lambda given: (f"{name}={given.value}",)


def _front_end(name: str, short: str = "", values: str | None = None, expects: str = "a value") -> _Rule:
    return _Rule(name, short, values, expects)


def _use(key: str, name: str, short: str = "") -> _Rule:
    return _Rule(name, short, values=".*", refused=f"is set by the key {key!r}: use that instead")


def _refuse(reason: str, name: str, short: str = "") -> _Rule:
    return _Rule(name, short, values=".*", refused=reason)


_ONE_MODULE = "is decided by the build: list several files in one module's `sources` to device-link them"
_OTHER_OUTPUT = "asks for another kind of output than the build makes"

_TABLE: tuple[_Rule, ...] = (
    _Rule(
        "--use_fast_math",
        "-use_fast_math",
        to_nvjitlink=lambda _: ("-ftz=1", "-prec-div=0", "-prec-sqrt=0", "-fma=1"),
        implied=True,
    ),
    _Rule("--ftz", "-ftz", _BOOLEAN, _BOOLEAN_WORDS, to_nvjitlink=lambda given: (f"-ftz={_number(given)}",)),
    _Rule(
        "--prec-div", "-prec-div", _BOOLEAN, _BOOLEAN_WORDS, to_nvjitlink=lambda given: (f"-prec-div={_number(given)}",)
    ),
    _Rule(
        "--prec-sqrt",
        "-prec-sqrt",
        _BOOLEAN,
        _BOOLEAN_WORDS,
        to_nvjitlink=lambda given: (f"-prec-sqrt={_number(given)}",),
    ),
    _Rule(
        "--fmad",
        "-fmad",
        _BOOLEAN,
        _BOOLEAN_WORDS,
        to_ptxas=_as_is("--fmad"),
        to_nvjitlink=lambda given: (f"-fma={_number(given)}",),
    ),
    _Rule("--maxrregcount", "-maxrregcount", "[0-9]+", "a number of registers", to_ptxas=_as_is("--maxrregcount")),
    _Rule(
        "--device-stack-protector",
        "-device-stack-protector",
        _BOOLEAN,
        _BOOLEAN_WORDS,
        to_ptxas=_as_is("--device-stack-protector"),
        survives_linking=False,
    ),
    _Rule(
        "--Ofast-compile",
        "-Ofc",
        "0|min|mid|max",
        "one of 0, min, mid, max",
        to_ptxas=_as_is("--Ofast-compile"),
        survives_linking=False,
    ),
    _Rule(
        "--ptxas-options",
        "-Xptxas",
        ".+",
        "the options for ptxas, separated by commas",
        to_nvrtc=False,
        to_ptxas=lambda given: _split_commas(given.value or ""),
    ),
    _Rule("--restrict", "-restrict", survives_linking=False),
    _Rule("--extra-device-vectorization", "-extra-device-vectorization", survives_linking=False),
    _Rule("--jump-table-density", "-jtd", "[0-9]+", "a percentage", survives_linking=False),
    _Rule("--split-compile", "-split-compile", "[0-9]+", "a number of threads", survives_linking=False),
    _front_end("--device-int128", "-device-int128"),
    _front_end("--device-float128", "-device-float128"),
    _front_end("--disable-warnings", "-w"),
    _front_end("-Werror", "", ".+", "the kinds of warning"),
    _front_end("--builtin-move-forward", "-builtin-move-forward", _BOOLEAN, _BOOLEAN_WORDS),
    _front_end("--builtin-initializer-list", "-builtin-initializer-list", _BOOLEAN, _BOOLEAN_WORDS),
    _front_end("--device-as-default-execution-space", "-default-device"),
    _Rule("--optimization-info", "-opt-info", "inline", "the value inline", survives_linking=False),
    _front_end("--display-error-number", "-err-no"),
    _front_end("--no-display-error-number", "-no-err-no"),
    _front_end("--diag-error", "-diag-error", "[0-9, ]+", "diagnostic numbers"),
    _front_end("--diag-suppress", "-diag-suppress", "[0-9, ]+", "diagnostic numbers"),
    _front_end("--diag-warn", "-diag-warn", "[0-9, ]+", "diagnostic numbers"),
    _front_end("--brief-diagnostics", "-brief-diag", _BOOLEAN, _BOOLEAN_WORDS),
    _front_end("--minimal", "-minimal"),
    _front_end("--undefine-macro", "-U", r"[A-Za-z_]\w*", "a macro's name"),
    _use("archs", "--gpu-architecture", "-arch"),
    _use("archs", "--gpu-code", "-code"),
    _use("archs", "--generate-code", "-gencode"),
    _use("include-dirs", "--include-path", "-I"),
    _use("include-dirs", "--system-include", "-isystem"),
    _use("defines", "--define-macro", "-D"),
    _use("std", "--std", "-std"),
    _use("lineinfo", "--generate-line-info", "-lineinfo"),
    _use("debug", "--device-debug", "-G"),
    _use("debug", "--dopt", "-dopt"),
    _use("jobs", "--threads", "-t"),
    _refuse("cannot be followed into the sdist: write the #include into the source", "--pre-include", "-include"),
    _refuse("would hide headers from the build", "--no-source-include", "-no-source-include"),
    _refuse(_ONE_MODULE, "--relocatable-device-code", "-rdc"),
    _refuse(_ONE_MODULE, "--device-c", "-dc"),
    _refuse(_ONE_MODULE, "--device-w", "-dw"),
    _refuse(_ONE_MODULE, "--dlink-time-opt", "-dlto"),
    _refuse(_ONE_MODULE, "--gen-opt-lto", "-gen-opt-lto"),
    _refuse(_ONE_MODULE, "--extensible-whole-program", "-ewp"),
    _refuse(_OTHER_OUTPUT, "--ptx", "-ptx"),
    _refuse(_OTHER_OUTPUT, "--cubin", "-cubin"),
    _refuse(_OTHER_OUTPUT, "--fatbin", "-fatbin"),
    _refuse(_OTHER_OUTPUT, "--optix-ir", "-optix-ir"),
    _refuse(_OTHER_OUTPUT, "--fdevice-syntax-only", "-fdevice-syntax-only"),
    _refuse("is always on: builds keep no hidden cache", "--no-cache", "-no-cache"),
    _refuse("is an option of nvcc's host side and means nothing here", "--compiler-options", "-Xcompiler"),
    _refuse(
        "is an option of nvcc: NVRTC allows constexpr calls", "--expt-relaxed-constexpr", "-expt-relaxed-constexpr"
    ),
    _refuse("is an option of nvcc that NVRTC does not have", "--extended-lambda", "-extended-lambda"),
    _refuse("is an option of nvcc: use '--ptxas-options=-O…'", "--optimize", "-O"),
)
_RULES: dict[str, _Rule] = {spelling: rule for rule in _TABLE for spelling in (rule.name, rule.short) if spelling}

#: Short options whose value may follow without a separator, as in ``-DNAME=1`` and ``-O3``.
_GLUED = ("-D", "-I", "-U", "-O")

#: Options of ptxas that the build sets itself, or that would change what it writes.
_PTXAS_OWN = re.compile(
    r"--?(arch|gpu-name|o|output-file|c|compile-only|e|entry|g|device-debug|lineinfo|generate-line-info|optf|options-file"
    r"|ias|input-as-string|h|help|V|version|arch-ls|list-arch|m|machine|apply-controls)(=.*)?"
)

#: The value of an option before it.  Anything else ptxas takes for another file to read, which no cache would know of.
_PTXAS_VALUE = re.compile(r"[\w+-]+")


def _parse(options: Sequence[str]) -> Iterator[_Given]:
    """Join each option with its value, whichever way that was written."""
    items = list(options)
    while items:
        text = items.pop(0)
        name, equals, value = text.partition("=")
        rule = _RULES.get(name)
        glued = next((short for short in _GLUED if text.startswith(short) and text != short), None)
        if rule is None and glued is not None:
            rule, name, equals, value = _RULES[glued], glued, "=", text[len(glued) :]
        if rule is not None and not equals and rule.values is not None and items and not _takes_no_item(rule, items[0]):
            value, equals = items.pop(0), " "
            text = f"{text} {value}"
        yield _Given(rule.name if rule else name, value if equals else None, text)


def _takes_no_item(rule: _Rule, following: str) -> bool:
    """Tell whether `following` is an option of its own rather than the value of `rule`."""
    if rule.name == "--ptxas-options":
        return False
    return following.startswith("-")


def _split_commas(text: str) -> list[str]:
    return [part.replace("\\,", ",") for part in re.split(r"(?<!\\),", text) if part]


def _check_ptxas(option: str) -> str | None:
    if not option.startswith("-"):
        return (
            None
            if _PTXAS_VALUE.fullmatch(option)
            else f"holds {option!r}, which is neither an option nor a plain value"
        )
    if _PTXAS_OWN.fullmatch(option):
        return f"holds {option!r}, which the build sets itself"
    return None


def _advice(name: str) -> str:
    from difflib import get_close_matches

    known = [rule.name for rule in _TABLE if not rule.refused]
    close = get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known are: {', '.join(sorted(known))}"
