"""Ranking: which image a device gets, in which order, and what is said of the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatch_cuda_aot.runtime.arch import Arch, runs_cubin, runs_ptx
from hatch_cuda_aot.runtime.manifest import Image
from hatch_cuda_aot.runtime.report import Report, Row
from hatch_cuda_aot.runtime.select import (
    CHOSEN,
    JIT,
    JIT_LOWERED,
    LOAD,
    NVJITLINK,
    REFUSED,
    REJECTED,
    USABLE,
    Candidate,
    DeviceFacts,
    advise,
    exact,
    is_tegra,
    rank,
)

CCS = (75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121)


def image(
    arch: str, min_driver: int = 12000, kernels: tuple[str, ...] = ("k",), floor: tuple[str, int] | None = None
) -> Image:
    """Return an image of `arch` that holds `kernels`; `floor` is the lowest PTX version and the driver that reads it."""
    parsed = Arch.parse(arch)
    version = f"{min_driver // 1000 - 4}.{min_driver % 1000 // 10}" if parsed.virtual else None
    file = f"m.{arch}.{'ptx' if parsed.virtual else 'cubin'}"
    lowest, driver = floor if floor and parsed.virtual else (None, None)
    return Image(
        parsed,
        file,
        min_driver=min_driver,
        ptx_version=version,
        ptx_floor=lowest,
        floor_driver=driver,
        kernels={name: {} for name in kernels},
    )


def running(candidates: list[Candidate]) -> list[str]:
    """Return the architectures that run, best first."""
    return [str(candidate.image.arch) for candidate in candidates if candidate.verdict in {CHOSEN, USABLE}]


@pytest.mark.parametrize(
    ("cc", "archs", "expected"),
    [
        (90, "sm_80 sm_90 sm_90a compute_80 compute_90 compute_90a", "sm_90a sm_90 compute_90a compute_90 compute_80"),
        (103, "sm_100 sm_100f sm_100a sm_103 sm_103f sm_103a", "sm_103a sm_103f sm_103 sm_100f sm_100"),
        (107, "sm_100f sm_103f sm_100 sm_103 compute_100", "sm_103f sm_100f sm_103 sm_100 compute_100"),
        (89, "sm_75 sm_80 sm_86 sm_90 compute_75 compute_86", "sm_86 sm_80 compute_86 compute_75"),
        (87, "sm_80 sm_86 compute_80", "compute_80"),
        (86, "sm_87 sm_80", "sm_80"),
        (
            121,
            "sm_120 sm_120f compute_120 compute_120f compute_90",
            "sm_120f sm_120 compute_120f compute_120 compute_90",
        ),
        (110, "sm_101 sm_110 sm_100 sm_100f compute_100", "sm_110 sm_101 compute_100"),
        (101, "sm_101 sm_110", "sm_101 sm_110"),
        (75, "sm_80 compute_80", ""),
    ],
)
def test_order(cc: int, archs: str, expected: str) -> None:
    """Exact before family before major version before PTX; the higher version first within each."""
    candidates = rank(map(image, archs.split()), DeviceFacts(cc, tegra=is_tegra(cc)))
    assert " ".join(running(candidates)) == expected
    assert len(candidates) == len(archs.split())
    assert [candidate.verdict == CHOSEN for candidate in candidates].count(True) == bool(expected)


def test_driver_too_old_for_machine_code() -> None:
    """Machine code of CUDA 13 waits for a driver of 13.0; one of 12.9 loads on any of 12."""
    device = DeviceFacts(90, 12040)
    assert running(rank([image("sm_90", 13000), image("compute_75", 12040)], device)) == ["compute_75"]
    assert running(rank([image("sm_90", 12000)], device)) == ["sm_90"]
    assert running(rank([image("sm_90", 12000)], DeviceFacts(90, 13050))) == ["sm_90"]


def test_driver_too_old_for_ptx() -> None:
    """The reason names the PTX version, the driver that it needs and the one that is there."""
    (candidate,) = rank([image("compute_75", 13050)], DeviceFacts(90, 13000))
    assert candidate.verdict == REJECTED
    assert candidate.reason == "PTX 9.5 needs a driver of CUDA 13.5; this one is of 13.0"
    assert candidate.needs_driver == 13050


@pytest.mark.parametrize(
    ("arch", "min_driver", "floor", "device", "way", "reason"),
    [
        ("sm_90", 13000, None, DeviceFacts(90, 13000), LOAD, "machine code for 9.0, exact"),
        ("compute_75", 13050, ("7.0", 11000), DeviceFacts(90), JIT, "PTX 9.5, compiled by the driver"),
        ("compute_75", 13050, ("7.0", 11000), DeviceFacts(90, 13050), JIT, "PTX 9.5, compiled by the driver"),
        (
            *("compute_75", 13050, ("7.0", 11000), DeviceFacts(90, 13000)),
            *(JIT_LOWERED, "PTX 9.5, its version line lowered to 7.0 for this driver"),
        ),
        (
            *("compute_90a", 13050, ("8.0", 12000), DeviceFacts(90, 12000, nvjitlink=13050)),
            *(JIT_LOWERED, "PTX 9.5, its version line lowered to 8.0 for this driver, architecture-specific"),
        ),
        (
            *("compute_120", 13050, ("8.7", 12080), DeviceFacts(120, 12040)),
            *("", "PTX 9.5, lowered to 8.7, needs a driver of CUDA 12.8; this one is of 12.4"),
        ),
        (
            *("compute_75", 13050, None, DeviceFacts(90, 13000, nvjitlink=13050)),
            *(NVJITLINK, "PTX 9.5, compiled by nvJitLink 13.5 for this older driver"),
        ),
        (
            *("compute_75", 12090, ("8.7", 12080), DeviceFacts(90, 12040, nvjitlink=12090)),
            *(NVJITLINK, "PTX 8.9, compiled by nvJitLink 12.9 for this older driver"),
        ),
        (  # one too old for the PTX
            *("compute_75", 13050, None, DeviceFacts(90, 13000, nvjitlink=13040)),
            *("", "PTX 9.5 needs a driver of CUDA 13.5; this one is of 13.0"),
        ),
        (  # one whose machine code the driver would not take
            *("compute_75", 12090, None, DeviceFacts(90, 12040, nvjitlink=13000)),
            *("", "PTX 8.9 needs a driver of CUDA 12.9; this one is of 12.4"),
        ),
        (  # nvJitLink changes nothing for machine code
            *("sm_90", 13000, None, DeviceFacts(90, 12090, nvjitlink=13000)),
            *("", "needs a driver of CUDA 13.0; this one is of 12.9"),
        ),
    ],
)
def test_way(
    arch: str, min_driver: int, floor: tuple[str, int] | None, device: DeviceFacts, way: str, reason: str
) -> None:
    """PTX that is too new is lowered where its floor allows; else nvJitLink compiles it, if it is one that can."""
    (candidate,) = rank([image(arch, min_driver, floor=floor)], device)
    assert (candidate.way, candidate.reason) == (way, reason)
    assert (candidate.verdict == CHOSEN) == bool(way)


def test_who_asks_for_nvjitlink() -> None:
    """Only PTX that the driver alone stands in the way of waits for nvJitLink, and for the driver that reads its floor."""
    images = [image("compute_75", 13050, floor=("9.0", 13000)), image("sm_90", 13000), image("compute_100", 13050)]
    candidates = {str(candidate.image.arch): candidate for candidate in rank(images, DeviceFacts(90, 12090))}
    assert {arch for arch, candidate in candidates.items() if candidate.awaits_linker} == {"compute_75"}
    assert candidates["compute_75"].needs_driver == 13000


def test_kernel_missing_in_an_image() -> None:
    """An image that does not hold the kernel is passed over."""
    candidates = rank([image("sm_90", kernels=("other",)), image("compute_75")], DeviceFacts(90), kernel="k")
    assert running(candidates) == ["compute_75"]
    assert candidates[1].reason == "was built without k"


def test_force_ptx() -> None:
    """With the wish for PTX all machine code is rejected, and the reason names the variable."""
    candidates = rank([image("sm_90"), image("compute_75")], DeviceFacts(90), force_ptx=True)
    assert running(candidates) == ["compute_75"]
    assert candidates[1].reason == "CUDA_AOT_FORCE_PTX is set"


def test_refused_image_makes_room() -> None:
    """What the driver refused is kept in the table with its words, and the next image is chosen."""
    candidates = rank([image("sm_90"), image("compute_75")], DeviceFacts(90), refused={"m.sm_90.cubin": "no"})
    assert [(str(c.image.arch), c.verdict, c.reason) for c in candidates] == [
        ("compute_75", CHOSEN, "PTX 8.0, compiled by the driver"),
        ("sm_90", REFUSED, "no"),
    ]


@pytest.mark.parametrize(
    ("archs", "device", "force_ptx", "advice"),
    [
        (["sm_80"], DeviceFacts(90, 13000), False, ['Ask the authors of demo to add "sm_90"']),
        (
            ["compute_75:13050", "sm_90:13000"],
            DeviceFacts(90, 12090),
            False,
            ["Upgrade the NVIDIA driver to one of CUDA 13.0 or newer, which takes sm_90.", "Or ask the authors"],
        ),
        (
            ["compute_75:13050"],
            DeviceFacts(90, 13000),
            False,
            [
                "Upgrade the NVIDIA driver to one of CUDA 13.5 or newer, which takes PTX 9.5 of compute_75.",
                (
                    "Or install nvJitLink, which compiles it in the driver's place: "
                    'pip install "cuda-bindings==13.*" "nvidia-nvjitlink==13.*,>=13.5"'
                ),
                "Or ask",
            ],
        ),
        (["sm_90"], DeviceFacts(90, 13000), True, ["Unset CUDA_AOT_FORCE_PTX", "Or ask"]),
    ],
)
def test_advice(archs: list[str], device: DeviceFacts, force_ptx: bool, advice: list[str]) -> None:  # noqa: FBT001
    """Where nothing runs, the user is told what to change, in the order of what is easiest."""
    images = [image(arch, int(driver or 12000)) for arch, _, driver in (item.partition(":") for item in archs)]
    actual = advise(rank(images, device, force_ptx=force_ptx), device, "demo")
    assert len(actual) == len(advice)
    assert all(given.startswith(wanted) for given, wanted in zip(actual, advice, strict=True)), actual


ARCHS = [
    *(f"{kind}_{cc}" for kind in ("sm", "compute") for cc in CCS),
    *(f"{kind}_{cc}a" for kind in ("sm", "compute") for cc in CCS if cc >= 90),
    *(f"{kind}_{cc}f" for kind in ("sm", "compute") for cc in CCS if cc >= 100),
]
images_of_a_module = st.lists(
    st.builds(
        image,
        st.sampled_from(ARCHS),
        st.sampled_from([12000, 12040, 12090, 13000, 13050]),
        floor=st.sampled_from([None, ("6.3", 10000), ("8.0", 12000), ("8.7", 12080), ("9.5", 13050)]),
    ),
    max_size=12,
    unique_by=lambda item: item.file,
)
devices = st.builds(
    DeviceFacts,
    st.sampled_from(CCS),
    st.none() | st.sampled_from([12000, 12040, 12080, 13000, 13050]),
    st.booleans(),
    nvjitlink=st.none() | st.sampled_from([12040, 12090, 13000, 13050]),
)


@given(images_of_a_module, devices)
def test_choice_keeps_the_rules(images: list[Image], device: DeviceFacts) -> None:
    """Whatever is said to run does run by the rules, driver included; whatever is rejected does not."""
    for candidate in rank(images, device):
        arch = candidate.image.arch
        fits = runs_ptx(arch, device.cc) if arch.virtual else runs_cubin(arch, device.cc, tegra=device.tegra)
        driver, linker = device.driver or 99000, device.nvjitlink or 0
        loads = (
            candidate.image.min_driver <= driver
            or (candidate.image.floor_driver or 99000) <= driver
            or (arch.virtual and candidate.image.min_driver <= linker and linker // 1000 <= driver // 1000)
        )
        assert (candidate.verdict in {CHOSEN, USABLE}) == (fits is None and loads) == bool(candidate.way)
        assert candidate.reason


@given(images_of_a_module, devices, st.randoms())
def test_order_in_the_manifest_does_not_matter(images: list[Image], device: DeviceFacts, random: object) -> None:
    """Shuffled images rank the same."""
    shuffled = list(images)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert rank(shuffled, device) == rank(images, device)


@given(images_of_a_module, devices)
def test_another_image_never_makes_it_worse(images: list[Image], device: DeviceFacts) -> None:
    """Of all images the chosen one is also chosen against each other alone, so adding one never demotes the choice."""
    ranked = rank(images, device)
    for worse in ranked[1:]:
        assert rank([worse.image, ranked[0].image], device)[0].image == ranked[0].image


@pytest.mark.parametrize(
    ("archs", "refused", "found"),
    [
        ("sm_103 sm_103f sm_103a", "", "sm_103a"),
        ("sm_103 sm_103f sm_103a", "sm_103a", "sm_103f"),
        ("sm_103 sm_103f sm_103a", "sm_103a sm_103f sm_103", None),
        ("sm_100 sm_100f compute_103a compute_100", "", None),
        ("sm_103:13000 sm_100", "", None),
        ("sm_103 sm_103a:13000", "", "sm_103"),
    ],
)
def test_short_cut(archs: str, refused: str, found: str | None) -> None:
    """Machine code for the very device is found by its suffix, unless it was refused or the driver is too old for it."""
    images = [image(arch, int(driver or 12000)) for arch, _, driver in (item.partition(":") for item in archs.split())]
    refusals = {image(arch).file: "no" for arch in refused.split()}
    chosen = exact(images, DeviceFacts(103, 12090), "k", refusals)
    assert (chosen and str(chosen.arch)) == found
    assert exact(images, DeviceFacts(103, 12090), "other") is None


@given(images_of_a_module, devices, st.sets(st.sampled_from(ARCHS)))
def test_short_cut_is_the_rule(images: list[Image], device: DeviceFacts, archs: set[str]) -> None:
    """Where there is machine code for the very device, `exact` finds what `rank` chooses; else it finds nothing."""
    refused = {item.file: "no" for item in images if str(item.arch) in archs}
    ranked = rank(images, device, kernel="k", refused=refused)
    first = ranked[0].image if ranked and ranked[0].verdict == CHOSEN else None
    found = exact(images, device, "k", refused)
    assert found in (None, first)
    if first and not first.arch.virtual and first.arch.cc == device.cc not in {101, 110}:
        assert found == first


def test_report_table() -> None:
    """The table names every image with its reason; the same comes as data."""
    device = DeviceFacts(90, 13000, ordinal=0, name="NVIDIA H200")
    candidates = rank([image("compute_75", 12090), image("sm_80"), image("sm_90")], device)
    report = Report(device, tuple(Row.of("m", candidate) for candidate in candidates), "k")
    assert str(report).splitlines() == [
        "kernel k on device 0 (NVIDIA H200, compute capability 9.0, driver of CUDA 13.0)",
        "image             kind   verdict   reason",
        "m.sm_90.cubin     cubin  chosen    machine code for 9.0, exact",
        "m.compute_75.ptx  ptx    usable    PTX 8.9, compiled by the driver",
        "m.sm_80.cubin     cubin  rejected  machine code for 8.0 runs on 8.x devices only",
    ]
    data = report.to_dict()
    assert data["device"]["compute_capability"] == "9.0"
    assert data["images"][0] == {
        "module": "m",
        "image": "m.sm_90.cubin",
        "arch": "sm_90",
        "kind": "cubin",
        "verdict": "chosen",
        "reason": "machine code for 9.0, exact",
        "way": "load",
    }


@given(st.lists(st.tuples(st.text("ab.<>", max_size=150), st.text("ab ,", max_size=300)), max_size=4))
def test_report_fits_a_terminal(cells: list[tuple[str, str]]) -> None:
    """However long names and reasons are, no line is wider than 100 columns."""
    rows = tuple(Row("m", name, "sm_90", "cubin", "rejected", reason) for name, reason in cells)
    report = Report(DeviceFacts(90), rows, "a" * 120)
    assert max(map(len, str(report).splitlines())) <= 100
