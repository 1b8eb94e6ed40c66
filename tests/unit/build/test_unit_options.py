"""Compiler options: each reaches every program that needs it, or is an error that says what to do."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hatch_cuda_aot.compile.options import _TABLE, Routed, route

#: A slow machine must not fail a test of hypothesis.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


#: long name, short name, an example of its value, and what NVRTC, ptxas and nvJitLink get for it.
ACCEPTED: tuple[tuple[str, str, str | None, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "--use_fast_math",
        "-use_fast_math",
        None,
        ("--use_fast_math",),
        (),
        ("-ftz=1", "-prec-div=0", "-prec-sqrt=0", "-fma=1"),
    ),
    ("--ftz", "-ftz", "true", ("--ftz=true",), (), ("-ftz=1",)),
    ("--prec-div", "-prec-div", "false", ("--prec-div=false",), (), ("-prec-div=0",)),
    ("--prec-sqrt", "-prec-sqrt", "true", ("--prec-sqrt=true",), (), ("-prec-sqrt=1",)),
    ("--fmad", "-fmad", "false", ("--fmad=false",), ("--fmad=false",), ("-fma=0",)),
    ("--maxrregcount", "-maxrregcount", "32", ("--maxrregcount=32",), ("--maxrregcount=32",), ()),
    (
        "--device-stack-protector",
        "-device-stack-protector",
        "true",
        ("--device-stack-protector=true",),
        ("--device-stack-protector=true",),
        (),
    ),
    ("--Ofast-compile", "-Ofc", "mid", ("--Ofast-compile=mid",), ("--Ofast-compile=mid",), ()),
    ("--ptxas-options", "-Xptxas", "-O1", (), ("-O1",), ()),
    ("--restrict", "-restrict", None, ("--restrict",), (), ()),
    ("--extra-device-vectorization", "-extra-device-vectorization", None, ("--extra-device-vectorization",), (), ()),
    ("--jump-table-density", "-jtd", "50", ("--jump-table-density=50",), (), ()),
    ("--split-compile", "-split-compile", "2", ("--split-compile=2",), (), ()),
    ("--device-int128", "-device-int128", None, ("--device-int128",), (), ()),
    ("--device-float128", "-device-float128", None, ("--device-float128",), (), ()),
    ("--disable-warnings", "-w", None, ("--disable-warnings",), (), ()),
    ("-Werror", "", "all-warnings", ("-Werror=all-warnings",), (), ()),
    ("--builtin-move-forward", "-builtin-move-forward", "false", ("--builtin-move-forward=false",), (), ()),
    ("--builtin-initializer-list", "-builtin-initializer-list", "true", ("--builtin-initializer-list=true",), (), ()),
    (
        "--device-as-default-execution-space",
        "-default-device",
        None,
        ("--device-as-default-execution-space",),
        (),
        (),
    ),
    ("--optimization-info", "-opt-info", "inline", ("--optimization-info=inline",), (), ()),
    ("--display-error-number", "-err-no", None, ("--display-error-number",), (), ()),
    ("--no-display-error-number", "-no-err-no", None, ("--no-display-error-number",), (), ()),
    ("--diag-error", "-diag-error", "177", ("--diag-error=177",), (), ()),
    ("--diag-suppress", "-diag-suppress", "177,550", ("--diag-suppress=177,550",), (), ()),
    ("--diag-warn", "-diag-warn", "177", ("--diag-warn=177",), (), ()),
    ("--brief-diagnostics", "-brief-diag", "true", ("--brief-diagnostics=true",), (), ()),
    ("--minimal", "-minimal", None, ("--minimal",), (), ()),
    ("--undefine-macro", "-U", "NDEBUG", ("--undefine-macro=NDEBUG",), (), ()),
)

#: What nvJitLink has no counterpart for: such an option would be lost in a module of several sources.
LOST_IN_LINKING = {
    "--device-stack-protector",
    "--Ofast-compile",
    "--extra-device-vectorization",
    "--jump-table-density",
    "--split-compile",
    "--restrict",
    "--optimization-info",
}

#: Options that have a key of their own, each as people write it, and the key.
KEYED = (
    ("-arch=sm_90", "archs"),
    ("--gpu-architecture=sm_90", "archs"),
    ("-code=sm_90", "archs"),
    ("-gencode=arch=compute_80,code=sm_80", "archs"),
    ("-Iinclude", "include-dirs"),
    ("-I=include", "include-dirs"),
    ("--include-path=include", "include-dirs"),
    ("-isystem=include", "include-dirs"),
    ("-DN=4", "defines"),
    ("-D=N", "defines"),
    ("--define-macro=N=4", "defines"),
    ("-std=c++20", "std"),
    ("--std=c++20", "std"),
    ("-lineinfo", "lineinfo"),
    ("--generate-line-info", "lineinfo"),
    ("-G", "debug"),
    ("--device-debug", "debug"),
    ("--dopt=on", "debug"),
    ("-t=4", "jobs"),
    ("--threads=4", "jobs"),
)

#: Options that are refused for another reason, and words of it.
REFUSED = (
    ("-include=a.h", "write the #include into the source"),
    ("--pre-include=a.h", "write the #include into the source"),
    ("--no-source-include", "would hide headers"),
    ("-rdc=true", "list several files in one module's `sources`"),
    ("-dc", "list several files in one module's `sources`"),
    ("-dw", "list several files in one module's `sources`"),
    ("-dlto", "list several files in one module's `sources`"),
    ("--gen-opt-lto", "list several files in one module's `sources`"),
    ("-ewp", "list several files in one module's `sources`"),
    ("--ptx", "another kind of output"),
    ("--cubin", "another kind of output"),
    ("--fatbin", "another kind of output"),
    ("--optix-ir", "another kind of output"),
    ("--fdevice-syntax-only", "another kind of output"),
    ("--no-cache", "is always on"),
    ("-Xcompiler=-Wall", "host side"),
    ("--expt-relaxed-constexpr", "NVRTC allows constexpr calls"),
    ("--extended-lambda", "NVRTC does not have"),
    ("-O3", "use '--ptxas-options=-O…'"),
    ("--optimize=3", "use '--ptxas-options=-O…'"),
)


def flags(routed: Routed) -> tuple[str, ...]:
    """Return everything that any program gets."""
    return (*routed.nvrtc, *routed.ptxas, *routed.nvjitlink)


def spellings(name: str, short: str, value: str | None) -> list[list[str]]:
    """Return each way of writing an option, as items of the list."""
    names = [each for each in (name, short) if each]
    if value is None:
        return [[each] for each in names]
    return [[f"{each}={value}"] for each in names] + [[each, value] for each in names]


EVERY_SPELLING = [
    pytest.param(items, nvrtc, ptxas, nvjitlink, id=" ".join(items))
    for name, short, value, nvrtc, ptxas, nvjitlink in ACCEPTED
    for items in spellings(name, short, value)
]


@pytest.mark.parametrize(("items", "nvrtc", "ptxas", "nvjitlink"), EVERY_SPELLING)
def test_routing(items: list[str], nvrtc: tuple[str, ...], ptxas: tuple[str, ...], nvjitlink: tuple[str, ...]) -> None:
    """However it is spelled, an option reaches each program in that program's own spelling."""
    assert route(items, linked=False) == (Routed(nvrtc, ptxas, nvjitlink), [])


def test_the_table_above_is_complete() -> None:
    """Every option that is accepted is tested above, under its long and its short name."""
    assert {(rule.name, rule.short) for rule in _TABLE if not rule.refused} == {(row[0], row[1]) for row in ACCEPTED}


def test_every_refusal_is_tested() -> None:
    """Every option that is refused is tested below."""
    tested = {re.split(r"[=]|(?<=^-[IDO])", text, maxsplit=1)[0] for text, _ in KEYED + REFUSED}
    untested = [rule.name for rule in _TABLE if rule.refused and rule.name not in tested and rule.short not in tested]
    assert untested == []


@pytest.mark.parametrize("text", ["-UNDEBUG", "-U=NDEBUG", "--undefine-macro=NDEBUG"])
def test_glued_value(text: str) -> None:
    """A short option's value may follow without a separator, as in nvcc."""
    assert route([text], linked=False) == (Routed(nvrtc=("--undefine-macro=NDEBUG",)), [])


@pytest.mark.parametrize(("text", "key"), KEYED)
def test_options_with_a_key_of_their_own(text: str, key: str) -> None:
    """An option that a key sets is refused, with that key in the message, and reaches no program."""
    routed, problems = route([text], linked=False)
    assert flags(routed) == ()
    assert problems == [f"{text!r} is set by the key {key!r}: use that instead"]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_refused_options(text: str, words: str) -> None:
    """What the build decides itself, or NVRTC does not have, is refused with the reason."""
    routed, problems = route([text], linked=False)
    assert flags(routed) == ()
    assert len(problems) == 1
    assert problems[0].startswith(repr(text))
    assert words in problems[0]


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("--maxregcount=32", "'--maxrregcount'"),
        ("--use-fast-math", "'--use_fast_math'"),
        ("-maxrregcount 32", "'--maxrregcount'"),
        ("--diag-supress=177", "'--diag-suppress'"),
    ],
)
def test_unknown_option_with_a_suggestion(text: str, suggestion: str) -> None:
    """A misspelt option is an error that proposes the right one."""
    routed, problems = route([text], linked=False)
    assert flags(routed) == ()
    assert len(problems) == 1
    assert problems[0].endswith(f"is not an option that can be passed on. Did you mean {suggestion}?")


def test_unknown_option_without_a_suggestion() -> None:
    """An option that resembles none lists those that there are, and none of the refused."""
    _, (problem,) = route(["-Zqx"], linked=False)
    assert problem.startswith("'-Zqx' is not an option that can be passed on. Known are: ")
    assert "--fmad" in problem
    assert "--gpu-architecture" not in problem


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["--ftz=yes"], "'--ftz=yes' needs the value true or false"),
        (["--ftz"], "'--ftz' needs the value true or false"),
        (["--ftz", "--fmad=true"], "'--ftz' needs the value true or false"),
        (["--maxrregcount=many"], "'--maxrregcount=many' needs a number of registers"),
        (["--maxrregcount=-1"], "'--maxrregcount=-1' needs a number of registers"),
        (["--Ofast-compile=fast"], "'--Ofast-compile=fast' needs one of 0, min, mid, max"),
        (["--use_fast_math=true"], "'--use_fast_math=true' takes no value"),
        (["--restrict="], "'--restrict=' takes no value"),
        (["--diag-suppress", "none"], "'--diag-suppress none' needs diagnostic numbers"),
        (["--undefine-macro=3X"], "'--undefine-macro=3X' needs a macro's name"),
        (["--ptxas-options="], "'--ptxas-options=' needs the options for ptxas, separated by commas"),
        (["-Xptxas"], "'-Xptxas' needs the options for ptxas, separated by commas"),
        (["-Xptxas=,"], "'-Xptxas=,' needs the options for ptxas, separated by commas"),
    ],
)
def test_bad_values(items: list[str], expected: str) -> None:
    """A value that is missing, of the wrong kind or too many is an error that says what is needed."""
    _, problems = route(items, linked=False)
    assert problems == [expected]


def test_a_missing_value_swallows_no_option() -> None:
    """After an option without its value, the next option still takes effect."""
    routed, problems = route(["--maxrregcount", "--ftz=true"], linked=False)
    assert routed.nvrtc == ("--ftz=true",)
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["-Xptxas=-O1,-v"], ("-O1", "-v")),
        (["-Xptxas", "-O1,-v"], ("-O1", "-v")),
        (["-Xptxas", "-maxrregcount,32"], ("-maxrregcount", "32")),
        (["-Xptxas=--def-load-cache=ca,--warn-on-spills"], ("--def-load-cache=ca", "--warn-on-spills")),
        ([r"-Xptxas=--a=1\,2,-v"], ("--a=1,2", "-v")),
        (["-Xptxas=-O1", "--ptxas-options=-v"], ("-O1", "-v")),
        (["-Xptxas=,-v,"], ("-v",)),
    ],
)
def test_ptxas_options(items: list[str], expected: tuple[str, ...]) -> None:
    r"""Commas separate the options for ptxas, ``\,`` is a comma in one of them, and NVRTC gets none."""
    assert route(items, linked=False) == (Routed(ptxas=expected), [])


@pytest.mark.parametrize(
    "option",
    [
        "-arch=sm_80",
        "--gpu-name=sm_80",
        "-o",
        "--output-file=x",
        "-c",
        "-e",
        "--entry=k",
        "-g",
        "-lineinfo",
        "-V",
        "-h",
    ],
)
@pytest.mark.parametrize("before", ["", "-O1,"])
def test_ptxas_options_that_the_build_sets(option: str, before: str) -> None:
    """Through -Xptxas nothing can contradict the build: not the architecture, not the output."""
    routed, problems = route([f"-Xptxas={before}{option}"], linked=False)
    assert flags(routed) == ()
    assert problems == [f"'-Xptxas={before}{option}' holds {option!r}, which the build sets itself"]


@pytest.mark.parametrize(("name", "short", "value", "nvrtc", "ptxas", "nvjitlink"), ACCEPTED)
def test_linked_modules(
    name: str,
    short: str,
    value: str | None,
    nvrtc: tuple[str, ...],
    ptxas: tuple[str, ...],
    nvjitlink: tuple[str, ...],
) -> None:
    """Where sources are device-linked, an option that nvJitLink would drop is an error, and any other goes as before."""
    (items, *_) = spellings(name, short, value)
    routed, problems = route(items, linked=True)
    if name in LOST_IN_LINKING:
        assert flags(routed) == ()
        assert problems == [
            (
                f"{items[0]!r} has no effect where several sources are device-linked into one module: remove it for this "
                "module, or put its sources into one file"
            )
        ]
    else:
        assert (routed, problems) == (Routed(nvrtc, ptxas, nvjitlink), [])


@pytest.mark.parametrize("explicit", ["-ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=false"])
@pytest.mark.parametrize("explicit_first", [True, False])
def test_fast_math_yields_to_an_explicit_option(explicit: str, *, explicit_first: bool) -> None:
    """For nvJitLink, as in NVRTC, what use_fast_math implies gives way to the option itself, wherever that stands."""
    items = [explicit, "--use_fast_math"] if explicit_first else ["--use_fast_math", explicit]
    routed, problems = route(items, linked=True)
    (alone,) = route([explicit], linked=True)[0].nvjitlink
    implied = {"-ftz=1", "-prec-div=0", "-prec-sqrt=0", "-fma=1"}
    replaced = next(flag for flag in implied if flag.partition("=")[0] == alone.partition("=")[0])
    assert problems == []
    assert set(routed.nvjitlink) == (implied - {replaced}) | {alone}
    assert len(routed.nvjitlink) == 4


def test_the_last_of_two_values_counts() -> None:
    """Of one option given twice, nvJitLink gets the last value, as NVRTC takes it."""
    assert route(["--ftz=true", "--ftz=false"], linked=True)[0].nvjitlink == ("-ftz=0",)


_GROUPS = st.one_of(
    st.sampled_from([items for row in ACCEPTED for items in spellings(*row[:3])]),
    st.sampled_from([[text] for text, _ in KEYED + REFUSED]),
    st.from_regex(r"--[a-z]{1,12}(=[a-z0-9]{0,4})?", fullmatch=True).map(lambda text: [text]),
    st.sampled_from([["--maxrregcount"], ["--ftz=2"], ["-Xptxas=-O1,-v"], ["-Xptxas=-o"], ["--use_fast_math=1"]]),
)


@UNTIMED
@given(st.lists(_GROUPS, max_size=6), st.booleans())
def test_no_option_is_lost(groups: list[list[str]], linked: bool) -> None:  # noqa: FBT001
    """Among others, each option gives every program the flags that it gives alone, in order, or its own problem."""
    routed, problems = route([item for group in groups for item in group], linked=linked)
    alone = [route(group, linked=linked) for group in groups]
    assert all(flags(one) or messages for one, messages in alone)
    assert routed.nvrtc == tuple(flag for one, _ in alone for flag in one.nvrtc)
    assert routed.ptxas == tuple(flag for one, _ in alone for flag in one.ptxas)
    assert problems == [message for _, messages in alone for message in messages]
    names = {flag.partition("=")[0] for one, _ in alone for flag in one.nvjitlink}
    assert sorted(flag.partition("=")[0] for flag in routed.nvjitlink) == sorted(names)


@UNTIMED
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4), st.booleans())
def test_arbitrary_text(options: list[str], linked: bool) -> None:  # noqa: FBT001
    """Whatever is written, the answer is flags or problems: no exception, and not nothing."""
    routed, problems = route(options, linked=linked)
    assert flags(routed) or problems


@pytest.mark.parametrize(
    "value", ["-optf=/o", "--options-file,/o", "-apply-controls,/o", "--apply-controls=/o", "-ias,x"]
)
def test_options_of_ptxas_that_read_files(value: str) -> None:
    """What ptxas would read from another file no cache could know of."""
    _, problems = route([f"-Xptxas={value}"], linked=False)
    assert any("which the build sets itself" in problem for problem in problems)


@pytest.mark.parametrize("value", ["/home/me/other.ptx", "-v,other.ptx", "@options", "C:\\x.ptx"])
def test_ptxas_gets_no_other_file(value: str) -> None:
    """ptxas takes a second file without a word: only options and plain values are passed on."""
    _, (problem,) = route(["-Xptxas", value], linked=False)
    assert f"holds {value.rpartition(',')[2]!r}, which is neither an option nor a plain value" in problem


@pytest.mark.parametrize("value", ["-O,1", "-dlcm,ca", "-maxntid,128", "-regUsageLevel=7", "-fmad,false"])
def test_values_for_ptxas(value: str) -> None:
    """A value may follow its option as an item of its own."""
    routed, problems = route(["-Xptxas", value], linked=False)
    assert (routed.ptxas, problems) == (tuple(value.split(",")), [])
