"""Functions that the build tests call in a compiler's environment."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatch_cuda_aot.build import compile_plan, plan_project
from hatch_cuda_aot.cache import Cache
from hatch_cuda_aot.compile import nvrtc, precompiled, ptxas
from hatch_cuda_aot.compile.parts import installed_line
from hatch_cuda_aot.compile.pool import WorkerPool
from hatch_cuda_aot.compile.run import _compile, _compile_and_link, _parts, _staged
from hatch_cuda_aot.compile.tasks import Compiler as CompilerChoice
from hatch_cuda_aot.compile.tasks import FrontResult, FrontTask, ProbeTask
from hatch_cuda_aot.config import Config, load_config
from hatch_cuda_aot.errors import WorkerCrashError
from hatch_cuda_aot.plan import Plan
from hatch_cuda_aot.results import ModuleResult
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.sources import SourceTree
from hatch_cuda_aot.spans import record


class Silence:
    def planned(self, plan: Plan, tasks: int) -> None:
        pass

    def done(self, module: str, arch: str, step: str, log: str, *, cached: bool) -> None:
        pass


def make_plan(root: Path, table: dict[str, Any], package: str) -> Plan:
    return plan_project(_config(root, table, package))


def build(root: Path, table: dict[str, Any], package: str, jobs: int = 2) -> tuple[ModuleResult, ...]:
    """Build a project from its table, past hatchling."""
    return compile_plan(make_plan(root, table, package), jobs, Silence(), None).modules


def build_alike(
    root: Path, table: dict[str, Any], package: str, *, precompile: bool
) -> tuple[tuple[ModuleResult, ...], list[str], int]:
    """Build in two workers; return the modules, all that the compilers warned of, and how often a start was precompiled."""
    precompiled.PAYS = 2

    class Listen(Silence):
        def done(self, module: str, arch: str, step: str, log: str, *, cached: bool) -> None:  # noqa: ARG002
            logs.append(f"{module} {arch} {step}: {log}")

    logs: list[str] = []
    with record() as spans:
        modules = compile_plan(make_plan(root, table, package), 2, Listen(), None, precompile=precompile).modules
    return modules, sorted(logs), sum(each.name == "precompile" for each in spans)


def nvrtc_cubins(plan: Plan) -> dict[tuple[str, str], bytes]:
    """Let NVRTC alone make the cubin of every job of a plan, with the user's options only: by module and architecture."""
    found = {}
    for job in plan.jobs:
        for target in job.targets:
            if not target.image.virtual:
                found[job.front.module, str(target.image)] = _nvrtc_cubin(job.front, str(target.image), job.ptxas)
    return found


def unpruned_ptx(task: FrontTask) -> str:
    """Return the PTX of a front end before pruning."""
    with _staged(task, _parts(task.compiler)) as include_flags:
        options = (f"-arch={task.arch}", "-no-cache", *task.nvrtc, *include_flags)
        text, _, _ = (_compile if len(task.sources) == 1 else _compile_and_link)(task, options)
    return text


def nvjitlink_cubin(task: FrontTask, arch: str, options: Sequence[str]) -> bytes:
    """Let nvJitLink make the cubin of a device-linked module from LTO-IR, without any pruning."""
    from cuda.bindings import nvjitlink

    with _staged(task, _parts(task.compiler)) as include_flags:
        flags = [f"-arch={task.arch}", "-no-cache", *task.nvrtc, *include_flags, "-dlto"]
        objects = []
        for source in task.sources:
            expressions = [expression for expression, where in task.expressions if where == source]
            result = nvrtc.compile_program(task.tree.text(source), source, flags, expressions, lto=True)
            objects.append((source, result.code))
    linking = [f"-arch={arch}", "-lto", *options]
    handle = nvjitlink.create(len(linking), linking)
    for name, code in objects:
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, code, len(code), name)
    nvjitlink.complete(handle)
    buffer = bytearray(nvjitlink.get_linked_cubin_size(handle))
    nvjitlink.get_linked_cubin(handle, buffer)
    nvjitlink.destroy(handle)
    return bytes(buffer)


def supported() -> tuple[tuple[int, ...], frozenset[str]]:
    """Ask NVRTC what it supports: compute capabilities, and those with a suffix."""
    ccs = nvrtc.supported_ccs()
    specific = set()
    for cc in ccs:
        for suffix in "af":
            try:
                nvrtc.compile_program("", "probe.cu", [f"-arch=compute_{cc}{suffix}"])
            except nvrtc.NvrtcError:
                continue
            specific.add(f"{cc}{suffix}")
    return ccs, frozenset(specific)


def assembles(ptx: str, archs: Sequence[str], line: str) -> dict[str, bool]:
    """Say for which real architectures ptxas takes a PTX text."""
    program = _parts(CompilerChoice(line)).ptxas_path
    answers = {}
    for arch in archs:
        try:
            ptxas.assemble(program, ptx.encode(), arch, ())
        except ptxas.PtxasError:
            answers[arch] = False
        else:
            answers[arch] = True
    return answers


def code_of(cubin: bytes) -> dict[str, bytes]:
    """Return the machine code of each kernel and function in a cubin, by section."""
    from elftools.elf.elffile import ELFFile

    sections = ELFFile(io.BytesIO(cubin)).iter_sections()
    return {section.name: section.data() for section in sections if section.name.startswith(".text")}


def objects_of(cubin: bytes) -> set[str]:
    """Return the names of the variables in a cubin."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    table = ELFFile(io.BytesIO(cubin)).get_section_by_name(".symtab")
    assert isinstance(table, SymbolTableSection)
    return {symbol.name for symbol in table.iter_symbols() if symbol.entry["st_info"]["type"] == "STT_OBJECT"}


def read_table(pyproject: Path) -> dict[str, Any]:
    """Return ``[tool.cuda-aot]`` of a pyproject.toml."""
    from hatchling.metadata.core import load_toml  # has a reader for each Python

    return dict(load_toml(str(pyproject))["tool"]["cuda-aot"])


def _config(root: Path, table: dict[str, Any], package: str) -> Config:
    return load_config(root, table, {}, [package], {})


def _nvrtc_cubin(task: FrontTask, arch: str, ptxas_options: Sequence[str]) -> bytes:
    from cuda.bindings import nvrtc as api

    (source,) = task.sources
    expressions = [expression for expression, _ in task.expressions]
    with _staged(task, _parts(task.compiler)) as include_flags:
        given = [option for option in task.nvrtc if "_CCCL_META_UNROLL_LIMIT" not in option]
        assert len(given) == len(task.nvrtc) - 1
        options = [f"-arch={arch}", "-no-cache", *given, *include_flags]
        options += [f"-Xptxas={option}" for option in ptxas_options if option != "--generate-line-info"]
        text = task.tree.text(source).encode()
        _, program = api.nvrtcCreateProgram(text, source.encode(), 0, [], [])
        for expression in expressions:
            api.nvrtcAddNameExpression(program, expression.encode())
        (status,) = api.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        assert int(status) == 0, (source, options)
        _, size = api.nvrtcGetCUBINSize(program)
        buffer = bytearray(size)
        api.nvrtcGetCUBIN(program, buffer)
        api.nvrtcDestroyProgram(program)
    return bytes(buffer)


def build_cached(root: Path, table: dict[str, Any], package: str, folder: Path) -> tuple[tuple[ModuleResult, ...], int]:
    """Build with a cache in `folder`; return the modules and the number of hits."""
    result = compile_plan(make_plan(root, table, package), 2, Silence(), Cache(folder))
    return result.modules, result.hits


def crash_a_worker() -> tuple[WorkerCrashError, bool]:
    """Kill a worker from outside while it compiles; return the error, and whether another task then succeeded."""
    line = installed_line()
    compiler = CompilerChoice(line.version)
    slow = "#include <cub/cub.cuh>\n__global__ void k() {}\n"
    victim = _task(compiler, "victim", slow)
    with WorkerPool(1) as pool:
        pool.submit(ProbeTask(compiler)).result()
        future = pool.submit(victim)
        after = pool.submit(_task(compiler, "after", "__global__ void k() {}\n"))
        process = pool._slots[0]._process
        assert process is not None
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)
        error = future.exception()
        assert isinstance(error, WorkerCrashError)
        return error, isinstance(after.result(), FrontResult)


def _task(compiler: CompilerChoice, module: str, text: str) -> FrontTask:
    tree = SourceTree.of_texts({"k.cu": text})
    return FrontTask(compiler, module, Arch(80, virtual=True), tree, ("k.cu",), (), (), (), prune=True)
