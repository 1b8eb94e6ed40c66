"""Runs one task in this process: the steps between source and image, each with its check.

Nothing here knows of processes, caches or projects; `worker` calls it locally, and any other executor could.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hatch_cuda_aot.compile import nvrtc, ptx, ptxas
from hatch_cuda_aot.compile.parts import Parts, describe, find_parts, identified
from hatch_cuda_aot.compile.precompiled import PrecompiledHeaders
from hatch_cuda_aot.compile.tasks import (
    AssembleResult,
    AssembleTask,
    Compiler,
    FloorResult,
    FloorTask,
    FrontResult,
    FrontTask,
    ProbeTask,
    Result,
    Task,
)
from hatch_cuda_aot.errors import BuildError, CompileError, ResultError, WorkerCrashError
from hatch_cuda_aot.runtime.manifest import canonical_name
from hatch_cuda_aot.spans import span
from hatch_cuda_aot.toolchain import Toolchain, line_named, unsupported_archs

__all__ = ["import_late", "load", "run"]


def run(task: Task) -> Result:
    """Do `task` and return its result.

    Raises:
        BuildError: whatever the user can mend; see `errors`.

    """
    try:
        if isinstance(task, ProbeTask):
            return _probe(task)
        if isinstance(task, FrontTask):
            return _front(task)
        if isinstance(task, FloorTask):
            return _floor(task)
        return _assemble(task)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        where = tempfile.gettempdir()
        message = f"cannot write temporary files below {where}: {error.strerror}. Free some space, or set TMPDIR"
        raise BuildError(message) from error


def load(compiler: Compiler) -> None:
    """Load `compiler` ahead of the first task.

    Raises:
        BuildError: if it is not installed.

    """
    _parts(compiler)


def import_late() -> None:
    """Import what a task needs only when its compiler is done, in time that would otherwise go by unused."""
    from elftools.elf.elffile import ELFFile  # noqa: F401


#: What the system says where a file cannot be written, or cannot grow.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def _probe(task: ProbeTask) -> Toolchain:
    toolchain = describe(_parts(task.compiler))
    unsupported = [arch for arch in task.archs if not nvrtc.supports(arch)]
    if unsupported:
        raise unsupported_archs(line_named(task.compiler.line), unsupported)
    return identified(toolchain) if task.identify else toolchain


def _front(task: FrontTask) -> FrontResult:
    with _staged(task, _parts(task.compiler)) as include_flags:
        options = (f"-arch={task.arch}", "-no-cache", *task.nvrtc, *include_flags)
        if len(task.sources) == 1:
            text, symbols, log = _compile(task, options)
        else:
            text, symbols, log = _compile_and_link(task, options)
        text = ptx.without_folder(text, os.getcwd())
    if task.prune:
        with span("prune"):
            text = ptx.prune(text, own=ptx.opened_toolkit_namespaces(task.tree.texts()))
    with span("check"):
        module = ptx.parse(text)
        _check_front(task, module, symbols)
    return FrontResult(text.encode(), symbols, _minimum_driver(module.version, task.compiler.line), log)


def _compile(task: FrontTask, options: tuple[str, ...]) -> tuple[str, dict[str, str], str]:
    (source,) = task.sources
    result = _call_nvrtc(task, source, options)
    expressions = [expression for expression, _ in task.expressions]
    return result.code.decode(), dict(zip(expressions, result.symbols, strict=True)), result.log


def _compile_and_link(task: FrontTask, options: tuple[str, ...]) -> tuple[str, dict[str, str], str]:
    from hatch_cuda_aot.compile import nvjitlink

    objects: list[tuple[str, bytes]] = []
    symbols: dict[str, str] = {}
    logs: list[str] = []
    for source in task.sources:
        result = _call_nvrtc(task, source, (*options, "-dlto"), lto=True)
        objects.append((source, result.code))
        symbols.update(zip(_expressions_of(task, source), result.symbols, strict=True))
        logs.append(result.log)
    try:
        with span("link"):
            text = nvjitlink.link(objects, task.arch, task.nvjitlink)
    except nvjitlink.LinkError as error:
        where = f"module {task.module!r} ({', '.join(task.sources)}) for {task.arch}"
        message = f"nvJitLink cannot link {where}:\n{_indent(str(error))}"
        raise CompileError(
            message, module=task.module, arch=str(task.arch), stage="nvJitLink", log=str(error)
        ) from None
    return text, symbols, "\n".join(filter(None, logs))


def _call_nvrtc(task: FrontTask, source: str, options: tuple[str, ...], *, lto: bool = False) -> nvrtc.NvrtcResult:
    expressions = _expressions_of(task, source)
    try:
        with span("NVRTC", source=source):
            if task.start:
                return _headers().compile(task.start, task.tree.text(source), source, options, expressions)
            return nvrtc.compile_program(task.tree.text(source), source, options, expressions, lto=lto)
    except nvrtc.NvrtcError as error:
        log = _without_name_map(str(error))
        message = _explain_expressions(task, source, str(error)) if not log else None
        if message is None:
            message = (
                f"NVRTC cannot compile {source} (module {task.module!r}) for {task.arch}:\n{_indent(log or str(error))}"
            )
            message += _explain_missing_header(options, log)
        raise CompileError(message, module=task.module, arch=str(task.arch), stage="NVRTC", log=str(error)) from None


def _expressions_of(task: FrontTask, source: str) -> list[str]:
    return [expression for expression, where in task.expressions if where == source]


def _assemble(task: AssembleTask) -> AssembleResult:
    program = _parts(task.compiler).ptxas_path
    where = f"module {task.module!r} for {task.arch}"
    try:
        with span("ptxas"):
            done = ptxas.assemble(program, task.ptx, str(task.arch), task.ptxas)
    except ptxas.PtxasError as error:
        message = f"ptxas cannot assemble {where}:\n{_indent(str(error))}"
        raise CompileError(message, module=task.module, arch=str(task.arch), stage="ptxas", log=str(error)) from None
    except ptxas.PtxasCrashError as error:
        raise _crash(task, error.signal) from None
    with span("check"):
        _check_cubin(task, done)
    return AssembleResult(done.cubin, done.resources, done.log)


def _floor(task: FloorTask) -> FloorResult:
    """Try versions by bisection: what a version lacks, every older one lacks too."""
    program = _parts(task.compiler).ptxas_path
    text = task.ptx.decode()
    versions = ptx.versions_up_to(ptx.parse(text).version)

    def assembles(version: str) -> bool:
        try:
            lowered = ptx.with_version(text, version).encode()
            with span("ptxas", version=version):
                ptxas.assemble(program, lowered, str(task.arch.as_real), task.ptxas)
        except ptxas.PtxasError:
            return False
        except ptxas.PtxasCrashError as error:
            if _signal_name(error.signal) not in _OWN_CRASHES:  # someone killed it: that says nothing of the version
                raise _crash(task, error.signal) from None
            return False
        return True

    low, high = 0, len(versions) - 1  # the text's own version is good: its cubins were made from it, or will be
    while low < high:
        middle = (low + high) // 2
        if assembles(versions[middle]):
            high = middle
        else:
            low = middle + 1
    return FloorResult(versions[high], _minimum_driver(versions[high], task.compiler.line))


#: How ptxas dies by itself: old ones of PTX that is too new for them.
_OWN_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")


def _crash(task: AssembleTask | FloorTask, number: int) -> WorkerCrashError:
    name = _signal_name(number)
    message = f"ptxas crashed on module {task.module!r} for {task.arch}, with {name}. {CRASH_ADVICE}"
    return WorkerCrashError(message, module=task.module, arch=str(task.arch), stage="ptxas", log=name)


CRASH_ADVICE = (
    "This is a defect of the compiler: the source may well be valid. Try another `cuda` line, or change the code it "
    'fails on (for instance, kernels declared extern "C" under names such as r0 and r1)'
)


def _check_front(task: FrontTask, module: ptx.PtxModule, symbols: dict[str, str]) -> None:
    """Hold the PTX against what was asked for."""
    asked = str(task.arch.as_real)
    if module.target != asked:
        raise _result_error(task, f"its PTX is for {module.target}, not for {asked}")
    if not module.kernels:
        advice = (
            "If it holds only device functions, rename it to .cuh and include it, or list it in the `sources` of a "
            "[[tool.cuda-aot.modules]] together with the file that calls it; templates need name expressions in `kernels`"
        )
        raise _result_error(task, f"it defines no kernel. {advice}")
    for expression, symbol in symbols.items():
        if symbol not in module.kernels:
            raise _result_error(task, f"{expression!r} in `kernels` names {symbol!r}, which is no kernel of it")


def _check_cubin(task: AssembleTask, done: ptxas.PtxasResult) -> None:
    """Hold the cubin against the PTX that it was made from: every kernel and every variable must have arrived."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    module = ptx.parse(task.ptx.decode())
    table = ELFFile(io.BytesIO(done.cubin)).get_section_by_name(".symtab")
    present = {symbol.name for symbol in table.iter_symbols()} if isinstance(table, SymbolTableSection) else set()
    expected = set(module.kernels) | {name for name in module.variables if not name.startswith("$")}
    lost = sorted(expected - present)
    if lost:
        raise _result_error(task, f"ptxas left out {', '.join(lost)}")
    unreported = sorted(set(module.kernels) - set(done.resources))
    if unreported:
        raise _result_error(task, f"ptxas did not report on {', '.join(unreported)}")


def _result_error(task: FrontTask | AssembleTask, what: str) -> ResultError:
    stage = "NVRTC" if isinstance(task, FrontTask) else "ptxas"
    message = f"module {task.module!r} compiled for {task.arch}, but {what}"
    return ResultError(message, module=task.module, arch=str(task.arch), stage=stage, log="")


@functools.cache
def _parts(compiler: Compiler) -> Parts:
    with span("load compiler"):
        return find_parts(line_named(compiler.line), compiler.needs)


@functools.cache
def _headers() -> PrecompiledHeaders:
    return PrecompiledHeaders(nvrtc.compile_program)


@contextlib.contextmanager
def _staged(task: FrontTask, parts: Parts) -> Iterator[list[str]]:
    """Enter a folder that holds exactly the task's files; give the options that lead to the toolkit's headers.

    The toolkit appears in it under short relative names, so that ``__FILE__`` and diagnostics are the same wherever it is
    installed.
    """
    before = Path.cwd()
    with _temporary_folder() as folder:
        with span("stage"):
            for path, content in task.tree.files:
                target = Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            flags = []
            for short, where in task.visible(parts.include_dirs):
                link = Path(folder, ".cuda", short)
                link.parent.mkdir(exist_ok=True)
                try:
                    link.symlink_to(where, target_is_directory=True)
                except OSError:  # Windows without the right to make links
                    flags.append(f"--include-path={where}")
                else:
                    flags.append(f"--include-path=.cuda/{short}")
        os.chdir(folder)
        try:
            yield flags
        finally:
            os.chdir(before)


#: Length of the folder of a compilation.  It shows in debug information, so it is the same whatever ``TMPDIR`` is.
_LENGTH = 240


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hatch-cuda-aot-") as outer:
        missing = _LENGTH - len(os.fsencode(os.path.realpath(outer))) - 1
        if missing < 1 or sys.platform == "win32":  # a long TMPDIR, or a system that has no long paths
            yield outer
            return
        folder = os.path.join(outer, "x" * missing)
        os.mkdir(folder)
        yield folder


def _without_name_map(log: str) -> str:
    """Drop what NVRTC says of its own bookkeeping of name expressions; empty if it says nothing else."""
    blocks = [block for block in re.split(r"\n\s*\n", log) if not block.lstrip().startswith("__nv_name_map(")]
    rest = "\n\n".join(
        block for block in blocks if not re.fullmatch(r"\s*\d+ errors? detected in the compilation.*\s*", block)
    )
    return "\n\n".join(blocks).strip() if "error" in rest else ""


def _explain_expressions(task: FrontTask, source: str, log: str) -> str | None:
    bad = re.findall(r'Input name expression was: "([^"]*)"', log)
    if not bad:
        return None
    reasons = re.findall(r"__nv_name_map\(\d+\): error: (.*)", log)
    names = {canonical_name(expression) for expression in bad}
    items = [expression for expression, _ in task.expressions if canonical_name(expression) in names] or sorted(names)
    kernels = re.findall(r"__global__[^;{(]*?\b(\w+)\s*\(", task.tree.text(source))
    known = f" Kernels in {source}: {', '.join(dict.fromkeys(kernels))}." if kernels else ""
    return (
        f"`kernels` of module {task.module!r}: {', '.join(map(repr, items))} matches no kernel in {source} for {task.arch} "
        f"(NVRTC: {reasons[0]}).{known} Write templates with their arguments, as in 'axpy<float>'; plain kernels are found "
        "by themselves, and overloads are addressed by their symbol"
    )


def _explain_missing_header(options: tuple[str, ...], log: str) -> str:
    match = re.search(r'could ?n?not open source file "([^"]+)"|cannot open source file "([^"]+)"', log)
    if match is None:
        return ""
    name = match[1] or match[2]
    wheel = next((wheel for prefix, wheel in _HEADER_WHEELS.items() if name.startswith(prefix)), None)
    paths = [option.partition("=")[2] for option in options if option.startswith("--include-path=")]
    searched = ", ".join(["the including file's folder", *paths])
    advice = (
        f"It is in the wheel {wheel}"
        if wheel
        else "If it is a header of the project, add its folder to `include-dirs`. One that is included through a macro, or "
        "by a header of the toolkit, is not found by itself: list it in `headers`"
    )
    return f"\nsearched for {name!r}: {searched} (.cuda/ is the toolkit). {advice}"


#: Headers that are neither the compiler's nor found by scanning, and where NVIDIA publishes them.
_HEADER_WHEELS = {
    "cublasdx": "nvidia-mathdx (copy the headers into the project)",
    "cufftdx": "nvidia-mathdx (copy the headers into the project)",
    "cutlass/": "nvidia-cutlass (copy the headers into the project)",
    "cute/": "nvidia-cutlass (copy the headers into the project)",
}


def _minimum_driver(ptx_version: str, line: str) -> int:
    """Return the CUDA version (13000 for 13.0) of the first driver that reads this version of the PTX ISA.

    Where cuda.bindings does not know it (its releases for Python 3.10 end before the newest compilers), the answer is the
    compiler's own release, than which its PTX is never newer.
    """
    from cuda.bindings.utils import get_minimal_required_cuda_ver_from_ptx_ver

    try:
        return int(get_minimal_required_cuda_ver_from_ptx_ver(ptx_version))
    except ValueError:
        major, minor = line.split(".")
        return int(major) * 1000 + int(minor) * 10


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
