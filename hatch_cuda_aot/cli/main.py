"""The command's verbs.  Each takes ``--json``; without it people get sentences and tables.

Exit codes: 0 good, 1 findings, 2 usage or configuration.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from hatch_cuda_aot._version import __version__
from hatch_cuda_aot.errors import BuildError, CompileError, ConfigError, SourceError, UnsupportedArchError

__all__ = ["main"]

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="hatch-cuda-aot")
def main() -> None:
    """Compile CUDA kernels ahead of time into Python packages."""


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
@click.option("-v", "--verbose", is_flag=True, help="Show each compilation and the compiler's warnings.")
@click.option("--watch", is_flag=True, help="Build again whenever a source, a header or the configuration changes.")
@click.option(
    "--profile",
    metavar="[FILE]",
    type=click.Path(dir_okay=False, path_type=Path),
    is_flag=False,
    flag_value="cuda-aot-profile.json",
    help="Show where the time went, and write it to FILE as a trace for https://ui.perfetto.dev.",
)
@_JSON
def build(folder: Path, *, verbose: bool, watch: bool, profile: Path | None, as_json: bool) -> None:
    """Compile the kernels of the project in FOLDER into its source tree, where an editable install finds them."""
    from hatch_cuda_aot.cli.build import build_in_tree

    root = folder.resolve()
    try:
        if not watch:
            build_in_tree(root, verbose=verbose, as_json=as_json, profile=profile)
            return
        from hatch_cuda_aot.cli.watch import watch_project

        def build_or_show() -> None:
            try:
                build_in_tree(root, verbose=verbose, as_json=as_json, profile=profile, lines=True)
            except BuildError as error:
                _show(error, as_json=as_json, lines=True)

        watch_project(root, build_or_show, lambda text: click.echo(text, err=True))
    except BuildError as error:
        _fail(error, as_json=as_json)


@main.command()
@click.argument("cuda", required=False)
@_JSON
def targets(cuda: str | None, *, as_json: bool) -> None:
    """Show the CUDA lines and the architectures that each compiles for (of CUDA, one line such as 12.9, if given)."""
    from hatch_cuda_aot.toolchain import LINES, line_named

    try:
        lines = LINES if cuda is None else (line_named(cuda),)
    except BuildError as error:
        _fail(error, as_json=as_json, usage=True)
    if as_json:
        _print_json(
            {
                line.version: {
                    "archs": [f"sm_{cc}" for cc in line.ccs],
                    "specific": sorted((f"sm_{name}" for name in line.specific), key=_by_number),
                    "min_driver": line.minimum_driver,
                }
                for line in lines
            }
        )
        return
    from rich.console import Console
    from rich.table import Table

    from hatch_cuda_aot.runtime.arch import format_cuda

    table = Table("CUDA", "cubins need driver", "sm_ and compute_", "with a suffix", box=None, header_style="bold")
    for line in lines:
        specific = sorted(line.specific, key=_by_number)
        driver = f"CUDA {format_cuda(line.minimum_driver)}"
        table.add_row(line.version, driver, " ".join(map(str, line.ccs)), " ".join(specific))
    Console().print(table)


def _by_number(name: str) -> tuple[int, str]:
    return int("".join(filter(str.isdigit, name))), name


def _fail(error: BuildError, *, as_json: bool, usage: bool = False) -> NoReturn:
    _show(error, as_json=as_json)
    sys.exit(2 if usage or isinstance(error, (ConfigError, SourceError, UnsupportedArchError)) else 1)


def _show(error: BuildError, *, as_json: bool, lines: bool = False) -> None:
    if as_json:
        data = {"kind": type(error).__name__, "message": str(error)}
        if isinstance(error, CompileError):
            data |= {"module": error.module, "arch": error.arch, "stage": error.stage, "log": error.log}
        _print_json({"error": data}, lines=lines)
    else:
        click.echo(f"error: {error}", err=True)


def _print_json(data: Any, *, lines: bool = False) -> None:
    """Print JSON; `lines` is for several results one after the other, each of which then is one line."""
    click.echo(json.dumps(data, indent=None if lines else 2))
