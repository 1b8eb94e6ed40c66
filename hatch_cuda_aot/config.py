"""Turns tables of TOML and the environment into a `Config`, or into every error that they hold, each with its place.

Knows no compiler and no hatchling.  `KEYS` is the one description of the keys: validation, messages and the reference in
the docs all come from it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_cuda_aot.archs import Target, parse_spelling
from hatch_cuda_aot.compile.options import Routed, route
from hatch_cuda_aot.errors import ConfigError, Problem
from hatch_cuda_aot.sources import expand, is_outside, relative
from hatch_cuda_aot.toolchain import known_cuda_values

__all__ = [
    "DEFAULT_ARCHS",
    "ENVIRONMENT_PREFIX",
    "HOOK_TABLE",
    "KEYS",
    "TABLE",
    "Config",
    "Key",
    "ModuleConfig",
    "Settings",
    "load_config",
    "load_settings",
]

TABLE = "tool.cuda-aot"
HOOK_TABLE = "tool.hatch.build.targets.wheel.hooks.cuda-aot"
ENVIRONMENT_PREFIX = "HATCH_CUDA_AOT_"

DEFAULT_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_75", "compute_120")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a module is compiled.

    Attributes:
        archs: each item as parsed: targets, or a word such as ``all``.
        include_dirs: folders of the project that are searched for headers, relative to its root.
        std: the language standard.
        defines: (name, value) of each macro.
        options: the further compiler options, as each program gets them.
        prune: drop the toolkit's unused constants.
        lineinfo: keep line numbers for profilers.
        debug: compile for the debugger.
        embed_source: put the sources into the package too.

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

    """

    root: Path
    package: str
    package_dir: str
    cuda: str
    jobs: int | None
    modules: tuple[ModuleConfig, ...]
    warnings: tuple[str, ...] = ()


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
    return Config(root, package, package_dir, values["cuda"], values["jobs"], modules, tuple(warnings))


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


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration.

    Attributes:
        name: as written in TOML.
        type: what it takes, for people.
        default: value where it is not given, as TOML would hold it.
        doc: what it does; Markdown.
        parse: checks a TOML value and returns it in the form that the program uses; raises ValueError.
        per_module: a module may have its own value.
        environment: kind of value in the environment (``"list"``, ``"boolean"``, ``"string"``); empty if not read there.

    """

    name: str
    type: str
    default: Any
    doc: str
    parse: Callable[[Any], Any]
    per_module: bool = False
    environment: str = ""


def _string(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        message = f"is {value!r}: expected a string"
        raise ValueError(message)
    return value.strip()


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        message = f'is {value!r}: expected a list of strings, as in ["{value}"]'
        raise ValueError(message)
    return _each(value, _string)


def _each(values: Iterable[Any], parse: Callable[[Any], Any]) -> tuple[Any, ...]:
    parsed = []
    for number, value in enumerate(values, 1):
        try:
            parsed.append(parse(value))
        except ValueError as error:
            raise _ItemError(number, str(error)) from None
    return tuple(parsed)


class _ItemError(ValueError):
    """A list's item is wrong; `number` counts from 1."""

    def __init__(self, number: int, message: str) -> None:
        self.number = number
        super().__init__(message)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        message = f"is {value!r}: expected true or false"
        raise ValueError(message)
    return value


def _archs(value: Any) -> tuple[tuple[Target, ...] | str, ...]:
    names = _strings(value)
    if not names:
        message = 'is empty: expected at least one architecture, such as "sm_80"'
        raise ValueError(message)
    return _each(names, parse_spelling)


def _cuda(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        message = f'is the number {value}: expected a string, as in "{value}"'
        raise ValueError(message)
    known = known_cuda_values()
    if value not in known:
        message = f"is {value!r}: expected one of {', '.join(map(repr, known))}"
        raise ValueError(message)
    return str(value)


def _std(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"c\+\+[0-9]{2}", value):
        message = f'is {value!r}: expected a language standard such as "c++17" or "c++20"'
        raise ValueError(message)
    return value


def _defines(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        message = f"is {value!r}: expected a table, as in {{ UNROLL = 4, NDEBUG = true }}"
        raise ValueError(message)
    found = []
    for name, content in sorted(value.items()):
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            message = f"holds {name!r}, which is no name of a macro"
            raise ValueError(message)
        if not isinstance(content, (bool, int, float, str)):
            message = f"holds {name} = {content!r}: expected a string, a number, true (defined) or false (not defined)"
            raise ValueError(message)
        if content is not False:
            found.append((name, "1" if content is True else str(content)))
    return tuple(found)


def _jobs(value: Any) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        message = f'is {value!r}: expected "auto" or a number from 1'
        raise ValueError(message)
    return int(value)


def _tables(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        message = f"is {value!r}: expected tables, each headed [[{TABLE}.modules]]"
        raise ValueError(message)
    return tuple(value)


def _package(value: Any) -> str:
    name = _string(value)
    if not all(part.isidentifier() for part in name.split(".")):
        message = f'is {value!r}: expected the name by which the package is imported, such as "my_package"'
        raise ValueError(message)
    return name


KEYS: tuple[Key, ...] = (
    Key(
        "package",
        "string",
        None,
        "Import name of the package that gets `_cuda_aot/`. Default: the only package that the wheel ships.",
        _package,
    ),
    Key(
        "sources",
        "list of globs",
        [],
        "CUDA sources, relative to the project; `**` matches any number of folders. Each file becomes one module, named "
        "after its stem, unless an entry of `modules` lists it.",
        _strings,
    ),
    Key(
        "archs",
        "list of strings",
        list(DEFAULT_ARCHS),
        "Architectures to build for. `sm_XY[a|f]` makes a cubin, `compute_XY[a|f]` makes PTX, `sm_86@compute_80` makes a "
        "cubin from another front-end pass. Accepted as well: CMake's `90` (both), `90-real`, `90-virtual`; PyTorch's "
        "`9.0` (cubin) and `9.0+PTX` (both); `all` and `all-major` as nvcc means them (they need an explicit `cuda`), and "
        "`native`, the GPUs of the building machine.",
        _archs,
        per_module=True,
        environment="list",
    ),
    Key(
        "cuda",
        "string",
        "auto",
        'The CUDA line of the compiler: a minor release (`"12.9"`, `"13.0"`), or a major one (`"13"`) for its newest. '
        "`auto` takes the oldest that compiles every architecture, because its images load on more drivers.",
        _cuda,
        environment="string",
    ),
    Key(
        "include-dirs",
        "list of folders",
        [],
        "Folders of the project that are searched for headers. The toolkit's own headers need no entry.",
        _strings,
        per_module=True,
    ),
    Key("std", "string", "c++17", "The language standard.", _std, per_module=True),
    Key(
        "defines",
        "table",
        {},
        "Macros: a string or number is the value, `true` defines the macro as 1, `false` leaves it undefined.",
        _defines,
        per_module=True,
    ),
    Key(
        "options",
        "list of strings",
        [],
        "Further compiler options, as nvcc and NVRTC spell them. Each is passed to whichever of NVRTC, ptxas and nvJitLink "
        "must have it; one that could take no effect is an error.",
        _strings,
        per_module=True,
        environment="list",
    ),
    Key(
        "prune",
        "boolean",
        True,
        "Drop the hundreds of unused constants that the toolkit's headers leave in every image. Machine code and your own "
        "variables stay as they are.",
        _boolean,
        per_module=True,
        environment="boolean",
    ),
    Key(
        "lineinfo",
        "boolean",
        False,
        "Keep line numbers for profilers and compute-sanitizer (`-lineinfo`).",
        _boolean,
        per_module=True,
        environment="boolean",
    ),
    Key(
        "debug",
        "boolean",
        False,
        "Compile for cuda-gdb (`-G`): no optimisation, nothing pruned.",
        _boolean,
        per_module=True,
        environment="boolean",
    ),
    Key(
        "embed-source",
        "boolean",
        False,
        "Ship the sources and the project headers that they include, so that template instantiations which were not built, "
        "and GPUs that no image fits, are compiled where the package is used. That takes NVRTC there, which is not installed "
        "by itself. Not for modules of several sources.",
        _boolean,
        per_module=True,
    ),
    Key(
        "jobs",
        'integer or "auto"',
        "auto",
        "How many compilations run side by side. `auto` means one for each CPU that the build may use.",
        _jobs,
        environment="string",
    ),
    Key(
        "modules",
        "array of tables",
        [],
        "Modules that need more than a line in `sources`; see below.",
        _tables,
    ),
)

MODULE_KEYS: tuple[Key, ...] = (
    Key(
        "name",
        "string",
        None,
        "The module's name, which its images carry. Default: the stem of its source, where that is one file.",
        _string,
    ),
    Key(
        "sources",
        "list of globs",
        None,
        "The module's sources. Several files are compiled apart and device-linked, so that one can call functions of "
        "another (`__CUDACC_RDC__` is defined).",
        _strings,
    ),
    Key(
        "kernels",
        "list of name expressions",
        [],
        'Template instantiations to compile, such as `"axpy<float>"`. Plain kernels, `extern "C"` or not, in namespaces '
        "or not, are found by themselves.",
        _strings,
    ),
    *(key for key in KEYS if key.per_module),
)

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
            where = f"{place} #{error.number}" if isinstance(error, _ItemError) else place
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
