"""When a front end may share what it reads first, and what becomes of it when that cannot be had."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hatch_cuda_aot.compile.nvrtc import NvrtcError, NvrtcResult
from hatch_cuda_aot.compile.precompiled import PrecompiledHeaders, start_of
from hatch_cuda_aot.compile.tasks import Compiler, FrontTask
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.sources import SourceTree
from hatch_cuda_aot.toolchain import Needs

HEADER = "#pragma once\n#include <cub/cub.cuh>\n"
SOURCE = '#include "common.cuh"\n__global__ void a() {}\n'


def task(source: str = SOURCE, path: str = "src/a.cu", header: str = HEADER, **changes: Any) -> FrontTask:
    """Return a front end of one source that includes a header, with other attributes as given."""
    tree = SourceTree.of_texts({path: source, "src/common.cuh": header})
    options = ("--std=c++17",)
    plain = FrontTask(Compiler("12.9"), "a", Arch(90, virtual=True), tree, (path,), (), options, (), prune=True)
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize(
    "other",
    [
        task(SOURCE.replace("a()", "b()"), "src/b.cu"),
        task("// Of another author\n\n/* at\n length */" + SOURCE, "src/c.cu", module="c"),
        task(SOURCE.replace("\n", "\r\n")),
        task(prune=False, expressions=(("a<float>", "src/a.cu"),)),
    ],
)
def test_equal_starts(other: FrontTask) -> None:
    """Sources share their start whatever they are called, say in comments, and have behind it."""
    assert start_of(other) == start_of(task()) != ""


@pytest.mark.parametrize(
    "other",
    [
        task("#define NDEBUG\n" + SOURCE),
        task('#include "common.cuh"\n#include <cub/warp/warp_reduce.cuh>\n'),
        task(header=HEADER + "#define X\n"),
        task(header=HEADER.replace("cub.cuh", "cux.cuh")),
        task(path="src/deep/a.cu", source=SOURCE),
        task(arch=Arch(80, virtual=True)),
        task(arch=Arch(90, "a", virtual=True)),
        task(nvrtc=("--std=c++20",)),
        task(compiler=Compiler("13.0")),
        task(compiler=Compiler("12.9", Needs(curand=True))),
        task(SOURCE + "#include <curand_kernel.h>\n"),
    ],
)
def test_other_starts(other: FrontTask) -> None:
    """What the compiler reads, where, and with which options, all belong to it."""
    assert start_of(other) not in (start_of(task()), "")


@pytest.mark.parametrize(
    "other",
    [
        task("__global__ void a() {}\n" + SOURCE),
        task("#define X 1\n__global__ void a() {}\n#include <cub/cub.cuh>\n"),
        task("#ifdef X\n" + SOURCE + "#endif\n"),
        task("# if X\n#include <a>\n#\telse\n#endif\n" + SOURCE),
        task(header="#pragma once\n"),
        task(header=HEADER + "const char* file = __BASE_FILE__;\n"),
        task(nvrtc=("--std=c++17", "--generate-line-info")),
        task(nvrtc=("--std=c++17", "--device-debug")),
        task(sources=("src/a.cu", "src/b.cu")),
    ],
)
def test_nothing_to_share(other: FrontTask) -> None:
    """No start where there is nothing of the toolkit, conditions, or what names the source or its folder in the result."""
    assert start_of(other) == ""


class Nvrtc:
    """Compiles: notes what it did with precompiled headers, and writes them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.warnings: dict[str, str] = {}
        self.fails: set[str] = set()
        self.code: Callable[[str, str], bytes] = lambda text, _: text.encode()

    def __call__(self, text: str, name: str, options: Sequence[str], expressions: Sequence[str]) -> NvrtcResult:
        kind, path = "plain", ""
        for option in options:
            if option.startswith(("--create-pch=", "--use-pch=")):
                kind, path = option[2:].split("-pch=")
        self.calls.append(f"{kind} {name}")
        if kind == "use":
            assert Path(path).read_text() == options[0]
        if kind in self.fails or "error" in text:
            raise NvrtcError(f"{kind}: {text}")
        if kind == "create":
            Path(path).write_text(options[0])
        return NvrtcResult(self.code(text, kind), tuple(expressions), self.warnings.get(kind, ""))


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Nvrtc:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Nvrtc()


def compile_all(nvrtc: Nvrtc, starts: str, text: str = "text {}") -> list[str]:
    """Compile a source for each letter, which names its start; return what was done."""
    headers = PrecompiledHeaders(nvrtc)
    for number, start in enumerate(starts):
        result = headers.compile(start, text.format(number), f"{start}{number}", (f"-x={start}",), ["e"])
        assert result == NvrtcResult(text.format(number).encode(), ("e",), nvrtc.warnings.get("plain", ""))
    return nvrtc.calls


def test_made_once_and_used(nvrtc: Nvrtc, tmp_path: Path) -> None:
    """The first source makes it and tries it; the others use it; there is never more than one file."""
    assert compile_all(nvrtc, "aaabb") == ["create a0", "use a0", "use a1", "use a2", "create b3", "use b3", "use b4"]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("fails", ["create", "use"])
def test_it_cannot_be_made(nvrtc: Nvrtc, tmp_path: Path, fails: str) -> None:
    """A full disk, or a heap too small: sources are compiled without it, no file is left, and it is not tried again."""
    nvrtc.fails = {fails}
    calls = compile_all(nvrtc, "aaa")
    assert calls[-2:] == ["plain a1", "plain a2"]
    assert len(calls) <= 5
    assert list(tmp_path.iterdir()) == []


def test_it_makes_a_difference(nvrtc: Nvrtc, tmp_path: Path) -> None:
    """Warnings of a header come only when it is read, and code that is another is not wanted: it is not used then."""
    nvrtc.warnings = {"plain": "a warning", "create": "a warning"}
    assert compile_all(nvrtc, "aa") == ["create a0", "use a0", "plain a1"]
    nvrtc.warnings, nvrtc.calls = {}, []
    nvrtc.code = lambda text, kind: text.encode() if kind != "use" else b"other"
    assert compile_all(nvrtc, "aa") == ["create a0", "use a0", "plain a1"]
    assert list(tmp_path.iterdir()) == []


def test_it_does_not_fit(nvrtc: Nvrtc) -> None:
    """NVRTC's warning that it cannot use it reaches nobody."""
    headers = PrecompiledHeaders(nvrtc)
    headers.compile("a", "text", "0", ("-x",), [])
    nvrtc.warnings["use"] = "Warning #630-D: ... are not compatible with those of precompiled header file"
    assert headers.compile("a", "text", "1", ("-x",), []).log == ""
    assert nvrtc.calls[-2:] == ["use 1", "plain 1"]


def test_an_error_of_the_source(nvrtc: Nvrtc) -> None:
    """The message is that of a compilation without it, and the next source has it again."""
    headers = PrecompiledHeaders(nvrtc)
    headers.compile("a", "text", "0", ("-x",), [])
    with pytest.raises(NvrtcError, match="plain: an error"):
        headers.compile("a", "an error", "1", ("-x",), [])
    headers.compile("a", "text", "2", ("-x",), [])
    assert nvrtc.calls == ["create 0", "use 0", "use 1", "plain 1", "use 2"]
    with pytest.raises(NvrtcError, match="plain: an error"):
        headers.compile("b", "an error", "3", ("-x",), [])
