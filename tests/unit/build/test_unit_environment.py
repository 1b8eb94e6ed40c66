"""Workers get no variable that a compiler could read."""

from __future__ import annotations

import os

import pytest

from hatch_cuda_aot.compile.environment import worker_environ

#: What NVRTC, nvJitLink and ptxas of 12.9 and 13.5 ask for, as an interposed getenv() saw, and what nvcc and gcc read.
READ_BY_COMPILERS = (
    *("NVRTC_APPEND_FLAGS", "NVRTC_PREPEND_FLAGS", "NVRTC_DISABLE_CONCURRENT_NVVM", "NVRTC_DISABLE_PCH"),
    *("NVRTC_PCH_HEAP_SIZE", "NVRTC_INTERNAL_GLOBAL_LOCK", "NVRTCWIZ", "EDG_BASE", "EDG_MODULES_PATH"),
    *("LLVM_OVERRIDE_PRODUCER", "LLVM_IGNORED_ENV_VAR", "LIBNVVM_NVVM_VERSION", "LIBNVVM_DISABLE_CONCURRENT_API"),
    *("NVVM_IR_VER_CHK", "NV_NVVM_VERSION", "NVJITLINK_TRACE_MESSAGES", "AS_SECURE_LOG_FILE", "bar", "PWD"),
    *("CAN_FINALIZE_DEBUG", "FINALIZER_CUBIE", "FINALIZER_USE_LEGACY_ELF_BUILDER", "DUMP_KNOBS_TO_FILE", "MAKEFLAGS"),
    *("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH", "SOURCE_DATE_EPOCH"),
    *("LANG", "LC_ALL", "LC_MESSAGES", "TZ", "USER", "LOGNAME", "CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE"),
)


#: What the build sets itself.
OURS = ("TMPDIR", "TEMP", "TMP", "GLIBC_TUNABLES")


@pytest.mark.parametrize("name", READ_BY_COMPILERS)
def test_what_workers_do_not_get(name: str) -> None:
    """No variable that a compiler reads reaches a worker."""
    assert set(worker_environ({name: "1"}, "/t")) == {*OURS}


@pytest.mark.parametrize("name", ["PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONHOME", "CUDA_HOME", "SYSTEMROOT"])
def test_what_workers_need(name: str) -> None:
    """Python, the system's loader and the search for the compiler have what they need."""
    assert worker_environ({name: "value"}, "/t")[name] == "value"


def test_temporary_files() -> None:
    """Whatever the build's own folder for temporary files is, workers use the one that the build removes."""
    given = worker_environ({"TMPDIR": "/elsewhere", "TEMP": "/other"}, "/t")
    assert {given[name] for name in ("TMPDIR", "TEMP", "TMP")} == {"/t"}


def test_large_pages() -> None:
    """The C library is asked for large pages, unless the user tunes it."""
    assert worker_environ({}, "/t")["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert worker_environ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "/t")["GLIBC_TUNABLES"].endswith("=0")


def test_the_process_environment_is_enough() -> None:
    """What is left of this process's own environment has the PATH and little else."""
    assert set(worker_environ(os.environ, "/t")) <= {*os.environ, *OURS}
    assert "PATH" in worker_environ(os.environ, "/t")
