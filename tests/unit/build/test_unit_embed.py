"""The key `embed-source`, and what it puts into the results and the files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hatch_cuda_aot.collect import _source
from hatch_cuda_aot.config import Config, load_config
from hatch_cuda_aot.errors import ConfigError
from hatch_cuda_aot.manifest import manifest_files
from hatch_cuda_aot.plan import Module, make_plan
from hatch_cuda_aot.results import ModuleResult, Source
from hatch_cuda_aot.sources import read_tree
from hatch_cuda_aot.stage import write_folder
from hatch_cuda_aot.stub import make_stub
from hatch_cuda_aot.toolchain import Toolchain, line_named

TOOLCHAIN = Toolchain("12.9", "12.9.86", "12.9.86", "", "", (), (90,))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with two sources, one of which includes a header."""
    for path, text in {
        "pkg/__init__.py": "",
        "pkg/a.cu": '#include "h.cuh"\ntemplate <class T> __global__ void f(T);',
        "pkg/b.cu": "",
        "pkg/include/h.cuh": "namespace n { template <class T> __global__ void g(T); }",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def load(root: Path, **table: Any) -> Config:
    return load_config(root, {"include-dirs": ["pkg/include"], "archs": ["sm_90"], **table}, {}, ["pkg"], {})


def test_only_where_it_is_asked_for(root: Path) -> None:
    """It is off by default; a module's own value wins over the project's."""
    modules: dict[str, Any] = {"modules": [{"sources": ["pkg/a.cu"], "embed-source": True}], "sources": ["pkg/*.cu"]}
    assert [m.settings.embed_source for m in load(root, **modules).modules] == [True, False]
    modules["modules"][0]["embed-source"] = False
    modules["embed-source"] = True
    assert [m.settings.embed_source for m in load(root, **modules).modules] == [False, True]


def test_wrong_value(root: Path) -> None:
    """Anything but true and false is refused."""
    with pytest.raises(ConfigError, match=r"tool\.cuda-aot\.embed-source.*expected true or false"):
        load(root, sources=["pkg/*.cu"], **{"embed-source": "yes"})


def test_not_for_linked_sources(root: Path) -> None:
    """A module of several sources cannot have it, wherever it was set, and can turn it off."""
    module: dict[str, Any] = {"name": "both", "sources": ["pkg/*.cu"]}
    with pytest.raises(ConfigError, match=r"tool\.cuda-aot\.embed-source.*has no meaning where several sources"):
        load(root, modules=[module], **{"embed-source": True})
    with pytest.raises(ConfigError, match=r"tool\.cuda-aot\.modules #1\.embed-source.*has no meaning"):
        load(root, modules=[{**module, "embed-source": True}])
    (both,) = load(root, modules=[{**module, "embed-source": False}], **{"embed-source": True}).modules
    assert not both.settings.embed_source


def test_from_plan_to_result(root: Path) -> None:
    """The result has the files that the compiler saw, its options and the templates; without the key it has none."""
    config = load(
        root,
        sources=["pkg/a.cu"],
        defines={"N": 1},
        options=["--fmad=false", "-Xptxas=-O1"],
        **{"embed-source": True},
    )
    (module,) = config.modules
    tree = read_tree(root, module.sources, module.settings.include_dirs)
    (job,) = make_plan([Module(module, tree)], line_named("12.9"), list).jobs
    assert _source(job) == Source(
        "pkg/a.cu",
        (
            "--std=c++17",
            "--define-macro=_CCCL_META_UNROLL_LIMIT=10",
            "--define-macro=N=1",
            "--include-path=pkg/include",
            "--fmad=false",
        ),
        ("--fmad=false", "-O1"),
        tree.files,
        ("f", "n::g"),
    )
    (plain,) = load(root, sources=["pkg/a.cu"]).modules
    (job,) = make_plan([Module(plain, tree)], line_named("12.9"), list).jobs
    assert _source(job) is None


def test_files(tmp_path: Path) -> None:
    """Sources lie in a folder beside the manifest, once for all modules, and the module's file says what each must be."""
    header = ("dev/h.cuh", b"// h\n")
    modules = [
        ModuleResult(
            name, (), {}, (), (), Source(main, ("--std=c++17",), ("-O1",), ((main, b"// m\n"), header), ("f",))
        )
        for name, main in (("a", "k/a.cu"), ("b", "k/b.cu"))
    ]
    modules.append(ModuleResult("c", (), {}, (), ()))
    files = manifest_files("pkg", modules, TOOLCHAIN, "0")
    assert {name for name in files if "/" in name} == {"source/k/a.cu", "source/k/b.cu", "source/dev/h.cuh"}
    assert json.loads(files["a.json"])["source"] == {
        "main": "k/a.cu",
        "options": ["--std=c++17"],
        "ptxas": ["-O1"],
        "folder": "source",
        "files": {
            "dev/h.cuh": {"size": 5, "sha256": hashlib.sha256(b"// h\n").hexdigest()},
            "k/a.cu": {"size": 5, "sha256": hashlib.sha256(b"// m\n").hexdigest()},
        },
        "templates": ["f"],
        "cuda": "12.9",
    }
    assert "source" not in json.loads(files["c.json"])
    write_folder(tmp_path / "out", files)
    assert (tmp_path / "out/source/dev/h.cuh").read_bytes() == b"// h\n"


def test_stub_knows_whose_names_are_kernels() -> None:
    """Editors complete the names of kernels where a kernel is asked for, and not where a variable is."""
    stub = make_stub("def get_kernel(name: str): ...\ndef get_global(name: str): ...\n", ["axpy"])
    assert "def get_kernel(name: KernelName | str): ..." in stub
    assert "def get_global(name: str): ..." in stub
