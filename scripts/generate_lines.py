"""Generates the table of CUDA lines in hatch_cuda_aot/toolchain.py by asking the NVRTC of each line.

Each line's NVRTC (about 90 MB) is downloaded from the package index, unpacked and asked; Linux only.  The versions of
CCCL and cuRAND are kept as they stand in the table.  To add a line, write it into the table with those two versions and
empty strings for the architectures, and run this with ``--write``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from hatch_cuda_aot.toolchain import LINES, Line

TOOLCHAIN = Path(__file__).resolve().parent.parent / "hatch_cuda_aot" / "toolchain.py"
START, END = "# fmt: off\n", "# fmt: on\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the table in toolchain.py")
    parser.add_argument("--ask", metavar="LIBNVRTC", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        print(json.dumps(ask(arguments.ask)))
        return
    table = render([measure(line) for line in LINES])
    print(table, end="")
    if arguments.write:
        TOOLCHAIN.write_text(replace_table(TOOLCHAIN.read_text(encoding="utf-8"), table), encoding="utf-8")


def measure(line: Line) -> Line:
    """Return `line` with the architectures that its NVRTC compiles for."""
    requirement = f"nvidia-cuda-nvrtc{line.suffix}=={line.version}.*"
    print(f"asking {requirement} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="hatch-cuda-aot-") as folder:
        download = ["pip", "--quiet", "download", "--no-deps", "--only-binary=:all:", "--dest", folder, requirement]
        subprocess.run([sys.executable, "-m", *download], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        (library,) = Path(folder).rglob(f"libnvrtc.so.{line.major}")
        # A process for each: several libraries of one name do not go well together.
        answer = subprocess.check_output([sys.executable, __file__, "--ask", str(library)], text=True)
    found = json.loads(answer)
    return replace(line, ccs=tuple(found["ccs"]), specific=frozenset(found["specific"]))


def ask(path: str) -> dict[str, list[int] | list[str]]:
    """Return the compute capabilities that an NVRTC says it supports, and those with a suffix that it compiles for."""
    (builtins,) = Path(path).parent.glob("libnvrtc-builtins.so.*")
    ctypes.CDLL(str(builtins))  # NVRTC 13.0 does not look beside itself for it
    nvrtc = ctypes.CDLL(path)
    count = ctypes.c_int()
    check(nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    ccs = (ctypes.c_int * count.value)()
    check(nvrtc.nvrtcGetSupportedArchs(ccs))
    specific = [f"{cc}{suffix}" for cc in ccs for suffix in "af" if compiles(nvrtc, f"compute_{cc}{suffix}")]
    return {"ccs": list(ccs), "specific": specific}


def compiles(nvrtc: ctypes.CDLL, arch: str) -> bool:
    program = ctypes.c_void_p()
    source = b'extern "C" __global__ void probe() {}'
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"probe.cu", 0, None, None))
    options = (ctypes.c_char_p * 2)(f"-arch={arch}".encode(), b"-no-cache")
    done: int = nvrtc.nvrtcCompileProgram(program, len(options), options)
    check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    return done == 0


def check(status: int) -> None:
    if status != 0:
        sys.exit(f"NVRTC answered {status}")


def render(lines: list[Line]) -> str:
    """Return the table as Python code."""
    rows = []
    for line in lines:
        ccs = " ".join(map(str, line.ccs))
        specific = " ".join(sorted(line.specific, key=lambda name: (int(name[:-1]), name)))
        rows.append(f'    ("{line.version}", "{ccs}",\n     "{specific}", "{line.cccl}", "{line.curand}"),\n')
    return f"_TABLE = (\n{''.join(rows)})\n"


def replace_table(text: str, table: str) -> str:
    """Return the text of toolchain.py with another table."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    return before + start + table + end + after


if __name__ == "__main__":
    main()
