"""Which of the tasks that wait is next."""

from __future__ import annotations

import itertools
import queue
import threading
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatch_cuda_aot.compile.backlog import Backlog, Waiting
from hatch_cuda_aot.compile.precompiled import PAYS
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
        backlog.put(task, Future(), 0, 0)
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
    backlog.put(image(b"short"), Future(), 0, -5)
    backlog.put(image(b"longer"), Future(), 0, -6)
    taken = [backlog.take() for _ in range(3)]
    assert [waiting.task for waiting in taken if waiting] == [image(b"longer"), image(b"short"), PROBE]
    assert take(backlog) == "a 80"


def test_the_last_front_ends_before_images() -> None:
    """When every front end that waits can have a worker, they start: they are what the end of the build waits for."""
    backlog = Backlog(2)
    tasks: list[Task] = [*(front(name, 80) for name in "abc"), image(b"1"), image(b"2")]
    for task in tasks:
        backlog.put(task, Future(), 0, 0)
    assert [take(backlog) for _ in range(2)] == ["other", "other"]
    backlog = Backlog(2)
    for task in [*tasks[:2], *tasks[3:]]:
        backlog.put(task, Future(), 0, 0)
    assert [take(backlog) for _ in range(4)] == ["a 80", "b 80", "other", "other"]


def test_workers_stay_with_their_options() -> None:
    """A worker gets front ends of the options that it has compiled with, as long as there are any."""
    fast = ("--use_fast_math",)
    backlog = filled(front("a", 80), front("b", 80, *fast), front("a", 90), front("b", 90, *fast))
    assert [take(backlog, fast) for _ in range(3)] == ["b 80", "b 90", "a 80"]
    backlog.put(front("b", 100, *fast), Future(), 0, 0)
    assert [take(backlog, ()) for _ in range(2)] == ["a 90", "b 100"]


def test_closing() -> None:
    """Threads that wait for a task get None, and so does whoever comes later; a task wakes one of them."""
    backlog = Backlog(1)
    found: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
    threads = [threading.Thread(target=lambda: found.put(backlog.take())) for _ in range(2)]
    for thread in threads:
        thread.start()
    backlog.put(PROBE, Future(), 0, 0)
    first = found.get(timeout=60)
    assert first is not None
    assert first.task == PROBE
    backlog.close()
    for thread in threads:
        thread.join()
    assert found.get(timeout=60) is None
    backlog.put(PROBE, Future(), 0, 0)
    assert backlog.take() is None


def same_start(name: str, cc: int, *nvrtc: str) -> FrontTask:
    """Return a front end that begins as all of its architecture and options do."""
    tree = SourceTree.of_texts({f"{name}.cu": f"#include <cub/cub.cuh>\n__global__ void {name}() {{}}"})
    return FrontTask(COMPILER, name, Arch(cc, virtual=True), tree, (f"{name}.cu",), (), nvrtc, (), prune=True)


def turns(backlog: Backlog, workers: int) -> list[list[tuple[str, str]]]:
    """Let workers take a front end each in turn; return for each what it took, and in how many it had a start made."""
    starts = [""] * workers
    found: list[list[tuple[str, str]]] = [[] for _ in range(workers)]
    for turn in itertools.count():
        number = turn % workers
        if not backlog._fronts:
            return found
        waiting = backlog.take((), starts[number])
        assert waiting is not None
        assert isinstance(waiting.task, FrontTask)
        made = "" if not waiting.start else "uses" if waiting.start == starts[number] else "makes"
        starts[number] = waiting.start or starts[number]
        found[number].append((str(waiting.task.arch.cc), made))
    raise AssertionError


def test_common_starts() -> None:
    """Each worker makes the start of one architecture, and stays with it while sources of that wait."""
    backlog = Backlog(2)
    for cc in (80, 90):
        for number in range(PAYS + 4):
            backlog.put(same_start(f"k{number}", cc), Future(), 0, 0)
    for worker in turns(backlog, 2):
        assert [made for _, made in worker] == ["makes"] + ["uses"] * (PAYS + 3)
        assert len({cc for cc, _ in worker}) == 1


def test_a_start_is_shared_out_while_it_pays() -> None:
    """Several workers make the same start if each of them has enough to do with it."""
    backlog = Backlog(3)
    for number in range(2 * PAYS + 2):
        backlog.put(same_start(f"k{number}", 80), Future(), 0, 0)
    made = [[made for _, made in worker] for worker in turns(backlog, 3)]
    assert [worker[0] for worker in made] == ["makes", "makes", ""]
    assert all(set(worker[1:]) == {"uses"} for worker in made[:2])
    assert set(made[2]) == {""}


def test_precompiling_is_off() -> None:
    """A project may not want it."""
    backlog = Backlog(2, precompile=False)
    for number in range(2 * PAYS):
        backlog.put(same_start(f"k{number}", 80), Future(), 0, 0)
    assert {made for worker in turns(backlog, 2) for _, made in worker} == {""}


@pytest.mark.parametrize("count", [1, PAYS - 1])
def test_few_sources_of_equal_start(count: int) -> None:
    """Where it does not pay, nothing is precompiled."""
    backlog = Backlog(2)
    for number in range(count):
        backlog.put(same_start(f"k{number}", 80), Future(), 0, 0)
    assert {made for worker in turns(backlog, 2) for _, made in worker} == {""}


TASKS = st.tuples(st.sampled_from("abcd"), st.booleans(), st.integers(0, 9), st.booleans(), st.booleans())


@given(st.lists(TASKS, max_size=60))
def test_nothing_is_lost(steps: list[tuple[str, bool, int, bool, bool]]) -> None:
    """Whatever is put, taken and timed in whatever order, each task comes out once."""
    backlog = Backlog(2)
    taken, start = [], ""
    for number, (name, take_one, time, other_options, common) in enumerate(steps):
        make = same_start if common else front
        task = make(name, number % 3, *(["-x"] if other_options else []))
        backlog.put(task, Future(), number, 0)
        backlog.took(task, time)
        if take_one:
            taken.append(backlog.take(("-x",), start))
            start = taken[-1].start or start if taken[-1] else start
    taken += [backlog.take((), start) for _ in range(len(steps) - len(taken))]
    assert sorted(waiting.since for waiting in taken if waiting) == list(range(len(steps)))
