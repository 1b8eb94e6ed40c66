"""NVRTC through cuda.bindings: CUDA C++ to PTX or LTO-IR, in this process and its current folder.

A crash of the compiler takes the process along, and ``--restrict`` stays in force for later compilations of the same
process (seen with 12.9 and 13.5), so this is called in worker processes that serve one set of options each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hatch_cuda_aot.compile.ptx import release_of
from hatch_cuda_aot.runtime.arch import Arch

__all__ = ["NvrtcError", "NvrtcResult", "build_version", "compile_program", "supported_ccs", "supports", "version"]


class NvrtcError(Exception):
    """NVRTC refused; the text is its log."""


@dataclass(frozen=True, slots=True)
class NvrtcResult:
    """What one compilation gave.

    Attributes:
        code: PTX text, or LTO-IR where ``-dlto`` was among the options.
        symbols: the lowered name of each name expression, in their order.
        log: warnings.

    """

    code: bytes
    symbols: tuple[str, ...]
    log: str


def compile_program(
    text: str, name: str, options: Sequence[str], expressions: Sequence[str] = (), *, lto: bool = False
) -> NvrtcResult:
    """Compile one source.

    Args:
        text: the CUDA C++.
        name: its path as diagnostics and ``__FILE__`` show it; quoted includes are found beside it.
        options: NVRTC's options, ``-arch`` among them.
        expressions: name expressions to instantiate.
        lto: return LTO-IR; ``-dlto`` must be among the options.

    Raises:
        NvrtcError: with NVRTC's log.

    """
    from cuda.bindings import nvrtc

    program = _value(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    try:
        for expression in expressions:
            _value(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = (
            _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            .rstrip(b"\0")
            .decode(errors="replace")
        )
        if int(status) != 0:
            raise NvrtcError(log.strip() or str(status))
        if lto:
            code = _read(nvrtc.nvrtcGetLTOIRSize, nvrtc.nvrtcGetLTOIR, program)
        else:
            code = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0")
        symbols = tuple(
            _value(nvrtc.nvrtcGetLoweredName(program, expression.encode())).decode() for expression in expressions
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return NvrtcResult(code, symbols, log.strip())


def version() -> str:
    """Return NVRTC's version, as ``"12.9"``."""
    from cuda.bindings import nvrtc

    major, minor = _value(nvrtc.nvrtcVersion())
    return f"{major}.{minor}"


def build_version() -> str:
    """Return NVRTC's full version, as ``"12.9.86"``, which only its output tells."""
    ptx = compile_program("", "version.cu", ["-no-cache"]).code.decode()
    return release_of(ptx) or version()


def supported_ccs() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC compiles for."""
    from cuda.bindings import nvrtc

    return tuple(_value(nvrtc.nvrtcGetSupportedArchs()))


def supports(arch: Arch) -> bool:
    """Tell whether NVRTC compiles for `arch`, real or virtual."""
    if arch.cc not in supported_ccs():
        return False
    if not arch.suffix:
        return True
    try:  # NVRTC lists no suffixes
        compile_program("", "probe.cu", [f"-arch={arch.as_virtual}", "-no-cache"])
    except NvrtcError:
        return False
    return True


def _value(answer: tuple[Any, ...]) -> Any:
    status, *rest = answer
    if int(status) != 0:
        raise NvrtcError(str(status))
    return rest[0] if len(rest) == 1 else rest


def _read(size: Any, get: Any, program: Any) -> bytes:
    buffer = bytearray(_value(size(program)))
    _value(get(program, buffer))
    return bytes(buffer)
