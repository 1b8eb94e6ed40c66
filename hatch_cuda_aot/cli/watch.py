"""``build --watch``: builds again when what a build reads has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from hatch_cuda_aot.build import plan_project
from hatch_cuda_aot.errors import BuildError, ConfigError, Problem
from hatch_cuda_aot.project import Project
from hatch_cuda_aot.stage import FOLDER

__all__ = ["changed", "inputs", "watch_project"]

#: How often the watcher looks up, in milliseconds: after the first time nothing that it could have missed is left.
_TICK = 1000


def watch_project(root: Path, build: Callable[[], None], say: Callable[[str], None]) -> None:
    """Call `build` now, and after each change of what it reads, until Ctrl-C.

    A change of any file in `root` is a reason to look; whether it matters is seen from the inputs themselves, as only they
    tell which headers are included and what the patterns match.

    Raises:
        ConfigError: if the library that watches is not installed.

    """
    try:
        from watchfiles import DefaultFilter, watch
    except ImportError as error:
        message = f"needs the package watchfiles ({error}): pip install 'hatch-cuda-aot[watch]'"
        raise ConfigError([Problem("--watch", message)]) from error
    wanted = DefaultFilter(ignore_dirs=(*DefaultFilter.ignore_dirs, FOLDER))
    with contextlib.suppress(KeyboardInterrupt):
        before = inputs(root)  # taken before they are read, so that no edit falls between
        build()
        say(f"watching {root} (Ctrl-C ends it)")
        first = True
        for events in watch(root, watch_filter=wanted, rust_timeout=_TICK, yield_on_timeout=True):
            if not (events or first):
                continue
            first = False
            now = inputs(root)
            if names := changed(before, now):
                say(f"changed: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}")
                before = now
                build()


def inputs(root: Path) -> dict[str, bytes]:
    """Return the content of every file that a build reads, by path relative to `root`; what is wrong with them as well."""
    found = {name: (root / name).read_bytes() for name in ("pyproject.toml", "hatch.toml") if (root / name).is_file()}
    try:
        project = Project.at(root)
        plan = plan_project(project.config())
    except BuildError as error:
        return {**found, "": str(error).encode()}
    return found | {path: content for job in plan.jobs for path, content in job.front.tree.files}


def changed(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[str]:
    """Return the paths of what differs, sorted; where only the error does, the word for that."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [name for name in names if name] or (["the configuration"] if names else [])
