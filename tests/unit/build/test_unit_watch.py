"""What `build --watch` looks at; the build tests watch for real."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hatch_cuda_aot.cli import main
from hatch_cuda_aot.cli.watch import changed, inputs
from hatch_cuda_aot.config import HOOK_TABLE

PROJECT = f"""\
[project]
name = "pkg"
version = "1.0"
dependencies = ["cuda-core", "cuda-bindings", "platformdirs"]
[tool.hatch.build.targets.wheel]
packages = ["src/pkg"]
[{HOOK_TABLE}]
sources = ["src/pkg/*.cu"]
include-dirs = ["src/include"]
archs = ["sm_80"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one source, which includes a header of the project and one that is not there."""
    for folder in ("src/pkg", "src/include"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/pkg/__init__.py").touch()
    (tmp_path / "src/pkg/a.cu").write_text('#include "a.cuh"\n#include "later.cuh"\n')
    (tmp_path / "src/pkg/a.cuh").write_text("")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return tmp_path


def test_inputs(project: Path) -> None:
    """The configuration, the sources, and the headers that they include."""
    assert set(inputs(project)) == {"pyproject.toml", "src/pkg/a.cu", "src/pkg/a.cuh"}


@pytest.mark.parametrize(
    ("path", "text", "names"),
    [
        ("src/pkg/a.cu", "changed", ["src/pkg/a.cu", "src/pkg/a.cuh"]),  # the header is no longer included
        ("src/pkg/a.cuh", "changed", ["src/pkg/a.cuh"]),
        ("src/pkg/b.cu", "new", ["src/pkg/b.cu"]),
        ("src/include/later.cuh", "new", ["src/include/later.cuh"]),
        ("src/include/a.cuh", "another of that name", ["src/include/a.cuh"]),
        ("src/include/other.cuh", "included by none", []),
        ("src/pkg/__init__.py", "no source", []),
        ("pyproject.toml", PROJECT + 'std = "c++20"\n', ["pyproject.toml"]),
        ("hatch.toml", "", ["hatch.toml"]),
    ],
)
def test_changes(project: Path, path: str, text: str, names: list[str]) -> None:
    """What a build reads counts, new files too; nothing else does."""
    before = inputs(project)
    (project / path).write_text(text)
    assert changed(before, inputs(project)) == names


def test_configuration_that_is_wrong_for_a_while(project: Path) -> None:
    """In the middle of an edit the configuration may be no TOML; when it is right again, that is a change."""
    before = inputs(project)
    (project / "pyproject.toml").write_text("[project")
    between = inputs(project)
    assert "pyproject.toml" in changed(before, between)
    (project / "pyproject.toml").write_text(PROJECT)
    assert changed(between, inputs(project))
    assert changed(before, inputs(project)) == []


def test_source_that_comes_back(project: Path) -> None:
    """Without any source the configuration is wrong; a new one is a change."""
    (project / "src/pkg/a.cu").rename(project / "a.cu")
    before = inputs(project)
    (project / "a.cu").rename(project / "src/pkg/a.cu")
    assert changed(before, inputs(project)) == ["src/pkg/a.cu", "src/pkg/a.cuh"]


def test_only_the_error_changed() -> None:
    """A folder that appears may mend the configuration without any file."""
    assert changed({"a": b"", "": b"no folder"}, {"a": b""}) == ["the configuration"]


def test_without_the_library(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without watchfiles the error says how to get it."""
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    result = CliRunner().invoke(main, ["build", str(project), "--watch"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --watch: needs the package watchfiles (")
    assert result.stderr.endswith("pip install 'hatch-cuda-aot[watch]'\n")


def test_pyproject_that_is_no_toml(project: Path) -> None:
    """What hatchling cannot read is an error of the configuration."""
    (project / "pyproject.toml").write_text("[project")
    result = CliRunner().invoke(main, ["build", str(project)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: pyproject.toml: Expected ']' at the end of a table declaration")


def test_profile_in_a_folder_that_is_not_there(project: Path) -> None:
    """A profile that cannot be written is an error that names the file; a folder's name is one of usage."""
    result = CliRunner().invoke(main, ["build", str(project), f"--profile={project}/no/trace.json"])
    assert result.exit_code == 2
    assert f"cannot write the profile to {project}/no/trace.json: No such file or directory" in result.stderr
    result = CliRunner().invoke(main, ["build", str(project), "--profile", str(project)])
    assert result.exit_code == 2
    assert "is a directory" in result.stderr
