"""Decides what is compiled: modules and architectures in, an ordered list of jobs out.  Pure.

A job is one pass of the front end, for one module and one virtual architecture, with every image that is made from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hatch_cuda_aot.archs import Target, resolve, share_fronts
from hatch_cuda_aot.compile.tasks import Compiler, FloorTask, FrontTask, ImageTask
from hatch_cuda_aot.config import ModuleConfig, Settings
from hatch_cuda_aot.errors import ConfigError, Problem
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.sources import SourceTree
from hatch_cuda_aot.toolchain import Line, Needs, choose_line

__all__ = [
    "Job",
    "Module",
    "Plan",
    "in_order",
    "make_plan",
    "needs_of",
    "priority_of",
    "ptxas_options",
    "select_line",
]


@dataclass(frozen=True, slots=True)
class Module:
    """A module and the files that its sources can see."""

    config: ModuleConfig
    tree: SourceTree


@dataclass(frozen=True, slots=True)
class Job:
    """One front-end pass and the images made from it; `embed_source` says that the package gets the source as well."""

    front: FrontTask
    targets: tuple[Target, ...]
    ptxas: tuple[str, ...]
    embed_source: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a build will do, in a fixed order."""

    line: Line
    needs: Needs
    jobs: tuple[Job, ...]

    @property
    def images(self) -> tuple[Target, ...]:
        """Every image, of every module."""
        return tuple(target for job in self.jobs for target in job.targets)

    @property
    def archs(self) -> tuple[Arch, ...]:
        """Every architecture that the compiler must know, each once."""
        return tuple(sorted({arch for target in self.images for arch in target.archs}))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What can be compiled, and is seldom meant: headers that get slow where a shared front end is for an older GPU."""
        return tuple(
            f"module {job.front.module!r} includes {header}, and its {', '.join(map(str, slow))} "
            f"{'is' if len(slow) == 1 else 'are'} compiled from {job.front.arch}: before {since / 10} {what}. Set "
            'share-front-end = "none" for this module, or leave out the @ in `archs`'
            for job in self.jobs
            for header, (since, what) in _SLOW_BEFORE.items()
            if header in job.front.tree.unresolved
            and (slow := [each.image for each in job.targets if job.front.arch.cc < since <= each.image.cc])
        )

    def __str__(self) -> str:
        modules = len({job.front.module for job in self.jobs})
        cubins = sum(not target.image.virtual for target in self.images)
        texts = len(self.images) - cubins
        return f"{_count(modules, 'module')}, {_count(cubins, 'cubin')} and {texts} PTX with CUDA {self.line.version}"


#: Headers of the toolkit that choose by architecture: from which compute capability on they use the GPU's own instructions.
#: Sources: their `__CUDA_ARCH__`; NVIDIA, CUDA C++ Programming Guide, "Asynchronous Barrier" and "Asynchronous Data Copies".
_SLOW_BEFORE = {
    "cuda_bf16.h": (80, "arithmetic with __nv_bfloat16 is done in float, many times slower"),
    "cuda_fp8.h": (89, "conversions from and to fp8 are done by many instructions"),
    **dict.fromkeys(
        ("cuda/barrier", "cuda/pipeline", "cuda_pipeline.h", "cooperative_groups/memcpy_async.h"),
        (80, "barriers and asynchronous copies to shared memory are done in software"),
    ),
}


def select_line(cuda: str, modules: Sequence[ModuleConfig], native: Callable[[], Sequence[int]]) -> Line:
    """Return the CUDA line for a project.

    Raises:
        ConfigError: where ``auto`` meets a word whose meaning depends on the line.
        UnsupportedArchError: where the line does not know an architecture.

    """
    if cuda == "auto":
        for module in modules:
            if word := next((word for word in module.settings.archs if word in ("all", "all-major")), None):
                message = f'{word!r} in `archs` means what one compiler supports: set `cuda` too, for instance to "13"'
                raise ConfigError([Problem(f"{module.place} (module {module.name!r})", message)])
        line = None
    else:
        line = choose_line(cuda, ())
    targets = [target for module in modules for target in resolve(module.settings.archs, line, native)]
    return choose_line(cuda, [arch for target in targets for arch in target.archs])


def needs_of(modules: Sequence[Module]) -> Needs:
    """Return what the modules need beyond the compiler."""
    return Needs(
        linker=any(len(module.config.sources) > 1 for module in modules),
        curand=any(module.tree.includes_curand for module in modules),
    )


def make_plan(modules: Sequence[Module], line: Line, native: Callable[[], Sequence[int]]) -> Plan:
    """Return the jobs of a build, ordered by module and architecture.

    Raises:
        ConfigError: where two items of ``archs`` ask for the same image made in two ways.

    """
    needs = needs_of(modules)
    compiler = Compiler(line.version, needs)
    jobs: list[Job] = []
    for module in modules:
        settings = module.config.settings
        by_front: dict[str, list[Target]] = {}
        targets = resolve(settings.archs, line, native)
        _refuse_doubles(module.config, targets)
        targets = share_fronts(targets, settings.share_front_end)
        _refuse_linked_debug(module.config, targets)
        for target in targets:
            by_front.setdefault(str(target.front), []).append(target)
        for group in by_front.values():
            front = FrontTask(
                compiler=compiler,
                module=module.config.name,
                arch=group[0].front,
                tree=module.tree,
                sources=module.config.sources,
                expressions=_place_expressions(module),
                nvrtc=_nvrtc_options(settings, module.tree),
                nvjitlink=_nvjitlink_options(settings),
                prune=settings.prune,
            )
            jobs.append(Job(front, tuple(group), ptxas_options(settings), settings.embed_source))
    return Plan(line, needs, tuple(jobs))


def in_order(jobs: Sequence[Job]) -> list[int]:
    """Return the places of `jobs` in the order in which their front ends should be started.

    Those with the same options follow each other, so that each worker can serve many (see `FrontTask.affinity`).  Among
    them each module is compiled once before any is compiled again, which shows how long it takes (see `Backlog`), and the
    longest come first, as far as their sources tell.
    """
    seen: Counter[str] = Counter()
    keys = []
    for place, job in enumerate(jobs):
        keys.append((job.front.affinity, seen[job.front.module], -_weight(job.front), place))
        seen[job.front.module] += 1
    return sorted(range(len(jobs)), key=keys.__getitem__)


def _weight(front: FrontTask) -> int:
    """Estimate how long a front end takes, by the text it reads; a header of the toolkit brings many others along."""
    return sum(len(content) for _, content in front.tree.files) + 100_000 * len(front.tree.unresolved)


def priority_of(task: FrontTask | ImageTask) -> float:
    """Return the priority of a task that is ready; lower is sooner.

    Images come before front ends: those are made for them, and they free the memory of their PTX.  Among images those with
    the longest PTX come first; finding a version floor takes several runs of ptxas.
    """
    if isinstance(task, FrontTask):
        return 0.0
    return -1.0 - len(task.ptx) * (4 if isinstance(task, FloorTask) else 1)


def _refuse_doubles(module: ModuleConfig, targets: Sequence[Target]) -> None:
    seen: dict[str, Target] = {}
    for target in targets:
        other = seen.setdefault(str(target.image), target)
        if other is not target:
            message = f"`archs` asks for {target.image} twice, as {other} and as {target}: leave one"
            raise ConfigError([Problem(f"{module.place} (module {module.name!r})", message)])


def _refuse_linked_debug(module: ModuleConfig, targets: Sequence[Target]) -> None:
    """Refuse what no line can do: 13.5 says that there is more than one debug compile unit, ptxas 12.9 fails within."""
    bad = [target for target in targets if target.front.cc >= _ONE_DEBUG_UNIT]
    if module.settings.debug and len(module.sources) > 1 and bad:
        example = next(
            (f"compile from an older one ({each.image}@compute_90), " for each in bad if not each.image.virtual), ""
        )
        message = (
            f"`debug` of several sources is not possible for {', '.join(map(str, bad))}: from compute_{_ONE_DEBUG_UNIT} on, "
            f"nvJitLink takes debug information of one source only. For these architectures {example}put the sources into "
            "one file, or leave them out of `archs`"
        )
        raise ConfigError([Problem(f"{module.place} (module {module.name!r})", message)])


_ONE_DEBUG_UNIT = 100


def _place_expressions(module: Module) -> tuple[tuple[str, str], ...]:
    """Say for each name expression which source instantiates it: the first that mentions the name, else the first."""
    sources = module.config.sources
    placed = []
    for expression in module.config.kernels:
        name = expression.partition("<")[0].rpartition("::")[2].strip()
        owner = next((source for source in sources if name in module.tree.text(source)), sources[0])
        placed.append((expression, owner))
    return tuple(sorted(placed))  # in whichever order they are listed, the images are the same


def _nvrtc_options(settings: Settings, tree: SourceTree) -> tuple[str, ...]:
    return (
        f"--std={settings.std}",
        *_unroll_limit(settings, tree),
        *(f"--define-macro={name}={value}" for name, value in settings.defines),
        *(f"--include-path={folder}" for folder in settings.include_dirs),
        *(("--generate-line-info",) if settings.lineinfo else ()),
        *(("--device-debug",) if settings.debug else ()),
        *settings.options.nvrtc,
    )


def _unroll_limit(settings: Settings, tree: SourceTree) -> tuple[str, ...]:
    """Have CCCL's type lists unrolled as far as for nvcc, unless the project has its own say in that.

    ``<cuda/std/__type_traits/type_list.h>`` does not count NVRTC as nvcc, though the front end is the same, and then goes to
    16 instead of 10.  The work doubles with each step: half the time of every source that includes CUB, for the same code.
    """
    given = (*(name for name, _ in settings.defines), *settings.options.nvrtc, *tree.texts())
    return () if any(_UNROLL_LIMIT in text for text in given) else (f"--define-macro={_UNROLL_LIMIT}=10",)


_UNROLL_LIMIT = "_CCCL_META_UNROLL_LIMIT"


def ptxas_options(settings: Settings) -> tuple[str, ...]:
    """Return ptxas's options; those of a debug build are what ``nvcc -G`` gives it."""
    return (
        *(("--generate-line-info",) if settings.lineinfo else ()),
        *(("--device-debug", "--dont-merge-basicblocks", "--return-at-end") if settings.debug else ()),
        *settings.options.ptxas,
    )


def _nvjitlink_options(settings: Settings) -> tuple[str, ...]:
    return (
        *(("-lineinfo",) if settings.lineinfo else ()),
        *(("-g", "-O0") if settings.debug else ()),
        *settings.options.nvjitlink,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
