"""The build hook: a thin adapter between hatchling and `project`.  It decides nothing about compilation.

hatchling constructs hooks several times, also only to ask for dependencies, so nothing happens before a method is called.
"""

from __future__ import annotations

import atexit
import gc
import os
import time
from typing import TYPE_CHECKING, Any, NoReturn

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

from hatch_cuda_aot.errors import BuildError

if TYPE_CHECKING:
    from hatch_cuda_aot.config import Config
    from hatch_cuda_aot.plan import Plan
    from hatch_cuda_aot.project import Project
    from hatch_cuda_aot.scratch import Scratch

__all__ = ["CudaAotBuildHook"]


class CudaAotBuildHook(BuildHookInterface[Any]):
    """Compiles the project's CUDA sources and puts the images, the manifest and the loader into its wheel."""

    PLUGIN_NAME = "cuda-aot"

    _scratch: Scratch | None = None

    def dependencies(self) -> list[str]:
        """Return the packages that the build needs; the build frontend installs them before it."""
        if self.target_name != "wheel":
            return []
        try:
            return self._project().requirements()
        except BuildError as error:
            self._abort(error)

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling which files to add."""
        try:
            if self.target_name == "wheel":
                self._build(version, build_data)
            elif self.target_name == "sdist":
                project, config = self._configured()
                build_data["force_include"].update({str(project.root / path): path for path in project.sources(config)})
        except BuildError as error:
            self._abort(error)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 -- as above
        """Remove what only hatchling needed."""
        if self._scratch is not None:
            self._scratch.close()

    def clean(self, versions: list[str]) -> None:  # noqa: ARG002 -- the interface's signature
        """Remove what an editable build wrote into the source tree."""
        from hatch_cuda_aot.stage import remove_folder

        if self.target_name == "wheel":
            project = self._project()
            try:
                remove_folder(project.folder(project.config()))
            except BuildError as error:
                self._warn(f"nothing cleaned, as the configuration is wrong: {error}")

    def _build(self, version: str, build_data: dict[str, Any]) -> None:
        from hatch_cuda_aot.compile.starter import start_early

        with start_early(os.environ) as starter:
            from hatch_cuda_aot.scratch import Scratch
            from hatch_cuda_aot.stage import remove_leftovers, write_folder, write_new_folder

            project, config = self._configured()
            reporter = _Reporter(self.app)
            built = project.build(config, reporter, self._warn, in_tree=version == "editable", starter=starter)
        self.app.display_success(f"cuda-aot: {reporter.summary(built)}")
        for warning in project.sdist_warnings(config):
            self._warn(warning)
        build_data["tag"] = "py3-none-any"
        if version == "editable":
            write_folder(project.folder(config), built.files)
            return
        # Held by the hook, so that it outlives this method; hatchling skips finalize() after an error.
        self._scratch = Scratch()
        folder = self._scratch.path / "files"
        write_new_folder(folder, built.files)
        inside = project.wheel_folder(config)
        build_data["force_include"].update({str(folder / name): f"{inside}/{name}" for name in built.files})
        # Whatever an earlier editable build left in the tree stays out of the wheel.
        self.build_config.build_reserved_paths.update(project.stale_files(config))
        remove_leftovers(project.folder(config))

    def _configured(self) -> tuple[Project, Config]:
        project = self._project()
        config = project.config()
        for warning in config.warnings:
            self._warn(warning)
        return project, config

    def _project(self) -> Project:
        from hatchling.builders.wheel import WheelBuilder

        from hatch_cuda_aot.project import Project

        # The last collection of garbage would look at all that hatchling and we imported, only to find it in use.
        atexit.unregister(gc.freeze)
        atexit.register(gc.freeze)
        # A builder of our own: asking this one would fill caches of hatchling's before their time.
        return Project(WheelBuilder(self.root))

    def _warn(self, message: str) -> None:
        self.app.display_warning(f"cuda-aot: {message}")

    def _abort(self, error: BuildError) -> NoReturn:
        self.app.abort(f"cuda-aot: {error}")
        raise SystemExit(1)


class _Reporter:
    """Says at normal verbosity one line before and one after; each compilation and its warnings with -v."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._warnings = 0
        self._started = time.monotonic()

    def planned(self, plan: Plan, tasks: int) -> None:  # noqa: ARG002 -- the protocol's signature
        for warning in plan.warnings:
            self._app.display_warning(f"cuda-aot: {warning}")
        self._app.display_waiting(f"cuda-aot: building {plan}")

    def done(self, module: str, arch: str, step: str, log: str, *, cached: bool) -> None:
        from hatch_cuda_aot.report import count_warnings

        self._warnings += count_warnings(log)
        self._app.display_debug(f"cuda-aot: {step} {module} for {arch}{' (cached)' if cached else ''}")
        if log:
            self._app.display_debug(log)

    def summary(self, built: Any) -> str:
        from hatch_cuda_aot.report import summarise

        return summarise(built.result, built.files, self._warnings, time.monotonic() - self._started)
