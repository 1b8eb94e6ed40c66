"""One worker process: ``python -m hatch_cuda_aot.compile.worker`` reads tasks from stdin and writes results to stdout.

Messages are pickles, each behind its length in eight bytes.  The parent is our own build, so they are trusted.  An answer
is ``(kind, content, spans)``; where the time went stands beside the result, not in it, and is never cached.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

__all__ = ["main", "receive", "send"]

_LENGTH = struct.Struct("<Q")


def main() -> None:
    """Serve tasks until the parent closes the pipe or is gone."""
    tasks = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # whatever a compiler prints must not get between the results
    inbox: list[Any] = []
    arrived = threading.Semaphore(0)
    threading.Thread(target=_listen, args=(tasks, inbox, arrived), daemon=True).start()
    from hatch_cuda_aot.compile.run import import_late, run
    from hatch_cuda_aot.errors import BuildError
    from hatch_cuda_aot.spans import record

    threading.Thread(target=_later, args=(import_late,), daemon=True).start()
    while True:
        arrived.acquire()
        answer: tuple[str, Any]
        with record() as spans:
            try:
                answer = ("result", run(inbox.pop(0)))
            except BuildError as error:
                answer = ("error", error)
            except Exception:  # noqa: BLE001 -- a defect here or in a library: the parent shows it whole
                answer = ("defect", traceback.format_exc())
        send(results, (*answer, spans))


def send(stream: IO[bytes], message: object) -> None:
    """Write one message."""
    payload = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(payload)))
    stream.write(payload)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one message.

    Raises:
        EOFError: if the other side is gone.

    """
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    payload = stream.read(length)
    if len(payload) < length:
        raise EOFError
    return pickle.loads(payload)  # noqa: S301


def _later(call: Callable[[], None]) -> None:
    """Do so when the first task has come to its compiler, which needs nothing of Python's."""
    time.sleep(0.1)
    with contextlib.suppress(Exception):  # the task that needs it will say so
        call()


def _listen(tasks: IO[bytes], inbox: list[Any], arrived: threading.Semaphore) -> None:
    """Take in tasks while the compiler works; when the parent is gone, end at once, with any ptxas of ours."""
    try:
        while True:
            inbox.append(receive(tasks))
            arrived.release()
    except BaseException:  # noqa: BLE001 -- EOF or a broken pipe: there is nobody left to work for
        if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


if __name__ == "__main__":
    main()
