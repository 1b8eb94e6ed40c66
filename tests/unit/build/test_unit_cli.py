"""The command's verbs without a compiler: output for people and for programs, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hatch_cuda_aot._version import __version__
from hatch_cuda_aot.cli import main
from hatch_cuda_aot.config import HOOK_TABLE
from hatch_cuda_aot.toolchain import LINES, known_cuda_values

PROJECT = """\
[build-system]
requires = ["hatchling", "hatch-cuda-aot"]
build-backend = "hatchling.build"

[project]
name = "pkg"
version = "1.0"
dependencies = ["cuda-core", "cuda-bindings", "platformdirs"]

[tool.hatch.build.targets.wheel]
packages = ["src/pkg"]
"""
#: What the lines compile with a suffix, in the order of a table.
SPECIFIC_12_9 = "90a 100a 100f 101a 101f 103a 103f 120a 120f 121a 121f"
SPECIFIC_13_0 = "90a 100a 100f 103a 103f 110a 110f 120a 120f 121a 121f"

HOOK = f"\n[{HOOK_TABLE}]\n"


def invoke(*arguments: str) -> Result:
    """Run the command with wide lines."""
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(main, arguments, catch_exceptions=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that has all but the table of the hook and a configuration."""
    (tmp_path / "src/pkg/kernels").mkdir(parents=True)
    (tmp_path / "src/pkg/__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "src/pkg/kernels/k.cu").write_text("", encoding="utf-8")
    configure(tmp_path, "")
    return tmp_path


def configure(project: Path, text: str, base: str = PROJECT) -> None:
    """Write pyproject.toml."""
    (project / "pyproject.toml").write_text(base + text, encoding="utf-8")


def test_targets() -> None:
    """The table has a row for each line, with the driver that its cubins need and what it compiles for."""
    result = invoke("targets")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == [line.version for line in LINES]
    twelve = rows[0]
    assert twelve[1:3] == ["CUDA", "12.0"]
    assert twelve[3:] == [
        *map(str, LINES[0].ccs),
        *["90a", "100a", "100f", "101a", "101f", "103a", "103f", "120a", "120f", "121a", "121f"],
    ]


def test_targets_json() -> None:
    """Programs get the same, with architectures as tokens."""
    result = invoke("targets", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert list(data) == [line.version for line in LINES]
    assert data["13.0"] == {
        "archs": [f"sm_{cc}" for cc in (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)],
        "specific": [
            f"sm_{arch}"
            for arch in ["90a", "100a", "100f", "103a", "103f", "110a", "110f", "120a", "120f", "121a", "121f"]
        ],
        "min_driver": 13000,
    }


@pytest.mark.parametrize(("cuda", "line"), [("12.9", "12.9"), ("13", LINES[-1].version)])
def test_targets_of_one_line(cuda: str, line: str) -> None:
    """One line can be asked for, by a major version too."""
    assert list(json.loads(invoke("targets", cuda, "--json").stdout)) == [line]
    assert len(invoke("targets", cuda).stdout.splitlines()) == 2


@pytest.mark.parametrize("cuda", ["11.8", "auto", "13.99"])
def test_targets_of_an_unknown_line(cuda: str) -> None:
    """An unknown line is an error of usage, which lists those that there are."""
    message = f"unknown CUDA line {cuda!r}: expected one of {', '.join(known_cuda_values()[1:])}"
    result = invoke("targets", cuda)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {message}\n"
    result = invoke("targets", cuda, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["message"] == message


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["targets", "--nonsense"], ["targets", "13", "14"], ["build", "nowhere"]]
)
def test_usage(arguments: list[str]) -> None:
    """What the command does not understand ends with 2, on stderr."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: " in result.stderr


def test_help_and_version() -> None:
    """Help lists the verbs, and the version is that of the package."""
    assert all(verb in invoke("-h").stdout for verb in ("build", "targets"))
    assert invoke("-h").exit_code == 0
    assert __version__ in invoke("--version").stdout


def test_build_without_the_hook(project: Path) -> None:
    """Without the hook's table wheels would have no kernels; the error says so and gives the line to paste."""
    configure(project, '\n[tool.cuda-aot]\nsources = ["src/**/*.cu"]\n')
    words = "missing: without it hatchling never runs the hook, and wheels have no kernels. Add"
    message = f"[{HOOK_TABLE}]: {words}\n[{HOOK_TABLE}]"
    result = invoke("build", str(project))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {message}\n"
    result = invoke("build", str(project), "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {"error": {"kind": "ConfigError", "message": message}}
    assert result.stderr == ""


def test_build_outside_a_project(tmp_path: Path) -> None:
    """A folder without pyproject.toml is named."""
    result = invoke("build", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr == f"error: {tmp_path}: there is no pyproject.toml here: run this in a project's folder\n"


def test_build_with_a_wrong_configuration(project: Path) -> None:
    """Every problem of the configuration is printed, one a line."""
    configure(project, f'{HOOK}arch = ["sm_90"]\n[tool.cuda-aot]\nsources = ["src/**/*.cu"]\nstd = "c17"\n')
    result = invoke("build", str(project))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        'error: tool.cuda-aot.std: is \'c17\': expected a language standard such as "c++17" or "c++20"',
        f"{HOOK_TABLE}.arch: unknown key. Did you mean 'archs'?",
    ]


def test_build_without_runtime_requirements(project: Path) -> None:
    """What the loader imports must be declared by the project; the error is the lines to paste."""
    base = PROJECT.replace('"cuda-bindings", "platformdirs"', '"numpy"')
    configure(project, f'{HOOK}[tool.cuda-aot]\nsources = ["src/**/*.cu"]\n', base)
    result = invoke("build", str(project))
    assert result.exit_code == 2
    assert result.stderr == (
        "error: project.dependencies: cuda-bindings, platformdirs are missing, which the loader in the built package "
        'imports. Add\n[project]\ndependencies = [\n    "cuda-bindings",\n    "platformdirs",\n]\n'
    )


def test_build_for_an_arch_that_the_line_lacks(project: Path) -> None:
    """Architectures that no line knows together are an error of configuration, before any compiler is looked for."""
    configure(project, f'{HOOK}archs = ["sm_70", "sm_110"]\n[tool.cuda-aot]\nsources = ["src/**/*.cu"]\n')
    result = invoke("build", str(project))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: no one CUDA line compiles all of ")
    assert "sm_70" in result.stderr


def test_warnings_of_the_configuration(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is odd is said on stderr before the build goes on."""
    monkeypatch.setenv("HATCH_CUDA_AOT_ARCH", "sm_90")
    configure(project, f'{HOOK}cuda = "13.0"\narchs = ["sm_70"]\n[tool.cuda-aot]\nsources = ["src/**/*.cu"]\n')
    first = invoke("build", str(project)).stderr.splitlines()[0]
    assert first.startswith("warning: the environment variable HATCH_CUDA_AOT_ARCH is not read. Did you mean ")


def test_build_where_no_compiler_exists(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS the configuration is good and the build still cannot be: that is 1, and nothing was written."""
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    configure(project, f'{HOOK}[tool.cuda-aot]\nsources = ["src/**/*.cu"]\n')
    result = invoke("build", str(project))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: NVIDIA publishes no CUDA compiler for Darwin on ")
    assert not (project / "src/pkg/_cuda_aot").exists()
