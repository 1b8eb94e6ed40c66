"""Results to the manifest: the index and one file for each module, as canonical JSON.  Pure.

`runtime/manifest.py` reads what is written here; docs/reference/manifest.schema.json describes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hatch_cuda_aot.results import Image, ModuleResult, Source
from hatch_cuda_aot.runtime.files import PART_BYTES
from hatch_cuda_aot.runtime.manifest import FORMAT, INDEX
from hatch_cuda_aot.toolchain import Toolchain

__all__ = ["MANY_MODULES", "MODULES_FOLDER", "SOURCE_FOLDER", "image_file", "manifest_files", "tree_table"]

#: Where sources lie that are shipped, beside the manifest.
SOURCE_FOLDER = "source"

#: Where the files of modules lie that are too many to lie beside the loader: Python lists a package's folder to import from
#: it, and 9,000 files delay the first kernel by 4 ms.
MODULES_FOLDER = "modules"
MANY_MODULES = 100


def manifest_files(
    package: str,
    modules: Sequence[ModuleResult],
    toolchain: Toolchain,
    version: str,
    tree: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """Return the manifest's files and the images by file name; `tree` is for a source tree only, see `tree_table`."""
    files: dict[str, bytes] = {}
    index: dict[str, Any] = {}
    kernels: dict[str, list[str]] = {}
    folder = f"{MODULES_FOLDER}/" if len(modules) > MANY_MODULES else ""
    for module in modules:
        name = f"{folder}{module.name}.json"
        files[name] = _canonical(_module_table(module, toolchain, folder))
        index[module.name] = {"file": name, **_identity(files[name])}
        files.update((folder + image_file(module.name, image), image.data) for image in module.images)
        if module.source is not None:
            files.update((f"{SOURCE_FOLDER}/{path}", content) for path, content in module.source.files)
        for kernel in module.kernels:
            kernels.setdefault(kernel.name, []).append(module.name)
    files[INDEX] = _canonical(
        {
            "format": FORMAT,
            "generator": {"name": "hatch-cuda-aot", "version": version},
            "package": package,
            "toolchain": {"cuda": toolchain.line, "nvrtc": toolchain.nvrtc, "ptxas": toolchain.ptxas},
            "modules": index,
            "kernels": {name: owners[0] if len(owners) == 1 else sorted(owners) for name, owners in kernels.items()},
            **({"tree": tree} if tree is not None else {}),
        }
    )
    return dict(sorted(files.items()))


def tree_table(root: str, sources: Mapping[str, bytes], *, rebuild: bool) -> dict[str, Any]:
    """Return what the loader must know of the source tree that it is in, to notice when a source changes.

    Args:
        root: the project's folder, relative to that of the manifest.
        sources: the files that were compiled, by path relative to the project's folder.
        rebuild: build again when one of them changed.

    """
    files = {path: _identity(content) for path, content in sources.items()}
    return {"root": root, "rebuild": rebuild, "files": files}


def image_file(module: str, image: Image) -> str:
    """Return the file name of an image, such as ``axpy.sm_90.cubin``."""
    return f"{module}.{image.arch}.{image.kind}"


def _module_table(module: ModuleResult, toolchain: Toolchain, folder: str) -> dict[str, Any]:
    table: dict[str, Any] = {
        "format": FORMAT,
        "module": module.name,
        "kernels": {
            kernel.name: {
                "symbol": kernel.symbol,
                "params": [dataclasses.asdict(param) for param in kernel.params],
                "policy": {},
            }
            for kernel in module.kernels
        },
        "globals": {name: dataclasses.asdict(variable) for name, variable in module.variables.items()},
        "images": [_image_table(module.name, image, folder) for image in module.images],
    }
    if module.source is not None:
        table["source"] = _source_table(module.source, toolchain)
    return table


def _source_table(source: Source, toolchain: Toolchain) -> dict[str, Any]:
    return {
        "main": source.main,
        "options": list(source.options),
        "ptxas": list(source.ptxas),
        "folder": SOURCE_FOLDER,
        "files": {path: _identity(content) for path, content in source.files},
        "templates": list(source.templates),
        "cuda": toolchain.line,
    }


def _image_table(module: str, image: Image, folder: str) -> dict[str, Any]:
    return {
        "arch": str(image.arch),
        "kind": image.kind,
        "file": folder + image_file(module, image),
        **_identity(image.data),
        **_parts(image.data),
        "min_driver": image.min_driver,
        "virtual": str(image.front),
        "ptx_version": image.isa.version if image.isa else None,
        "ptx_floor": image.isa.floor if image.isa else None,
        "floor_driver": image.isa.floor_driver if image.isa else None,
        "kernels": {name: dataclasses.asdict(taken) if taken else {} for name, taken in image.kernels.items()},
    }


def _identity(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _parts(content: bytes) -> dict[str, Any]:
    """Return the digests of the parts of a large file, which the loader then checks side by side."""
    if len(content) < _LARGE:
        return {}
    starts = range(0, len(content), PART_BYTES)
    return {"parts": [hashlib.sha256(content[start : start + PART_BYTES]).hexdigest() for start in starts]}


#: From this many bytes on, threads are faster than one.
_LARGE = 2 * PART_BYTES


def _canonical(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()
