"""Starts worker processes: forks of one that has loaded the compiler, or where that cannot be, one by one.

The process that forks can be started before the build knows what to compile: it takes as long to start as a small project
takes to be read.  So this imports little.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from hatch_cuda_aot.compile.environment import worker_environ
from hatch_cuda_aot.locations import has_compilers
from hatch_cuda_aot.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from hatch_cuda_aot.compile.forkserver import ForkedProcess, ForkServer
    from hatch_cuda_aot.compile.tasks import Compiler

__all__ = ["Starter", "default_jobs", "start_early"]

#: Starts a worker that finds modules where this process does, also in the isolated environments of build frontends.
_START = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from hatch_cuda_aot.compile.worker import main
main()
"""

#: The same for the process that forks workers.
_START_SERVER = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from hatch_cuda_aot.compile.forkserver import serve
serve()
"""


class Starter:
    """Starts worker processes, all with the same new folder for temporary files; leaving its context ends it.

    Args:
        fork: fork them, where that can be done.

    Attributes:
        forks: they are forked from one process that has loaded the compiler.

    """

    def __init__(self, *, fork: bool) -> None:
        # On macOS forks of processes that loaded system libraries are unsafe.
        self.forks = fork and sys.platform == "linux"
        self._server: ForkServer | None = None
        self._scratch: Scratch | None = None
        self._lock = threading.RLock()

    def prepare(self) -> None:
        """Start the process that forks, if there is to be one, which then waits to be told what to load."""
        from hatch_cuda_aot.compile.forkserver import ForkServer

        with self._lock:
            if self.forks and self._server is None:
                self._server = ForkServer(lambda stdin: self._launch(_START_SERVER, stdin, subprocess.DEVNULL))

    def start(self, compiler: Compiler) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start one that shall use `compiler`."""
        from hatch_cuda_aot.compile.forkserver import ForkServerError

        self.prepare()
        server = self._server
        if server is not None:
            try:
                return server.start(compiler)
            except ForkServerError:
                self.close()  # if the compiler crashes while it is loaded, a worker can say so
        return self._launch(_START, subprocess.PIPE, subprocess.PIPE)

    def close(self) -> None:
        """End the process that forks, if there is one; from now on workers are started one by one."""
        with self._lock:
            server, self.forks, self._server = self._server, False, None
        if server is not None:
            server.close()

    def clear(self) -> None:
        """Remove the folder for temporary files, when no worker is left."""
        with self._lock:
            if self._scratch is not None:
                self._scratch.close()

    def __enter__(self) -> Starter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self.clear()

    def _launch(self, program: str, stdin: int, stdout: int) -> subprocess.Popen[bytes]:
        with self._lock:
            self._scratch = self._scratch or Scratch()
        return subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(sys.path)],
            stdin=stdin,
            stdout=stdout,
            env=worker_environ(os.environ, str(self._scratch.path)),
            # A group of its own: Ctrl-C reaches only the build, which then kills the worker and its ptxas.
            start_new_session=True,
        )


def start_early(environ: Mapping[str, str]) -> Starter:
    """Return a starter for a build of which nothing else is known yet; it is at work if that build must ask a compiler."""
    starter = Starter(fork=default_jobs() > 1)
    if not has_compilers(environ):
        with contextlib.suppress(OSError):  # who needs a worker will say so
            starter.prepare()
    return starter


def default_jobs() -> int:
    """Return how many workers ``jobs = "auto"`` means: one for each CPU that this process may use."""
    with contextlib.suppress(AttributeError):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)
