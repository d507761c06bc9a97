"""From a place in the world to a transport."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from samestep.comm.alone import Alone
from samestep.comm.collectives import Collectives, Group
from samestep.comm.transport import Transport
from samestep.errors import ClusterError, ConfigError, TimedOut
from samestep.topology.environment import Place


def connect(place: Place, *, device: torch.device, timeout_s: float) -> Transport:
    """Collective. Meet the other ranks and return the transport between them.

    gloo carries CPU tensors, NCCL carries CUDA tensors. The process group is an object of its own and
    not torch's global default group, so several runs can live in one process. Raises TimedOut when not
    all ranks arrive within `timeout_s` seconds.
    """
    if place.world_size == 1:
        return Alone()
    if device.type == "cuda" and place.local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"{place.local_world_size} ranks run on this machine, but it has {torch.cuda.device_count()} "
            "CUDA devices, and NCCL needs one for each rank. Start at most one rank per device."
        )
    limit = timedelta(seconds=timeout_s)
    try:
        store = _store(place, limit)
        group = _group(store, place, device, limit)
    except (RuntimeError, dist.DistError) as error:
        text = str(error).strip().splitlines()[0]
        reason = TimedOut if "timed out" in text.lower() or "timeout" in text.lower() else ClusterError
        raise reason(
            f"rank {place.rank} of {place.world_size} could not meet the others at {place.rendezvous} "
            f"within {timeout_s:g} s: {text}"
        ) from error
    return Collectives(group, device=device, timeout_s=timeout_s)


def _store(place: Place, limit: timedelta) -> Store:
    kind, _, where = (place.rendezvous or "").partition("://")
    if kind == "file":
        # Without a number of workers it leaves the file, which the next run of the same ranks needs too:
        # the last of them to part could remove it under the first that meets again.
        store: Store = FileStore(where)
        store.set_timeout(limit)
        return store
    if kind == "tcp":
        host, _, port = where.rpartition(":")
        serves = place.rank == 0 and not place.agent_store
        host = host.strip("[]")  # around an IPv6 address
        return TCPStore(host, int(port), place.world_size, serves, timeout=limit, wait_for_workers=False)
    raise ConfigError(
        f"the rendezvous of rank {place.rank} is {place.rendezvous!r}; it must be file:///PATH or tcp://HOST:PORT."
    )


def _group(store: Store, place: Place, device: torch.device, limit: timedelta) -> Group:
    # An agent's store outlives a restart: under the same keys the old ranks' addresses would be found.
    attempt = f"samestep/attempt-{place.attempt}"
    # So do the addresses of an earlier run of the same processes: each rank counts its meetings.
    meeting = store.add(f"{attempt}/meetings-of-rank-{place.rank}", 1)
    own = PrefixStore(f"{attempt}/meeting-{meeting}", store)
    made: Any
    if device.type == "cuda":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = limit
        made = c10d.ProcessGroupNCCL(own, place.rank, place.world_size, options)
    else:
        made = c10d.ProcessGroupGloo(own, place.rank, place.world_size, limit)
    return cast("Group", made)
