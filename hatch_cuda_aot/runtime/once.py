"""Makes values once per key, whatever number of threads asks for them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["Once"]


class Once:
    """Values that are made once per key, by the first thread that asks, while others that ask for the same wait."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._locks: dict[Hashable, threading.Lock] = {}
        self._guard = threading.Lock()

    def get(self, key: Hashable, make: Callable[..., Any], *arguments: object) -> Any:
        """Return the value of `key`, which ``make(*arguments)`` made; where that raises, the next call tries again."""
        try:
            return self._values[key]
        except KeyError:
            pass
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._values:
                self._values[key] = make(*arguments)
            return self._values[key]
