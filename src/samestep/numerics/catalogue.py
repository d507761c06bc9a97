"""The catalogue of reproducibility: which operations move bits, and with what.

The table was found by experiment (`python -m samestep.numerics.experiments`) and is read without torch.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, TypeAlias

from samestep.errors import ConfigError

Verdict: TypeAlias = Literal["same", "moves", "refused", "unmeasured"]

COLUMNS = {
    "run_to_run": "repeats in one process, torch as it comes, with 1, 2 and 4 threads",
    "processes": "a repeat in a fresh process, torch as it comes, with 1 and 2 threads",
    "exact": "repeats in exact mode, in one process and in a fresh one, with 1, 2 and 4 threads",
    "threads": "1, 2 and 4 threads with each other",
    "shape": "one sample alone, and half of the samples, with the same rows of the whole batch",
    "alignment": "inputs at a multiple of 64 bytes with inputs 4, 8, 16 and 32 bytes further on",
    "layout": "the first input with the same values in another memory order (channels last, or transposed)",
    "instructions": "AVX512 with AVX2, on the same processor",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What is known of one operation, forward and backward, on one kind of device.

    A column says "moves" where any output or gradient did, and `moved` names which ones; "unmeasured" also
    where the question makes no sense (a sum over all samples has no rows).
    """

    operation: str
    inputs: str  # names and shapes; float32 unless said
    run_to_run: Verdict
    processes: Verdict
    exact: Verdict
    threads: Verdict
    shape: Verdict
    alignment: Verdict
    layout: Verdict
    instructions: Verdict
    moved: Mapping[str, tuple[str, ...]]  # column -> results that moved
    note: str
    hint: str  # what to do, where exact mode refuses it


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where and when a table was measured."""

    torch: str
    capability: str
    processor: str
    date: str


def catalogue(device: str = "cpu") -> tuple[Entry, ...]:
    """Return all entries of a device type, in the order of the experiments; () where nothing was measured."""
    table, texts = _read("catalogue.json")[device], _read("hints.json")
    return tuple(_entry(name, row, texts) for name, row in table["operations"].items()) if table else ()


def origin(device: str = "cpu") -> Origin | None:
    """Return where and when the table of a device type was measured; None where it was not."""
    table = _read("catalogue.json")[device]
    return Origin(**table["origin"]) if table else None


def look_up(operation: str, device: str = "cpu") -> Entry:
    """Return the entry of one operation, by its name in the table.

    Raises ConfigError, which names the nearest known one.
    """
    entries = {entry.operation: entry for entry in catalogue(device)}
    if operation in entries:
        return entries[operation]
    near = difflib.get_close_matches(operation, entries, n=1)
    raise ConfigError(
        f"The catalogue of {device} has no operation {operation!r}."
        + (f" Did you mean {near[0]}?" if near else " `catalogue()` returns all of them.")
    )


def hint_for(kernel: str) -> str:
    """Say what to do in place of a kernel, by the name that torch's refusal gives it."""
    texts = _read("hints.json")
    fitting = [name for name in texts["hints"] if name in kernel]
    hint: str = texts["hints"][max(fitting, key=len)] if fitting else texts["anything_else"]
    return hint


def _entry(name: str, row: Mapping[str, Any], texts: Mapping[str, Any]) -> Entry:
    verdicts: dict[str, Verdict] = {column: _verdict(row[column]) for column in COLUMNS}
    return Entry(
        operation=name,
        inputs=row["inputs"],
        moved={column: tuple(row[column]) for column, verdict in verdicts.items() if verdict == "moves"},
        note=texts["notes"].get(name, ""),
        hint=hint_for(name) if verdicts["exact"] in ("moves", "refused") else "",
        **verdicts,
    )


def _verdict(cell: list[str] | str | None) -> Verdict:
    if cell is None:
        return "unmeasured"
    if cell == "refused":
        return "refused"
    return "moves" if cell else "same"


def _read(name: str) -> Any:
    return json.loads(resources.files("samestep.numerics").joinpath(name).read_text(encoding="utf-8"))
