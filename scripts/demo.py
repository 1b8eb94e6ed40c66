"""Builds the example package and runs it in a fresh virtual environment: the whole way, on any machine.

Neither a GPU nor a CUDA toolkit is needed.  hatch-cuda-aot is built from this checkout first, into a folder where pip and
uv look for it.  Nothing is left behind but the caches of pip and of hatch-cuda-aot.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="show what pip prints")
    verbose = parser.parse_args().verbose
    if not has_pip():
        stop(f"{sys.executable} has no pip, which this needs: install it there, or run another Python that has it")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hatch-cuda-aot-demo-") as folder:
        demo(Path(folder), verbose=verbose)
    print(f"\nThe demo took {time.monotonic() - start:.0f} s")


def demo(folder: Path, *, verbose: bool) -> None:
    wheelhouse, environment = folder / "wheelhouse", folder / "venv"
    python = str(environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    environ = finding_wheels_in(wheelhouse)

    def step(what: str, *command: str) -> None:
        """Run one command, and print what it is for and how long it took."""
        print(f"{what} ...", end="\n" if verbose else " ", flush=True)
        start = time.monotonic()
        output = None if verbose else subprocess.PIPE
        done = subprocess.run(command, env=environ, stdout=output, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            stop(f"failed\n{done.stdout or ''}\nThis command failed: {' '.join(command)}")
        print(f"{time.monotonic() - start:.0f} s", flush=True)

    into = ["wheel", "--no-deps", "--wheel-dir", str(wheelhouse)]
    step("Building the wheel of hatch-cuda-aot", *pip, *into, str(ROOT))
    step("Fetching the compiler and building the wheel of example_pkg", *pip, *into, str(ROOT / "example_pkg"))
    wheel = next(wheelhouse.glob("example_pkg-*.whl"))
    print(f"  {describe(wheel)}")
    # The environment gets no pip of its own, which takes seconds to copy and is missing in some Pythons: ours serves it.
    step("Creating a virtual environment", sys.executable, "-m", "venv", "--without-pip", str(environment))
    step("Installing the wheel there, with its dependencies", *pip, "--python", python, "install", str(wheel))

    print("\n$ python -m example_pkg", flush=True)
    if subprocess.run([python, "-m", "example_pkg"], cwd=folder, check=False).returncode != 0:
        stop("The example found an error in its kernels.")


def finding_wheels_in(wheelhouse: Path) -> dict[str, str]:
    """Return the environment in which pip and uv find the wheels of a folder too, beside what they find already."""
    environ = dict(os.environ)
    for name, separator in (("PIP_FIND_LINKS", " "), ("UV_FIND_LINKS", ",")):
        environ[name] = separator.join(filter(None, [environ.get(name), str(wheelhouse)]))
    return environ


def describe(wheel: Path) -> str:
    """Say what is in a wheel of compiled kernels."""
    with zipfile.ZipFile(wheel) as archive:
        files = archive.infolist()
    kinds = Counter(Path(file.filename).suffix for file in files)
    unpacked = sum(file.file_size for file in files)
    return (
        f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB ({unpacked / 1e3:.0f} kB installed), "
        f"with {kinds['.cubin']} cubins and {kinds['.ptx']} PTX"
    )


def has_pip() -> bool:
    command = [sys.executable, "-m", "pip", "--version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def stop(message: str) -> NoReturn:
    sys.stdout.flush()
    sys.exit(message)


if __name__ == "__main__":
    main()
