"""The numbers of an event, under the names that every tracker shows them by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from samestep.events import Evaluated, Event, StepReport

LONGEST: Final = 500  # letters of a setting: the least limit of the trackers


def scalars(event: Event) -> tuple[int, dict[str, float]] | None:
    """Return the step and its numbers; None for an event that has none."""
    if isinstance(event, Evaluated):
        return event.step, {f"evaluation/{name}": value for name, value in event.metrics.items()}
    if not isinstance(event, StepReport):
        return None
    found = {"loss": event.loss, "learning_rate": event.learning_rate, "grad_norm": event.grad_norm}
    found["loss_scale"] = event.loss_scale
    found["samples_per_second"] = event.samples / event.seconds if event.seconds > 0 else None
    found |= {f"terms/{name}": term.loss for name, term in event.terms.items()}
    return event.step, {name: value for name, value in found.items() if value is not None}


def settings(facts: Mapping[str, object]) -> dict[str, str]:
    """Return the facts of a run as names with dots and short texts."""
    found: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": text for inner, text in settings(value).items()}
        else:
            found[name] = (value if isinstance(value, str) else json.dumps(value, default=str))[:LONGEST]
    return found
