"""The keys of the configuration: what each is called, takes and means.

`KEYS` is the one description of them: validation, messages and the reference in the docs all come from it.  A parser takes
one value of TOML and knows nothing of where it stands.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hatch_cuda_aot.archs import SHARING, Target, parse_spelling
from hatch_cuda_aot.toolchain import known_cuda_values

__all__ = ["DEFAULT_ARCHS", "KEYS", "MODULE_KEYS", "TABLE", "ItemError", "Key"]

TABLE = "tool.cuda-aot"

DEFAULT_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_75", "compute_120")


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
            raise ItemError(number, str(error)) from None
    return tuple(parsed)


class ItemError(ValueError):
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


def _sharing(value: Any) -> str:
    if value not in SHARING:
        message = f"is {value!r}: expected one of {', '.join(map(repr, SHARING))}"
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


def _cache_url(value: Any) -> str | None:
    if value == "":
        return None
    text = _string(value)
    well_formed = re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://\S+", text) is not None
    with contextlib.suppress(ValueError):
        if well_formed and urlsplit(text):
            return text
    message = f'is {value!r}: expected a URL such as "s3://bucket/prefix", "https://host/path" or "file:///folder"'
    raise ValueError(message)


def _executor(value: Any) -> str:
    if value not in ("local", "dask"):
        message = f'is {value!r}: expected "local" or "dask"'
        raise ValueError(message)
    return str(value)


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
        "share-front-end",
        "string",
        "none",
        "Which cubins are made from one pass of the front end, where most of a build's time goes. `major`: those of one "
        "major version, as if `sm_86` were written `sm_86@compute_80`; the lowest of them gives the pass. `all`: all of "
        "them. The code then sees the lowest architecture in `__CUDA_ARCH__`: what stands under `#if __CUDA_ARCH__ >= 860` "
        "is not in the cubin for `sm_86`; see [Share front ends](../how-to/share-front-ends.md). PTX, architectures with "
        "`a` or `f`, and those written with `@` keep their own.",
        _sharing,
        per_module=True,
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
    Key(
        "headers",
        "list of globs",
        [],
        "Headers that the search for `#include` lines cannot find, relative to the project: those that are included through "
        "a macro, or only by a header of the toolkit. With them come the headers that they include. All other headers of "
        "the project are found by themselves.",
        _strings,
        per_module=True,
    ),
    Key("std", "string", "c++17", "The language standard.", _std, per_module=True),
    Key(
        "defines",
        "table",
        {},
        "Macros: a string or number is the value, `true` defines the macro as 1, `false` leaves it undefined. "
        "`_CCCL_META_UNROLL_LIMIT` is defined as 10, as for nvcc, unless you set it here or in a source.",
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
        "editable-rebuild",
        "boolean",
        False,
        "For editable installs: when a source or header changed since the build, the first use of a kernel in a process "
        "builds again. Without it a warning names the file. Wheels are not concerned.",
        _boolean,
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
        "precompiled-headers",
        "boolean",
        True,
        "Where six or more sources begin with the same directives, have each worker read what those include once for each "
        "architecture (160 MB more of memory and of disk for a worker). Results are the same.",
        _boolean,
    ),
    Key(
        "cache-url",
        "URL",
        "",
        "Where compiled results are shared with other machines: `s3://bucket/prefix`, `https://host/path` (read only), "
        "`file:///folder`, or any other protocol of fsspec. Empty means nowhere. See [share the "
        "cache](../how-to/share-the-cache.md).",
        _cache_url,
        environment="string",
    ),
    Key(
        "executor",
        "string",
        "local",
        'Where compilations run. `"local"`: in processes of this machine. `"dask"`: on the workers of a Dask cluster, whose '
        "address Dask's own configuration holds, for instance in `DASK_SCHEDULER_ADDRESS`; `jobs` has no meaning then. See "
        "[build on many machines](../how-to/build-on-many-machines.md).",
        _executor,
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
