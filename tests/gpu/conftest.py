"""Wheels of the example and of small packages, unpacked and imported, for tests that run on a GPU.

The wheels come from the folder in HATCH_CUDA_AOT_TEST_WHEELS, one sub-folder per variant with one wheel in it; where
the variable is not set, each is built when it is first needed (that takes the compiler from the package index).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.wheels import build_wheel, copy_project, make_wheelhouse, only_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "example_pkg"
RUNTIME = ROOT / "hatch_cuda_aot" / "runtime"
VARIABLES = ROOT / "tests" / "packages" / "vars"
EMBED = ROOT / "tests" / "packages" / "embed"

#: Variant -> project, archs (None for the project's own) and compiler line.
VARIANTS: dict[str, tuple[Path, str | None, str]] = {
    "default-12.9": (EXAMPLE, None, "12.9"),
    "default-13.0": (EXAMPLE, None, "13.0"),
    "ptx-12.9": (EXAMPLE, "compute_75", "12.9"),
    "ptx-13.0": (EXAMPLE, "compute_75", "13.0"),
    "ptx-13.5": (EXAMPLE, "compute_75", "13.5"),
    "sm80-12.9": (EXAMPLE, "sm_80 compute_80", "12.9"),
    "vars-12.9": (VARIABLES, None, "12.9"),
    "vars-13.0": (VARIABLES, None, "13.0"),
    "embed-12.9": (EMBED, None, "12.9"),
    "embed-13.0": (EMBED, None, "13.0"),
    "embed-sm80-12.9": (EMBED, "sm_80", "12.9"),
}


def pytest_configure(config: pytest.Config) -> None:
    """Know the marker `gpu` wherever the tests are run from."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU of compute capability 9.0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test here as `gpu`, and skip it with the reason where there is no such GPU."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = _why_not() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        # CuPy, PyTorch and cuda.core are whatever the machine has, and each release of them deprecates something.
        item.add_marker(pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Installed:
    """An unpacked wheel.

    Attributes:
        site: the folder that it was unpacked into, to be put on `sys.path`.
        package: its import package.

    """

    site: Path
    package: str

    @property
    def folder(self) -> Path:
        """Where its images lie."""
        return self.site / self.package / "_cuda_aot"

    @property
    def cache(self) -> Path:
        """Where the tests keep what is compiled from its PTX; made by the first that is."""
        return self.site.with_name(f"{self.site.name}-cache")

    def edit_module(self, module: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Let `change` edit a module's manifest, and make all digests fit again, so that only the content lies."""
        path = self.folder / f"{module}.json"
        data = json.loads(path.read_bytes())
        change(data)
        for image in data["images"]:
            content = (self.folder / image["file"]).read_bytes()
            image["size"], image["sha256"] = len(content), hashlib.sha256(content).hexdigest()
        content = json.dumps(data).encode()
        path.write_bytes(content)
        index_path = self.folder / "manifest.json"
        index = json.loads(index_path.read_bytes())
        digest = hashlib.sha256(content).hexdigest()
        index["modules"][module] = {"file": path.name, "size": len(content), "sha256": digest}
        index_path.write_text(json.dumps(index))

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find the package and its cache."""
        path = os.pathsep.join([str(self.site), os.environ.get("PYTHONPATH", "")])
        return {"PYTHONPATH": path, "CUDA_AOT_CACHE_DIR": str(self.cache)}

    def run(self, code: str, **environment: str) -> str:
        """Run `code` in a process of its own next to the package and return what it printed; stderr must stay empty."""
        env = {**os.environ, **self.environment, **environment}
        result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the wheel of a variant."""
    given = os.environ.get("HATCH_CUDA_AOT_TEST_WHEELS")
    root = Path(given) if given else tmp_path_factory.mktemp("wheels")

    def find(variant: str) -> Path:
        folder = root / variant
        if given or folder.exists():
            return only_wheel(folder)
        house = root / "wheelhouse"
        return build(variant, folder, house if house.exists() else make_wheelhouse(house))

    return find


@pytest.fixture
def unpack(wheel: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Installed]:
    """Return a function that unpacks a variant's wheel into a folder of the test's own, where it can be damaged.

    The loader in it is the one of this source tree, whenever the wheel was built.
    """

    def unpack_it(variant: str) -> Installed:
        path = wheel(variant)
        site = tmp_path / variant
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
        installed = Installed(site, path.name.partition("-")[0])
        for source in RUNTIME.glob("*.py"):
            shutil.copy(source, installed.folder)
        return installed

    return unpack_it


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Installed], ModuleType]]:
    """Return a function that imports an unpacked package anew, and returns it; it is forgotten after the test."""
    packages = set()

    def import_it(installed: Installed) -> ModuleType:
        monkeypatch.delenv("CUDA_AOT_FORCE_PTX", raising=False)
        monkeypatch.setenv("CUDA_AOT_CACHE_DIR", str(installed.cache))
        monkeypatch.syspath_prepend(installed.site)
        packages.add(installed.package)
        _forget(installed.package)
        importlib.import_module(f"{installed.package}._cuda_aot")
        return sys.modules[installed.package]

    yield import_it
    for package in packages:
        _forget(package)


@pytest.fixture
def install(unpack: Callable[[str], Installed], load: Callable[[Installed], ModuleType]) -> Callable[[str], ModuleType]:
    """Return a function that unpacks a variant's wheel and imports its package."""
    return lambda variant: load(unpack(variant))


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def build(variant: str, folder: Path, wheelhouse: Path) -> Path:
    """Build the wheel of a variant into `folder`, with the hatch-cuda-aot in `wheelhouse`."""
    project, archs, cuda = VARIANTS[variant]
    environ = {"HATCH_CUDA_AOT_CUDA": cuda}
    if archs is not None:
        environ["HATCH_CUDA_AOT_ARCHS"] = archs
    return build_wheel(copy_project(project, folder / "project"), folder, wheelhouse, **environ)


def _why_not() -> str | None:
    """Return why no test here can run, or None."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return "cuda.bindings is not installed"
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError:
        return "there is no NVIDIA driver"
    if status:
        return f"the NVIDIA driver cannot start: {status.name}"
    attribute = driver.CUdevice_attribute
    major = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0)[1]
    minor = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0)[1]
    return (
        None if (major, minor) == (9, 0) else f"device 0 is of compute capability {major}.{minor}, the tests know 9.0"
    )
