"""What a rank uses of its machine: processor, memory, GPU, network and disk, read when asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, final

import psutil

GPU_PREFIX: Final = "GPU-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One reading of a GPU."""

    used_percent: float  # of the time in which any kernel ran
    memory_bytes: int  # in use, by all processes


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """One reading; the rates run from the reading before it, and None stands for what cannot be read."""

    cpu_percent: float  # of this process; 100 is one processor
    memory_bytes: int  # resident, of this process
    machine_cpu_percent: float  # of all processors together
    machine_memory_percent: float
    sent_bytes: int | None  # by all processes of the machine, since the reading before
    received_bytes: int | None
    read_bytes: int | None  # by this process from disks, since the reading before
    written_bytes: int | None
    gpu: Gpu | None = None


@final
class Sampler:
    """Read the resources of this process, without a thread of its own.

    `gpu_uuid` names the GPU of this rank, as torch.cuda.get_device_properties(device).uuid gives it. It is
    read through nvidia-ml-py where that is installed, and left out elsewhere.
    """

    def __init__(self, gpu_uuid: str | None = None) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call starts the clock and returns 0
        psutil.cpu_percent()
        self._read_gpu = None if gpu_uuid is None else _gpu_reader(gpu_uuid)
        self._before = self._counters()

    def read(self) -> Resources:
        """Return the use since the last call."""
        before, self._before = self._before, self._counters()
        sent, received, read, written = (
            None if now is None or then is None else max(0, now - then)
            for now, then in zip(self._before, before, strict=True)
        )
        return Resources(
            cpu_percent=self._process.cpu_percent(),
            memory_bytes=self._process.memory_info().rss,
            machine_cpu_percent=psutil.cpu_percent(),
            machine_memory_percent=psutil.virtual_memory().percent,
            sent_bytes=sent,
            received_bytes=received,
            read_bytes=read,
            written_bytes=written,
            gpu=None if self._read_gpu is None else self._read_gpu(),
        )

    def _counters(self) -> tuple[int | None, int | None, int | None, int | None]:
        network = psutil.net_io_counters()
        sent, received = (None, None) if network is None else (network.bytes_sent, network.bytes_recv)
        try:
            disk = self._process.io_counters()
        except (AttributeError, psutil.AccessDenied):  # macOS has none; containers may hide them
            return sent, received, None, None
        return sent, received, disk.read_bytes, disk.write_bytes


def _gpu_reader(uuid: str) -> Callable[[], Gpu | None] | None:
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None
    name = uuid if uuid.startswith(GPU_PREFIX) else f"{GPU_PREFIX}{uuid}"
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:  # no driver here, or a GPU that is not shown to this process
        return None
    return lambda: _read_gpu(nvml, handle)


def _read_gpu(nvml: ModuleType, handle: Any) -> Gpu | None:
    try:
        used = nvml.nvmlDeviceGetUtilizationRates(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:  # a sliced GPU has no utilisation of its own
        return None
    return Gpu(used_percent=float(used.gpu), memory_bytes=int(memory.used))
