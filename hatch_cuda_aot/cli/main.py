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
@_JSON
def build(folder: Path, *, verbose: bool, as_json: bool) -> None:
    """Compile the kernels of the project in FOLDER into its source tree, where an editable install finds them."""
    from hatch_cuda_aot.cli.progress import Progress
    from hatch_cuda_aot.project import Project
    from hatch_cuda_aot.report import summarise
    from hatch_cuda_aot.stage import write_folder

    try:
        project = Project.at(folder.resolve())
        config = project.config()
        for warning in config.warnings:
            click.echo(f"warning: {warning}", err=True)
        with Progress(verbose=verbose, silent=as_json) as progress:
            built = project.build(config, progress, progress.warn)
        target = project.folder(config)
        write_folder(target, built.files)
    except BuildError as error:
        _fail(error, as_json=as_json)
    if as_json:
        _print_json({"folder": str(target), "files": {name: len(data) for name, data in built.files.items()}})
        return
    click.echo(summarise(built.result, built.files, progress.warnings))
    click.echo(f"written to {target}")


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
    if as_json:
        data = {"kind": type(error).__name__, "message": str(error)}
        if isinstance(error, CompileError):
            data |= {"module": error.module, "arch": error.arch, "stage": error.stage, "log": error.log}
        _print_json({"error": data})
    else:
        click.echo(f"error: {error}", err=True)
    sys.exit(2 if usage or isinstance(error, (ConfigError, SourceError, UnsupportedArchError)) else 1)


def _print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2))
