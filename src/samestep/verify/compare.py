"""Two run folders side by side: the first step, then the first tensor and element, that differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from samestep.checkpoint.state import read_state
from samestep.events import StepReport
from samestep.track.folder import LEDGER, STATE, read_fingerprint
from samestep.track.ledger import compared_values, read_ledger
from samestep.verify.distance import Level, TensorDifference, compare_tensors

STATES: Final = "states"  # a folder of step-NNNNNN.safetensors, where a run kept any
LIMIT: Final = 1e-6  # relative, for the numbers of a step: they come from float32
BITS: Final = frozenset(("digest",))  # tells that bits differ, not how far
MEASURED: Final = frozenset(("loss", "grad_norm", "terms"))  # what rounding may move


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDifference:
    """One step whose lines in two ledgers differ."""

    step: int
    level: Level
    fields: dict[str, tuple[str, str]]  # field -> its text in A and in B


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDifference:
    """One stored state that differs between two runs."""

    state: str  # its file, relative to the run folder
    level: Level
    num_tensors: int  # with other bits, tied ones counted once
    first: TensorDifference | None  # in the order of the model; None where there are problems
    problems: tuple[str, ...] = ()  # names, shapes or dtypes that differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How equal two run folders are."""

    level: Level
    num_steps: tuple[int, int]
    step: StepDifference | None  # the first one
    states: tuple[str, ...]  # those that both runs hold, in the order compared
    state: StateDifference | None  # the first one
    fingerprints: tuple[str | None, str | None]
    notices: tuple[str, ...] = ()


def compare_runs(first: Path, second: Path) -> Comparison:
    """Compare two run folders, by their ledgers and then by the states that both hold.

    Raises ConfigError where a folder holds no run or one of its files is damaged.
    """
    ledgers = [read_ledger(folder / LEDGER) for folder in (first, second)]
    ours, theirs = (ledger.steps for ledger in ledgers)
    steps = list(step_differences(ours, theirs))
    names = tuple(name for name in _states(first) if (second / name).is_file())
    states = [found for name in names if (found := compare_states(first / name, second / name, name))]
    prints = (read_fingerprint(first), read_fingerprint(second))
    levels = [Level.SAME, *(step.level for step in steps), *(state.level for state in states)]
    bits_differ = prints[0] != prints[1] or any(BITS & step.fields.keys() for step in steps)
    # Digests and fingerprints tell that bits differ; how far, only states tell.
    if len(ours) != len(theirs) or (bits_differ and not states):
        levels.append(Level.CHANGED)
    return Comparison(
        level=max(levels),
        num_steps=(len(ours), len(theirs)),
        step=steps[0] if steps else None,
        states=names,
        state=states[0] if states else None,
        fingerprints=prints,
        notices=tuple(ledger.torn for ledger in ledgers if ledger.torn),
    )


def step_differences(first: Sequence[StepReport], second: Sequence[StepReport]) -> Iterator[StepDifference]:
    """Yield the steps that differ, as far as both ledgers go, without world size and generation."""
    for ours, theirs in zip(first, second, strict=False):
        texts, others = compared_values(ours), compared_values(theirs)
        fields = {name: (text, others[name]) for name, text in texts.items() if text != others[name]}
        if fields:
            yield StepDifference(step=ours.step, level=_step_level(ours, theirs, set(fields)), fields=fields)


def _step_level(first: StepReport, second: StepReport, fields: set[str]) -> Level:
    if fields - MEASURED - BITS or first.terms.keys() != second.terms.keys():
        return Level.CHANGED
    pairs = [(first.loss, second.loss), (first.grad_norm, second.grad_norm)]
    for name, term in first.terms.items():
        other = second.terms[name]
        if term.weight != other.weight:
            return Level.CHANGED
        pairs += [(term.loss, other.loss), (term.contribution, other.contribution)]
    return Level.ROUNDING if all(_close(ours, theirs) for ours, theirs in pairs) else Level.CHANGED


def _close(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=LIMIT) or (math.isnan(first) and math.isnan(second))


def compare_states(first: Path, second: Path, name: str) -> StateDifference | None:
    """Compare two state files tensor by tensor; None where all bits are equal."""
    ours, theirs = read_state(first), read_state(second)
    problems = [f"only in A: {key}" for key in ours if key not in theirs]
    problems += [f"only in B: {key}" for key in theirs if key not in ours]
    for key in ours.keys() & theirs.keys():
        kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in (ours[key], theirs[key])]
        if kinds[0] != kinds[1]:
            problems.append(f"{key}: {kinds[0][0]} {kinds[0][1]} in A, {kinds[1][0]} {kinds[1][1]} in B")
    if problems:
        return StateDifference(
            state=name, level=Level.CHANGED, num_tensors=0, first=None, problems=tuple(sorted(problems))
        )
    pairs = {(id(ours[key]), id(theirs[key])): key for key in reversed(ours)}  # tied tensors: the first name
    found = [compare_tensors(key, ours[key], theirs[key]) for key in reversed(pairs.values())]
    different = [difference for difference in found if difference is not None]
    if not different:
        return None
    level = max(difference.level for difference in different)
    return StateDifference(state=name, level=level, num_tensors=len(different), first=different[0])


def _states(folder: Path) -> list[str]:
    kept = sorted(f"{STATES}/{path.name}" for path in (folder / STATES).glob("step-*.safetensors"))
    return [*kept, STATE] if (folder / STATE).is_file() else kept


def describe(comparison: Comparison) -> list[str]:
    """Return what a person wants to know, most important first, one line each."""
    lines = [f"level: {comparison.level.word}", *comparison.notices]
    ours, theirs = comparison.num_steps
    if ours != theirs:
        lines.append(f"ledger: {ours} steps in A, {theirs} in B; compared as far as both go")
    if comparison.step is None:
        lines.append(f"ledger: {min(ours, theirs)} steps, all equal")
    else:
        lines.append(f"ledger: first differing step: {comparison.step.step}")
        lines += [f"  {name}: {a} in A, {b} in B" for name, (a, b) in comparison.step.fields.items()]
    lines += _describe_states(comparison)
    for run, value in zip("AB", comparison.fingerprints, strict=True):
        lines.append(f"fingerprint of {run}: {value or 'none, the run did not end'}")
    return lines


def _describe_states(comparison: Comparison) -> Iterator[str]:
    state = comparison.state
    if state is None:
        count = len(comparison.states)
        yield f"states: {count} compared, all equal" if count else "states: none that both runs hold"
        return
    yield f"states: first that differs: {state.state}"
    yield from (f"  {problem}" for problem in state.problems)
    if (tensor := state.first) is not None:
        place = ", ".join(str(part) for part in tensor.index)
        apart = "no distance in ulp" if tensor.ulps is None else f"{tensor.ulps} ulp apart"
        relative = "" if tensor.deviation is None else f", relative deviation {tensor.deviation:.1e}"
        yield f"  {state.num_tensors} tensors differ, the first: {tensor.name}"
        yield f"  {tensor.num_different} of its {tensor.num_elements} elements{relative}"
        yield f"  the first at [{place}]: {tensor.first!r} in A, {tensor.second!r} in B, {apart}"
