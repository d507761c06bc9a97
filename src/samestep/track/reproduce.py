"""The commands that make a run again, and what its bits depend on."""

from __future__ import annotations

import shlex
from typing import Any, Final

from samestep.config.plain_yaml import parse_yaml
from samestep.errors import ConfigError
from samestep.track.folder import RECIPE
from samestep.track.record import RunRecord

PROOF_STEPS: Final = 20  # enough to see every kind of step, and short enough to be run
FROM_PYTHON: Final = (
    "This run was made from Python, without a recipe. Run the same script, with another folder, on any "
    "number of ranks: the bits do not depend on it."
)
FROM_RECIPE: Final = (
    "The first command runs all of it again, the second compares every step and the state, and the third "
    "proves that the bits are the same on 1, 2 and 3 ranks."
)
OWN_TASK: Final = (
    "A task of your own is looked for beside the recipe: copy recipe.yaml there where it is one."
)
SAME_KEY: Final = "Equal bits need the same numerics key, which stands below, and the same data."


def reproduction(record: RunRecord) -> dict[str, Any]:
    """Return the commands and the remarks of the page's part on how to reproduce."""
    folder = str(record.folder)
    again = f"{folder.rstrip('/')}-again"
    world = int(record.facts.get("world_size") or 1)
    compare = shlex.join(["samestep", "compare", folder, again])
    if record.recipe is None:
        commands = [
            f"samestep run --workers {world} SCRIPT.py",
            compare,
        ]
        notes = [FROM_PYTHON]
    else:
        recipe = str(record.folder / RECIPE)
        train = ["samestep", "train", recipe, "--workers", str(world), "--folder", again]
        verify = ["samestep", "verify", recipe, "--workers", "1,2,3", *_proof_steps(record)]
        commands = [shlex.join(train), compare, shlex.join(verify)]
        notes = [FROM_RECIPE, OWN_TASK]
    return {"commands": commands, "notes": [*notes, SAME_KEY]}


def _proof_steps(record: RunRecord) -> list[str]:
    try:
        recipe = parse_yaml(record.recipe or "", RECIPE)
    except ConfigError:
        return []
    schedule = recipe.get("schedule") if isinstance(recipe, dict) else None
    # A schedule that ends with a decay of its own length fits no shorter run.
    if isinstance(schedule, dict) and schedule.get("name") == "wsd":
        return []
    steps = record.facts.get("steps")
    return ["--steps", str(min(steps, PROOF_STEPS) if isinstance(steps, int) else PROOF_STEPS)]
