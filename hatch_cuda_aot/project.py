"""One project on disk: reads its configuration through hatchling, builds it, and gives the files that its package gets.

The hook and the command line share this; it decides nothing about compilation and prints nothing.  Build frontends ask for
the requirements in a process of its own, so what only a build needs is imported there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hatchling.builders.wheel import WheelBuilder

from hatch_cuda_aot._version import __version__
from hatch_cuda_aot.config import HOOK_TABLE, Config, load_config
from hatch_cuda_aot.errors import ConfigError, Problem
from hatch_cuda_aot.native import visible_ccs
from hatch_cuda_aot.plan import Module, needs_of, select_line
from hatch_cuda_aot.sources import read_tree
from hatch_cuda_aot.stage import FOLDER, runtime_files
from hatch_cuda_aot.toolchain import check_platform, requirements

if TYPE_CHECKING:
    from hatchling.builders.sdist import SdistBuilder

    from hatch_cuda_aot.build import BuildResult, Reporter
    from hatch_cuda_aot.compile.starter import Starter

__all__ = ["Built", "Project"]

HOOK = "cuda-aot"

#: What the loader imports at run time, and what else may bring it along.
_RUNTIME_REQUIREMENTS = {
    "cuda-core": (),
    "cuda-bindings": ("cuda-python", "cuda-core[cu12]", "cuda-core[cu13]"),
    "platformdirs": (),
}


@dataclass(frozen=True, slots=True)
class Built:
    """A finished build: the files of ``_cuda_aot/`` by name, and what was done for them."""

    files: dict[str, bytes]
    result: BuildResult


class Project:
    """A project with ``[tool.cuda-aot]`` in its pyproject.toml."""

    def __init__(self, builder: WheelBuilder) -> None:
        self._builder = builder
        self.root = Path(builder.root)

    @classmethod
    def at(cls, root: Path) -> Project:
        """Return the project in the folder `root`.

        Raises:
            ConfigError: if there is none, hatchling cannot read it, or its wheel target does not use the hook.

        """
        if not (root / "pyproject.toml").is_file():
            raise ConfigError([Problem(str(root), "there is no pyproject.toml here: run this in a project's folder")])
        project = cls(WheelBuilder(str(root)))
        try:
            hooks = project._builder.config.hook_config
            _ = project._builder.config.packages, project._builder.metadata.core.dependencies
        except (TypeError, ValueError) as error:  # it is no TOML, or a table of hatchling's has the wrong type
            raise ConfigError([Problem("pyproject.toml", str(error))]) from error
        if HOOK not in hooks:
            message = (
                f"missing: without it hatchling never runs the hook, and wheels have no kernels. Add\n[{HOOK_TABLE}]"
            )
            raise ConfigError([Problem(f"[{HOOK_TABLE}]", message)])
        return project

    def config(self) -> Config:
        """Read and check the configuration.

        Raises:
            ConfigError: with every problem found.

        """
        raw = self._builder.metadata.config.get("tool", {}).get("cuda-aot", {})
        hook = self._builder.config.hook_config.get(HOOK, {})
        return load_config(self.root, raw, hook, self._packages())

    def requirements(self) -> list[str]:
        """Return what a build of this project needs: the compiler or what leads to a cluster's, and the shared cache's."""
        config = self.config()
        shared = _sharing(config)
        if config.executor == "dask":
            from hatch_cuda_aot.compile.dask_pool import REQUIREMENTS

            return [*REQUIREMENTS, *shared]
        check_platform()
        line = select_line(config.cuda, config.modules, visible_ccs)
        return [*requirements(line, needs_of(_modules(config))), *shared]

    def build(
        self,
        config: Config,
        reporter: Reporter,
        warn: Callable[[str], None],
        *,
        in_tree: bool = False,
        starter: Starter | None = None,
    ) -> Built:
        """Compile everything and return the files of ``_cuda_aot/``.

        Args:
            config: what to build.
            reporter: hears what happens.
            warn: hears of trouble that stops no build.
            in_tree: the files are for the source tree, where the loader is to notice when a source changes.
            starter: starts the workers; by default one of the build's own.

        Raises:
            BuildError: whatever is wrong.

        """
        from hatch_cuda_aot.build import build_project
        from hatch_cuda_aot.cache import open_cache
        from hatch_cuda_aot.manifest import manifest_files, tree_table

        self._check_runtime_requirements()
        result = build_project(config, reporter, open_cache(url=config.cache_url, warn=warn), starter)
        tree = None
        if in_tree:
            root = os.path.relpath(self.root, self.folder(config)).replace(os.sep, "/")
            tree = tree_table(root, result.sources, rebuild=config.editable_rebuild)
        files = manifest_files(config.package, result.modules, result.toolchain, __version__, tree)
        names = {kernel.name for module in result.modules for kernel in module.kernels}
        return Built({**runtime_files(names), **files}, result)

    def sources(self, config: Config) -> list[str]:
        """Return every file that a build reads, relative to the root: what an sdist must carry."""
        return sorted({path for module in _modules(config) for path, _ in module.tree.files})

    def folder(self, config: Config) -> Path:
        """Return ``_cuda_aot/`` in the source tree."""
        return self.root / config.package_dir / FOLDER

    def wheel_folder(self, config: Config) -> str:
        """Return ``_cuda_aot/`` as a path in the wheel."""
        inside = self._builder.config.get_distribution_path(f"{config.package_dir}/")
        return f"{inside.rstrip('/')}/{FOLDER}".replace("\\", "/")

    def stale_files(self, config: Config) -> set[str]:
        """Return what lies in ``_cuda_aot/`` of the source tree, as paths in the wheel."""
        folder = self.folder(config)
        inside = self.wheel_folder(config)
        return {f"{inside}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.is_file()}

    def sdist_warnings(self, config: Config) -> list[str]:
        """Say which sources and headers the project's sdist would lack; a wheel could not be built from it."""
        if (self.root / "PKG-INFO").is_file():  # this is an sdist, unpacked
            return []
        from hatchling.builders.sdist import SdistBuilder

        sdist = SdistBuilder(str(self.root))
        if HOOK in sdist.config.hook_config:  # then the hook adds them itself
            return []
        lacking = [path for path in self.sources(config) if not _ships(sdist, path)]
        if not lacking:
            return []
        shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        return [f"the sdist will lack {shown}: add them to [tool.hatch.build.targets.sdist]"]

    def _packages(self) -> list[str]:
        try:
            return list(self._builder.config.packages) or list(self._builder.config.default_packages())
        except ValueError:  # hatchling finds nothing to ship; it says so itself when it builds
            return []

    def _check_runtime_requirements(self) -> None:
        core = self._builder.metadata.core
        declared = [*core.dependencies, *(item for group in core.optional_dependencies.values() for item in group)]
        missing = _missing_requirements(declared)
        if missing:
            lines = "\n".join(f'    "{name}",' for name in missing)
            message = (
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing, which the loader in the built package "
                f"imports. Add\n[project]\ndependencies = [\n{lines}\n]"
            )
            raise ConfigError([Problem("project.dependencies", message)])


def _ships(sdist: SdistBuilder, path: str) -> bool:
    only = sdist.config.only_include
    if only and not any(path == start or path.startswith(f"{start}/") for start in only):
        return False
    return bool(sdist.config.include_path(path, explicit=bool(only)))


def _sharing(config: Config) -> list[str]:
    """Return the packages that lead to the shared cache, if there is one."""
    if config.cache_url is None:
        return []
    from hatch_cuda_aot.locations import is_off
    from hatch_cuda_aot.storage import packages_for

    return [] if is_off(os.environ) else packages_for(config.cache_url)


def _modules(config: Config) -> list[Module]:
    return [
        Module(module, read_tree(config.root, module.sources, module.settings.include_dirs, module.settings.headers))
        for module in config.modules
    ]


def _missing_requirements(declared: Iterable[str]) -> list[str]:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    present: set[str] = set()
    for text in declared:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        name = canonicalize_name(requirement.name)
        present.update((str(name), *(f"{name}[{extra}]" for extra in requirement.extras)))
    return [
        name for name, others in _RUNTIME_REQUIREMENTS.items() if name not in present and present.isdisjoint(others)
    ]
