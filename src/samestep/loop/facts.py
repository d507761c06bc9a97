"""What a reader of a run may ask later: versions, place, settings, and what the bits depend on."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version

from samestep.loop.walk import Plan
from samestep.numerics.exact import KERNEL_VARIABLES, Pinned, numerics_key
from samestep.precision.policy import Precision
from samestep.topology.environment import Environment, Place

ONE_KIND = (
    "Such kernels round differently, so the bits would depend on which rank computes what. Use machines "
    "of one kind, one build of PyTorch and the same settings for all ranks."
)


def run_facts(
    *,
    place: Place,
    pinned: Pinned,
    batches: Plan,
    precision: Precision,
    seed: int,
    strategy: str,
    reduction: str,
    key: Mapping[str, str | int],
) -> dict[str, object]:
    """Collect the resolved settings of a run, with its numerics key."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("samestep", "torch", "numpy")},
        },
        "launcher": f"{place.launcher}: {place.reason}",
        "device": str(pinned.device),
        "threads": pinned.threads,
        "seed": seed,
        "batching": batches.batching.model_dump(),
        "strategy": strategy,
        "reduction": reduction,
        "precision": precision.model_dump(),
        "numerics_key": dict(key),
    }


def key_of_run(
    *,
    pinned: Pinned,
    environment: Environment,
    batches: Plan,
    precision: Precision,
    reduction: str,
) -> dict[str, str | int]:
    """Return the numerics key of this rank: where the keys of ranks differ, so may their bits."""
    numbers: dict[str, str | int] = {
        "micro_batch": batches.micro_batch,
        "precision": precision.model_dump_json(exclude_none=True),
        "reduction": reduction,
    }
    return numerics_key(pinned, environment=environment.values(KERNEL_VARIABLES), settings=numbers)
