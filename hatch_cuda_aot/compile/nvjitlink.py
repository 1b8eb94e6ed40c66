"""nvJitLink through cuda.bindings: the LTO-IR of several sources to the PTX of one module.

Only that step is left to it.  Its own pruning can fold variables that the host sets by name, and what it does not read
of NVRTC's options is lost; from the PTX on, a linked module goes the same way as any other, through our own pruning and
ptxas.  The machine code is the same as that of nvJitLink's own cubins (tests/build/test_codegen.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from hatch_cuda_aot.compile.nvrtc import compile_program
from hatch_cuda_aot.compile.ptx import parse, release_of, retarget
from hatch_cuda_aot.runtime.arch import Arch

__all__ = ["LinkError", "build_version", "link", "version"]


class LinkError(Exception):
    """nvJitLink refused; the text is its log."""


def link(objects: Sequence[tuple[str, bytes]], arch: Arch, options: Sequence[str]) -> str:
    """Link LTO-IR, given as (name, bytes), to the PTX of the virtual architecture `arch`.

    Raises:
        LinkError: with nvJitLink's log, for instance on an undefined or doubly defined symbol.

    """
    from cuda.bindings import nvjitlink

    flags = [f"-arch={arch}", "-lto", "-ptx", *options]
    handle = 0
    try:
        handle = nvjitlink.create(len(flags), flags)
        for name, code in objects:
            nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, code, len(code), name)
        nvjitlink.complete(handle)
        buffer = bytearray(nvjitlink.get_linked_ptx_size(handle))
        nvjitlink.get_linked_ptx(handle, buffer)
    except nvjitlink.nvJitLinkError as error:
        raise LinkError(_log(handle) or str(error)) from None
    finally:
        if handle:
            nvjitlink.destroy(handle)
    text = buffer.rstrip(b"\0").decode()
    if (
        arch.suffix == "f" and parse(text).target == f"sm_{arch.cc}"
    ):  # all that 12.9 writes for a family-specific target
        text = retarget(text, str(arch.as_real))
    return text


def version() -> str:
    """Return nvJitLink's version, as ``"12.9"``."""
    from cuda.bindings import nvjitlink

    major, minor = nvjitlink.version()
    return f"{major}.{minor}"


def build_version(arch: Arch) -> str:
    """Return nvJitLink's full version, as ``"12.9.86"``, which only its output tells; `arch` may be any."""
    empty = compile_program("", "version.cu", [f"-arch={arch}", "-dlto", "-no-cache"], lto=True)
    return release_of(link([("version.cu", empty.code)], arch, [])) or version()


def _log(handle: int) -> str:
    from cuda.bindings import nvjitlink

    if not handle:
        return ""
    buffer = bytearray(nvjitlink.get_error_log_size(handle))
    nvjitlink.get_error_log(handle, buffer)
    return buffer.rstrip(b"\0").decode(errors="replace").strip()
