"""The ledger: one JSON line a step, by which two runs are compared.

Floats stand in their shortest exact form, infinities and NaN as the strings "inf", "-inf" and "nan". The
wall time of a step is left out: all else is the same on every rank and in every repetition.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any, Final, Self, final

from samestep.errors import ConfigError
from samestep.events import Event, StepReport, TermReport
from samestep.track.lines import cut_torn_line

FIELDS: Final = tuple(field.name for field in fields(StepReport) if field.name != "seconds")
COMPARED: Final = tuple(name for name in FIELDS if name not in ("world_size", "generation"))
NOT_COMPARED: Final = re.compile(rb', "generation": [0-9]*, "world_size": [0-9]*')
REQUIRED: Final = frozenset(
    field.name
    for field in fields(StepReport)
    if field.default is MISSING and field.default_factory is MISSING
)
# Annotations are strings here: those with a float may come back from JSON as a word or an integer.
FLOATS: Final = frozenset(
    field.name for kind in (StepReport, TermReport) for field in fields(kind) if "float" in str(field.type)
)


def ledger_line(report: StepReport) -> str:
    """Return the line of a step, without its end: keys in the order of StepReport."""
    values = {name: _stored(getattr(report, name)) for name in FIELDS}
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def compared_values(report: StepReport) -> dict[str, str]:
    """Return field -> its text in the ledger, for the fields that must be equal in two runs.

    Equal texts mean equal bits, but for the payload of a NaN.
    """
    return {name: json.dumps(_stored(getattr(report, name))) for name in COMPARED}


@final
class LedgerWriter:
    """Append each step as one line; a listener of events.

    Law: a line is one write, so that a process that dies leaves at most the last line torn. Such a rest is
    cut off when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        self._file = FileIO(path, "a")

    def __call__(self, event: Event) -> None:
        """Write a StepReport; pass over anything else."""
        if isinstance(event, StepReport):
            self._file.write(f"{ledger_line(event)}\n".encode())

    def close(self) -> None:
        """Wait until the lines are on the disk, and close the file."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class LedgerDigest:
    """One SHA-256 over what must be equal in two runs.

    Rule: the lines as they stand, each with its end, but without what may differ between equal runs:
    `sed 's/, "generation": [0-9]*, "world_size": [0-9]*//' ledger.jsonl | sha256sum`.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, line: bytes) -> None:
        """Add a line, without its end."""
        self._hash.update(NOT_COMPARED.sub(b"", line, count=1) + b"\n")

    def hexdigest(self) -> str:
        """Return 64 hex digits over the lines so far."""
        return self._hash.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What a ledger file holds."""

    steps: list[StepReport]  # with `seconds` 0.0
    torn: str | None = None  # what was ignored, where the last line is not whole


def read_ledger(path: Path) -> Ledger:
    """Read a ledger file.

    A last line without an end is ignored, which `torn` says: its writer died. Raises ConfigError, which
    names the line, where any other line is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: there is no ledger to read: {error.strerror}.") from None
    *lines, rest = content.split(b"\n")
    steps = [parse_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    torn = (
        f"{path}, line {len(lines) + 1}: ignored, its writer stopped in the middle of it." if rest else None
    )
    return Ledger(steps=steps, torn=torn)


def parse_line(line: bytes, place: str) -> StepReport:
    """Return the step of one line; raise ConfigError, which names `place`, where it is damaged."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: this line is damaged: {error}. Restore the file from a copy.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: expected an object, found {line[:60]!r}. Is this a ledger?")
    missing, unknown = sorted(REQUIRED - values.keys()), sorted(values.keys() - set(FIELDS))
    if missing or unknown:
        raise ConfigError(
            f"{place}: missing fields: {', '.join(missing) or 'none'}; unknown fields: "
            f"{', '.join(unknown) or 'none'}. Another version of samestep may have written it."
        )
    try:
        loaded = _floats(values)
        terms = loaded.pop("terms", {})
        return StepReport(**loaded, terms={name: TermReport(**_floats(term)) for name, term in terms.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{place}: this line is damaged: {error}. Restore the file from a copy.") from None


def _floats(values: Mapping[str, object]) -> dict[str, Any]:
    return {name: _loaded(name, value) for name, value in values.items()}


def _stored(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, TermReport):
        return {field.name: _stored(getattr(value, field.name)) for field in fields(TermReport)}
    if isinstance(value, Mapping):
        return {name: _stored(part) for name, part in value.items()}
    return value


def _loaded(name: str, value: object) -> object:
    return float(value) if name in FLOATS and isinstance(value, int | str) else value


def keep_steps(path: Path, count: int) -> list[StepReport]:
    """Cut a ledger back to the steps before `count`, where a run goes on, and return them.

    The file is replaced by one rename. A ledger that is not there has none.
    """
    if not path.exists():
        return []
    steps = [report for report in read_ledger(path).steps if report.step < count]
    shorter = path.with_name(f".{path.name}.part")
    shorter.write_text("".join(f"{ledger_line(report)}\n" for report in steps), encoding="utf-8")
    shorter.replace(path)
    return steps
