"""What each process of the gloo tests runs: all kinds, one after the other, over one process group."""

from __future__ import annotations

import torch
from law_runs import Ended, run

from samestep.comm.connect import connect
from samestep.topology.environment import Place, settle_interface


def run_all(place: Place, runs: list[tuple[str, str, str, str]]) -> dict[tuple[str, str, str, str], Ended]:
    """Take every run, a kind and a strategy, and return how each ended."""
    settle_interface(place)
    transport = connect(place, device=torch.device("cpu"), timeout_s=60)
    return {each: run(transport, *each) for each in runs}
