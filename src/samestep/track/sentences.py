"""One short sentence for each event, the same on the console and in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SHOWN_IDS: Final = 8


def sentence(kind: str, values: Mapping[str, Any]) -> str | None:
    """Return what there is to say of an event, given its class's name and its fields; None for steps.

    Sentences name the number of steps taken, as the console does; reports and evaluations count from 0.
    """
    match kind:
        case "RunStarted":
            steps = f", {values['steps']} steps" if values.get("steps") else ""
            return f"training on {counted(values['world_size'], 'rank')}{steps}"
        case "Notice":
            level = "" if values["level"] == "info" else f"{values['level']}: "
            return f"{level}{values['message']}"
        case "Evaluated":
            metrics = ", ".join(f"{name} {number(value)}" for name, value in values["metrics"].items())
            return f"evaluation after step {values['step'] + 1}: {metrics or 'no metrics'}"
        case "CheckpointSaved":
            return (
                f"checkpoint at step {values['step']} ({values['reason']}): {size(values['num_bytes'])}, "
                f"stall {values['stall_seconds']:.2f} s, written in {values['write_seconds']:.2f} s"
            )
        case "CheckpointFailed":
            return f"warning: no checkpoint at step {values['step']}: {values['problem']}"
        case "Resumed":
            return _resumed(values)
        case "Stopping":
            return f"stopping after step {values['step']}: {values['reason']}"
        case "Quarantined":
            return _quarantined(values)
        case "RunEnded":
            steps, updates = counted(values["step"], "step"), counted(values["update"], "update")
            return f"ended: {steps}, {updates}, fingerprint {values['fingerprint']}"
        case "RunStopped":
            return f"ended with exit code {values['code']}"
        case "RunFailed":
            return f"failed: {values['problem']}"
    return None


def _resumed(values: Mapping[str, Any]) -> str:
    text = (
        f"resumed at step {values['step']} from {values['folder']}, "
        f"written by {counted(values['world_size_before'], 'rank')}"
    )
    broken = values.get("broken_key") or {}
    changes = ", ".join(f"{name} ({change})" for name, change in broken.items())
    return f"{text}; the bits may differ from here on: {changes}" if broken else text


def _quarantined(values: Mapping[str, Any]) -> str:
    ids = values["ids"]
    shown = ", ".join(str(sample) for sample in ids[:SHOWN_IDS])
    more = ", ..." if len(ids) > SHOWN_IDS else ""
    samples = counted(len(ids), "sample")
    return f"quarantined after step {values['step']}: {samples} ({shown}{more}): {values['reason']}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "rank"), counted(3, "rank")
    ('1 rank', '3 ranks')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def number(value: Any) -> str:
    """Return a number with four digits behind the point, or with an exponent where that would hide it.

    >>> number(2.5), number(3e-7), number("nan")
    ('2.5000', '3.00e-07', 'nan')
    """
    value = float(value)
    plain = value == 0 or 1e-3 <= abs(value) < 1e6 or value != value
    return f"{value:.4f}" if plain else f"{value:.2e}"


def size(num_bytes: float) -> str:
    """Return bytes in a readable unit.

    >>> size(512), size(12_345_678)
    ('512 B', '12.3 MB')
    """
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
