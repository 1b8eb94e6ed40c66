"""Kernels in a source tree, as editable installs have them: notices that a source changed since they were built.

Only the manifest of a build into a source tree has the table ``tree`` that leads here; that of a wheel never does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from .errors import ManifestError
from .manifest import INDEX, Manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["changed_files", "up_to_date"]


def up_to_date(manifest: Manifest, logger: str) -> Manifest:
    """Return the manifest of kernels that fit their sources, or the one given, with a warning that they may not.

    Raises:
        ManifestError: if they were to be built again and that failed.

    """
    root, changed = _root(manifest), changed_files(manifest)
    if not changed:
        return manifest
    log = logging.getLogger(logger)
    command = f"hatch-cuda-aot build {shlex.quote(root)}"
    rebuild = bool((manifest.tree or {}).get("rebuild"))
    if not rebuild or not sys.executable or importlib.util.find_spec("hatch_cuda_aot") is None:
        absent = " (hatch_cuda_aot, which editable-rebuild needs, is not installed here)" if rebuild else ""
        words = "%s after the kernels of %s were built; build them again with: %s%s"
        log.warning(words, _words(changed), manifest.package, command, absent)
        return manifest
    # Of many processes that start at once, one builds and the others take what it made.  The build puts another folder in
    # the place of this one, so whoever comes later waits for nobody; it locks the folder around it itself.
    with _locked(manifest.folder):
        manifest = Manifest.read(manifest.folder)
        changed = changed_files(manifest)
        if changed:
            _rebuild(manifest, root, changed, command, log)
            manifest = Manifest.read(manifest.folder)
    return manifest


def changed_files(manifest: Manifest) -> list[str]:
    """Return what was done to the files that the kernels were built from, one phrase for each that changed.

    Contents are compared, so that a file which was only touched, or checked out again, does not count.  Where the project
    itself is not there, nothing is known and nothing is said.
    """
    tree: Mapping[str, Any] | None = manifest.tree
    root = _root(manifest)
    if tree is None or not os.path.isfile(os.path.join(root, "pyproject.toml")):
        return []
    found = []
    for path, entry in sorted(tree["files"].items()):
        try:
            with open(os.path.join(root, path), "rb") as file:
                content = file.read()
        except FileNotFoundError:
            found.append(f"{path} was removed")
        except OSError:
            continue  # what cannot be read cannot be built either; that build will say so
        else:
            if len(content) != entry["size"] or sha256(content).hexdigest() != entry["sha256"]:
                found.append(f"{path} changed")
    return found


def _root(manifest: Manifest) -> str:
    root = (manifest.tree or {}).get("root", "")
    return os.path.normpath(os.path.join(manifest.folder, root))


def _words(changed: list[str]) -> str:
    shown = ", ".join(changed[:3])
    return shown + (f" and {len(changed) - 3} more files" if len(changed) > 3 else "")


def _rebuild(manifest: Manifest, root: str, changed: list[str], command: str, log: logging.Logger) -> None:
    """Build in a process of its own, which shares no state with the program that only wants its kernels."""
    started = time.monotonic()
    code = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from hatch_cuda_aot.cli import main; main()"
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    done = subprocess.run(
        [sys.executable, "-c", code, path, "build", root, "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        words = "%s: built the kernels of %s again in %.1f s"
        log.info(words, _words(changed), manifest.package, time.monotonic() - started)
        return
    try:
        refused = json.loads(done.stdout)["error"]["message"]
    except (ValueError, KeyError, TypeError):  # it did not come to that
        refused = done.stderr.strip() or f"it ended with {done.returncode}"
    message = f"{_words(changed)}, and building the kernels of {manifest.package} again ({command}) failed: {refused}"
    raise ManifestError(message, os.path.join(manifest.folder, INDEX))


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold a lock on `folder`; where the system has none, or refuses it, go on without."""
    descriptor = None
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except (ImportError, OSError):
        pass
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
