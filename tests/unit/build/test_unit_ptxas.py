"""What ``ptxas -v`` prints, read back: samples are the words of the programs themselves."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from hatch_cuda_aot.compile.ptxas import PtxasCrashError, PtxasError, assemble, is_complete, parse_resources
from hatch_cuda_aot.compile.tasks import Resources

#: ptxas 12.9.86 -v -arch=sm_75: a kernel that calls a function, one with shared memory, one that spills.
SAMPLE_12_9 = """\
ptxas warning : Value of threads per SM for entry spilly is out of range. .minnctapersm will be ignored
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'calls' for 'sm_75'
ptxas info    : Function properties for calls
    96 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 29 registers, used 0 barriers, 96 bytes cumulative stack size, 364 bytes cmem[0]
ptxas info    : Compile time = 9.089 ms
ptxas info    : Function properties for _Z4deepPfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'tile' for 'sm_75'
ptxas info    : Function properties for tile
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 1024 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 0.906 ms
ptxas info    : Compiling entry function 'spilly' for 'sm_75'
ptxas info    : Function properties for spilly
    160 bytes stack frame, 160 bytes spill stores, 160 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 160 bytes cumulative stack size, 360 bytes cmem[0]
ptxas info    : Compile time = 14.919 ms
"""

#: ptxas 13.5.37 -v -arch=sm_90 -maxrregcount=16: a recursive function that spills, and mangled names.
SAMPLE_13_5 = """\
ptxas warning : For profile sm_90 adjusting per thread register count of 16 to lower bound of 24
ptxas info    : Overriding maximum register limit 256 for 'stacky' with  24 of maxrregcount option
ptxas info    : Overriding maximum register limit 256 for 'plain' with  24 of maxrregcount option
ptxas warning : Stack size for entry function 'stacky' cannot be statically determined
ptxas info    : 141 bytes gmem
ptxas info    : Compiling entry function '_Z3sumIfLin4ELb1EEvPT_' for 'sm_90'
ptxas info    : Function properties for _Z3sumIfLin4ELb1EEvPT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers, 44 bytes smem
ptxas info    : Compile time = 2.374 ms
ptxas info    : Compiling entry function 'noargs' for 'sm_90'
ptxas info    : Function properties for noargs
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers
ptxas info    : Compile time = 0.325 ms
ptxas info    : Compiling entry function 'stacky' for 'sm_90'
ptxas info    : Function properties for stacky
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers
ptxas info    : Compile time = 5.682 ms
ptxas info    : Function properties for _Z3recPfi
    120 bytes stack frame, 36 bytes spill stores, 36 bytes spill loads
ptxas info    : Compiling entry function 'plain' for 'sm_90'
ptxas info    : Function properties for plain
    24 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 24 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compile time = 3.149 ms
"""


def test_sample_of_12_9() -> None:
    """Registers, shared and local memory and spills are read per kernel; device functions are no kernels."""
    assert parse_resources(SAMPLE_12_9) == {
        "calls": Resources(registers=29, local=96),
        "tile": Resources(registers=10, shared=1024),
        "spilly": Resources(registers=64, local=160, spill_stores=160, spill_loads=160),
    }


def test_sample_of_13_5() -> None:
    """A function's own stack and spills, printed between two kernels, belong to neither of them."""
    assert parse_resources(SAMPLE_13_5) == {
        "_Z3sumIfLin4ELb1EEvPT_": Resources(registers=14, shared=44),
        "noargs": Resources(registers=4),
        "stacky": Resources(registers=24),
        "plain": Resources(registers=24, shared=512, local=24),
    }


def test_function_before_the_kernel_is_done() -> None:
    """A function's properties between a kernel's own and its registers do not replace the kernel's."""
    log = SAMPLE_12_9.splitlines()
    moved = [*log[:5], *log[7:8], "    64 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads", log[5]]
    assert parse_resources("\n".join(moved)) == {"calls": Resources(registers=29, local=96)}


def test_registers_of_a_function() -> None:
    """Registers that are told of a function, as for relocatable code, are not the kernel's before it."""
    log = SAMPLE_13_5.replace("36 bytes spill loads\n", "36 bytes spill loads\nptxas info    : Used 40 registers\n")
    assert log != SAMPLE_13_5
    assert parse_resources(log) == parse_resources(SAMPLE_13_5)


def test_the_larger_stack_counts() -> None:
    """Local memory is the whole call tree's stack where ptxas knows it, else the kernel's own frame."""
    own_only = SAMPLE_12_9.replace("160 bytes cumulative stack size, ", "")
    assert parse_resources(own_only)["spilly"].local == 160
    deeper = SAMPLE_12_9.replace("96 bytes cumulative stack size", "208 bytes cumulative stack size")
    assert parse_resources(deeper)["calls"].local == 208


def test_nothing_compiled() -> None:
    """A log without kernels holds no resources."""
    assert parse_resources("ptxas info    : 0 bytes gmem\n") == {}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A stand-in for ptxas, whose body each test writes."""
    path = tmp_path / "ptxas"
    path.write_text("", encoding="utf-8")
    path.chmod(0o755)
    return path


needs_a_shell = pytest.mark.skipif(sys.platform == "win32", reason="runs a shell script")


@needs_a_shell
def test_assemble(program: Path) -> None:
    """Arch and options reach the program, the PTX its input; cubin, resources and warnings come back."""
    program.write_text(
        "#!/bin/sh\n"
        'echo "ptxas warning : $*" >&2\n'
        "echo \"ptxas info    : Compiling entry function 'k' for 'sm_90'\" >&2\n"
        'echo "ptxas info    : Used 8 registers, used 0 barriers" >&2\n'
        'for last; do :; done; cp module.ptx "$last"\n',  # a cubin is an ELF file, of which only the length is read
        encoding="utf-8",
    )
    done = assemble(str(program), CUBIN, "sm_90a", ("--fmad=false", "-O1"))
    assert done.cubin == CUBIN
    assert done.resources == {"k": Resources(registers=8)}
    assert done.log == "ptxas warning : -v -arch=sm_90a --fmad=false -O1 module.ptx -o module.cubin"


@needs_a_shell
@pytest.mark.parametrize("body", ["echo 'fatal : no' >&2; exit 255", "echo 'fatal : no'; exit 0"])
def test_refusal(program: Path, body: str) -> None:
    """An exit status, or a cubin that is not there, is a refusal with the program's words."""
    program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    with pytest.raises(PtxasError, match=r"^fatal : no$"):
        assemble(str(program), b"", "sm_90", ())


#: The header of an ELF file with two segments of 56 bytes at 192, after a section header of 64 at 128, and all else zero.
CUBIN = (b"\x7fELF".ljust(32, b"\0") + struct.pack("<QQ6xHHHH2x", 192, 128, 56, 2, 64, 1)).ljust(192 + 112, b"\0")


def test_length_of_a_cubin() -> None:
    """A cubin that is cut anywhere, or no cubin, is not complete."""
    assert is_complete(CUBIN)
    assert not any(is_complete(CUBIN[:length]) for length in range(len(CUBIN)))
    assert not is_complete(b"\0" * 1000)


@needs_a_shell
@pytest.mark.parametrize(
    "body",
    [
        'for last; do :; done; : > "$last"',
        'for last; do :; done; head -c 200 module.ptx > "$last"',
        "echo 'ptxas fatal   : Internal error: writing file'; exit 255",
        "echo \"ptxas fatal   : Output file '/t/module.cubin' could not be opened\"; exit 255",
        "kill -XFSZ $$",
    ],
)
def test_full_disk(program: Path, body: str) -> None:
    """A result that was not written whole is no cubin, and no refusal either, whatever ptxas says of it."""
    program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    with pytest.raises(OSError, match="No space left on device"):
        assemble(str(program), CUBIN, "sm_90", ())


@needs_a_shell
def test_crash(program: Path) -> None:
    """Death by a signal is not a refusal, and the signal is told."""
    program.write_text("#!/bin/sh\nkill -SEGV $$\n", encoding="utf-8")
    with pytest.raises(PtxasCrashError) as caught:
        assemble(str(program), b"", "sm_90", ())
    assert caught.value.signal == 11
