"""Starts workers as forks of a process that has loaded the compiler: each takes milliseconds, and shares its memory.

The server has one thread, compiles nothing, and ends with the build.  (multiprocessing has such a server too; its workers
import the build's main module, which an unguarded script does not survive.)
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from hatch_cuda_aot.compile.tasks import Compiler

__all__ = ["ForkServer", "ForkServerError", "ForkedProcess", "serve"]

_FORK = b"fork"
_REPLY = struct.Struct("<q")

#: Seconds without a request after which none is expected for a while.
_PAUSE = 0.05


class ForkServerError(Exception):
    """The server is gone."""


class ForkServer:
    """The server, as the build sees it; several threads may use it.

    Args:
        launch: starts a process that calls `serve`, with the given descriptor as stdin.

    """

    def __init__(self, launch: Callable[[int], subprocess.Popen[bytes]]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = launch(theirs.fileno())
            except BaseException:
                self._socket.close()
                raise
        self._is_loaded = False

    def start(self, compiler: Compiler) -> ForkedProcess:
        """Start a worker; the `compiler` of the first one is what the server loads.

        Raises:
            ForkServerError: if the server did not survive loading the compiler, or was killed.

        """
        self._load(compiler)
        tasks, stdin = os.pipe()
        stdout, results = os.pipe()
        try:
            pid = self._ask(_FORK, [tasks, results])
        except ForkServerError:
            os.close(stdin)
            os.close(stdout)
            raise
        finally:
            os.close(tasks)
            os.close(results)
        return ForkedProcess(self, pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))

    def status(self, pid: int) -> int:
        """Wait for a worker's end; return its exit status, or the negative number of the signal that ended it."""
        return self._ask(str(pid).encode(), [])

    def close(self) -> None:
        """End the server; whoever waits for an answer of it gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _load(self, compiler: Compiler) -> None:
        with self._lock:
            if not self._is_loaded:
                self._is_loaded = True
                content = pickle.dumps(compiler)
                with contextlib.suppress(OSError):  # if it is gone, that shows when it is asked for a worker
                    self._socket.sendall(_REPLY.pack(len(content)) + content)

    def _ask(self, message: bytes, descriptors: list[int]) -> int:
        with self._lock:
            try:
                socket.send_fds(self._socket, [message], descriptors)
                reply = self._socket.recv(_REPLY.size, socket.MSG_WAITALL)
            except OSError as error:
                raise ForkServerError(str(error)) from error
        if len(reply) < _REPLY.size:
            raise ForkServerError("it has ended")
        answer: int = _REPLY.unpack(reply)[0]
        return answer


class ForkedProcess:
    """A worker; has what a pool uses of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._server = server
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout

    def wait(self) -> int | None:
        """Wait for its end; return its exit status, or the negative number of the signal that ended it.

        None if the server ended before it could tell.
        """
        try:
            return self._server.status(self.pid)
        except ForkServerError:
            return None


def serve() -> None:
    """Load what workers need, and fork one whenever the socket asks for it, until its other end is closed."""
    gc.disable()
    with socket.socket(fileno=os.dup(0)) as channel:
        _import_early()
        header = channel.recv(_REPLY.size, socket.MSG_WAITALL)
        if len(header) < _REPLY.size:
            return
        (length,) = _REPLY.unpack(header)
        _load(pickle.loads(channel.recv(length, socket.MSG_WAITALL)))  # noqa: S301 -- from the build itself
        gc.freeze()  # or the first collection in each worker would copy all of it
        gc.enable()
        complete = False
        while True:
            if not complete and not select.select([channel], [], [], _PAUSE)[0]:
                _import_late()
                complete = True
            message, descriptors, _, _ = socket.recv_fds(channel, 64, 2)
            if not message:
                return
            if message == _FORK:
                pid = os.fork()
                if pid == 0:
                    channel.close()
                    _become_worker(*descriptors)
                for each in descriptors:
                    os.close(each)
                reply = pid
            else:
                _, status = os.waitpid(int(message), 0)
                reply = os.waitstatus_to_exitcode(status)
            channel.sendall(_REPLY.pack(reply))


def _import_early() -> None:
    """Import what any compiler needs, while the build still finds out which."""
    with contextlib.suppress(Exception):
        import cuda.bindings.nvrtc  # noqa: F401

        import hatch_cuda_aot.compile.run  # noqa: F401


def _load(compiler: Compiler) -> None:
    """Load what a worker needs first.  What fails here fails in the worker as well, which says it to whoever waits for it."""
    with contextlib.suppress(Exception):
        from hatch_cuda_aot.compile import run

        run.load(compiler)


def _import_late() -> None:
    """Import the rest, now that nobody waits for a worker."""
    with contextlib.suppress(Exception):
        from hatch_cuda_aot.compile import run

        run.import_late()


def _become_worker(tasks: int, results: int) -> None:
    from hatch_cuda_aot.compile.worker import main

    try:
        os.setsid()  # a group of its own, which can be killed with any ptxas of it
        os.dup2(tasks, 0)
        os.dup2(results, 1)
        os.close(tasks)
        os.close(results)
        main()
    finally:
        os._exit(1)
