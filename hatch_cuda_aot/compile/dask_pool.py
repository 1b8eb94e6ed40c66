"""Runs tasks on a Dask cluster, behind the interface of `pool.WorkerPool`.

Knows of the cluster only what Dask's own configuration says.  The other end is `dask_worker`.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from hatch_cuda_aot.compile.dask_worker import Answer, Report, survey
from hatch_cuda_aot.compile.software import PROGRAM, Software, differences, most_common, pins, program
from hatch_cuda_aot.compile.tasks import Compiler, FrontTask, ProbeTask, Result, Task
from hatch_cuda_aot.errors import BuildError, ClusterError, WorkerCrashError
from hatch_cuda_aot.sources import SourceTree

__all__ = ["REQUIREMENTS", "DaskPool"]

#: What the extra ``dask`` installs; distributed brings the release of dask that belongs to it.
REQUIREMENTS = ("distributed>=2025.1",)


class DaskPool:
    """The workers of a Dask cluster; use it as a context manager.

    Its first task must be a `ProbeTask`: that checks all workers against each other, and what they have is then demanded of
    every worker that comes later.  Dask runs the tasks of a worker that is gone again elsewhere.

    Raises:
        ClusterError: if no scheduler is configured, or none answers.

    """

    def __init__(self) -> None:
        self._client = _connect()
        self._address = str(self._client.scheduler.address)
        self._executor = self._client.get_executor(pure=False)
        self._expected: Software | None = None
        self._trees: dict[str, Any] = {}
        self._waiting: set[Future[Result]] = set()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def submit(self, task: Task, *, priority: float = 0.0) -> Future[Result]:
        """Send `task`; of those that wait, a lower `priority` starts first.

        Raises:
            ClusterError: at a `ProbeTask`, if workers do not fit.

        """
        future = self._send(task, priority)
        if isinstance(task, ProbeTask):
            wait([future])  # a cluster may start its first worker only now that there is work
            self._check_workers(task.compiler, future)
        return future

    def warm_up(self, compiler: Compiler) -> None:
        """Do nothing: all workers are asked what they have before the first of them compiles anything."""

    def close(self) -> None:
        """Cancel whatever is not done, and leave the cluster."""
        self._closed.set()
        self._watcher.join(5)  # it may hang on a scheduler that does not answer
        with _silence():  # the scheduler may be gone
            with contextlib.suppress(Exception):
                self._executor.shutdown(wait=False)
            with contextlib.suppress(Exception):
                self._client.close()

    def __enter__(self) -> DaskPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, task: Task, priority: float) -> Future[Result]:
        tree = None
        if isinstance(task, FrontTask):
            tree = self._send_tree(task.tree)
            task = task if tree is None else replace(task, tree=SourceTree(()))
        inner = self._executor.submit(
            eval,
            _CALL,
            {"payload": pickle.dumps(task), "tree": tree, "expected": self._expected},
            key=f"cuda_aot_{type(task).__name__}-{uuid.uuid4().hex}",
            priority=-priority,
        )
        outer: Future[Result] = Future()
        self._waiting.add(outer)
        inner.add_done_callback(partial(self._deliver, task, outer))
        return outer

    def _send_tree(self, tree: SourceTree) -> Any:
        """Send a large tree once for all the tasks that need it; return None for a small one, which travels in them.

        It is a task, not scattered data: if the worker that holds it is killed, Dask makes it again elsewhere.
        """
        if sum(len(content) for _, content in tree.files) <= TREE_LIMIT:
            return None
        if tree.digest not in self._trees:
            import dask.config

            key = f"cuda_aot_tree-{uuid.uuid4().hex}"
            with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TiB"}):
                self._trees[tree.digest] = self._client.submit(bytes, pickle.dumps(tree), key=key, priority=_FIRST)
        return self._trees[tree.digest]

    def _deliver(self, task: Task, outer: Future[Result], inner: Future[Any]) -> None:
        self._waiting.discard(outer)
        with contextlib.suppress(InvalidStateError):  # the watcher was first
            try:
                outer.set_result(self._unpack(task, inner))
            except BaseException as error:  # noqa: BLE001 -- whatever it is belongs to whoever waits for the task
                outer.set_exception(error)

    def _unpack(self, task: Task, inner: Future[Any]) -> Result:
        """Return what a worker answered, or raise it."""
        try:
            payload = inner.result()
        except CancelledError:
            raise self._lost() from None
        except Exception as error:
            raise self._explain(task, error) from error
        if isinstance(payload, tuple):
            _, worker, host = payload
            raise self._refusal({worker: Report(host, None, _ABSENT)}, task.compiler)
        answer: Answer = pickle.loads(payload)  # noqa: S301 -- from the cluster that we chose
        if answer.kind == "result":
            return answer.content  # type: ignore[no-any-return]
        if answer.kind == "error":
            raise answer.content
        if answer.kind == "unfit":
            raise self._refusal({answer.worker: answer.content}, task.compiler)
        message = f"the Dask worker {answer.worker} failed in a way that it should not:\n{answer.content}"
        raise RuntimeError(message)

    def _explain(self, task: Task, error: Exception) -> BuildError:
        """Return the error to raise where Dask itself gave a task up."""
        from distributed.scheduler import KilledWorker

        if isinstance(error, KilledWorker) and not isinstance(task, ProbeTask):
            message = (
                f"{error.allowed_failures + 1} Dask workers died one after the other while they had module "
                f"{task.module!r} for {task.arch}. See their logs: short of memory, perhaps"
            )
            stage = "NVRTC" if isinstance(task, FrontTask) else "ptxas"
            return WorkerCrashError(
                message, module=task.module, arch=str(task.arch), stage=stage, log="the Dask worker was killed"
            )
        message = f"the Dask cluster at {self._address} cannot do this build: {type(error).__name__}: {error}"
        return ClusterError(message, scheduler=self._address)

    def _check_workers(self, compiler: Compiler, probed: Future[Result]) -> None:
        """Hold all workers against each other, and remember what they have."""
        try:
            answers = self._client.run(survey, compiler, on_error="return")
        except Exception as error:
            probed.result()  # it says what is wrong, as a rule
            raise self._lost() from error
        reports = {
            worker: found if isinstance(found, Report) else Report(_host(worker), None, _describe(found))
            for worker, found in answers.items()
            if not isinstance(found, OSError)  # it is gone; Dask has noticed too
        }
        complete = [report.software for report in reports.values() if report.software is not None]
        self._expected = {PROGRAM: program(), **(most_common(complete) if complete else {})}
        unfit = {worker: report for worker, report in reports.items() if report.software != self._expected}
        if unfit:
            raise self._refusal(unfit, compiler, len(reports))
        if not reports and probed.exception() is None:
            raise self._no_workers()

    def _refusal(self, unfit: Mapping[str, Report], compiler: Compiler, of: int | None = None) -> ClusterError:
        """Return the error that names workers which do not fit, and what would mend them."""
        expected = self._expected or {PROGRAM: program()}
        lines = [
            f"  - {worker} ({report.host}): {_what_is_wrong(report, expected)}" for worker, report in unfit.items()
        ]
        if len(lines) > _SHOWN:
            lines[_SHOWN:] = [f"  - and {len(lines) - _SHOWN} more"]
        who = f"{len(unfit)} of {of} Dask workers" if of is not None else "a Dask worker that joined"
        message = "\n".join(
            [
                f"{who} cannot take part in this build:",
                *lines,
                _ALIKE,
                "  pip install " + " ".join(f"'{pin}'" for pin in pins(compiler, expected)),
            ]
        )
        return ClusterError(message, scheduler=self._address, workers=tuple(unfit))

    def _watch(self) -> None:
        """Give up where tasks wait and the cluster has had no worker for too long."""
        limit = _patience()
        since: float | None = None
        while not self._closed.wait(_INTERVAL):
            workers = True
            with contextlib.suppress(Exception):  # no connection: the client notices, and cancels what waits
                workers = bool(self._client.nthreads())
            if workers or not self._waiting:
                since = None
            else:
                since = since or time.monotonic()
                if time.monotonic() - since > limit:
                    self._give_up(self._no_workers())

    def _give_up(self, error: BuildError) -> None:
        for future in tuple(self._waiting):
            self._waiting.discard(future)
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)

    def _lost(self) -> ClusterError:
        message = f"the connection to the Dask scheduler at {self._address} was lost"
        return ClusterError(message, scheduler=self._address)

    def _no_workers(self) -> ClusterError:
        message = (
            f"no worker has been connected to the Dask scheduler at {self._address} for {_patience():g} seconds. Start "
            f"some, on machines that have hatch-cuda-aot and the compiler:\n  dask worker {self._address}\n"
            "Where workers take longer to come, set DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT, for instance to 10min"
        )
        return ClusterError(message, scheduler=self._address)


#: What a Dask worker evaluates.  Nothing of ours may be part of the graph itself: a scheduler without hatch-cuda-aot
#: refuses such a graph, and a worker without it never answers.
_CALL = (
    "__import__('hatch_cuda_aot.compile.dask_worker', fromlist=['*']).answer(payload, tree, expected)"
    " if __import__('importlib.util', fromlist=['*']).find_spec('hatch_cuda_aot') else"
    " ('absent', __import__('distributed').get_worker().address, __import__('socket').gethostname())"
)

_ALIKE = (
    "Every worker must have the same versions, or results would depend on who made them. Install these there, and start the "
    "workers again:"
)

_ABSENT = "hatch-cuda-aot is not installed"

#: Bytes of sources above which a tree is sent once, and not with every task.
TREE_LIMIT = 256 * 1024

#: Trees go before everything that needs them.
_FIRST = 1_000_000

#: Seconds between two looks at the cluster.
_INTERVAL = 1.0

#: Unfit workers that are named.
_SHOWN = 8


def _connect() -> Any:
    try:
        import dask.config
        from distributed import Client
    except ImportError as error:
        message = f"`executor = \"dask\"` needs the package {error.name}:\n  pip install 'hatch-cuda-aot[dask]'"
        raise ClusterError(message) from None
    address = dask.config.get("scheduler-address", None)
    if not address:
        raise ClusterError(_NO_ADDRESS)
    try:
        return Client(address, set_as_default=False, name="hatch-cuda-aot")
    except Exception as error:
        message = (
            f"no Dask scheduler answers at {address}, which is `scheduler-address` in Dask's configuration "
            f"({type(error).__name__}: {error})"
        )
        raise ClusterError(message, scheduler=str(address)) from error


_NO_ADDRESS = """\
`executor = "dask"` needs the address of a Dask scheduler, and Dask's configuration has none. Set one of
  - the environment variable DASK_SCHEDULER_ADDRESS, for instance to tcp://build-server:8786
  - `scheduler-address: tcp://build-server:8786` in a YAML file in ~/.config/dask
or build on this machine: HATCH_CUDA_AOT_EXECUTOR=local"""


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep Dask from logging with a traceback what our own errors say."""
    logger = logging.getLogger("distributed.client")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _patience() -> float:
    """Return for how many seconds a cluster may have no worker: as Dask's configuration says, if it does."""
    import dask.config
    from dask.utils import parse_timedelta

    configured = dask.config.get("distributed.scheduler.no-workers-timeout", None)
    return float(parse_timedelta(configured)) if configured else 60.0


def _what_is_wrong(report: Report, expected: Software) -> str:
    if report.software is None:
        return report.problem
    return ", ".join(differences(report.software, expected))


def _describe(error: object) -> str:
    """Say what an exception in place of a report means; Dask hands some over as text."""
    return _ABSENT if "No module named 'hatch_cuda_aot" in str(error) else f"{type(error).__name__}: {error}"


def _host(worker: str) -> str:
    return worker.rpartition("://")[2].rpartition(":")[0]
