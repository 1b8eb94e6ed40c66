"""Which variables of the environment a worker process gets.

NVRTC, nvJitLink and ptxas read some that change what they write: ``NVRTC_APPEND_FLAGS`` (12.9), ``LLVM_OVERRIDE_PRODUCER``
and a dozen without documentation.  No key of a result knows of them, so workers get only what is listed here: what Python
and the system's loader need, and what leads to the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["worker_environ"]

_NAMES = frozenset(
    {
        *("PATH", "HOME", "VIRTUAL_ENV", "GLIBC_TUNABLES"),
        *("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CONDA_PREFIX"),  # where cuda.pathfinder looks
        *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "OS", "HOMEDRIVE", "HOMEPATH", "USERPROFILE"),
        *("APPDATA", "LOCALAPPDATA", "PROGRAMDATA", "NUMBER_OF_PROCESSORS"),
    }
)
_PREFIXES = ("PYTHON", "LD_", "DYLD_", "NIX_", "PROGRAMFILES", "COMMONPROGRAMFILES", "PROCESSOR_")

#: What each system calls the variable that names the folder for temporary files.
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")


def worker_environ(environ: Mapping[str, str], temporary: str) -> dict[str, str]:
    """Return the environment of a worker that keeps its temporary files in the folder `temporary`.

    Compilers take hundreds of megabytes.  In large pages, where the system has them to give, that is a tenth of their time
    less on many cores.
    """
    kept = {name: value for name, value in environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **kept, **dict.fromkeys(_TEMPORARY, temporary)}
