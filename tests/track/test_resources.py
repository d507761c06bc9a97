"""Resources of a rank: rates since the reading before, and a GPU only where there is one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from samestep.track.resources import Gpu, Sampler


class NVMLError(Exception):
    """Any error of the driver."""


def nvml(*, busy: bool = True) -> ModuleType:
    """Return a driver with one GPU, in the shape of nvidia-ml-py."""

    def by_uuid(name: str) -> str:
        if name != "GPU-1234":
            raise NVMLError(name)
        return name

    def used(handle: str) -> SimpleNamespace:
        if not busy:
            raise NVMLError("not supported")
        return SimpleNamespace(gpu=87, memory=3)

    made = ModuleType("pynvml")
    vars(made).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUtilizationRates=used,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=1_000, total=9_000),
    )
    return made


@pytest.mark.parametrize("uuid", ["1234", "GPU-1234"])
def test_a_gpu_is_read_through_its_driver(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert Sampler(uuid).read().gpu == Gpu(used_percent=87.0, memory_bytes=1_000)


def test_a_gpu_that_cannot_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert Sampler("5678").read().gpu is None
    monkeypatch.setitem(sys.modules, "pynvml", nvml(busy=False))
    assert Sampler("1234").read().gpu is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Sampler("1234").read().gpu is None
    assert Sampler().read().gpu is None


def test_bytes_are_counted_from_the_reading_before(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([(100, 50), (160, 55), (10, 70)])  # the last: the counter of the machine began anew

    def network() -> SimpleNamespace:
        sent, received = next(counts)
        return SimpleNamespace(bytes_sent=sent, bytes_recv=received)

    monkeypatch.setattr(psutil, "net_io_counters", network)
    sampler = Sampler()
    first, second = sampler.read(), sampler.read()
    assert (first.sent_bytes, first.received_bytes) == (60, 5)
    assert (second.sent_bytes, second.received_bytes) == (0, 15)


def test_what_the_system_does_not_count_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: psutil.Process) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_io_counters", lambda: None)
    monkeypatch.setattr(psutil.Process, "io_counters", denied)
    found = Sampler().read()
    assert (found.sent_bytes, found.read_bytes, found.written_bytes) == (None, None, None)
    assert found.memory_bytes > 0
