"""Turns tables of TOML and the environment into a `Config`, or into every error that they hold, each with its place.

Knows no compiler and no hatchling; what each key takes stands in `keys`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_cuda_aot.archs import Target
from hatch_cuda_aot.compile.options import Routed, route
from hatch_cuda_aot.errors import ConfigError, Problem
from hatch_cuda_aot.keys import KEYS, MODULE_KEYS, TABLE, ItemError, Key
from hatch_cuda_aot.sources import HEADERS, expand, is_outside, relative

__all__ = [
    "ENVIRONMENT_PREFIX",
    "HOOK_TABLE",
    "Config",
    "ModuleConfig",
    "Settings",
    "load_config",
    "load_settings",
]

HOOK_TABLE = "tool.hatch.build.targets.wheel.hooks.cuda-aot"
ENVIRONMENT_PREFIX = "HATCH_CUDA_AOT_"


@dataclass(frozen=True, slots=True)
class Settings:
    """How a module is compiled.

    Attributes:
        archs: each item as parsed: targets, or a word such as ``all``.
        include_dirs: folders of the project that are searched for headers, relative to its root.
        headers: files of the project that the sources can see beyond those that ``#include`` lines lead to.
        std: the language standard.
        defines: (name, value) of each macro.
        options: the further compiler options, as each program gets them.
        prune: drop the toolkit's unused constants.
        lineinfo: keep line numbers for profilers.
        debug: compile for the debugger.
        embed_source: put the sources into the package too.
        share_front_end: which cubins are made from one front-end pass: ``"none"``, ``"major"`` or ``"all"``.

    """

    archs: tuple[tuple[Target, ...] | str, ...]
    include_dirs: tuple[str, ...]
    std: str
    defines: tuple[tuple[str, str], ...]
    options: Routed
    prune: bool
    lineinfo: bool
    debug: bool
    embed_source: bool = False
    headers: tuple[str, ...] = ()
    share_front_end: str = "none"


@dataclass(frozen=True, slots=True)
class ModuleConfig:
    """One module: the kernels of one source, or of several that are device-linked."""

    name: str
    sources: tuple[str, ...]
    kernels: tuple[str, ...]
    settings: Settings
    place: str


@dataclass(frozen=True, slots=True)
class Config:
    """A project's configuration, checked.

    Attributes:
        root: the project's folder.
        package: import name of the package that gets the kernels.
        package_dir: its folder, relative to `root`.
        cuda: ``"auto"`` or a CUDA line.
        jobs: number of worker processes; None for one a CPU.
        modules: sorted by name.
        warnings: what is odd but no error.
        editable_rebuild: an editable install builds again when a source changed.
        precompiled_headers: what many sources begin with may be precompiled.
        cache_url: where results are shared with other machines, if anywhere.
        executor: where compilations run: ``"local"`` or ``"dask"``.

    """

    root: Path
    package: str
    package_dir: str
    cuda: str
    jobs: int | None
    modules: tuple[ModuleConfig, ...]
    warnings: tuple[str, ...] = ()
    editable_rebuild: bool = False
    precompiled_headers: bool = True
    cache_url: str | None = None
    executor: str = "local"


def load_config(
    root: Path,
    table: Mapping[str, Any],
    hook_table: Mapping[str, Any],
    packages: Sequence[str],
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Check and merge the configuration.

    Args:
        root: the project's folder.
        table: ``[tool.cuda-aot]``.
        hook_table: the hook's own table, whose keys win over `table`.
        packages: the folders of the packages that the wheel ships, relative to `root`.
        environ: variables named ``HATCH_CUDA_AOT_<KEY>`` win over both; default the process's environment.

    Raises:
        ConfigError: with every problem found.

    """
    problems: list[Problem] = []
    warnings: list[str] = []
    values = _Values(problems)
    values.take(table, TABLE, KEYS)
    values.take({name: value for name, value in hook_table.items() if name not in _HATCHLING_KEYS}, HOOK_TABLE, KEYS)
    values.take_environment(os.environ if environ is None else environ, warnings)
    package, package_dir = _find_package(root, values, packages, problems)
    modules = _find_modules(root, values, problems)
    if problems:
        raise ConfigError(problems)
    return Config(
        root,
        package,
        package_dir,
        values["cuda"],
        values["jobs"],
        modules,
        tuple(warnings),
        editable_rebuild=values["editable-rebuild"],
        precompiled_headers=values["precompiled-headers"],
        cache_url=values["cache-url"],
        executor=values["executor"],
    )


def load_settings(table: Mapping[str, Any], place: str) -> Settings:
    """Check the compile keys in `table`, for a source that is no file of a project; `place` is named in messages.

    Raises:
        ConfigError: with every problem found.

    """
    problems: list[Problem] = []
    values = _Values(problems)
    values.take(table, place, [key for key in KEYS if key.per_module])
    if not problems:
        settings = _settings(Path(), values, problems, linked=False)
    if problems:
        raise ConfigError(problems)
    return settings


#: Keys that hatchling reads from a hook's table itself.
_HATCHLING_KEYS = frozenset(
    {"dependencies", "require-runtime-dependencies", "require-runtime-features", "enable-by-default"}
)

#: Variables of the prefix that other parts of the program read.
_OTHER_VARIABLES = ("CACHE", "CACHE_DIR")


class _Values:
    """Values by key, with the place that each came from; keys that nobody set answer with their default."""

    def __init__(self, problems: list[Problem], defaults: _Values | None = None) -> None:
        self._problems = problems
        self._defaults = defaults
        self._values: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        self._wrong: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        if self._defaults is not None and name in _BY_NAME:
            return self._defaults[name]
        key = _BY_NAME.get(name)
        return None if key is None or key.default is None else key.parse(key.default)

    def place(self, name: str) -> str:
        """Return where the value of a key stands."""
        if name in self._places:
            return self._places[name]
        return self._defaults.place(name) if self._defaults is not None else f"{TABLE}.{name}"

    def wrong(self, *names: str) -> bool:
        """Tell whether a value was given for one of these keys and refused."""
        return not self._wrong.isdisjoint(names)

    def take(self, table: Mapping[str, Any], place: str, keys: Sequence[Key]) -> None:
        """Read a table, noting what is wrong with it."""
        known = {key.name: key for key in keys}
        for name, value in table.items():
            if name not in known:
                self._problems.append(Problem(f"{place}.{name}", f"unknown key. {_similar(name, known)}"))
            else:
                self._set(known[name], value, f"{place}.{name}")

    def take_environment(self, environ: Mapping[str, str], warnings: list[str]) -> None:
        """Read the variables of our prefix."""
        known = {_variable(key): key for key in KEYS if key.environment}
        for variable, text in sorted(environ.items()):
            if not variable.startswith(ENVIRONMENT_PREFIX) or variable[len(ENVIRONMENT_PREFIX) :] in _OTHER_VARIABLES:
                continue
            key = known.get(variable)
            if key is None:
                names = [*known, *(ENVIRONMENT_PREFIX + name for name in _OTHER_VARIABLES)]
                warnings.append(f"the environment variable {variable} is not read. {_similar(variable, names)}")
            else:
                self._set(key, _from_environment(key, text), f"environment variable {variable}")

    def _set(self, key: Key, value: Any, place: str) -> None:
        try:
            self._values[key.name] = key.parse(value)
        except ValueError as error:
            where = f"{place} #{error.number}" if isinstance(error, ItemError) else place
            self._problems.append(Problem(where, str(error)))
            self._wrong.add(key.name)
        self._places[key.name] = place


_BY_NAME = {key.name: key for key in KEYS}


def _variable(key: Key) -> str:
    return ENVIRONMENT_PREFIX + key.name.replace("-", "_").upper()


def _from_environment(key: Key, text: str) -> Any:
    if key.environment == "list":
        return [item for item in re.split(r"[\s,;]+", text) if item]
    if key.environment == "boolean":
        return {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }.get(text.strip().lower(), text)
    return text.strip()


def _similar(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    import difflib  # which few builds need

    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known are: {', '.join(known)}"


def _find_package(root: Path, values: _Values, packages: Sequence[str], problems: list[Problem]) -> tuple[str, str]:
    shipped = [path.strip("/").replace(os.sep, "/") for path in packages]
    name = values["package"]
    if name is None:
        if len(shipped) == 1:
            return _descend(root, shipped[0])
        found = f"the wheel ships {', '.join(shipped)}" if shipped else "hatchling finds no package to ship"
        problems.append(Problem(f"{TABLE}.package", f"missing, and {found}: name the package that gets the kernels"))
        return "", ""
    first, *rest = name.split(".")
    candidates = [path for path in shipped if PurePosixPath(path).name == first]
    candidates += [first, f"src/{first}"]
    for candidate in candidates:
        folder = "/".join([candidate, *rest])
        if (root / folder).is_dir():
            return name, folder
    tried = ", ".join("/".join([candidate, *rest]) for candidate in dict.fromkeys(candidates))
    problems.append(
        Problem(values.place("package"), f"there is no folder for the package {name!r} in {root} (looked for {tried})")
    )
    return "", ""


def _descend(root: Path, shipped: str) -> tuple[str, str]:
    """Return the import name and folder of a shipped package; in a namespace package, of the one package in it."""
    name, folder = PurePosixPath(shipped).name, shipped
    while not (root / folder / "__init__.py").is_file():
        inside = [path.name for path in (root / folder).iterdir() if path.is_dir() and path.name.isidentifier()]
        if len(inside) != 1:
            break
        name, folder = f"{name}.{inside[0]}", f"{folder}/{inside[0]}"
    return name, folder


def _find_modules(root: Path, values: _Values, problems: list[Problem]) -> tuple[ModuleConfig, ...]:
    modules: list[ModuleConfig] = []
    claimed: dict[str, str] = {}
    settings = _settings(root, values, problems, linked=False)
    for number, table in enumerate(values["modules"], 1):
        place = f"{values.place('modules')} #{number}"
        module = _read_module(root, table, place, values, problems)
        if module is not None:
            modules.append(module)
            claimed.update(dict.fromkeys(module.sources, place))
    if not values["sources"] and not values["modules"] and not values.wrong("sources", "modules"):
        example = f'[{TABLE}]\nsources = ["src/my_package/kernels/*.cu"]'
        message = f"missing: there is nothing to compile. Add for instance\n{example}"
        problems.append(Problem(values.place("sources"), message))
    files, wrong = expand(root, values["sources"], values.place("sources"))
    problems += wrong
    place = values.place("sources")
    modules += [
        ModuleConfig(PurePosixPath(file).stem, (file,), (), settings, place) for file in files if file not in claimed
    ]
    _check_names(modules, problems)
    return tuple(sorted(modules, key=lambda module: module.name))


def _read_module(
    root: Path, table: Mapping[str, Any], place: str, defaults: _Values, problems: list[Problem]
) -> ModuleConfig | None:
    before = len(problems)
    values = _Values(problems, defaults)
    values.take(table, place, MODULE_KEYS)
    name: str | None = table.get("name")
    sources: list[str] = []
    if table.get("sources", []) == []:
        problems.append(Problem(f"{place}.sources", "missing: list the files that make this module"))
    elif not values.wrong("sources"):
        sources, wrong = expand(root, values["sources"], f"{place}.sources")
        problems += wrong
    if name is None and len(sources) > 1:
        problems.append(Problem(f"{place}.name", f"missing: a module of {len(sources)} files needs a name"))
    settings = _settings(root, values, problems, linked=len(sources) > 1)
    if len(problems) > before:
        return None
    kernels = values["kernels"] or ()
    return ModuleConfig(name or PurePosixPath(sources[0]).stem, tuple(sources), kernels, settings, place)


def _settings(root: Path, values: _Values, problems: list[Problem], *, linked: bool) -> Settings:
    routed, wrong = route(values["options"], linked=linked)
    place = values.place("options")
    problems += [problem for message in wrong if (problem := Problem(place, message)) not in problems]
    if linked and values["embed-source"]:
        message = (
            "has no meaning where several sources are device-linked into one module, as NVRTC alone cannot link: set it to "
            "false for this module, or put its sources into one file"
        )
        problems.append(Problem(values.place("embed-source"), message))
    folders: list[str] = []
    for number, folder in enumerate(values["include-dirs"], 1):
        where = f"{values.place('include-dirs')} #{number}"
        if is_outside(root, folder):
            problem = Problem(where, f"{folder!r} lies outside the project {root}: sdists cannot carry its headers")
        elif not (root / folder).is_dir():
            problem = Problem(where, f"there is no folder {folder!r} in {root}")
        else:
            folders.append(relative(root, folder))
            continue
        if problem not in problems:
            problems.append(problem)
    headers, wrong_headers = expand(root, values["headers"], values.place("headers"), HEADERS)
    problems += [problem for problem in wrong_headers if problem not in problems]
    return Settings(
        values["archs"],
        tuple(folders),
        values["std"],
        values["defines"],
        routed,
        values["prune"] and not values["debug"],
        values["lineinfo"] and not values["debug"],
        values["debug"],
        values["embed-source"],
        tuple(headers),
        values["share-front-end"],
    )


def _check_names(modules: Sequence[ModuleConfig], problems: list[Problem]) -> None:
    seen: dict[str, ModuleConfig] = {}
    for module in modules:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", module.name):
            problems.append(
                Problem(module.place, f"{module.name!r} cannot name a module: use letters, digits, '_', '-' and '.'")
            )
        if module.name.lower() == "manifest":
            problems.append(
                Problem(module.place, f"the name {module.name!r} is taken by the index of modules: choose another")
            )
        other = seen.setdefault(module.name.lower(), module)
        if other is not module:
            message = (
                f"two modules would be called {module.name!r}: {', '.join(other.sources)} and {', '.join(module.sources)}. "
                "Rename a file, or give one of them a `name`:\n"
                f'[[{TABLE}.modules]]\nname = "{module.name}_2"\nsources = ["{module.sources[0]}"]'
            )
            problems.append(Problem(module.place, message))
