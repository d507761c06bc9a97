"""From a place in the world to a transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from samestep.comm.alone import Alone
from samestep.comm.collectives import Collectives, Group
from samestep.comm.doors import Door, ring
from samestep.comm.transport import Transport
from samestep.errors import ClusterError, ConfigError, TimedOut
from samestep.topology.environment import Place
from samestep.topology.machine import locality, machine_id
from samestep.topology.meeting_point import DOOR, HERE, host_and_port


def connect(place: Place, *, device: torch.device, timeout_s: float) -> Transport:
    """Collective. Meet the other ranks and return the transport between them.

    gloo carries CPU tensors, NCCL carries CUDA tensors. The process group is an object of its own and
    not torch's global default group, so several runs can live in one process. Raises TimedOut when not
    all ranks arrive within `timeout_s` seconds.
    """
    return meet(place, timeout_s=timeout_s).connect(device)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """The ranks have found one another, but have no transport yet: a device must be chosen first."""

    place: Place  # with the true local rank, where the launcher told none
    store: Store | None  # None: a world of one
    timeout_s: float

    def connect(self, device: torch.device) -> Transport:
        """Collective. Return the transport between the ranks that met."""
        place = self.place
        if self.store is None:
            return Alone()
        if device.type == "cuda" and place.local_world_size > torch.cuda.device_count():
            raise ConfigError(
                f"{place.local_world_size} ranks run on this machine, but it has {torch.cuda.device_count()} "
                "CUDA devices, and NCCL needs one for each rank. Start at most one rank per device."
            )
        with _told_in_our_words(place, self.timeout_s):
            group = _group(self.store, place, device, timedelta(seconds=self.timeout_s))
        return Collectives(group, device=device, timeout_s=self.timeout_s)


def meet(place: Place, *, timeout_s: float) -> Rendezvous:
    """Collective. Find the other ranks, and those among them that share this machine.

    Local ranks that the launcher did not tell come from who shares a machine, never from an even division.
    Raises TimedOut when not all ranks arrive within `timeout_s` seconds.
    """
    if place.world_size == 1:
        return Rendezvous(place=place, store=None, timeout_s=timeout_s)
    with _told_in_our_words(place, timeout_s):
        store = _own_part(_store(place, timeout_s), place)
        store.set(f"machine-of-rank-{place.rank}", machine_id())
        if not place.locality_known:
            keys = [f"machine-of-rank-{rank}" for rank in range(place.world_size)]
            machines = [machine.decode() for machine in store.multi_get(keys)]
            local_rank, local_world_size = locality(machines, place.rank)
            place = replace(
                place, local_rank=local_rank, local_world_size=local_world_size, locality_known=True
            )
    return Rendezvous(place=place, store=store, timeout_s=timeout_s)


@contextmanager
def _told_in_our_words(place: Place, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        text = str(error).strip().splitlines()[0]
        reason = TimedOut if "timed out" in text.lower() or "timeout" in text.lower() else ClusterError
        raise reason(
            f"rank {place.rank} of {place.world_size} could not meet the others at {place.rendezvous} "
            f"within {timeout_s:g} s: {text}"
        ) from error


def _store(place: Place, timeout_s: float) -> Store:
    kind, _, where = (place.rendezvous or "").partition("://")
    limit = timedelta(seconds=timeout_s)
    if kind == "file":
        # Without a number of workers it leaves the file, which the next run of the same ranks needs too:
        # the last of them to part could remove it under the first that meets again.
        store: Store = FileStore(where)
        store.set_timeout(limit)
        return store
    if kind == "tcp":
        host, port = host_and_port(f"tcp://{where}")
        serves = place.rank == 0 and not place.agent_store
        return TCPStore(host, port, place.world_size, serves, timeout=limit, wait_for_workers=False)
    if f"{kind}://" in (HERE, DOOR):
        return _store_behind_door(place, timeout_s)
    raise ConfigError(
        f"the rendezvous of rank {place.rank} is {place.rendezvous!r}; it must be file:///PATH or tcp://HOST:PORT."
    )


def _store_behind_door(place: Place, timeout_s: float) -> Store:
    host = "127.0.0.1" if place.rendezvous == HERE else host_and_port(str(place.rendezvous))[0]
    limit = timedelta(seconds=timeout_s)
    if place.rank > 0:
        port = ring(place, timeout_s)
        return TCPStore(host, port, place.world_size, False, timeout=limit, wait_for_workers=False)
    with closing(Door(place, timeout_s)) as door:
        store = TCPStore(host, 0, place.world_size, True, timeout=limit, wait_for_workers=False)
        door.answer(store.port)
    return store


def _own_part(store: Store, place: Place) -> Store:
    # An agent's store outlives a restart: under the same keys the old ranks' addresses would be found.
    attempt = f"samestep/attempt-{place.attempt}"
    # So do the addresses of an earlier run of the same processes: each rank counts its meetings.
    meeting = store.add(f"{attempt}/meetings-of-rank-{place.rank}", 1)
    return PrefixStore(f"{attempt}/meeting-{meeting}", store)


def _group(store: Store, place: Place, device: torch.device, limit: timedelta) -> Group:
    made: Any
    if device.type == "cuda":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = limit
        made = c10d.ProcessGroupNCCL(store, place.rank, place.world_size, options)
    else:
        made = c10d.ProcessGroupGloo(store, place.rank, place.world_size, limit)
    return cast("Group", made)
