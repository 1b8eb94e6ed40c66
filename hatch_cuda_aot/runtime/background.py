"""Runs loads in the background: calls in, one Future out.

It knows nothing of kernels.  Its threads are daemons, since those of `concurrent.futures` would hold a process up at its
end until everything is loaded; here only the call under way is waited for, and what has not begun is dropped.
"""

from __future__ import annotations

import atexit
import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["in_background"]

#: Loading is the driver's work, one image at a time for the most part; more threads only wait for one another.
_THREADS = 4

#: How long the end of the process waits for a call under way, in seconds.  A call that is still in the driver when that
#: is torn down may crash, and PTX may take the driver longer than anybody wants to wait.
_PATIENCE = 10.0


def in_background(prepare: Callable[[], Iterable[Callable[[], object]]]) -> Future[None]:
    """Call `prepare`, and then each of the functions that it returns, in threads of their own.

    Args:
        prepare: returns the work, as functions that may run side by side.

    Returns:
        A future that is done when all functions have returned.  Its exception is that of `prepare`, or that of the first
        function (in their order) which raised; the others are called all the same.  It can be cancelled until the work
        begins.

    """
    future: Future[None] = Future()
    _start(lambda: _run(future, prepare))
    return future


def _run(future: Future[None], prepare: Callable[[], Iterable[Callable[[], object]]]) -> None:
    if _ending.is_set() or not future.set_running_or_notify_cancel():
        return
    errors: dict[int, BaseException] = {}
    try:
        work = list(enumerate(prepare()))
        work.reverse()  # `pop` takes the first

        def help_out() -> None:
            while work and not _ending.is_set():
                try:
                    number, call = work.pop()
                except IndexError:  # another thread took the last one
                    return
                try:
                    call()
                except BaseException as error:  # noqa: BLE001 -- whatever it is, the future hands it on
                    errors[number] = error

        helpers = [_start(help_out) for _ in range(min(_THREADS, os.cpu_count() or 1, len(work)) - 1)]
        help_out()
        for helper in helpers:
            helper.join()
    except BaseException as error:  # noqa: BLE001 -- as above
        errors[-1] = error
    if errors:
        future.set_exception(errors[min(errors)])
    else:
        future.set_result(None)


def _start(target: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        _threads.add(threading.current_thread())
        try:
            target()
        finally:
            _threads.discard(threading.current_thread())

    thread = threading.Thread(target=run, name="cuda-aot preload", daemon=True)
    thread.start()
    return thread


_threads: set[threading.Thread] = set()
_ending = threading.Event()


@atexit.register
def _finish() -> None:
    """Let the calls under way return before the interpreter goes away beneath them."""
    import time

    _ending.set()
    end = time.monotonic() + _PATIENCE
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))
