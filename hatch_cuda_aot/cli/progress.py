"""Shows a build on the terminal: a bar that counts compilations, or nothing where there is no terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hatch_cuda_aot.plan import Plan
from hatch_cuda_aot.report import count_warnings

__all__ = ["Progress"]


class Progress:
    """A `Reporter` for people; use it as a context manager."""

    def __init__(self, *, verbose: bool, silent: bool) -> None:
        self.warnings = 0
        self._verbose = verbose and not silent
        self._silent = silent
        self._console = Console(stderr=True, quiet=silent)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=silent or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=None)

    def planned(self, plan: Plan, tasks: int) -> None:
        """Show what is about to be built."""
        self._console.print(f"building {plan}", highlight=False)
        self._bar.update(self._task, total=tasks)

    def done(self, module: str, arch: str, step: str, log: str, *, cached: bool) -> None:
        """Advance the bar."""
        self.warnings += count_warnings(log)
        self._bar.update(self._task, advance=1, description=f"{module} {arch}")
        if self._verbose:
            self._console.print(f"{step} {module} for {arch}{' (cached)' if cached else ''}", highlight=False)
            if log:
                self._console.print(log, highlight=False, markup=False)

    def warn(self, message: str) -> None:
        """Show a warning, silent or not; the bar stays below it."""
        console = Console(stderr=True) if self._silent else self._console
        console.print(f"warning: {message}", highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
