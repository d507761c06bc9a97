"""The callbacks that come with samestep: when they ask for what."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from samestep.callbacks.callback import Callback
from samestep.callbacks.dispatch import Callbacks
from samestep.callbacks.evaluations import BestCheckpoint, EarlyStopping
from samestep.callbacks.noise_scale import GradientNoiseScale
from samestep.callbacks.spikes import SpikeWatch
from samestep.errors import CallbackError, ConfigError
from samestep.events import Evaluated, Notice, RunEnded, StepReport
from samestep.loop.noise import GradientNoise, StepDetails
from samestep.loop.requests import Requests

NAN, INF = math.nan, math.inf


def runner(*callbacks: Callback) -> tuple[Callbacks, list[str]]:
    told: list[str] = []

    def notify(notice: Notice) -> None:
        told.append(notice.message)

    return Callbacks(callbacks, rank=0, world_size=1, timeout_s=60.0, notify=notify), told


def evaluated(callbacks: Callbacks, values: list[float]) -> list[Requests]:
    asked = []
    for step, value in enumerate(values):
        callbacks.dispatch(Evaluated(step=step, metrics={"loss": value, "acc": -value}))
        asked.append(callbacks.take())
    return asked


def resumed(callbacks: Callbacks, *fresh: Callback) -> Callbacks:
    """Hand the state over to new callbacks, through JSON."""
    after, _ = runner(*fresh)
    assert after.load_state(json.loads(json.dumps(callbacks.state()))) == []
    return after


@pytest.mark.parametrize(
    ("settings", "values", "stops_at"),
    [
        ({"metric": "loss", "patience": 2}, [3.0, 2.0, 2.0, 2.5, 1.0], 3),
        ({"metric": "loss", "patience": 2}, [3.0, 2.0, 2.5, 1.0, 1.5, 1.0], 5),
        ({"metric": "acc", "mode": "max", "patience": 1}, [3.0, 2.0, 2.0], 2),
        ({"metric": "loss", "patience": 2, "min_delta": 0.5}, [3.0, 2.6, 2.5, 2.0], 2),
        ({"metric": "loss", "patience": 2}, [NAN, NAN], 1),
        ({"metric": "loss", "patience": 3}, [1.0, NAN, 0.5, 2.0, INF], None),
        ({"metric": "loss", "patience": 2}, [-INF, -INF, 0.0], 2),
    ],
)
def test_early_stopping(settings: dict[str, Any], values: list[float], stops_at: int | None) -> None:
    callbacks, _ = runner(EarlyStopping(**settings))
    stops = [bool(asked.stop) for asked in evaluated(callbacks, values)]
    assert (stops.index(True) if True in stops else None) == stops_at
    for cut in range(len(values)):  # stopped and resumed anywhere
        first, _ = runner(EarlyStopping(**settings))
        before = evaluated(first, values[:cut])
        after = evaluated(resumed(first, EarlyStopping(**settings)), values[cut:])
        assert [bool(asked.stop) for asked in before + after] == stops


def test_early_stopping_says_why_and_where_it_had_nothing_to_look_at() -> None:
    callbacks, _ = runner(EarlyStopping("loss", patience=1))
    *_, last = evaluated(callbacks, [1.5, 2.0])
    assert last.stop == (
        "EarlyStopping: loss was not better for 1 evaluations; the best was 1.5 after step 0"
    )
    callbacks, told = runner(EarlyStopping("loss"))
    callbacks.dispatch(RunEnded(step=3, update=3, fingerprint=""))
    assert "there was no evaluation to look at" in told[0]
    with pytest.raises(CallbackError, match=r"no metric f1\. The evaluation has: loss, acc"):
        evaluated(runner(EarlyStopping("f1"))[0], [1.0])


def test_the_best_checkpoint_is_asked_for_at_each_best_value() -> None:
    values = [3.0, 3.0, 2.0, NAN, 2.5, 1.0]
    callbacks, _ = runner(BestCheckpoint("loss"))
    saves = [bool(asked.save) for asked in evaluated(callbacks, values)]
    assert saves == [True, False, True, False, False, True]
    first, _ = runner(BestCheckpoint("loss"))
    evaluated(first, values[:3])
    after = resumed(first, best := BestCheckpoint("loss"))
    assert [bool(asked.save) for asked in evaluated(after, values[3:])] == saves[3:]
    assert best.best == 1.0


def step(number: int, loss: float | None, *, skipped: str | None = None) -> StepReport:
    return StepReport(
        step=number,
        update=number,
        epoch=0,
        cursor=0,
        samples=4,
        sample_hash="",
        micro_batches=2,
        weight=4.0,
        loss=loss,
        grad_norm=1.0,
        learning_rate=0.1,
        applied=skipped is None,
        skipped=skipped,
    )


def watched(watch: Callbacks, losses: list[float | None], first: int = 0) -> list[Requests]:
    asked = []
    for number, loss in enumerate(losses, start=first):
        ids = tuple(range(4 * number, 4 * number + 4))
        bad = ids[2:] if loss is not None and not math.isfinite(loss) else ()
        watch.dispatch(step(number, loss), StepDetails(ids=ids, bad_ids=bad))
        asked.append(watch.take())
    return asked


CALM: list[float | None] = [2.0 + 0.01 * (7 * number % 5) for number in range(30)]


def test_losses_that_are_not_finite_quarantine_their_micro_batch() -> None:
    for bad in (NAN, INF):
        callbacks, told = runner(watch := SpikeWatch())
        asked = watched(callbacks, [1.0, bad, 1.0])
        assert [request.skip for request in asked] == [(), (6, 7), ()]
        assert watch.quarantined == {6, 7}
        assert "the loss of 2 samples is not finite" in told[0]
    callbacks, _ = runner(SpikeWatch())
    callbacks.dispatch(step(0, 1.0, skipped="overflow"), StepDetails(ids=(1, 2)))  # of the loss scale
    assert not callbacks.take()
    assert callbacks.skips_nonfinite


def test_a_jump_of_the_loss_is_a_spike_and_ordinary_noise_is_none() -> None:
    callbacks, told = runner(SpikeWatch(at_spike="skip"))
    asked = watched(callbacks, [*CALM, 2.9, None, *CALM])
    assert [number for number, request in enumerate(asked) if request.skip] == [30]
    assert asked[30].skip == (120, 121, 122, 123)
    assert len(told) == 1
    assert "the loss of step 30 is 2.9, above the limit of" in told[0]
    callbacks, _ = runner(SpikeWatch(at_spike="stop"))
    assert [bool(request.stop) for request in watched(callbacks, [*CALM, 2.9])] == [False] * 30 + [True]
    callbacks, told = runner(SpikeWatch())
    assert not any(watched(callbacks, [*CALM, 2.9]))
    assert len(told) == 1


def test_the_limit_is_that_of_the_written_rule() -> None:
    watch = SpikeWatch(threshold=3.0, window=5, least=3)
    callbacks, _ = runner(watch)
    watched(callbacks, [9.0, 9.0, 1.0, 2.0, 4.0, 2.0, 3.0])
    # Of 1, 2, 4, 2, 3 the median is 2, and that of the distances 1, 0, 2, 0, 1 is 1.
    assert watch.threshold() == 2.0 + 3.0 * 1.4826 * 1.0
    flat = SpikeWatch(threshold=10.0, window=5, least=3)
    watched(runner(flat)[0], [4.0] * 5)
    assert flat.threshold() == 4.0 + 10.0 * 0.001 * 4.0
    assert SpikeWatch().threshold() is None


def test_a_new_level_is_normal_after_half_a_window() -> None:
    callbacks, told = runner(SpikeWatch(window=30))
    watched(callbacks, [*CALM, *[5.0 + 0.01 * (number % 3) for number in range(40)]])
    assert 10 <= len(told) <= 16


def test_too_many_quarantined_samples_stop_the_run_and_the_watch_goes_on_after_a_resume() -> None:
    losses: list[float | None] = [1.0, NAN, NAN, 1.0, NAN]
    callbacks, _ = runner(SpikeWatch(limit=5))
    asked = watched(callbacks, losses)
    assert [bool(request.stop) for request in asked] == [False] * 4 + [True]
    first, _ = runner(SpikeWatch(limit=5))
    watched(first, losses[:3])
    again = watched(resumed(first, SpikeWatch(limit=5)), losses[3:], first=3)
    assert [bool(request.stop) for request in again] == [False, True]


def noise(signal: float, trace: float) -> StepDetails:
    return StepDetails(noise=GradientNoise(signal=signal, trace=trace, weight=32.0, samples=8))


def test_the_noise_scale_is_a_ratio_of_averages() -> None:
    measure = GradientNoiseScale(smoothing=0.5, tell_every=3)
    callbacks, told = runner(measure)
    assert callbacks.needs_noise
    assert measure.scale is None
    for number, (signal, trace) in enumerate([(-1.0, 4.0), (3.0, 8.0), (5.0, 2.0)]):
        callbacks.dispatch(step(number, 1.0), noise(signal, trace))
        callbacks.dispatch(step(number, 1.0), None)  # a step without an estimate changes nothing
    signal, trace = 5.0 * 4 + 3.0 * 2 - 1.0, 2.0 * 4 + 8.0 * 2 + 4.0
    assert measure.scale == pytest.approx(trace / signal, rel=1e-12)
    assert measure.samples == pytest.approx(trace / signal / 4, rel=1e-12)
    assert measure.signal == pytest.approx(signal / 7, rel=1e-12)
    assert measure.trace == pytest.approx(trace / 7, rel=1e-12)
    assert (
        told[0]
        == f"GradientNoiseScale: step 2: the gradient-noise scale is about {measure.samples:.3g} samples."
    )
    after = GradientNoiseScale(smoothing=0.5)
    resumed(callbacks, after)
    assert after.scale == measure.scale


BAD: list[tuple[Any, str]] = [
    (lambda: EarlyStopping(""), "metric is ''"),
    (lambda: EarlyStopping("loss", patience=0), "patience is 0"),
    (lambda: BestCheckpoint("loss", mode="least"), "mode is 'least'"),
    (lambda: BestCheckpoint("loss", min_delta=-1), "min_delta is -1"),
    (lambda: SpikeWatch(at_spike="run"), "at_spike is 'run'"),
    (lambda: SpikeWatch(window=5), "window is 5"),
    (lambda: SpikeWatch(threshold=0), "threshold is 0"),
    (lambda: GradientNoiseScale(smoothing=1.0), "smoothing is 1.0"),
    (lambda: GradientNoiseScale(tell_every=0), "tell_every is 0"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_settings_that_mean_nothing_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
