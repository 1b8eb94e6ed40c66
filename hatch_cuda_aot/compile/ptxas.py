"""ptxas as a program: PTX to a cubin, with the resources that each kernel takes."""

from __future__ import annotations

import errno
import os
import re
import signal
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hatch_cuda_aot.compile.tasks import Resources

__all__ = ["PtxasCrashError", "PtxasError", "PtxasResult", "assemble", "is_complete", "parse_resources"]


class PtxasError(Exception):
    """ptxas refused; the text is what it printed."""


class PtxasCrashError(Exception):
    """ptxas was killed by a signal, whose number is `signal`."""

    def __init__(self, signal: int) -> None:
        self.signal = signal
        super().__init__(f"ptxas was killed by signal {signal}")


@dataclass(frozen=True, slots=True)
class PtxasResult:
    """The cubin, the resources by kernel symbol, and the warnings."""

    cubin: bytes
    resources: dict[str, Resources]
    log: str


def assemble(program: str, ptx: bytes, arch: str, options: Sequence[str]) -> PtxasResult:
    """Assemble `ptx` for the real architecture `arch` with the ptxas at the path `program`.

    Raises:
        PtxasError: if it refuses.
        PtxasCrashError: if it is killed by a signal.
        OSError: if there is no space for its input or output.

    """
    with tempfile.TemporaryDirectory(prefix="hatch-cuda-aot-") as folder:
        source, target = Path(folder, "module.ptx"), Path(folder, "module.cubin")
        source.write_bytes(ptx)
        command = [program, "-v", f"-arch={arch}", *options, source.name, "-o", target.name]
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False, stdin=subprocess.DEVNULL)
        log = (done.stdout + done.stderr).decode(errors="replace")
        if done.returncode == -getattr(signal, "SIGXFSZ", 0) or _WRITE_ERROR.search(log):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if done.returncode < 0:
            raise PtxasCrashError(-done.returncode)
        if done.returncode != 0 or not target.is_file():
            raise PtxasError(log.strip())
        cubin = target.read_bytes()
        if not is_complete(cubin):  # on a full disk ptxas may say nothing, and exit with 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    warnings = "\n".join(line for line in log.splitlines() if "warning" in line.lower())
    return PtxasResult(cubin, parse_resources(log), warnings)


#: What ptxas says where it does not write its result; mostly it says nothing.
_WRITE_ERROR = re.compile(r"Internal error: writing file|Output file '.*' could not be opened")


def is_complete(cubin: bytes) -> bool:
    """Tell whether a cubin has the length that its header tells: NVIDIA puts the table of segments or sections last."""
    if len(cubin) < _HEADER.size or not cubin.startswith(b"\x7fELF"):
        return False
    segments, sections, segment_size, segment_count, section_size, section_count = _HEADER.unpack_from(cubin)
    end: int = max(segments + segment_size * segment_count, sections + section_size * section_count)
    return len(cubin) >= end


#: Of the header of a 64-bit ELF file: e_phoff, e_shoff, e_phentsize, e_phnum, e_shentsize, e_shnum.
_HEADER = struct.Struct("<32xQQ6xHHHH2x")

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_CUMULATIVE = re.compile(r"(\d+) bytes cumulative stack size")


def parse_resources(log: str) -> dict[str, Resources]:
    """Read the resources of each entry function from what ``ptxas -v`` prints."""
    found: dict[str, Resources] = {}
    kernel = function = ""
    stack = (0, 0, 0)
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            kernel, stack = match[1], (0, 0, 0)
            found[kernel] = Resources()
        elif match := _PROPERTIES.search(line):
            function = match[1]
        elif (match := _STACK.search(line)) and function == kernel:
            stack = (int(match[1]), int(match[2]), int(match[3]))
        elif kernel and (match := _USED.search(line)):
            shared, cumulative = _SHARED.search(line), _CUMULATIVE.search(line)
            local = max(stack[0], int(cumulative[1]) if cumulative else 0)
            found[kernel] = Resources(int(match[1]), int(shared[1]) if shared else 0, local, stack[1], stack[2])
            kernel = ""
    return found
