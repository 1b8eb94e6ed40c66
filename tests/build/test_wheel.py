"""Wheels from every build frontend, as an author makes them and as a user installs them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from tests.build.conftest import EXAMPLE, make_compiler
from tests.wheels import ROOT, copy_project, frontend_environ, only_wheel

ARCHS = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"]
MODULES = ["axpy", "histogram", "reduce", "softmax"]
KERNELS = [
    "axpy<__half>",
    "axpy<double>",
    "axpy<float>",
    "block_sum<double,256>",
    "block_sum<float,256>",
    "histogram",
    "softmax<__half>",
    "softmax<__nv_bfloat16>",
    "softmax<float>",
]


def expected_names() -> set[str]:
    own = {path.name for path in (EXAMPLE / "src" / "example_pkg").glob("*.py")} | {"py.typed"}
    runtime = {path.name for path in (ROOT / "hatch_cuda_aot" / "runtime").glob("*.py")}
    aot = {*runtime, "py.typed", "__init__.pyi", "manifest.json"}
    for module in MODULES:
        aot.add(f"{module}.json")
        aot |= {f"{module}.{arch}.cubin" for arch in ARCHS}
        aot |= {f"{module}.{arch}.ptx" for arch in ("compute_75", "compute_120")}
    names = {f"example_pkg/{name}" for name in own} | {f"example_pkg/_cuda_aot/{name}" for name in aot}
    return names | {f"example_pkg-0.1.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD")}


class Frontend:
    """Runs build frontends on a copy of the example, with a cache of results that the runs share."""

    def __init__(self, folder: Path, wheelhouse: Path) -> None:
        self.folder = folder
        cache = str(folder / "cache")
        self.environ = {**frontend_environ(wheelhouse), "HATCH_CUDA_AOT_CACHE_DIR": cache}

    def copy(self, name: str) -> Path:
        return copy_project(EXAMPLE, self.folder / name)

    def run(self, *command: str, cwd: Path, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**self.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stdout
        return done

    def python(self, *command: str, cwd: Path, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, *command, cwd=cwd, check=check, **environ)


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory, wheelhouse: Path) -> Frontend:
    return Frontend(tmp_path_factory.mktemp("frontends"), wheelhouse)


@pytest.fixture(scope="module")
def isolated(frontend: Frontend) -> Path:
    """The example's wheel as `pip wheel .` makes it."""
    project = frontend.copy("isolated")
    frontend.python("-m", "pip", "wheel", "--no-deps", "--wheel-dir", "out", ".", cwd=project)
    return only_wheel(project / "out")


def digests(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_pip_isolated(isolated: Path) -> None:
    """A project that names only hatchling and hatch-cuda-aot builds in isolation; the wheel holds these files and no more."""
    assert isolated.name == "example_pkg-0.1.0-py3-none-any.whl"
    assert set(digests(isolated)) == expected_names()
    with zipfile.ZipFile(isolated) as archive:
        index = json.loads(archive.read("example_pkg/_cuda_aot/manifest.json"))
        tag = archive.read("example_pkg-0.1.0.dist-info/WHEEL").decode()
        for info in archive.infolist():
            assert info.external_attr >> 16 & 0o777 == 0o644, info.filename
    assert sorted(index["kernels"]) == KERNELS
    assert index["toolchain"]["cuda"] == "12.9"
    assert "tree" not in index
    assert "Tag: py3-none-any" in tag


def test_manifest_of_the_wheel(isolated: Path) -> None:
    """Every image is in the manifest with its size, digest, driver floor, parameters and resources."""
    with zipfile.ZipFile(isolated) as archive:
        for module in MODULES:
            table = json.loads(archive.read(f"example_pkg/_cuda_aot/{module}.json"))
            assert len(table["images"]) == len(ARCHS) + 2
            for image in table["images"]:
                data = archive.read(f"example_pkg/_cuda_aot/{image['file']}")
                assert (len(data), hashlib.sha256(data).hexdigest()) == (image["size"], image["sha256"])
                assert image["min_driver"] == (12000 if image["kind"] == "cubin" else 12090)
                assert set(image["kernels"]) == set(table["kernels"])
                if image["kind"] == "cubin":
                    assert all(taken["registers"] > 0 for taken in image["kernels"].values())
        table = json.loads(archive.read("example_pkg/_cuda_aot/histogram.json"))
        assert table["kernels"]["histogram"]["params"] == [
            {"kind": "u64", "size": 8, "offset": 0},
            {"kind": "u64", "size": 8, "offset": 8},
            {"kind": "u64", "size": 8, "offset": 16},
            {"kind": "u32", "size": 4, "offset": 24},
        ]
        assert table["globals"]["bin_of"]["size"] == 256


def test_hatch_build(frontend: Frontend, isolated: Path) -> None:
    """`hatch build` makes the same wheel."""
    project = frontend.copy("hatch")
    frontend.python("-m", "hatch", "build", "-t", "wheel", cwd=project)
    assert digests(only_wheel(project / "dist")) == digests(isolated)


def test_build_through_the_sdist(frontend: Frontend, isolated: Path) -> None:
    """`python -m build` makes the wheel from the sdist, which carries sources and headers: the same wheel."""
    project = frontend.copy("build")
    frontend.python("-m", "build", cwd=project)
    assert digests(only_wheel(project / "dist")) == digests(isolated)


def test_uv_build(frontend: Frontend, isolated: Path) -> None:
    """`uv build --wheel` makes the same wheel."""
    project = frontend.copy("uv")
    done = frontend.python("-m", "uv", "build", "--wheel", cwd=project)
    assert digests(only_wheel(project / "dist")) == digests(isolated), done.stdout


def test_sdist_with_the_global_hook(frontend: Frontend) -> None:
    """Where the hook is enabled for every target, it adds sources and headers to an sdist that would leave them out."""
    project = frontend.copy("global")
    file = project / "pyproject.toml"
    text = file.read_text().replace(".targets.wheel.hooks.cuda-aot]", ".hooks.cuda-aot]")
    file.write_text(text + '\n[tool.hatch.build.targets.sdist]\ninclude = ["*.py", "py.typed"]\n')
    frontend.python("-m", "build", cwd=project)
    assert expected_names() == set(digests(only_wheel(project / "dist")))


def test_sdist_that_lacks_sources_is_a_warning(frontend: Frontend) -> None:
    """A wheel build says when the project's sdist would lack sources, since no wheel could be built from it."""
    project = frontend.copy("lacking")
    with (project / "pyproject.toml").open("a") as file:
        file.write('\n[tool.hatch.build.targets.sdist]\nexclude = ["*.cuh"]\n')
    done = frontend.python("-m", "pip", "wheel", "-v", "--no-deps", "--wheel-dir", "out", ".", cwd=project)
    assert "cuda-aot: the sdist will lack src/example_pkg/device/" in done.stdout


@pytest.fixture(scope="module")
def line_environment(pytestconfig: pytest.Config, frontend: Frontend, wheelhouse: Path) -> Path:
    """A Python with the compiler of CUDA 12.9 and hatch-cuda-aot installed, for builds without isolation."""
    python = make_compiler(pytestconfig, "12.9").python
    wheel = only_wheel(wheelhouse)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    installed = python.parent.parent / "installed"
    with FileLock(installed.with_suffix(".lock")):  # never take it away beneath another process that uses it
        if not installed.is_file() or installed.read_text() != digest:
            install = ["-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)]
            frontend.run(str(python), *install, cwd=frontend.folder)
            installed.write_text(digest)
    return python


def test_pip_without_isolation(frontend: Frontend, isolated: Path, line_environment: Path) -> None:
    """With the compiler installed, a build without isolation makes the same wheel."""
    project = frontend.copy("plain")
    command = ["-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--wheel-dir", "out", "."]
    done = frontend.run(str(line_environment), *command, cwd=project)
    assert digests(only_wheel(project / "out")).keys() == digests(isolated).keys()
    assert "cuda-aot: building 4 modules, 32 cubins and 8 PTX with CUDA 12.9" in done.stdout
    assert "cuda-aot: built 9 kernels in 40 images" in done.stdout
    assert "compile axpy" not in done.stdout


def test_verbose_build(frontend: Frontend, line_environment: Path) -> None:
    """With more verbosity the hook shows each compilation and the compiler's warnings, which it only counts otherwise."""
    project = frontend.copy("verbose")
    command = ["-m", "hatchling", "build", "-t", "wheel"]
    quiet = frontend.run(str(line_environment), *command, cwd=project)
    assert len([line for line in quiet.stdout.splitlines() if line.startswith("cuda-aot: ")]) == 2
    assert "compiler warnings (shown with -v)" in quiet.stdout
    verbose = frontend.run(str(line_environment), *command, cwd=project, HATCH_VERBOSE="1")
    assert len([line for line in verbose.stdout.splitlines() if line.startswith("cuda-aot: assemble ")]) == 32
    assert "was declared deprecated" in verbose.stdout


def test_native_without_a_gpu(frontend: Frontend, line_environment: Path) -> None:
    """The word `native` needs a GPU where the build runs, and the error says what to write instead."""
    project = frontend.copy("native")
    command = ["-m", "hatchling", "build", "-t", "wheel"]
    done = frontend.run(str(line_environment), *command, cwd=project, check=False, HATCH_CUDA_AOT_ARCHS="native")
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert 'cuda-aot: `archs` asks for "native", but ' in done.stdout
    assert 'List the architectures to build for instead, such as "sm_90"' in done.stdout


def test_missing_compiler_without_isolation(frontend: Frontend, line_environment: Path) -> None:
    """Without isolation and without the compiler, the error names each missing part and the command that installs them."""
    project = frontend.copy("missing")
    command = ["-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "."]
    done = frontend.run(str(line_environment), *command, cwd=project, check=False, HATCH_CUDA_AOT_CUDA="13.5")
    assert done.returncode != 0
    assert "cuda-aot: the compiler of CUDA 13.5 is not complete in this environment" in done.stdout
    assert "- cuda-bindings 12." in done.stdout
    assert "- ptxas 13.5 (" in done.stdout
    assert "pip install 'cuda-bindings==13.*' 'cuda-pathfinder' 'nvidia-cuda-nvrtc==13.5.*'" in done.stdout
    assert "Traceback" not in done.stdout


def test_environment_reaches_the_build(frontend: Frontend) -> None:
    """HATCH_CUDA_AOT_ARCHS and _CUDA choose architectures and compiler of one build; the other line works as well."""
    project = frontend.copy("environment")
    command = ["-m", "pip", "wheel", "--no-deps", "--wheel-dir", "out", "."]
    archs = "sm_90,compute_90"
    frontend.python(*command, cwd=project, HATCH_CUDA_AOT_ARCHS=archs, HATCH_CUDA_AOT_CUDA="13.5")
    wheel = only_wheel(project / "out")
    images = {name.partition("_cuda_aot/")[2] for name in digests(wheel) if name.endswith((".cubin", ".ptx"))}
    assert images == {f"{module}.{tail}" for module in MODULES for tail in ("sm_90.cubin", "compute_90.ptx")}
    with zipfile.ZipFile(wheel) as archive:
        assert json.loads(archive.read("example_pkg/_cuda_aot/manifest.json"))["toolchain"]["cuda"] == "13.5"


def test_stale_images_in_the_tree_stay_out(frontend: Frontend, isolated: Path) -> None:
    """Whatever an earlier build left in the source tree, a wheel holds this build's files only."""
    project = frontend.copy("stale")
    folder = project / "src" / "example_pkg" / "_cuda_aot"
    folder.mkdir()
    (folder / "gone.sm_90.cubin").write_bytes(b"stale")
    (folder / "axpy.sm_90.cubin").write_bytes(b"stale")
    frontend.python("-m", "pip", "wheel", "--no-deps", "--wheel-dir", "out", ".", cwd=project)
    assert digests(only_wheel(project / "out")) == digests(isolated)


def test_clean_environment(frontend: Frontend, isolated: Path) -> None:
    """The installed wheel answers without any CUDA package, and says what is missing when a kernel is asked for."""
    environment = frontend.folder / "clean"
    venv.create(environment, with_pip=True)
    python = str(environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    frontend.run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(isolated), cwd=frontend.folder)
    script = (
        "import sys; sys.modules.update(cuda=None, numpy=None)\n"
        "import example_pkg; from example_pkg._cuda_aot import *\n"
        "print(kernel_names()); print(explain('axpy<float>', cc=(8, 7), driver='12.4'))\n"
        "try: get_kernel('axpy<float>')\n"
        "except CudaUnavailableError as error: print(type(error).__name__, error)\n"
    )
    done = frontend.run(python, "-c", script, cwd=frontend.folder)
    assert repr(KERNELS) in done.stdout
    assert "axpy.sm_80.cubin" in done.stdout
    assert "CudaUnavailableError" in done.stdout
    assert "pip install" in done.stdout
    demo = frontend.run(python, "-m", "example_pkg", cwd=frontend.folder)
    assert max(map(len, demo.stdout.splitlines())) <= 100


def test_editable(frontend: Frontend, line_environment: Path) -> None:
    """An editable install finds its images in the source tree, notices an edit, and `hatch-cuda-aot build` builds there."""
    project = frontend.copy("editable")
    environment = frontend.folder / "editable-environment"
    venv.create(environment, with_pip=True)
    python = str(environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    frontend.run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", ".", cwd=project)
    folder = project / "src" / "example_pkg" / "_cuda_aot"
    script = "from example_pkg import _cuda_aot as k; print(k.__file__, len(k.kernel_names()))"
    done = frontend.run(python, "-c", script, cwd=frontend.folder)
    assert str(folder) in done.stdout
    assert done.stdout.split()[-1] == "9"
    source = project / "src" / "example_pkg" / "kernels" / "histogram.cu"
    source.write_text(source.read_text() + '\nextern "C" __global__ void added(int* x) { *x = 1; }\n')
    done = frontend.run(python, "-c", script, cwd=frontend.folder)
    assert "src/example_pkg/kernels/histogram.cu changed after the kernels of example_pkg were built" in done.stdout
    rebuild = frontend.run(str(line_environment.parent / "hatch-cuda-aot"), "build", cwd=project)
    assert "built 10 kernels in 40 images" in rebuild.stdout
    assert "\x1b" not in rebuild.stdout
    assert frontend.run(python, "-c", script, cwd=frontend.folder).stdout.split()[-1] == "10"
    frontend.run(str(line_environment), "-m", "hatchling", "build", "-t", "wheel", "--clean-only", cwd=project)
    assert not folder.exists()


def test_compiler_of_the_environment_around(frontend: Frontend, pytestconfig: pytest.Config, isolated: Path) -> None:
    """An isolated build takes its own NVRTC 12.9, also where the environment that runs pip has NVRTC 13."""
    project = frontend.copy("around")
    python = str(make_compiler(pytestconfig, "13.5").python)
    command = ["-m", "pip", "wheel", "--no-deps", "--wheel-dir", "out", "."]
    frontend.run(python, *command, cwd=project, HATCH_CUDA_AOT_CACHE="0")
    assert digests(only_wheel(project / "out")) == digests(isolated)
