"""What the benchmarks share: unpacked wheels, processes, medians, the machine, and tables with their goals."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "hatch_cuda_aot" / "runtime"
RESULTS = Path(__file__).resolve().parent / "results"

sys.path.insert(0, str(ROOT))  # the hatch_cuda_aot of this checkout, installed or not


@dataclass(frozen=True)
class Line:
    """One line of a result.

    Attributes:
        what: what was measured.
        value: the median.
        unit: of `value`.
        spread: the quartiles, in the same unit.
        ratio: `value` over that of what it is compared with, or None.
        goal: what `ratio`, or else `value`, must not exceed, or None.

    """

    what: str
    value: float
    unit: str
    spread: tuple[float, float] | None = None
    ratio: float | None = None
    goal: float | None = None

    @property
    def met(self) -> str:
        """Whether the goal is reached: yes, NO, or nothing where there is none."""
        if self.goal is None:
            return ""
        return "yes" if (self.value if self.ratio is None else self.ratio) <= self.goal else "NO"


def parser(doc: str | None, *, wheel: bool = True) -> argparse.ArgumentParser:
    """Return the arguments that all benchmarks have."""
    arguments = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    if wheel:
        arguments.add_argument("wheel", type=Path, help="a wheel of example_pkg")
    arguments.add_argument("--rounds", type=int, help="how often each thing is measured")
    arguments.add_argument("--write", action="store_true", help="write the result into benchmarks/results/")
    return arguments


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack a wheel with the loader of this checkout in it, and return the folder to put on sys.path."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (inside,) = folder.glob("*/_cuda_aot")
    for path in RUNTIME.glob("*.py"):
        shutil.copy(path, inside)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=True)
    return folder


def until_done(code: str, environ: Mapping[str, str]) -> float:
    """Run `code` in a new process; return the seconds from its start until it prints a line."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if process.returncode or line != "done\n":
        raise SystemExit(f"a measured process failed:\n{code}")
    return seconds


def printed(code: str, environ: Mapping[str, str]) -> str:
    """Run `code` in a new process and return what it printed."""
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def interleave(calls: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call everything once unmeasured, then `rounds` times in turn, so that what changes with time meets all alike."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(call())
    return times


def quartiles(values: Sequence[float], scale: float) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low * scale, high * scale


def report(name: str, doc: str | None, lines: Sequence[Line], *, write: bool, notes: Sequence[str] = ()) -> None:
    """Print a table, and write it with all that it depends on if asked to."""
    title = (doc or "").partition("\n\n")[0]
    table = ["| what | median | quartiles | ratio | goal | met |", "| --- | ---: | --- | ---: | ---: | --- |"]
    for line in lines:
        spread = f"{line.spread[0]:.4g} to {line.spread[1]:.4g}" if line.spread else ""
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        goal = "" if line.goal is None else f"≤ {line.goal:g}"
        table.append(f"| {line.what} | {line.value:.4g} {line.unit} | {spread} | {ratio} | {goal} | {line.met} |")
    about = environment()
    text = "\n".join(
        [
            f"# {title}",
            "",
            *table,
            "",
            *(f"{note}\n" for note in notes),
            *(f"- {key}: {value}" for key, value in about.items()),
            "",
        ]
    )
    print(text)
    if write:
        RESULTS.mkdir(exist_ok=True)
        data = {"environment": about, "lines": [{**asdict(line), "met": line.met} for line in lines]}
        (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
        (RESULTS / f"{name}.md").write_text(text)


def environment() -> dict[str, str]:
    """Return what the numbers depend on: date, machine, versions."""
    found = {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "platform": platform.platform(),
        "processor": processor(),
        "GPU": gpu(),
        "Python": platform.python_version(),
    }
    names = ("cuda-bindings", "cuda-core", "cupy-cuda13x", "cupy-cuda12x")
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return f"{os.cpu_count()} CPUs, {model}"


def gpu() -> str:
    """Return the GPU and its driver, as they name themselves."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().replace("\n", "; ")
    except (OSError, subprocess.CalledProcessError):
        return "none"
