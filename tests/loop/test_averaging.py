"""Averaged weights follow the applied updates, with the same bits on any ranks, and leave training alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.comm.transport import Transport
from samestep.loop.averaging import Averaging
from samestep.numerics.fingerprint import fingerprint
from samestep.optim.ema import EMA
from samestep.testing.threads import run_threads
from samestep.testing.workloads import Drawn, cnn_with_batch_norm

STEPS = 6
POINTS = Drawn(40, lambda g: (torch.randn(9, generator=g), torch.randn(5, generator=g)))


def make_model() -> nn.Module:
    torch.manual_seed(14)
    return nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.LayerNorm(31), nn.Linear(31, 5))


def loss(model: nn.Module, batch: Any) -> samestep.Weighted:
    inputs = batch[0].to(next(model.parameters()).dtype)
    return samestep.weighted(((model(inputs) - batch[1]).float() ** 2).mean(1))


@dataclass
class Seen:
    """What a run came to."""

    fingerprint: str
    averages: dict[str, Tensor]
    moves: int
    applied: int
    reference: dict[str, Tensor]

    def key(self) -> tuple[str, str, int, int]:
        return self.fingerprint, fingerprint(self.averages), self.moves, self.applied


def train(
    transport: Transport,
    *,
    ema: float | EMA | None,
    strategy: str = "replicate",
    precision: Any = "fp32",
    loss: Callable[..., Any] = loss,
    between: Callable[[samestep.Session, Averaging | None], None] = lambda session, average: None,
    optimizer: Any = lambda params: torch.optim.AdamW(params, lr=0.02),
) -> Seen:
    with transport.turn():
        model = make_model()
    session = samestep.Session(transport=transport, ema=ema, strategy=strategy, precision=precision)
    reference: dict[str, Tensor] = {}
    applied = moves = 0
    settings = EMA() if ema is None else ema
    assert isinstance(settings, EMA)
    with session:
        session.setup(model, optimizer)
        average = session.average
        store = session._engine.parts.store
        wide = {slot.name: slot.view(store.masters[slot.flat]) for slot in store.layout.slots}
        reference = {name: tensor.clone() for name, tensor in wide.items()}
        batching = samestep.Batching(global_batch=8, micro_batch=2)
        for batch in session.batches(POINTS, batching, steps=STEPS):
            for micro in batch:
                with micro.collect() as record:
                    record(loss(model, micro.data))
            report = session.step(batch)
            applied += report.applied
            if report.applied and settings.due(report.update):
                keep, moves = settings.decay_at(moves), moves + 1
                for name, tensor in wide.items():
                    reference[name] = keep * reference[name] + (1 - keep) * tensor
            between(session, average)
        averages = {} if average is None else average.gathered()
        ended = session.fingerprint()
        moved = 0 if average is None else average.moves
    return Seen(ended, averages, moved, applied, reference)


EVERYWHERE = [(world_size, strategy) for world_size in (1, 2, 3, 5) for strategy in ("replicate", "zero1")]
SOMEWHERE = [(2, "zero1"), (3, "replicate"), (5, "zero1")]
KINDS: list[tuple[EMA, Any, list[tuple[int, str]]]] = [
    (EMA(decay=0.9), "fp32", EVERYWHERE),
    (EMA(decay=0.9, warmup=True), samestep.Precision(parameters="bf16"), SOMEWHERE),
    (EMA(decay=lambda moves: min(0.9, (1 + moves) / (10 + moves)), every=2), "fp32", SOMEWHERE),
]


@pytest.mark.parametrize(("ema", "precision", "places"), KINDS)
def test_the_average_is_that_of_a_plain_loop_on_any_ranks(ema: EMA, precision: Any, places: Any) -> None:
    (alone,) = run_threads(lambda t: train(t, ema=ema, precision=precision), 1)
    assert alone.moves == STEPS // ema.every
    for name, tensor in alone.reference.items():
        assert torch.equal(alone.averages[name], tensor)
        assert alone.averages[name].dtype == torch.float32
    for world_size, strategy in places:
        ended = run_threads(
            lambda t, s=strategy: train(t, ema=ema, strategy=s, precision=precision), world_size
        )
        assert [seen.key() for seen in ended] == [alone.key()] * world_size


def test_an_optimizer_that_needs_whole_parameters() -> None:
    whole = lambda params: torch.optim.Adafactor(params, lr=0.02)  # noqa: E731
    (alone,) = run_threads(lambda t: train(t, ema=EMA(decay=0.5), optimizer=whole), 1)
    assert all(torch.equal(alone.averages[name], tensor) for name, tensor in alone.reference.items())
    ended = run_threads(lambda t: train(t, ema=EMA(decay=0.5), optimizer=whole, strategy="zero1"), 3)
    assert [seen.key() for seen in ended] == [alone.key()] * 3


def overflowing(model: nn.Module, batch: Any) -> samestep.Weighted:
    values = ((model(batch[0]) - batch[1]).float() ** 2).mean(1)
    return samestep.weighted(values * torch.where(batch[0][:, 0] > 1.2, torch.inf, 1.0))


def test_skipped_steps_do_not_move_the_average() -> None:
    runs = [
        run_threads(
            lambda t, s=s: train(t, ema=EMA(decay=0.9), precision="fp16", loss=overflowing, strategy=s), n
        )
        for n, s in ((1, "replicate"), (2, "zero1"), (3, "replicate"))
    ]
    (alone,) = runs[0]
    assert 0 < alone.applied < STEPS
    assert alone.moves == alone.applied
    assert all(torch.equal(alone.averages[name], tensor) for name, tensor in alone.reference.items())
    assert all(seen.key() == alone.key() for run in runs for seen in run)


@pytest.mark.parametrize("precision", ["fp32", samestep.Precision(parameters="bf16")])
@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_looking_at_the_averaged_model_moves_no_bit(strategy: str, precision: Any) -> None:
    found: list[float] = []

    def between(session: samestep.Session, average: Averaging | None) -> None:
        if average is None:
            return
        raw = session.fingerprint()
        wanted = average.gathered()
        measured = session.evaluate(
            samestep.Evaluation(dataset=POINTS, metric=lambda m, b: {"loss": loss(m, b)}, micro_batch=7)
        )
        with average.applied():
            assert average.is_applied
            named = dict(session.model.named_parameters())
            assert all(torch.equal(named[name], mean.to(named[name].dtype)) for name, mean in wanted.items())
            assert session.fingerprint() != raw
        assert session.fingerprint() == raw
        assert list(measured) == ["loss", "ema/loss"]
        found.append(measured["ema/loss"])

    settings: dict[str, Any] = {"strategy": strategy, "precision": precision}
    (plain,) = run_threads(lambda t: train(t, ema=None, **settings), 1)
    by_world = []
    for world_size in (1, 3):
        found.clear()
        watched = run_threads(lambda t: train(t, ema=EMA(decay=0.9), between=between, **settings), world_size)
        assert all(seen.fingerprint == plain.fingerprint for seen in watched)
        assert len(found) == STEPS * world_size
        by_world.append(sorted(set(found)))
    assert by_world[0] == by_world[1]


def test_an_evaluation_says_of_which_weights() -> None:
    def between(session: samestep.Session, average: Averaging | None) -> None:
        asked: dict[str, Any] = {"dataset": POINTS, "metric": loss}
        for weights, names in (("raw", ["metric"]), ("ema", ["ema/metric"])):
            told = session.evaluate(samestep.Evaluation(**asked, weights=weights))
            assert list(told) == names

    run_threads(lambda t: train(t, ema=EMA(), between=between), 2)


def test_running_statistics_are_the_models_own_or_averaged_with_the_weights() -> None:
    load = cnn_with_batch_norm()

    def run(transport: Transport, buffers: Any, strategy: str) -> tuple[str, str, bool]:
        with transport.turn():
            torch.manual_seed(0)
            model = load.make_model()
        with samestep.Session(
            transport=transport, strategy=strategy, ema=EMA(decay=0.5, buffers=buffers)
        ) as session:
            session.setup(model, lambda params: torch.optim.SGD(params, lr=0.1))
            average = session.average
            assert average is not None
            kept = {name: b.clone() for name, b in model.named_buffers()}
            for batch in session.batches(
                load.dataset, samestep.Batching(global_batch=8, micro_batch=2), steps=4
            ):
                for micro in batch:
                    with micro.collect() as record:
                        record(samestep.weighted(*load.values(model, micro.data)))
                session.step(batch)
                for name, buffer in model.named_buffers():
                    moved = 0.5 * kept[name] + 0.5 * buffer if buffer.is_floating_point() else buffer.clone()
                    kept[name] = moved
            own = {name: b.clone() for name, b in model.named_buffers()}
            with average.applied():
                wanted = kept if buffers == "average" else own
                assert all(torch.equal(b, wanted[name]) for name, b in model.named_buffers())
                seen = fingerprint({**dict(model.named_parameters()), **dict(model.named_buffers())})
            assert all(torch.equal(b, own[name]) for name, b in model.named_buffers())
            differs = any(not torch.equal(kept[name], own[name]) for name in own)
            return session.fingerprint(), seen, differs

    for buffers in ("copy", "average"):
        (alone,) = run_threads(lambda t, b=buffers: run(t, b, "replicate"), 1)
        assert alone[2]
        for world_size, strategy in ((2, "zero1"), (3, "replicate")):
            ended = run_threads(lambda t, b=buffers, s=strategy: run(t, b, s), world_size)
            assert ended == [alone] * world_size


def test_pieces_hold_each_element_once_and_go_over_to_other_ranks() -> None:
    stored: dict[str, Tensor] = {}
    count: dict[str, int] = {}

    def write(session: samestep.Session, average: Averaging | None) -> None:
        assert average is not None
        if session.update == STEPS:
            for slot, start, stop, tensor in average.pieces():
                whole = stored.setdefault(slot.name, torch.full((slot.numel,), torch.nan))
                whole[start - slot.start : stop - slot.start] = tensor
            count.update(average.state())

    (first, *_) = run_threads(lambda t: train(t, ema=EMA(decay=0.9), between=write, strategy="zero1"), 3)
    assert count == {"moves": STEPS}
    for name, tensor in first.averages.items():
        assert torch.equal(stored[name], tensor.flatten())

    def read(session: samestep.Session, average: Averaging | None) -> None:
        assert average is not None
        if session.update == STEPS:
            for slot, start, stop, tensor in average.pieces():
                tensor.copy_(stored[slot.name][start - slot.start : stop - slot.start])
            average.load_state({"moves": 77})

    for seen in run_threads(lambda t: train(t, ema=EMA(decay=0.1), between=read), 2):
        assert seen.moves == 77
        assert fingerprint(seen.averages) == fingerprint(first.averages)


def test_averages_are_not_put_where_a_parameter_was_exchanged() -> None:
    def between(session: samestep.Session, average: Averaging | None) -> None:
        assert average is not None
        session.model[0].weight.data = session.model[0].weight.data.clone()
        with pytest.raises(samestep.ConfigError, match=r"0\.weight: \.data was replaced"), average.applied():
            pass

    run_threads(lambda t: train(t, ema=EMA(), between=between), 1)


def test_an_error_while_the_averages_are_in_the_model_puts_it_back() -> None:
    def between(session: samestep.Session, average: Averaging | None) -> None:
        assert average is not None
        before = session.fingerprint()
        with pytest.raises(KeyError), average.applied():
            raise KeyError
        assert session.fingerprint() == before

    run_threads(lambda t: train(t, ema=EMA(), between=between), 1)
