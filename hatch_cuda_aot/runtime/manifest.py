"""Reads the manifest: which kernels there are, and which images hold them.

The index (``manifest.json``) maps each kernel's name to its module; all else stands in one file per module, which is
read when a kernel of it is first asked for.  Nothing here walks all names of the index: a lookup is a dict hit, so that
a package of 10,000 kernels opens as fast as a package of one.  This module knows nothing of devices and loads no image.

Values are named tuples here and in the other modules that the first kernel of a process needs: each dataclass would
delay it by half a millisecond, which is more than the loading of a kernel takes.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from .arch import Arch
from .errors import KernelNotFoundError, ManifestError, VariableNotFoundError
from .files import DamagedError, read_verified
from .index import scan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FORMAT", "INDEX", "Global", "Image", "Kernel", "Manifest", "ModuleManifest", "Param", "canonical_name"]

#: The manifest format that this module reads.
FORMAT = 1

#: The name of the index file.
INDEX = "manifest.json"


class Manifest:
    """The index of a package's kernels.

    Attributes:
        folder: where the manifest and the images lie.
        package: the import package that they were built for.
        toolchain: versions of the compiler, such as ``{"cuda": "12.9", "nvrtc": "12.9", "ptxas": "12.9.86"}``.
        kernels: canonical kernel name -> the module that defines it, or a list of modules.
        modules: module name -> ``{"file": ..., "size": ..., "sha256": ...}`` of its own manifest.
        tree: in a source tree, what the kernels were built from; None in wheels.

    """

    def __init__(self, folder: str, data: Mapping[str, Any]) -> None:
        """Wrap the parsed index `data` of `folder`.

        Raises:
            KeyError: if a table is missing.

        """
        self.folder = folder
        self.package: str = data["package"]
        self.toolchain: Mapping[str, str] = data["toolchain"]
        self.kernels: Mapping[str, str | list[str]] = data["kernels"]
        self.modules: Mapping[str, Any] = data["modules"]
        self.tree: Mapping[str, Any] | None = data.get("tree")
        self._read: dict[str, ModuleManifest] = {}

    @classmethod
    def read(cls, folder: str) -> Manifest:
        """Read the index in `folder`.

        Raises:
            ManifestError: if it is missing, damaged or of another format.

        """
        path = os.path.join(folder, INDEX)
        try:
            with open(path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            raise ManifestError(_missing_index(path), path) from None
        except OSError as error:
            message = f"{path} cannot be read: {error.strerror or error}"
            raise ManifestError(message, path) from error
        try:
            return cls(folder, scan(content, path) or _parse(content, path))
        except KeyError as error:
            raise ManifestError(_damaged(path, f"it has no {error}"), path) from error

    def find(self, name: str) -> tuple[ModuleManifest, Kernel]:
        """Return the kernel that `name` addresses, and its module.

        `name` is the kernel's name (spacing between tokens is ignored), ``module:name``, or its symbol.

        Raises:
            KernelNotFoundError: if no kernel has that name, or kernels of several modules have.
            ManifestError: if the manifest is damaged.

        """
        modules, key = self._locate(name)
        if not modules:
            raise self._not_found(name)
        if len(modules) > 1:
            forms = [f"{module}:{key}" for module in modules]
            message = f"{len(modules)} modules define the kernel {name!r}: say which one with {_words(forms)}"
            raise KernelNotFoundError(message, name, forms, ambiguous=True)
        module = self.module(modules[0])
        return module, module.kernel(key)

    def find_variable(self, name: str) -> tuple[ModuleManifest, Global]:
        """Return the variable that `name` addresses, and its module.

        `name` is the variable's name as in the source, ``module:name``, or its symbol.  The index has no variables, so
        without a module every module is read.

        Raises:
            VariableNotFoundError: if no variable has that name, or variables of several modules have.
            KernelNotFoundError: if the module that `name` says does not exist.
            ManifestError: if the manifest is damaged.

        """
        only, colon, rest = name.partition(":")
        if not colon or rest.startswith(":"):
            only, rest = "", name
        key = canonical_name(rest)
        modules = [self.module(module) for module in ([only.strip()] if only else sorted(self.modules))]
        found = [(module, variable) for module in modules if (variable := module.variable(key)) is not None]
        if len(found) == 1:
            return found[0]
        if found:
            forms = [f"{module.name}:{variable.name}" for module, variable in found]
            message = f"{len(found)} modules have a variable {name!r}: say which one with {_words(forms)}"
            raise VariableNotFoundError(message, name, forms, ambiguous=True)
        known = {variable: None for module in modules for variable in module.globals}
        close = _close(key, known)
        hint = _did_you_mean(close) or (
            f"; there are {', '.join(sorted(known)[:8])}" if known else ": it has none at all"
        )
        where = f"module {modules[0].name!r}" if only else self.package
        raise VariableNotFoundError(f"{where} has no variable {key!r}{hint}", name, close)

    def module(self, name: str) -> ModuleManifest:
        """Return the manifest of the module `name`, read from its file the first time.

        Raises:
            KernelNotFoundError: if there is no such module.
            ManifestError: if the file is missing, damaged or of another format.

        """
        module = self._read.get(name)
        if module is None:
            if name not in self.modules:
                close = _close(name, self.modules)
                message = f"there is no module {name!r}{_did_you_mean(close)}"
                raise KernelNotFoundError(message, name, close)
            module = self._read.setdefault(name, ModuleManifest.read(self.folder, name, self.modules[name]))
        return module

    def kernel_names(self) -> list[str]:
        """Return the name of every kernel, sorted; ``module:name`` where several modules define the name."""
        names = []
        for name, modules in self.kernels.items():
            if isinstance(modules, str):
                names.append(name)
            else:
                names += [f"{module}:{name}" for module in modules]
        return sorted(names)

    def _locate(self, name: str) -> tuple[list[str], str]:
        """Return the modules that define `name`, and the canonical name under which they do."""
        found = self.kernels.get(name)
        key = name
        if found is None:
            key = canonical_name(name)
            found = self.kernels.get(key)
        if found is not None:
            return ([found] if isinstance(found, str) else found), key
        module, colon, rest = name.partition(":")
        if colon and not rest.startswith(":"):
            manifest, key = self.module(module.strip()), canonical_name(rest)
            actual = key if key in manifest.kernels else manifest.name_of_symbol(key)
            return ([manifest.name], actual) if actual is not None else ([], key)
        if key.replace("$", "_").replace(".", "_").isidentifier():
            # The index has no symbols (they would double it), so a name that is none costs a look into every module.
            modules = {module: self.module(module).name_of_symbol(key) for module in self.modules}
            holders = {module: actual for module, actual in modules.items() if actual is not None}
            if len(holders) == 1:
                return list(holders), next(iter(holders.values()))
            return sorted(holders), key
        return [], key

    def _not_found(self, name: str) -> KernelNotFoundError:
        close = _close(canonical_name(name), self.kernels)
        if close:
            hint = _did_you_mean(close)
        elif self.kernels:
            hint = "; kernel_names() lists those there are"
        else:
            hint = ": it has none at all"
        return KernelNotFoundError(f"{self.package} has no kernel {name!r}{hint}", name, close)


class ModuleManifest(NamedTuple):
    """The kernels, variables and images of one module.

    Attributes:
        name: the module.
        path: the file that this was read from.
        images: its images, in the manifest's order, which means nothing.
        kernels: canonical name -> the kernel's raw entry; `kernel` returns it as a value.
        globals: name -> the raw entry of a ``__constant__`` or ``__device__`` variable.
        source: the raw table of the source that the package carries for it, or None.

    """

    name: str
    path: str
    images: tuple[Image, ...]
    kernels: Mapping[str, Any]
    globals: Mapping[str, Any]
    source: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, folder: str, name: str, entry: Mapping[str, Any]) -> ModuleManifest:
        """Read the module `name` from the file that `entry` of the index names, size and digest checked.

        Raises:
            ManifestError: if the file is missing, differs from the one that was built, or is of another format.

        """
        try:
            path, size, digest = os.path.join(folder, entry["file"]), entry["size"], entry["sha256"]
        except (KeyError, TypeError) as error:
            path = os.path.join(folder, INDEX)
            raise ManifestError(_damaged(path, f"its entry of module {name!r} is incomplete"), path) from error
        try:
            content = read_verified(path, size, digest)
        except DamagedError as error:
            raise ManifestError(f"{error}; reinstall the package", path) from error
        data = _parse(content, path)
        try:
            images = tuple(Image.from_json(image) for image in data["images"])
            return cls(name, path, images, data["kernels"], data.get("globals", {}), data.get("source"))
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(_damaged(path, f"{type(error).__name__}: {error}"), path) from error

    def kernel(self, name: str) -> Kernel:
        """Return the kernel of the canonical `name`.

        Raises:
            ManifestError: if the index promises it and the module does not have it.

        """
        try:
            return Kernel.from_json(name, self.kernels[name])
        except (KeyError, TypeError) as error:
            message = _damaged(self.path, f"its entry of kernel {name!r} is missing or incomplete")
            raise ManifestError(message, self.path) from error

    def name_of_symbol(self, symbol: str) -> str | None:
        """Return the canonical name of the kernel whose lowered name is `symbol`, or None."""
        for name, entry in self.kernels.items():
            if entry["symbol"] == symbol:
                return name
        return None

    def variable(self, name: str) -> Global | None:
        """Return the variable whose name or symbol is `name`, or None if the module has none."""
        if name not in self.globals:
            name = next((other for other, entry in self.globals.items() if entry["symbol"] == name), name)
        entry = self.globals.get(name)
        return None if entry is None else Global(name, entry["symbol"], entry["space"], entry["size"], entry["align"])


class Kernel(NamedTuple):
    """One kernel: a name expression with the symbol that it was lowered to.

    Attributes:
        name: canonical name, such as ``axpy<float>``.
        symbol: the name in the images, such as ``_Z4axpyIfEvT_PKS0_PS0_i``.
        params: its parameters in order.
        policy: launch metadata of the package's author, as it was written.

    """

    name: str
    symbol: str
    params: tuple[Param, ...] = ()
    policy: Mapping[str, Any] = {}

    @classmethod
    def from_json(cls, name: str, entry: Mapping[str, Any]) -> Kernel:
        """Return the kernel of a module's raw `entry`."""
        params = tuple([Param(item["kind"], item["size"], item["offset"]) for item in entry["params"]])
        return cls(name, entry["symbol"], params, entry.get("policy") or {})


class Param(NamedTuple):
    """One kernel parameter.

    Attributes:
        kind: its PTX type (``u8`` … ``u64``, ``s8`` … ``s64``, ``f32``, ``f64``, ``b8`` … ``b64``) or ``"struct"``.
        size: in bytes.
        offset: in bytes from the start of the parameter block.

    """

    kind: str
    size: int
    offset: int


class Image(NamedTuple):
    """One compiled form of a module: a cubin for one real architecture, or PTX of one virtual architecture.

    Attributes:
        arch: what it was compiled for.
        file: its file name, next to the manifest.
        size: of the file, in bytes.
        sha256: of the file, in lower-case hex.
        min_driver: lowest CUDA version of a driver that takes it, as ``cuDriverGetVersion`` counts (13000 for 13.0).
        virtual: the architecture of the front-end pass, such as ``compute_80`` for ``sm_86@compute_80``.
        ptx_version: the PTX's ``.version``, such as ``"8.8"``; None for a cubin.
        ptx_floor: the lowest ``.version`` under which the PTX still assembles, or None where it was not established.
        floor_driver: lowest CUDA version of a driver that takes the PTX with `ptx_floor` as its ``.version``, or None.
        kernels: canonical name of each kernel that it holds -> resources per thread or block (registers; shared, local
            and spill bytes), empty for PTX.
        parts: of a large file, the SHA-256 of each `files.PART_BYTES` of it, in order.

    """

    arch: Arch
    file: str = ""
    size: int = 0
    sha256: str = ""
    min_driver: int = 0
    virtual: str | None = None
    ptx_version: str | None = None
    ptx_floor: str | None = None
    floor_driver: int | None = None
    kernels: Mapping[str, Mapping[str, int]] = {}
    parts: Sequence[str] = ()

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Image:
        """Return the image of a module's raw `entry`.

        Raises:
            KeyError: if a key is missing.
            ValueError: if the architecture is none, or contradicts the kind.

        """
        image = cls(
            Arch.parse(entry["arch"]),
            entry["file"],
            entry["size"],
            entry["sha256"],
            entry["min_driver"],
            entry.get("virtual"),
            entry.get("ptx_version"),
            entry.get("ptx_floor"),
            entry.get("floor_driver"),
            entry["kernels"],
            entry.get("parts", ()),
        )
        if entry["kind"] != image.kind:
            message = f"{image.file} is called {entry['kind']} and {image.arch} is for {image.kind}"
            raise ValueError(message)
        return image

    @property
    def kind(self) -> str:
        """``"ptx"`` for a virtual architecture, ``"cubin"`` for a real one."""
        return "ptx" if self.arch.virtual else "cubin"


class Global(NamedTuple):
    """One variable that the host can set or read.

    Attributes:
        name: as it is written in the source.
        symbol: the name in the images.
        space: ``"const"`` (``__constant__``) or ``"global"`` (``__device__``).
        size: in bytes.
        align: in bytes.

    """

    name: str
    symbol: str
    space: str
    size: int
    align: int


def canonical_name(name: str) -> str:
    """Return a kernel's name without the blanks that mean nothing: ``axpy< float >`` becomes ``axpy<float>``.

    Two words keep one blank between them (``unsigned int``); every other token joins its neighbours.
    """
    parts: list[str] = []
    after_word = False
    for token in re.findall(r"[\w$]+|::|\S", name):
        word = token[0].isalnum() or token[0] in "_$"
        if word and after_word:
            parts.append(" ")
        parts.append(token)
        after_word = word
    return "".join(parts)


def _parse(content: bytes | bytearray, path: str) -> dict[str, Any]:
    """Return the JSON object in `content`, of a format that this module reads."""
    import json

    try:
        data = json.loads(content)
    except ValueError as error:
        raise ManifestError(_damaged(path, str(error)), path) from error
    if not isinstance(data, dict) or "format" not in data:
        raise ManifestError(_damaged(path, "it is not a manifest of hatch-cuda-aot"), path)
    if data["format"] != FORMAT:
        message = (
            f"{path} is of format {data['format']!r}, and the loader beside it reads format {FORMAT}: files of two "
            "builds are mixed; reinstall the package"
        )
        raise ManifestError(message, path)
    return data


def _missing_index(path: str) -> str:
    return (
        f"there are no compiled kernels here: {path} does not exist.\n"
        "Installed from a wheel: the wheel was built without them. Hatchling runs the hook only if the project's "
        "pyproject.toml has the table\n"
        "    [tool.hatch.build.targets.wheel.hooks.cuda-aot]\n"
        "(it may be empty); add it and build the wheel again.\n"
        "Editable install or source tree: run `hatch-cuda-aot build` in the project."
    )


def _damaged(path: str, what: str) -> str:
    return f"{path} is damaged: {what}; reinstall the package"


def _close(name: str, names: Mapping[str, object]) -> list[str]:
    import difflib

    close = difflib.get_close_matches(name, names, n=4, cutoff=0.6)
    # An instantiation that was not built resembles its siblings less than its own template's name suggests.
    stem = name.partition("<")[0]
    siblings = sorted(other for other in names if other not in close and other.partition("<")[0] == stem)
    return close + siblings[: 8 - len(close)]


def _did_you_mean(names: list[str]) -> str:
    return f"; did you mean {_words(names, last='or')}?" if names else ""


def _words(names: list[str], last: str = "or") -> str:
    quoted = [repr(name) for name in names]
    return f"{', '.join(quoted[:-1])} {last} {quoted[-1]}" if len(quoted) > 1 else quoted[0]
