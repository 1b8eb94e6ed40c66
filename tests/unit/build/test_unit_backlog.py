"""Which of the tasks that wait is next."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st

from hatch_cuda_aot.compile.backlog import Backlog, Waiting
from hatch_cuda_aot.compile.tasks import AssembleTask, Compiler, FrontTask, ProbeTask, Task
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.sources import SourceTree

COMPILER = Compiler("12.9")
PROBE = ProbeTask(COMPILER)


def front(name: str, cc: int, *nvrtc: str) -> FrontTask:
    tree = SourceTree.of_texts({f"{name}.cu": ""})
    return FrontTask(COMPILER, name, Arch(cc, virtual=True), tree, (f"{name}.cu",), (), nvrtc, (), prune=True)


def image(ptx: bytes) -> AssembleTask:
    return AssembleTask(COMPILER, "k", Arch(90), ptx, ())


def filled(*tasks: Task) -> Backlog:
    """Return a backlog for one worker."""
    backlog = Backlog(1)
    for task in tasks:
        backlog.put(Waiting(task, Future(), 0), 0)
    return backlog


def take(backlog: Backlog, affinity: tuple[str, ...] | None = None) -> str:
    """Return the next task in short."""
    waiting = backlog.take(affinity)
    assert waiting is not None
    return f"{waiting.task.module} {waiting.task.arch.cc}" if isinstance(waiting.task, FrontTask) else "other"


def test_each_module_once_and_then_the_longest() -> None:
    """Every module has a turn, in the order given; then one still at work counts as longest, and then it is time."""
    backlog = filled(*[front(name, cc) for name in "abc" for cc in (80, 90, 100, 120)])
    assert [take(backlog) for _ in range(3)] == ["a 80", "b 80", "c 80"]
    backlog.took(front("a", 80), 5)
    backlog.took(front("c", 80), 7)
    assert [take(backlog) for _ in range(5)] == ["b 90", "b 100", "b 120", "c 90", "c 100"]
    backlog.took(front("c", 90), 1)  # on average 4
    assert [take(backlog) for _ in range(4)] == ["a 90", "a 100", "a 120", "c 120"]


def test_images_before_front_ends() -> None:
    """Whatever is no front end comes first, since images free the memory of their PTX; the largest before all others."""
    backlog = filled(front("a", 80), PROBE, front("a", 90))
    backlog.put(Waiting(image(b"short"), Future(), 0), -5)
    backlog.put(Waiting(image(b"longer"), Future(), 0), -6)
    taken = [backlog.take() for _ in range(3)]
    assert [waiting.task for waiting in taken if waiting] == [image(b"longer"), image(b"short"), PROBE]
    assert take(backlog) == "a 80"


def test_the_last_front_ends_before_images() -> None:
    """When every front end that waits can have a worker, they start: they are what the end of the build waits for."""
    backlog = Backlog(2)
    tasks: list[Task] = [*(front(name, 80) for name in "abc"), image(b"1"), image(b"2")]
    for task in tasks:
        backlog.put(Waiting(task, Future(), 0), 0)
    assert [take(backlog) for _ in range(2)] == ["other", "other"]
    backlog = Backlog(2)
    for task in [*tasks[:2], *tasks[3:]]:
        backlog.put(Waiting(task, Future(), 0), 0)
    assert [take(backlog) for _ in range(4)] == ["a 80", "b 80", "other", "other"]


def test_workers_stay_with_their_options() -> None:
    """A worker gets front ends of the options that it has compiled with, as long as there are any."""
    fast = ("--use_fast_math",)
    backlog = filled(front("a", 80), front("b", 80, *fast), front("a", 90), front("b", 90, *fast))
    assert [take(backlog, fast) for _ in range(3)] == ["b 80", "b 90", "a 80"]
    backlog.put(Waiting(front("b", 100, *fast), Future(), 0), 0)
    assert [take(backlog, ()) for _ in range(2)] == ["a 90", "b 100"]


def test_closing() -> None:
    """Threads that wait for a task get None, and so does whoever comes later; a task wakes one of them."""
    backlog = Backlog(1)
    found: list[Waiting | None] = []
    threads = [threading.Thread(target=lambda: found.append(backlog.take())) for _ in range(2)]
    for thread in threads:
        thread.start()
    waiting = Waiting(PROBE, Future(), 0)
    backlog.put(waiting, 0)
    while not found:
        pass
    backlog.close()
    for thread in threads:
        thread.join()
    assert found == [waiting, None]
    backlog.put(waiting, 0)
    assert backlog.take() is None


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.integers(0, 9), st.booleans()), max_size=40))
def test_nothing_is_lost(steps: list[tuple[str, bool, int, bool]]) -> None:
    """Whatever is put, taken and timed in whatever order, each task comes out once."""
    backlog = Backlog(1)
    expected, taken = [], []
    for number, (name, take_one, time, linked) in enumerate(steps):
        waiting = Waiting(front(name, number, *(["-x"] if linked else [])), Future(), number)
        backlog.put(waiting, 0)
        expected.append(waiting)
        backlog.took(waiting.task, time)
        if take_one:
            taken.append(backlog.take(("-x",)))
    taken += [backlog.take() for _ in range(len(expected) - len(taken))]
    assert sorted(taken, key=lambda waiting: waiting.since if waiting else -1) == expected
