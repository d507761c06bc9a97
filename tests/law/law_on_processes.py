"""What each process of the gloo tests runs: all kinds, one after the other, over one process group."""

from __future__ import annotations

import torch
from law_runs import STRATEGIES, Ended, run

from samestep.comm.connect import connect
from samestep.topology.environment import Place, settle_interface


def run_all(place: Place, kinds: list[tuple[str, str, str]]) -> dict[tuple[str, str, str, str], Ended]:
    """Run every kind with every strategy and return how each ended."""
    settle_interface(place)
    transport = connect(place, device=torch.device("cpu"), timeout_s=60)
    return {(*kind, s): run(transport, *kind, s) for kind in kinds for s in STRATEGIES}
