"""The tutorial's project, taken from its page, builds as the page says and answers as it shows."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.wheels import ROOT, build_wheel

TUTORIAL = ROOT / "docs" / "tutorial" / "first-kernel.md"
FILES = {"pyproject.toml", "src/vecmath/vector.cu", "src/vecmath/__init__.py", "src/vecmath/__main__.py"}


def snippets(page: Path) -> dict[str, str]:
    """Return the fenced blocks of a page that have a title, by it."""
    blocks = re.findall(
        r'^```\w+ title="([^"]+)"\n(.*?)^```$', page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(dict(blocks)) == len(blocks)
    return dict(blocks)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, wheelhouse: Path) -> Path:
    """The tutorial's wheel, unpacked."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name, text in snippets(TUTORIAL).items():
        path = folder / "vecmath" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    wheel = build_wheel(folder / "vecmath", folder / "dist", wheelhouse)
    assert wheel.name == "vecmath-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def ask(site: Path, code: str) -> str:
    """Return what Python prints that runs `code` with the wheel's package at hand."""
    # Outside of the package's own environment numpy and the CUDA packages may be missing; these questions need neither.
    code = f"import sys; sys.path.insert(0, 'vecmath')\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=site, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_files_of_the_tutorial() -> None:
    """The page holds the whole project."""
    assert set(snippets(TUTORIAL)) == FILES


def test_kernels_of_the_tutorial(site: Path) -> None:
    """The template's instantiations and the plain kernel are there; the source is not in the wheel."""
    names = ask(site, "from _cuda_aot import kernel_names; print(kernel_names())")
    assert names == "['axpy<double>', 'axpy<float>', 'count_positive']\n"
    assert not list(site.rglob("*.cu"))


@pytest.mark.parametrize("arguments", ['cc="8.9", driver="12.9"', 'cc="9.0", driver="13.0"'])
def test_tables_of_the_tutorial(site: Path, arguments: str) -> None:
    """What the page shows of `explain()` is what it prints, but for the line that names the device."""
    table = ask(site, f"from _cuda_aot import explain; print(explain({arguments}))").partition("\n")[2]
    assert table in TUTORIAL.read_text(encoding="utf-8")


def test_python_of_the_tutorial_compiles(site: Path) -> None:
    """The modules are valid Python."""
    for path in (site / "vecmath").glob("*.py"):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
