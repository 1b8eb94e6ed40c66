"""The verb ``build``: one build into the source tree, shown to people or to programs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from hatch_cuda_aot.cli.progress import Progress
from hatch_cuda_aot.compile.starter import start_early
from hatch_cuda_aot.errors import SourceError
from hatch_cuda_aot.profile import phases, task_times, trace
from hatch_cuda_aot.project import Project
from hatch_cuda_aot.report import summarise
from hatch_cuda_aot.spans import Span, record, span
from hatch_cuda_aot.stage import write_folder

__all__ = ["build_in_tree"]

#: Rows of the table of tasks; the trace has all of them.
_ROWS = 20


def build_in_tree(
    root: Path, *, verbose: bool, as_json: bool, profile: Path | None = None, lines: bool = False
) -> None:
    """Build the project in `root` and write the files into its source tree.

    Args:
        root: the project's folder.
        verbose: show each task and the compiler's warnings.
        as_json: print one JSON object, and nothing else.
        profile: the file for the trace of where the time went, which is shown as a table as well.
        lines: the JSON object is one line.

    Raises:
        BuildError: whatever is wrong.  The profile of what was done until then is there all the same.

    """
    started = time.monotonic()
    with record() as spans, _profiled(profile, spans, show=not as_json), start_early(os.environ) as starter:
        with span("configure"):
            project = Project.at(root)
            config = project.config()
        for warning in config.warnings:
            click.echo(f"warning: {warning}", err=True)
        with Progress(verbose=verbose, silent=as_json, spans=spans) as progress:
            built = project.build(config, progress, progress.warn, in_tree=True, starter=starter)
        target = project.folder(config)
        with span("write files"):
            write_folder(target, built.files)
    if as_json:
        data: dict[str, Any] = {
            "folder": str(target),
            "files": {name: len(content) for name, content in built.files.items()},
            "tasks": built.result.tasks,
            "hits": built.result.hits,
            "seconds": round(time.monotonic() - started, 3),
        }
        if profile is not None:
            data["profile"] = str(profile)
        click.echo(json.dumps(data, indent=None if lines else 2))
        return
    click.echo(summarise(built.result, built.files, progress.warnings, time.monotonic() - started))
    click.echo(f"written to {target}")


@contextlib.contextmanager
def _profiled(file: Path | None, spans: Sequence[Span], *, show: bool) -> Iterator[None]:
    """Write and show where the time of this block went, also if it fails."""
    if file is None:
        yield
        return
    try:
        out = file.open("w", encoding="utf-8")  # before the build: it may take long
    except OSError as error:
        message = f"cannot write the profile to {file}: {error.strerror}"
        raise SourceError(message) from error
    with out:
        try:
            yield
        finally:
            json.dump(trace(spans), out)
            if show:
                _print_profile(spans)
                click.echo(f"profile written to {file}: open it at https://ui.perfetto.dev")


def _print_profile(spans: Sequence[Span]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)  # nobody's window must be kept to
    table = Table("phase", box=None, header_style="bold")
    for heading in ("times", "total s", "longest s"):
        table.add_column(heading, justify="right")
    for phase in phases(spans):
        table.add_row(phase.name, str(phase.count), _seconds(phase.total), _seconds(phase.longest))
    console.print(table)
    tasks = task_times(spans)
    table = Table("task", box=None, header_style="bold")
    for heading in ("waited s", "took s"):
        table.add_column(heading, justify="right")
    table.add_column("of that")
    for task in tasks[:_ROWS]:
        parts = sorted(task.phases.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {_seconds(time)}" for name, time in parts if time >= 500_000)
        name = " ".join(filter(None, [task.step, task.module, task.arch]))
        table.add_row(name, _seconds(task.waited), _seconds(task.total), shown)
    console.print(table)
    if len(tasks) > _ROWS:
        console.print(f"and {len(tasks) - _ROWS} shorter tasks, which the trace has as well")


def _seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e9:.3f}"
