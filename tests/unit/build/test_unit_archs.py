"""Spellings of architectures: what each means, in which order images are built, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hatch_cuda_aot.archs import EXPECTED, WORDS, Target, parse_spelling, resolve
from hatch_cuda_aot.errors import BuildError
from hatch_cuda_aot.keys import DEFAULT_ARCHS
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.toolchain import line_named

#: A slow machine must not fail a test of hypothesis.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def no_gpu() -> Sequence[int]:
    """Stand for a machine without a GPU."""
    message = "no GPU here"
    raise BuildError(message)


def meaning(*texts: str, cuda: str = "13.0") -> list[str]:
    """Return what a list of spellings asks for, as text."""
    items = [parse_spelling(text) for text in texts]
    return [str(target) for target in resolve(items, line_named(cuda), no_gpu)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sm_90", ["sm_90"]),
        ("sm_90a", ["sm_90a"]),
        ("sm_100f", ["sm_100f"]),
        ("sm_120", ["sm_120"]),
        ("compute_75", ["compute_75"]),
        ("compute_90a", ["compute_90a"]),
        ("compute_120f", ["compute_120f"]),
        ("sm_86@compute_80", ["sm_86@compute_80"]),
        ("sm_90a@compute_80", ["sm_90a@compute_80"]),
        ("sm_103@compute_100f", ["sm_103@compute_100f"]),
        ("sm_86@compute_86", ["sm_86"]),
        ("sm_90a@compute_90a", ["sm_90a"]),
        ("90", ["sm_90", "compute_90"]),
        ("90a", ["sm_90a", "compute_90a"]),
        ("100f", ["sm_100f", "compute_100f"]),
        ("90-real", ["sm_90"]),
        ("90a-real", ["sm_90a"]),
        ("90-virtual", ["compute_90"]),
        ("120f-virtual", ["compute_120f"]),
        ("9.0", ["sm_90"]),
        ("9.0a", ["sm_90a"]),
        ("7.5", ["sm_75"]),
        ("10.3", ["sm_103"]),
        ("12.1+PTX", ["sm_121", "compute_121"]),
        ("9.0+PTX", ["sm_90", "compute_90"]),
        ("9.0a+PTX", ["sm_90a", "compute_90a"]),
    ],
)
def test_spelling(text: str, expected: list[str]) -> None:
    """Each spelling means what it means where it comes from: NVIDIA, CMake, PyTorch."""
    assert meaning(text) == expected


def test_front_end_pass() -> None:
    """A cubin is made from the virtual architecture of its own name, or from the one after the @."""
    assert parse_spelling("sm_90a") == (Target(Arch(90, "a"), Arch(90, "a", virtual=True)),)
    assert parse_spelling("sm_86@compute_80") == (Target(Arch(86), Arch(80, virtual=True)),)
    assert parse_spelling("compute_75") == (Target(Arch(75, virtual=True), Arch(75, virtual=True)),)
    assert Target(Arch(86), Arch(80, virtual=True)).archs == (Arch(86), Arch(80, virtual=True))


@pytest.mark.parametrize(
    "text",
    sorted(
        {"", "sm90", "SM_90", "sm_9", "sm_090", "sm_1000", "sm_90b", "sm_90 ", "90-fake", "90b", "9", "9.0+ptx", "9.00"}
        | {"lto_90", "compute_86@sm_80", "sm_86@sm_80", "sm_90,sm_80", "All", "ALL", "every", "sm_90\n", "Hopper"}
    ),
)
def test_not_an_architecture(text: str) -> None:
    """Anything else is an error that quotes it and lists every accepted spelling."""
    with pytest.raises(ValueError, match="is not an architecture") as caught:
        parse_spelling(text)
    assert str(caught.value) == f"{text!r} is not an architecture: {EXPECTED}"
    assert all(word in EXPECTED for word in (*WORDS, "sm_XY", "90-real", "9.0+PTX", "@compute_XY"))


@pytest.mark.parametrize(
    "text", ["sm_80@compute_86", "sm_90@compute_90a", "sm_100a@compute_90a", "sm_100f@compute_100a"]
)
def test_impossible_front_end_pass(text: str) -> None:
    """A cubin cannot be made from PTX that its device does not run: a higher, or another architecture-specific one."""
    image, _, front = text.partition("@")
    with pytest.raises(ValueError, match="cannot be made from") as caught:
        parse_spelling(text)
    assert str(caught.value) == f"{text!r}: {image} cannot be made from {front}, which it does not run"


@pytest.mark.parametrize("word", WORDS)
def test_words_are_kept(word: str) -> None:
    """A word stays a word until the compiler or the machine is known."""
    assert parse_spelling(word) == word


def test_all_is_what_nvcc_means() -> None:
    """``all`` is `nvcc -arch=all` of CUDA 13.0: a cubin for everything it supports, PTX for its highest major version."""
    cubins = [f"sm_{cc}" for cc in (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)]
    assert meaning("all", cuda="13.0") == [*cubins, "compute_120"]


def test_all_major_is_what_nvcc_means() -> None:
    """``all-major`` is `nvcc -arch=all-major` of CUDA 13.0: its first architecture and each X0, PTX for the highest."""
    assert meaning("all-major", cuda="13.0") == [*(f"sm_{cc}" for cc in (75, 80, 90, 100, 110, 120)), "compute_120"]


def test_all_major_depends_on_the_line() -> None:
    """On 12.9 the first architecture is sm_50, itself an X0."""
    expected = [*(f"sm_{cc}" for cc in (50, 60, 70, 80, 90, 100, 120)), "compute_120"]
    assert meaning("all-major", cuda="12.9") == expected


def test_native_asks_the_machine() -> None:
    """``native`` is a cubin for each GPU of the machine; a machine without one is its own error, and only then asked."""
    assert [str(target) for target in resolve(["native"], None, lambda: (80, 90))] == ["sm_80", "sm_90"]
    with pytest.raises(BuildError, match="no GPU here"):
        resolve(["native"], None, no_gpu)
    assert meaning("sm_80") == ["sm_80"]


def test_words_wait_for_the_line() -> None:
    """While the line is not chosen, ``all`` adds nothing rather than something wrong."""
    assert resolve(["all", "all-major", parse_spelling("sm_80")], None, no_gpu) == parse_spelling("sm_80")


def test_order() -> None:
    """Cubins come before PTX, each by compute capability as a number, a plain one before its own suffixes."""
    texts = [
        "compute_120",
        "sm_120",
        "sm_90a",
        "compute_75",
        "sm_100f",
        "sm_100a",
        "sm_90",
        "sm_100",
        "sm_86@compute_80",
    ]
    assert meaning(*texts) == [
        "sm_86@compute_80",
        "sm_90",
        "sm_90a",
        "sm_100",
        "sm_100a",
        "sm_100f",
        "sm_120",
        "compute_75",
        "compute_120",
    ]


def test_doubles() -> None:
    """What several spellings ask for is built once."""
    assert meaning("sm_90", "9.0", "90", "9.0+PTX", "90-real", "compute_90", "sm_90@compute_90") == [
        "sm_90",
        "compute_90",
    ]
    assert meaning("all", "sm_75", "compute_120") == meaning("all")


def test_two_passes_for_one_image_are_two_targets() -> None:
    """The same image asked for through two front-end passes stays visible, so that the plan can refuse it."""
    assert meaning("sm_86", "sm_86@compute_80") == ["sm_86", "sm_86@compute_80"]


@UNTIMED
@given(st.permutations(["sm_90", "sm_90a", "compute_75", "sm_86@compute_80", "120", "9.0+PTX", "all-major"]))
def test_order_of_the_list_means_nothing(texts: list[str]) -> None:
    """However the list is ordered, the build is the same."""
    assert meaning(*texts) == meaning(*sorted(texts))


@UNTIMED
@given(st.text(max_size=12))
def test_arbitrary_text(text: str) -> None:
    """Any text is a spelling that round-trips through its own canonical form, or a ValueError."""
    try:
        targets = parse_spelling(text)
    except ValueError:
        return
    if isinstance(targets, str):
        assert targets in WORDS
    else:
        assert all(parse_spelling(str(target)) == (target,) for target in targets)


@UNTIMED
@given(
    st.builds(
        lambda kind, cc, suffix: f"{kind}_{cc}{suffix}",
        st.sampled_from(["sm", "compute"]),
        st.integers(10, 999),
        st.sampled_from(["", "a", "f"]),
    )
)
def test_nvidia_tokens_round_trip(text: str) -> None:
    """NVIDIA's own tokens print as they were written."""
    assert [str(target) for target in parse_spelling(text)] == [text]


def test_the_default_list() -> None:
    """The default spells one image an item, and reads as DESIGN.md lists it."""
    assert meaning(*DEFAULT_ARCHS) == list(DEFAULT_ARCHS)
