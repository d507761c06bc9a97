"""The processes of a DataLoader: starting them quietly, hearing of a loss in the right place, ending them.

Note [torch's own parts]: DataLoader has no public way to end its workers before the last batch. And when a
worker is lost, a signal handler of PyTorch's raises RuntimeError wherever the main thread happens to be, in
the middle of a step too. And its collation makes tensors in /dev/shm where it finds itself in a worker. So
this file, and no other, uses names that PyTorch keeps to itself. The tests in test_loader_workers.py and
test_loader_slots.py hold each of these uses in place.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, final

import torch
from torch._C import _remove_worker_pids, _set_worker_pids
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from samestep.errors import InternalError

# ruff: noqa: SLF001 - Note [torch's own parts]


@final
class Workers:
    """The running workers of one DataLoader."""

    def __init__(self, make_loader: Callable[[], DataLoader[object]]) -> None:
        """Make the DataLoader, start its workers and give them their first requests."""
        with warnings.catch_warnings():
            # More workers than cores are right where samples are waited for, not computed.
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            # Python 3.12 and later warn of any fork beside threads, and PyTorch always has threads.
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            batches = iter(make_loader())
        if not isinstance(batches, _MultiProcessingDataLoaderIter):
            raise InternalError("a DataLoader without workers was given to Workers, which has none to end.")
        self._batches = batches
        self._unwatch()

    def receive(self) -> object:
        """Return the next batch in the order of the requests. Raises StopIteration after the last one."""
        self._watch()
        try:
            if lost := self.lost():  # before it was watched
                raise ChildProcessError("; ".join(lost))
            return next(self._batches)
        finally:
            self._unwatch()

    def lost(self, within_s: float = 0.0) -> list[str]:
        """Return a sentence for each worker that ended on its own; wait so long for the first to end."""
        if self._batches._shutdown:
            return []
        if within_s:
            wait([worker.sentinel for worker in self._batches._workers], timeout=within_s)
        return [
            f"loader worker {number} (process {worker.pid}) {_ending(worker.exitcode)}"
            for number, worker in enumerate(self._batches._workers)
            if worker.exitcode is not None
        ]

    def end(self) -> None:
        """Return when no worker is left. Done twice, the second time does nothing."""
        if not self.lost():
            self._batches._shutdown_workers()
            return
        # A worker that was killed may have died with a lock in its hands, on which asking the others
        # politely would wait for ever.
        self._unwatch()
        for worker in self._batches._workers:
            worker.kill()
            worker.join()
        if self._batches._pin_memory:
            self._batches._pin_memory_thread_done_event.set()
        self._batches._shutdown = True

    def _watch(self) -> None:
        """Let PyTorch's signal handler raise when a worker is lost, which it does in the main thread.

        Without it the loss is noticed only every five seconds, and not at all where the worker was killed
        while it wrote: the rest of the batch is then waited for without end.
        """
        if threading.current_thread() is threading.main_thread():
            pids = [worker.pid for worker in self._batches._workers if worker.pid is not None]
            _set_worker_pids(id(self._batches), tuple(pids))
            self._batches._worker_pids_set = True

    def _unwatch(self) -> None:
        if self._batches._worker_pids_set:  # PyTorch takes this back itself when it ends the workers
            _remove_worker_pids(id(self._batches))
            self._batches._worker_pids_set = False


def _ending(exitcode: int) -> str:
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def collate_in_own_memory(_worker: int) -> None:
    """Let default_collate, in this process, make tensors as it makes them outside workers."""
    default_collate_fn_map[torch.Tensor] = _stack


def _stack(tensors: list[torch.Tensor], **kwargs: Any) -> object:
    if tensors[0].is_nested or tensors[0].layout is not torch.strided:
        return collate_tensor_fn(tensors, **kwargs)  # which refuses them
    return torch.stack(tensors, 0)
