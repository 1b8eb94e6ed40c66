"""``native``: the driver's answer, and each way in which there is none."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest

from hatch_cuda_aot.errors import BuildError
from hatch_cuda_aot.native import visible_ccs

ADVICE = '. List the architectures to build for instead, such as "sm_90"'


class FakeDriver:
    """Answers like libcuda: `ccs` are its devices, `status` what cuInit returns."""

    def __init__(self, ccs: tuple[int, ...], status: int = 0) -> None:
        self._ccs = ccs
        self._status = status
        self.cuInit = lambda _flags: status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._ccs)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:  # noqa: N802
        cc = self._ccs[device.value]
        value._obj.value = {75: cc // 10, 76: cc % 10}[attribute]
        return 0


def use(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None) -> list[str]:
    """Put a driver in the place of libcuda; return the names that are loaded."""
    loaded: list[str] = []

    def load(name: str) -> FakeDriver:
        loaded.append(name)
        if driver is None:
            raise OSError
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    return loaded


@pytest.mark.parametrize(("platform", "name"), [("linux", "libcuda.so.1"), ("win32", "nvcuda.dll")])
def test_devices(monkeypatch: pytest.MonkeyPatch, platform: str, name: str) -> None:
    """Each compute capability of the machine is there once, in order, from the driver of the platform."""
    monkeypatch.setattr(sys, "platform", platform)
    loaded = use(monkeypatch, FakeDriver((120, 90, 86, 90)))
    assert visible_ccs() == (86, 90, 120)
    assert loaded == [name]


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (FakeDriver((), status=100), "the driver shows no GPU (cuInit returns 100)"),
        (FakeDriver(()), "the driver shows no GPU"),
    ],
)
def test_no_gpu(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, words: str) -> None:
    """A driver without a GPU says so, and what to write instead."""
    use(monkeypatch, driver)
    with pytest.raises(BuildError) as caught:
        visible_ccs()
    assert str(caught.value) == f'`archs` asks for "native", but {words}{ADVICE}'


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a driver says which library is missing."""
    monkeypatch.setattr(sys, "platform", "linux")
    use(monkeypatch, None)
    with pytest.raises(BuildError) as caught:
        visible_ccs()
    words = "there is no NVIDIA driver here (libcuda.so.1 does not load)"
    assert str(caught.value) == f'`archs` asks for "native", but {words}{ADVICE}'
