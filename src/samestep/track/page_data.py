"""From the record of a run to what the page shows: numbers and plain text, nothing that runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from samestep.track.console import clock_time
from samestep.track.curve import MOST_BUCKETS, Curve, short
from samestep.track.record import RunRecord
from samestep.track.reproduce import reproduction
from samestep.track.sentences import counted, number, sentence
from samestep.track.stragglers import find_stragglers
from samestep.track.verdict import State, state_of

MOST_EVENTS: Final = 400
MOST_RANKS: Final = 16  # whose resources are drawn
MOST_POINTS: Final = 12_000  # of all curves together: about one megabyte
PHASES: Final = ("data", "forward", "backward", "communication", "update", "checkpoint", "other")
MARKED: Final = ("Resumed", "Stopping", "CheckpointFailed", "RunFailed", "Quarantined")
RULE: Final = """sed 's/, "generation": [0-9]*, "world_size": [0-9]*//' ledger.jsonl | sha256sum"""
# name of the reading -> title and unit of its chart
RESOURCE_CHARTS: Final = {
    "cpu_percent": ("CPU of the rank, 100 % is one core", "%"),
    "memory_bytes": ("Memory of the rank", "B"),
    "gpu_used_percent": ("GPU in use", "%"),
    "gpu_memory_bytes": ("GPU memory", "B"),
    "machine_cpu_percent": ("CPU of the machine", "%"),
    "machine_memory_percent": ("Memory of the machine", "%"),
    "sent_bytes_per_second": ("Network out, whole machine", "B/s"),
    "received_bytes_per_second": ("Network in, whole machine", "B/s"),
    "read_bytes_per_second": ("Read from disk by the rank", "B/s"),
    "written_bytes_per_second": ("Written to disk by the rank", "B/s"),
}


def page_data(record: RunRecord, *, every: float, now: float) -> dict[str, Any]:
    """Return all that the page shows of a record; it can be written as JSON."""
    state = state_of(record, now)
    return {
        "title": record.folder.absolute().name,
        "state": state.word,
        "why": state.why,
        "running": state.running,
        "written": now,
        "every": every,
        "span": record.span or [0, 1],
        "tiles": list(_tiles(record, state)),
        "events": _events(record),
        "events_left_out": max(0, len(record.events) - MOST_EVENTS),
        "marks": list(_marks(record)),
        "recipe": record.recipe,
        "reproduce": reproduction(record),
        "facts": list(_facts(record, now)),
        "numerics": _rows(record.facts.get("numerics_key")),
        "digest": {"value": record.digest.hexdigest(), "command": RULE, "lines": record.num_lines},
        "fingerprint": state.fingerprint,
        "problems": record.problems(),
        "charts": list(_charts(record)),
        "ranks": _ranks(record),
    }


def _tiles(record: RunRecord, state: State) -> Iterator[dict[str, str]]:
    done = int(record.last.get("step", -1)) + 1
    planned = record.facts.get("steps")
    note = f"of {planned:,}" if isinstance(planned, int) else ""
    if record.num_skipped:
        note = f"{note}, {record.num_skipped:,} skipped".lstrip(", ")
    yield {"label": "Steps", "value": f"{done:,}", "note": note}
    first = record.ranks[min(record.ranks)] if record.ranks else None
    seconds = first.wall if first else state.seconds
    yield {"label": "Time", "value": clock_time(seconds), "note": "without pauses"}
    loss = record.curves["loss"].last
    start = record.curves["loss"].first
    yield {
        "label": "Loss",
        "value": "none" if loss is None else number(loss),
        "note": "" if start is None else f"from {number(start)}",
    }
    if first is not None and first.seconds:
        samples = first.speed.summary()
        yield {
            "label": "Samples/s",
            "value": f"{samples['last'] or 0:,.4g}"
            if (samples["last"] or 0) < 1000
            else f"{samples['last']:,.0f}",
            "note": f"{1000 * first.seconds / max(1, first.steps):,.3g} ms a step",
        }
    world = record.last.get("world_size", record.facts.get("world_size"))
    if isinstance(world, int):
        yield {"label": "Ranks", "value": f"{world:,}", "note": str(record.facts.get("device", ""))}


def _charts(record: RunRecord) -> Iterator[dict[str, Any]]:
    first = record.ranks[min(record.ranks)].speed if record.ranks else Curve()
    loss = {"loss": record.curves["loss"]}
    plans: list[tuple[str, str, dict[str, Curve]]] = [("Loss", "", loss)]
    if record.terms:
        plans.append(("Loss terms, before their coefficients", "", record.terms))
    plans.append(("Learning rate", "", {"learning rate": record.curves["learning_rate"]}))
    plans.append(("Gradient norm, before clipping", "", {"gradient norm": record.curves["grad_norm"]}))
    plans.append(("Throughput", "samples/s", {"samples/s": first}))
    plans.extend((f"Evaluation: {name}", "", {name: curve}) for name, curve in record.metrics.items())
    plans.append(("Checkpoints", "s", record.checkpoints))
    plans.append(("Loss scale", "", {"loss scale": record.curves["loss_scale"]}))
    shown = sorted(record.ranks)[:MOST_RANKS]
    resources: list[tuple[str, str, dict[str, Curve]]] = []
    for name, (title, unit) in RESOURCE_CHARTS.items():
        having = {f"rank {rank}": record.ranks[rank].resources.get(name, Curve()) for rank in shown}
        resources.append((title, unit, having))
    num_curves = sum(bool(curve) for _, _, curves in [*plans, *resources] for curve in curves.values())
    most = min(MOST_BUCKETS, MOST_POINTS // max(1, num_curves))
    for group, found in (("curves", plans), ("resources", resources)):
        for title, unit, curves in found:
            series = [
                {"name": name, "summary": curve.summary(), **curve.numbers(most)}
                for name, curve in curves.items()
                if curve
            ]
            # A reading that is zero from first to last is a device that nobody used.
            if series and (group == "curves" or any(one["summary"]["high"] for one in series)):
                yield {"group": group, "title": title, "unit": unit, "series": series}


def _ranks(record: RunRecord) -> dict[str, Any]:
    rows = [
        {
            "rank": rank,
            "steps": one.steps,
            "step_seconds": short(one.seconds / one.steps) if one.steps else None,
            "slowest": short(one.slowest),
            "phases": {name: short(value / max(1, one.steps)) for name, value in one.phases.items()},
        }
        for rank, one in sorted(record.ranks.items())
    ]
    used = {name for one in record.ranks.values() for name in one.phases}
    order = [name for name in PHASES if name in used] + sorted(used - set(PHASES))
    slices = {rank: one.slices for rank, one in record.ranks.items()}
    stragglers = [found.written() for found in find_stragglers(slices, uneven=record.uneven)]
    left_out = max(0, len(rows) - MOST_RANKS)
    return {"rows": rows, "order": order, "stragglers": stragglers, "resources_left_out": left_out}


def _events(record: RunRecord) -> list[dict[str, Any]]:
    return [_event(event) for event in record.events[-MOST_EVENTS:]]


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(event.get("event"))
    try:
        text = sentence(kind, event)
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version: shown as it stands
        text = None
    if text is None:
        text = json.dumps({name: value for name, value in event.items() if name not in ("event", "time")})
    warning = event.get("level") == "warning" or kind in ("CheckpointFailed", "RunFailed", "Quarantined")
    return {
        "kind": kind,
        "time": event.get("time"),
        "step": event.get("step"),
        "text": text.removeprefix("warning: "),
        "warning": warning or bool(event.get("broken_key")),
    }


def _marks(record: RunRecord) -> Iterator[dict[str, Any]]:
    for event in record.events[-MOST_EVENTS:]:
        if event.get("event") in MARKED:
            step = event.get("step", record.last.get("step"))
            if isinstance(step, int):
                yield {"step": step, "kind": event["event"], "text": _event(event)["text"]}


def _facts(record: RunRecord, now: float) -> Iterator[list[str]]:
    for name, value in record.facts.items():
        if name == "versions" and isinstance(value, dict):
            yield ["versions", ", ".join(f"{part} {found}" for part, found in value.items())]
        elif name != "numerics_key":
            yield [name.replace("_", " "), _plain(value)]
    if record.num_skipped:
        some = ", ".join(f"{step} ({why})" for step, why in record.skipped)
        yield ["skipped steps", f"{counted(record.num_skipped, 'step')}, first: {some}"]
    yield ["page written", time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(now))]


def _rows(values: object) -> list[list[str]]:
    if not isinstance(values, dict):
        return []
    return [[str(name).replace("_", " "), _plain(value)] for name, value in values.items()]


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_plain(part)}" for name, part in value.items() if part is not None)
    return value if isinstance(value, str) else json.dumps(value)
