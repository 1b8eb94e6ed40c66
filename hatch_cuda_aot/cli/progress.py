"""Shows a build on the terminal: a bar with what is done and what is left, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from hatch_cuda_aot.plan import Plan
from hatch_cuda_aot.report import count_warnings, format_seconds
from hatch_cuda_aot.spans import Span

__all__ = ["Progress", "seconds_left"]


class Progress:
    """A `Reporter` for people; use it as a context manager.

    `spans` is where the build's times are noted: from them it knows how long a step takes.
    """

    def __init__(
        self, *, verbose: bool, silent: bool, spans: Sequence[Span] = (), console: Console | None = None
    ) -> None:
        self.warnings = 0
        self._verbose = verbose and not silent
        self._silent = silent
        self._spans = spans
        self._read = 0
        self._times: dict[str, list[int]] = {}
        self._started = time.monotonic()
        self._left: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._hits = 0
        self._console = console or Console(stderr=True, quiet=silent)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[hits]} cached"),
            _TimeLeft(),
            console=self._console,
            transient=True,
            disable=silent or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, hits=0, ends=None)

    def planned(self, plan: Plan, tasks: int) -> None:
        """Show what is about to be built."""
        self._started = time.monotonic()
        self._left.update({"compile": len(plan.jobs)})
        self._left.update("examine" if target.image.virtual else "assemble" for target in plan.images)
        for warning in plan.warnings:
            self.warn(warning)
        self._console.print(f"building {plan}", highlight=False)
        self._bar.update(self._task, total=tasks, description="compiling")

    def done(self, module: str, arch: str, step: str, log: str, *, cached: bool) -> None:
        """Advance the bar."""
        self.warnings += count_warnings(log)
        self._left[step] -= 1
        self._hits += cached
        self._done[step] += not cached
        left = seconds_left(time.monotonic() - self._started, self._done, self._left, self._mean_times())
        self._bar.update(
            self._task,
            advance=1,
            description=f"{module} {arch}",
            hits=self._hits,
            ends=None if left is None else time.monotonic() + left,
        )
        if self._verbose:
            self._console.print(f"{step} {module} for {arch}{' (cached)' if cached else ''}", highlight=False)
            if log:
                self._console.print(log, highlight=False, markup=False)

    def warn(self, message: str) -> None:
        """Show a warning, silent or not; the bar stays below it."""
        console = Console(stderr=True) if self._silent else self._console
        console.print(f"warning: {message}", highlight=False, markup=False, soft_wrap=True)

    def _mean_times(self) -> dict[str, float]:
        """Return how long a step took on average, of the steps that were noted so far."""
        end = len(self._spans)  # workers add to it
        for each in self._spans[self._read : end]:
            if "waited_ns" in each.about:
                times = self._times.setdefault(each.name, [0, 0])
                times[0] += each.end - each.start
                times[1] += 1
        self._read = end
        return {step: total / count for step, (total, count) in self._times.items()}

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def seconds_left(
    elapsed: float, done: Mapping[str, int], left: Mapping[str, int], times: Mapping[str, float]
) -> float | None:
    """Estimate how long the rest takes, in seconds, if it goes on as it went; None where nothing can be said yet.

    A front end takes many times as long as the assembly of a cubin, so that counts alone would mislead.  What is left is
    weighed by how long such a step took so far, and set against what was done in the time that passed: so it matters
    neither how many workers there are nor how busy the machine is.  What the cache may still answer counts as work.

    Args:
        elapsed: seconds since the first task began.
        done: how many of each step were done, without those that the cache answered.
        left: how many of each step are to be done.
        times: how long one of each step took on average, in any unit.  A step that was not seen yet counts as the mean.

    """
    if not sum(left.values()):
        return 0.0
    usual = sum(times.values()) / len(times) if times else 1.0
    worked = sum(count * times.get(step, usual) for step, count in done.items())
    to_do = sum(count * times.get(step, usual) for step, count in left.items())
    return elapsed * to_do / worked if worked else None


class _TimeLeft(ProgressColumn):
    """Counts down between two estimates."""

    def render(self, task: Task) -> Text:
        ends = task.fields["ends"]
        return Text("" if ends is None else f"{format_seconds(max(0.0, ends - time.monotonic()))} left")
