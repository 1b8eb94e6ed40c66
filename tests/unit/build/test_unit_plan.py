"""The plan: which front-end passes there are, which images each makes, and with which options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from hatch_cuda_aot.compile.tasks import AssembleTask, FloorTask, FrontTask, ImageTask
from hatch_cuda_aot.config import ModuleConfig, load_settings
from hatch_cuda_aot.errors import BuildError, ConfigError, UnsupportedArchError
from hatch_cuda_aot.plan import Module, in_order, make_plan, needs_of, priority_of, select_line
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.sources import SourceTree
from hatch_cuda_aot.toolchain import LINES, line_named


def no_gpu() -> Sequence[int]:
    """Stand for a machine without a GPU."""
    message = "no GPU here"
    raise BuildError(message)


def config(name: str = "k", sources: Sequence[str] = (), kernels: Sequence[str] = (), **keys: Any) -> ModuleConfig:
    """Return a module's configuration; ``_`` in a key stands for the hyphen."""
    table = {key.replace("_", "-"): value for key, value in keys.items()}
    files = tuple(sources) or (f"{name}.cu",)
    return ModuleConfig(name, files, tuple(kernels), load_settings(table, "here"), f"place of {name}")


def module(name: str = "k", text: str = "", **keys: Any) -> Module:
    """Return a module with one source."""
    return Module(config(name, **keys), SourceTree.of_texts({f"{name}.cu": text}))


def test_one_front_end_pass_for_many_images() -> None:
    """Images of one virtual architecture share its pass; the PTX is one of them, and its order is that of the list."""
    archs = ["sm_90", "sm_86@compute_80", "compute_80", "sm_80", "compute_90", "sm_89@compute_80"]
    plan = make_plan([module(archs=archs)], line_named("12.9"), no_gpu)
    assert [(str(job.front.arch), [str(target) for target in job.targets]) for job in plan.jobs] == [
        ("compute_80", ["sm_80", "sm_86@compute_80", "sm_89@compute_80", "compute_80"]),
        ("compute_90", ["sm_90", "compute_90"]),
    ]
    assert len(plan.images) == 6


def test_suffixes_are_passes_of_their_own() -> None:
    """``sm_90a`` is compiled from compute_90a, where its instructions are allowed, and sm_90 from compute_90."""
    plan = make_plan([module(archs=["sm_90", "sm_90a", "sm_100f"])], line_named("12.9"), no_gpu)
    assert [str(job.front.arch) for job in plan.jobs] == ["compute_90", "compute_90a", "compute_100f"]


def test_order_of_modules() -> None:
    """Jobs are ordered by module and architecture, whatever the order of the list."""
    modules = [module("a", archs=["sm_90", "sm_80"]), module("b", archs=["sm_80"])]
    plan = make_plan(modules, line_named("12.9"), no_gpu)
    assert [(job.front.module, str(job.front.arch)) for job in plan.jobs] == [
        ("a", "compute_80"),
        ("a", "compute_90"),
        ("b", "compute_80"),
    ]


def test_tasks_carry_everything() -> None:
    """A task has the compiler's line, the tree, the sources and the options: all that a worker needs."""
    source = module("k", text="x", archs=["sm_90"], prune=False)
    (job,) = make_plan([source], line_named("13.0"), no_gpu).jobs
    assert job.front.compiler.line == "13.0"
    assert (job.front.tree, job.front.sources, job.front.prune) == (source.tree, ("k.cu",), False)


def test_options() -> None:
    """Keys and options become flags in one place, the user's own options last, so that they win."""
    source = module(
        archs=["sm_90"],
        std="c++20",
        defines={"B": 2, "A": True, "C": False},
        options=["--use_fast_math", "--maxrregcount=32", "-Xptxas=-O1"],
        lineinfo=True,
    )
    (job,) = make_plan([source], line_named("12.9"), no_gpu).jobs
    assert job.front.nvrtc == (
        "--std=c++20",
        "--define-macro=_CCCL_META_UNROLL_LIMIT=10",
        "--define-macro=A=1",
        "--define-macro=B=2",
        "--generate-line-info",
        "--use_fast_math",
        "--maxrregcount=32",
    )
    assert job.ptxas == ("--generate-line-info", "--maxrregcount=32", "-O1")
    assert job.front.nvjitlink == ("-lineinfo", "-ftz=1", "-prec-div=0", "-prec-sqrt=0", "-fma=1")


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("#define _CCCL_META_UNROLL_LIMIT 16", {}),
        ("", {"defines": {"_CCCL_META_UNROLL_LIMIT": 16}}),
    ],
)
def test_the_project_has_its_say_in_cccl(text: str, keys: dict[str, Any]) -> None:
    """The limit that spares NVRTC half of its work is not given where the project sets it."""
    (job,) = make_plan([module(text=text, archs=["sm_90"], **keys)], line_named("12.9"), no_gpu).jobs
    assert "--define-macro=_CCCL_META_UNROLL_LIMIT=10" not in job.front.nvrtc
    (job,) = make_plan([module(archs=["sm_90"])], line_named("12.9"), no_gpu).jobs
    assert "--define-macro=_CCCL_META_UNROLL_LIMIT=10" in job.front.nvrtc


def test_debug_options() -> None:
    """A debug build reaches all three programs, as ``nvcc -G`` does, and prunes nothing."""
    (job,) = make_plan([module(archs=["sm_90"], debug=True, lineinfo=True)], line_named("12.9"), no_gpu).jobs
    assert "--device-debug" in job.front.nvrtc
    assert "--generate-line-info" not in job.front.nvrtc
    assert job.ptxas == ("--device-debug", "--dont-merge-basicblocks", "--return-at-end")
    assert job.front.nvjitlink == ("-g", "-O0")
    assert job.front.prune is False


def test_debug_of_several_sources() -> None:
    """From compute_100 on no compiler can do it; the cubins of those architectures can be had from an older front end."""
    sources = ["a.cu", "b.cu"]
    tree = SourceTree.of_texts(dict.fromkeys(sources, ""))
    archs = ["sm_80", "sm_100", "sm_120@compute_90", "compute_120"]
    linked = Module(config("m", sources=sources, archs=archs, debug=True), tree)
    with pytest.raises(ConfigError) as caught:
        make_plan([linked], line_named("12.9"), no_gpu)
    assert str(caught.value.problems[0]) == (
        "place of m (module 'm'): `debug` of several sources is not possible for sm_100, compute_120: from compute_100 on, "
        "nvJitLink takes debug information of one source only. For these architectures compile from an older one "
        "(sm_100@compute_90), put the sources into one file, or leave them out of `archs`"
    )
    for good in (
        config("m", sources=sources, archs=archs[:1] + archs[2:3], debug=True),
        config("m", sources=sources, archs=["sm_80", "sm_120"], debug=True, share_front_end="all"),
        config("m", sources=sources, archs=archs, lineinfo=True),
        config("m", sources=sources[:1], archs=archs, debug=True),
    ):
        assert make_plan([Module(good, tree)], line_named("12.9"), no_gpu).jobs


def test_include_dirs() -> None:
    """Include folders reach NVRTC relative to the project, in their order."""
    plain = config(archs=["sm_90"])
    settings = dataclasses.replace(plain.settings, include_dirs=("b", "a"))
    source = Module(dataclasses.replace(plain, settings=settings), SourceTree.of_texts({"k.cu": ""}))
    (job,) = make_plan([source], line_named("12.9"), no_gpu).jobs
    assert job.front.nvrtc[2:] == ("--include-path=b", "--include-path=a")


def test_place_of_expressions() -> None:
    """Each name expression is given to the source that mentions its template, and to the first where none does."""
    sources = {"a.cu": "void helper();", "b.cu": "template<class T> void scale(T*);", "c.cu": "void other();"}
    expressions = ["scale<int>", "n::scale<float>", "other", "&missing<3>"]
    both = Module(
        config("m", sources=sorted(sources), kernels=expressions, archs=["sm_90"]), SourceTree.of_texts(sources)
    )
    (job,) = make_plan([both], line_named("12.9"), no_gpu).jobs
    assert job.front.expressions == (
        ("&missing<3>", "a.cu"),
        ("n::scale<float>", "b.cu"),
        ("other", "c.cu"),
        ("scale<int>", "b.cu"),
    )


def test_order_of_expressions() -> None:
    """In whichever order kernels are listed, the task is the same, and with it its key and its PTX."""
    orders = (["f<int>", "f<float>"], ["f<float>", "f<int>"])
    first, second = (make_plan([module(kernels=order)], line_named("12.9"), no_gpu) for order in orders)
    assert first == second


def test_one_image_in_two_ways() -> None:
    """Two ways of making one image is an error that names both."""
    with pytest.raises(ConfigError) as caught:
        make_plan([module(archs=["sm_86", "sm_86@compute_80"])], line_named("12.9"), no_gpu)
    assert str(caught.value) == (
        "place of k (module 'k'): `archs` asks for sm_86 twice, as sm_86 and as sm_86@compute_80: leave one"
    )


def test_plan_in_words() -> None:
    """The plan prints as the one line that a build shows, in the singular where it is one."""
    one = make_plan([module(archs=["sm_90"])], line_named("12.9"), no_gpu)
    assert str(one) == "1 module, 1 cubin and 0 PTX with CUDA 12.9"
    modules = [module("a", archs=["90", "sm_80"]), module("b", archs=["compute_75"])]
    assert str(make_plan(modules, line_named("13.0"), no_gpu)) == "2 modules, 2 cubins and 2 PTX with CUDA 13.0"


BFLOAT16 = "before 8.0 arithmetic with __nv_bfloat16 is done in float, many times slower."
FP8 = "before 8.9 conversions from and to fp8 are done by many instructions."
COPIES = "before 8.0 barriers and asynchronous copies to shared memory are done in software."


@pytest.mark.parametrize(
    ("archs", "sharing", "text", "warnings"),
    [
        ("75 80 90", "all", "#include <cuda_bf16.h>", [("cuda_bf16.h", "sm_80, sm_90 are", "compute_75", BFLOAT16)]),
        ("75 80 90", "major", "#include <cuda_bf16.h>", []),
        ("75 80 90", "none", "#include <cuda_bf16.h>", []),
        ("75 80 90", "all", "#include <cuda_fp16.h>", []),
        ("75", "all", "#include <cuda_bf16.h>", []),
        ("sm_80 sm_89", "major", "#include <cuda_fp8.h>", [("cuda_fp8.h", "sm_89 is", "compute_80", FP8)]),
        ("sm_90@compute_75", "none", "#include <cuda/pipeline>", [("cuda/pipeline", "sm_90 is", "compute_75", COPIES)]),
        (
            "sm_75 sm_90",
            "all",
            "#include <cuda_fp8.h>\n#include <cuda_bf16.h>",
            [
                ("cuda_bf16.h", "sm_90 is", "compute_75", BFLOAT16),
                ("cuda_fp8.h", "sm_90 is", "compute_75", FP8),
            ],
        ),
    ],
)
def test_headers_that_get_slow(archs: str, sharing: str, text: str, warnings: list[tuple[str, ...]]) -> None:
    """A shared front end for an older GPU is named where the source includes what is slow before a newer one."""
    plan = make_plan([module(text=text, archs=archs.split(), share_front_end=sharing)], line_named("12.9"), no_gpu)
    assert list(plan.warnings) == [
        f"module 'k' includes {header}, and its {images} compiled from {front}: {why} "
        'Set share-front-end = "none" for this module, or leave out the @ in `archs`'
        for header, images, front, why in warnings
    ]


def test_needs() -> None:
    """NvJitLink is needed for modules of several files, cuRAND's headers where they are included."""
    plain = module("a", text="#include <cub/cub.cuh>")
    random = module("b", text="#include <curand_kernel.h>")
    linked = Module(config("c", sources=["c.cu", "d.cu"]), SourceTree.of_texts({"c.cu": "", "d.cu": ""}))
    assert [(needs_of([each]).linker, needs_of([each]).curand) for each in (plain, random, linked)] == [
        (False, False),
        (False, True),
        (True, False),
    ]
    together = needs_of([plain, random, linked])
    assert (together.linker, together.curand) == (True, True)
    assert make_plan([plain, linked], line_named("12.9"), no_gpu).needs == needs_of([plain, linked])


def test_auto_line() -> None:
    """``auto`` looks at every module, and at the virtual architectures too."""
    assert select_line("auto", [config("a", archs=["sm_90"])], no_gpu).version == "12.9"
    assert (
        select_line("auto", [config("a", archs=["sm_90"]), config("b", archs=["compute_110"])], no_gpu).version
        == "13.0"
    )
    assert select_line("auto", [config("a", archs=["sm_120@compute_88"])], no_gpu).version == "13.0"


def test_explicit_line() -> None:
    """An explicit line is taken; with "auto" the front end's architecture counts as well."""
    assert select_line("13", [config("a", archs=["sm_90"])], no_gpu).version == LINES[-1].version
    assert select_line("13.0", [config("a", archs=["sm_90@compute_50"])], no_gpu).version == "13.0"
    with pytest.raises(UnsupportedArchError, match=r"^no one CUDA line compiles all of sm_110, compute_50: "):
        select_line("auto", [config("a", archs=["sm_110@compute_50"])], no_gpu)


@pytest.mark.parametrize("word", ["all", "all-major"])
def test_words_need_a_line(word: str) -> None:
    """A word that means what one compiler supports needs an explicit line, and works with one."""
    modules = [config("a", archs=["sm_90"]), config("b", archs=["sm_90", word])]
    with pytest.raises(ConfigError) as caught:
        select_line("auto", modules, no_gpu)
    assert str(caught.value) == (
        f"place of b (module 'b'): {word!r} in `archs` means what one compiler supports: set `cuda` too, "
        'for instance to "13"'
    )
    assert select_line("13.0", modules, no_gpu).version == "13.0"


def test_native() -> None:
    """``native`` takes part in the choice of the line, and its absence of a GPU is not hidden."""
    modules = [config("a", archs=["native"])]
    assert select_line("auto", modules, lambda: (110,)).version == "13.0"
    plan = make_plan([module(archs=["native"])], line_named("13.0"), lambda: (80, 90))
    assert [str(target) for target in plan.images] == ["sm_80", "sm_90"]
    with pytest.raises(BuildError, match="no GPU here"):
        select_line("auto", modules, no_gpu)


SHARED = [
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90",
    "sm_90a",
    "sm_100",
    "sm_100f",
    "sm_103",
    "compute_80",
    "compute_89",
]


@pytest.mark.parametrize(
    ("sharing", "passes"),
    [
        (
            "none",
            {
                "compute_75": "sm_75",
                "compute_80": "sm_80 compute_80",
                "compute_86": "sm_86",
                "compute_89": "sm_89 compute_89",
                "compute_90": "sm_90",
                "compute_90a": "sm_90a",
                "compute_100": "sm_100",
                "compute_100f": "sm_100f",
                "compute_103": "sm_103",
            },
        ),
        (
            "major",
            {
                "compute_75": "sm_75",
                "compute_80": "sm_80 sm_86@compute_80 sm_89@compute_80 compute_80",
                "compute_89": "compute_89",
                "compute_90": "sm_90",
                "compute_90a": "sm_90a",
                "compute_100": "sm_100 sm_103@compute_100",
                "compute_100f": "sm_100f",
            },
        ),
        (
            "all",
            {
                "compute_75": (
                    "sm_75 sm_80@compute_75 sm_86@compute_75 sm_89@compute_75 sm_90@compute_75 sm_100@compute_75 "
                    "sm_103@compute_75"
                ),
                "compute_80": "compute_80",
                "compute_89": "compute_89",
                "compute_90a": "sm_90a",
                "compute_100f": "sm_100f",
            },
        ),
    ],
)
def test_shared_front_ends(sharing: str, passes: dict[str, str]) -> None:
    """Cubins share the pass of the lowest architecture of their group; suffixes and PTX keep theirs."""
    plan = make_plan([module(archs=SHARED, share_front_end=sharing)], line_named("13.0"), no_gpu)
    found = {str(job.front.arch): " ".join(map(str, job.targets)) for job in plan.jobs}
    assert found == passes


def test_shared_front_ends_leave_what_was_written() -> None:
    """``@`` is the user's own word, and neither changed nor counted; the lowest is one that is asked for."""
    archs = ["sm_86", "sm_89@compute_89", "sm_87@compute_75", "sm_88", "compute_80"]
    plan = make_plan([module(archs=archs, share_front_end="major")], line_named("13.0"), no_gpu)
    assert sorted((str(target.image), str(target.front)) for target in plan.images) == [
        ("compute_80", "compute_80"),
        ("sm_86", "compute_86"),
        ("sm_87", "compute_75"),
        ("sm_88", "compute_86"),
        ("sm_89", "compute_89"),
    ]


def test_shared_front_ends_are_those_written_out() -> None:
    """``major`` gives the very jobs that the long spelling gives, and so the same entries of the cache."""
    short = make_plan([module(archs=["sm_80", "sm_86"], share_front_end="major")], line_named("13.0"), no_gpu)
    long = make_plan([module(archs=["sm_80", "sm_86@compute_80"])], line_named("13.0"), no_gpu)
    assert short == long


def test_longest_first() -> None:
    """Front ends with the same options follow each other, the longest first: many toolkit headers, then much text."""
    texts = {"short": "x", "long": "x" * 100, "heavy": "#include <cub/cub.cuh>"}
    modules = [module(name, text=text, archs=["sm_80", "sm_90"]) for name, text in texts.items()]
    modules.append(module("other", archs=["sm_80"], defines={"A": 1}))
    jobs = make_plan(modules, line_named("12.9"), no_gpu).jobs
    ordered = [(jobs[place].front.module, jobs[place].front.arch.cc) for place in in_order(jobs)]
    assert ordered == [
        *[(name, cc) for cc in (80, 90) for name in ("heavy", "long", "short")],
        ("other", 80),
    ]


def test_images_before_front_ends() -> None:
    """What is ready for ptxas goes first, the longest text at the head."""
    (job,) = make_plan([module(archs=["sm_80"])], line_named("12.9"), no_gpu).jobs
    images: list[ImageTask] = [
        AssembleTask(job.front.compiler, "k", Arch(80), b"x" * size, ()) for size in (1, 300, 20)
    ]
    images.append(FloorTask(job.front.compiler, "k", Arch(80, virtual=True), b"x" * 10, ()))  # several runs of ptxas
    tasks: list[FrontTask | ImageTask] = [job.front, *images]
    assert sorted(tasks, key=priority_of) == [images[1], images[3], images[2], images[0], job.front]
