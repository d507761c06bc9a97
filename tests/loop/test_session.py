"""A session in a loop of the user's own: the bits of `train`, and a clear word for every misuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.comm.alone import Alone
from samestep.comm.transport import Transport
from samestep.errors import ConfigError, Disagreement, LossError, PeerLost
from samestep.loop import facts
from samestep.numerics.exact import numerics_key
from samestep.testing.threads import run_threads
from samestep.testing.workloads import Drawn

DATASET = Drawn(20, lambda g: torch.randn(3, generator=g))
LONGER = Drawn(60, lambda g: torch.randn(3, generator=g))
BATCHING = samestep.Batching(global_batch=6, micro_batch=2)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.2), nn.BatchNorm1d(5), nn.Linear(5, 1))


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def loss(model: nn.Module, batch: Tensor) -> samestep.Weighted:
    return samestep.weighted((model(batch).squeeze(1) - 1) ** 2)


def build(transport: Transport, seed: int = 0) -> nn.Module:
    with transport.turn():
        torch.manual_seed(seed)
        return make_model()


def opened(transport: Transport, **settings: Any) -> samestep.Session:
    return samestep.Session(transport=transport, **settings)


def take(session: samestep.Session, batch: Any) -> samestep.StepReport:
    for micro in batch:
        with micro.collect() as record:
            record(loss(session.model, micro.data))
    return session.step(batch)


def own_loop(transport: Transport, steps: int = 5, **settings: Any) -> tuple[str, list[Any]]:
    reports = []
    with opened(transport, clip_norm=1.0, **settings) as session:
        session.setup(build(transport), make_optimizer, samestep.schedules.constant(warmup=3))
        for batch in session.batches(DATASET, BATCHING, steps=steps):
            report = take(session, batch)
            reports.append((report.loss, report.grad_norm, report.digest, report.cursor))
        return session.fingerprint(), reports


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_a_loop_of_ones_own_gives_the_bits_of_train(strategy: str) -> None:
    def trained(transport: Transport) -> tuple[str, list[Any]]:
        result = samestep.train(
            build(transport),
            DATASET,
            loss,
            optimizer=make_optimizer,
            batching=BATCHING,
            steps=5,
            schedule=samestep.schedules.constant(warmup=3),
            clip_norm=1.0,
            transport=transport,
        )
        return result.fingerprint, [(r.loss, r.grad_norm, r.digest, r.cursor) for r in result.history]

    (wanted,) = run_threads(trained, 1)
    for world_size in (1, 2, 3, 5):
        assert run_threads(lambda t: own_loop(t, strategy=strategy), world_size) == [wanted] * world_size


def test_what_is_done_in_the_wrong_order_is_refused(alone: Transport) -> None:
    session = opened(alone)
    closed: list[Callable[[], object]] = [
        lambda: session.rank,
        lambda: session.world_size,
        lambda: session.first,
        lambda: session.setup(make_model(), make_optimizer),
        lambda: next(session.batches(DATASET, BATCHING, steps=1)),
    ]
    for call in closed:
        with pytest.raises(ConfigError, match=r"the session is not open. Use it as: with samestep\.Session"):
            call()
    with session:
        early: list[Callable[[], object]] = [
            lambda: session.model,
            session.fingerprint,
            lambda: next(session.batches(DATASET, BATCHING, steps=1)),
        ]
        for call in early:
            with pytest.raises(ConfigError, match=r"no model yet: call session\.setup"):
                call()
        session.setup(make_model(), make_optimizer)
        with pytest.raises(ConfigError, match="setup was called twice"):
            session.setup(make_model(), make_optimizer)


def test_steps_with_the_wrong_batch_are_refused(alone: Transport) -> None:
    with opened(alone) as session:
        session.setup(make_model(), make_optimizer)
        batches = session.batches(DATASET, BATCHING, steps=3)
        first = next(batches)
        stale = next(iter(first))
        take(session, first)
        with pytest.raises(
            ConfigError, match="step 0 is not the batch that was begun last, or was stepped before"
        ):
            session.step(first)
        with pytest.raises(ConfigError, match="no step was begun"), stale.collect():
            pass
        second = next(batches)
        with (
            pytest.raises(ConfigError, match="micro-batch 0 of step 0 was collected in step 1"),
            stale.collect(),
        ):
            pass
        with pytest.raises(ConfigError, match="step 0 is not the batch"):
            session.step(first)
        take(session, second)


def test_every_micro_batch_once_in_order(alone: Transport) -> None:
    with opened(alone) as session:
        session.setup(make_model(), make_optimizer)
        batches = session.batches(LONGER, BATCHING, steps=6)

        with pytest.raises(LossError, match=r"step 0 was taken after 0 of 3 micro-batches"):
            session.step(next(batches))

        batch = next(batches)
        micro = next(iter(batch))
        with pytest.raises(LossError, match="micro-batch 0 recorded no loss"), micro.collect():
            pass
        with pytest.raises(LossError, match="recorded its loss twice"), micro.collect() as record:
            record(loss(session.model, micro.data))
            record(loss(session.model, micro.data))

        first, second, third = next(batches)
        with first.collect() as record:
            record(loss(session.model, first.data))
        with (
            pytest.raises(LossError, match="micro-batch 0 was collected, but micro-batch 1 is due"),
            first.collect(),
        ):
            pass
        with (
            pytest.raises(LossError, match="micro-batch 2 was collected, but micro-batch 1 is due"),
            third.collect(),
        ):
            pass
        with second.collect() as record:
            record(loss(session.model, second.data))
        with third.collect() as record:
            record(loss(session.model, third.data))
        with (
            pytest.raises(LossError, match="micro-batch 2 was collected, but all of this rank are done"),
            third.collect(),
        ):
            pass

        batch = next(batches)
        list(batch)
        with pytest.raises(ConfigError, match="micro-batch 0 of step 3 was passed already"):
            list(batch)

        batch = next(batches)
        batch.load_all()
        assert [m.index for m in batch] == [m.index for m in batch] == [0, 1, 2]
        take(session, batch)


def test_a_batch_that_is_passed_over_does_not_shift_the_data(alone: Transport) -> None:
    with opened(alone) as session:
        session.setup(make_model(), make_optimizer)
        batching = samestep.Batching(global_batch=6, micro_batch=2, shuffle=False)
        for batch in session.batches(DATASET, batching, steps=3):
            if batch.step == 0:
                continue
            if batch.step == 1:
                next(iter(batch))
                continue
            for micro in batch:
                wanted = torch.stack([DATASET[int(i)] for i in micro.ids])
                assert torch.equal(micro.data, wanted)


@pytest.mark.parametrize("where", ["forward", "between", "first step", "listener"])
def test_an_error_on_one_rank_ends_the_others_at_once(where: str) -> None:
    lost: list[str] = []

    def work(transport: Transport) -> None:
        def listen(event: samestep.Event) -> None:
            if where == "listener" and transport.rank == 1 and isinstance(event, samestep.StepReport):
                raise KeyError("the cause")

        try:
            with opened(transport, listeners=[listen]) as session:
                session.setup(build(transport), make_optimizer)
                for batch in session.batches(DATASET, BATCHING, steps=5):
                    for micro in batch:
                        with micro.collect() as record:
                            due = 0 if where == "first step" else 2
                            if (
                                where in ("forward", "first step")
                                and transport.rank == 1
                                and batch.step == due
                            ):
                                raise KeyError("the cause")
                            record(loss(session.model, micro.data))
                    session.step(batch)
                    if where == "between" and transport.rank == 1 and batch.step == 2:
                        raise KeyError("the cause")
        except PeerLost as error:
            lost.append(str(error))
            raise

    started = time.monotonic()
    with pytest.raises(KeyError, match="the cause"):
        run_threads(work, 3, timeout_s=50)
    assert time.monotonic() - started < 25
    assert len(lost) == 2


def test_the_model_comes_back_usable_after_an_error(alone: Transport) -> None:
    torch.manual_seed(0)
    model = make_model()
    statistics = model[2].running_var.clone()
    with pytest.raises(KeyError), opened(alone) as session:
        session.setup(model, make_optimizer)
        for batch in session.batches(DATASET, BATCHING, steps=5):
            for micro in batch:
                with micro.collect():
                    model(micro.data)
                    raise KeyError
    assert torch.equal(model[2].running_var, statistics)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    loss(model, torch.stack([DATASET[0], DATASET[1]])).total.backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 for p in model.parameters())


def test_models_of_other_values_are_made_equal_and_it_is_told() -> None:
    def work(transport: Transport) -> tuple[str, list[str]]:
        events: list[samestep.Event] = []
        with opened(transport, listeners=[events.append]) as session:
            session.setup(build(transport, seed=transport.rank), make_optimizer)
            for batch in session.batches(DATASET, BATCHING, steps=2):
                take(session, batch)
            told = [e.message for e in events if isinstance(e, samestep.Notice)]
            return session.fingerprint(), told

    (alone,) = run_threads(work, 1)
    assert alone[1] == []
    for fingerprint, told in run_threads(work, 3):
        assert fingerprint == alone[0]
        assert len(told) == 1
        assert told[0].startswith(
            "ranks built the model with different values in 4 tensors (0.weight, 0.bias,"
        )


def unequal(rank: int, kind: str) -> dict[str, Any]:
    """Return what this rank does otherwise."""
    if rank != 2:
        return {}
    return {
        "shape": {"model": lambda: nn.Linear(3, 2)},
        "name": {"model": lambda: nn.Sequential(nn.Linear(3, 1))},
        "dtype": {"model": lambda: nn.Linear(3, 1).double()},
        "frozen": {"model": lambda: nn.Linear(3, 1, bias=False)},
        "optimizer": {"optimizer": lambda params: torch.optim.SGD(params, lr=0.01)},
        "rate": {"optimizer": lambda params: torch.optim.AdamW(params, lr=0.02)},
        "groups": {"optimizer": lambda params: torch.optim.AdamW([{"params": [p]} for p in params], lr=0.01)},
        "data": {"dataset": Drawn(19, lambda g: torch.randn(3, generator=g))},
        "batching": {"batching": samestep.Batching(global_batch=6, micro_batch=3)},
        "steps": {"steps": 3},
        "seed": {"settings": {"seed": 1}},
        "clip": {"settings": {"clip_norm": 2.0}},
        "precision": {"settings": {"precision": "bf16"}},
        "threads": {"settings": {"threads": 2}},
        "strategy": {"settings": {"strategy": "zero1"}},
        "weights": {"weights": lambda batch: {"a": 1.0}},
    }[kind]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("shape", r"weight \(1, 3\) torch.float32 on rank 0, but weight \(2, 3\) torch.float32 on rank 2"),
        ("name", "weight .* on rank 0, but 0.weight"),
        ("dtype", "torch.float32 on rank 0, but .*torch.float64 on rank 2"),
        ("frozen", "number of .*: 2 on rank 0, but 1 on rank 2"),
        ("optimizer", "the optimizer: AdamW on rank 0, but SGD on rank 2"),
        ("rate", "lr of optimizer group 0: 0.01 on rank 0, but 0.02 on rank 2"),
        ("groups", "number of parameters in optimizer group 0: 2 on rank 0, but 1 on rank 2"),
        ("data", "the number of samples: 20 on rank 0, but 19 on rank 2"),
        ("batching", "batching: .*micro_batch=2.* on rank 0, but .*micro_batch=3"),
        ("steps", "the number of steps: 2 on rank 0, but 3 on rank 2"),
        ("seed", "the seed: 0 on rank 0, but 1 on rank 2"),
        ("clip", "clip_norm: None on rank 0, but 2.0 on rank 2"),
        ("precision", "compute='fp32'.* on rank 0, but .*compute='bf16'"),
        ("threads", "CPU threads per rank: 1 on rank 0, but 2 on rank 2"),
        ("strategy", "the strategy: replicate, ordered on rank 0, but zero1, ordered on rank 2"),
        ("weights", "weights of loss terms are given: False on rank 0, but True on rank 2"),
    ],
)
def test_what_differs_between_ranks_is_named_on_all_of_them(kind: str, named: str) -> None:
    def work(transport: Transport) -> str:
        own = unequal(transport.rank, kind)
        with transport.turn():
            torch.manual_seed(0)
            model = own.get("model", lambda: nn.Linear(3, 1))()
        with (
            pytest.raises(Disagreement, match=named) as caught,
            opened(transport, **own.get("settings", {})) as session,
        ):
            session.setup(model, own.get("optimizer", make_optimizer))
            batches = session.batches(
                own.get("dataset", DATASET),
                own.get("batching", BATCHING),
                steps=own.get("steps", 2),
                weights=own.get("weights"),
            )
            next(batches)
        return str(caught.value)

    assert len(set(run_threads(work, 3, timeout_s=20))) == 1


@pytest.mark.parametrize("name", ["cpu_capability", "MKL_CBWR"])
def test_ranks_on_unlike_kernels_are_told_so_at_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(*arguments: Any, **settings: Any) -> dict[str, str | int]:
        made = numerics_key(*arguments, **settings)
        return made | {name: "unlike"} if threading.current_thread().name == "rank 2" else made

    monkeypatch.setattr(facts, "numerics_key", key)
    was = {"cpu_capability": torch.backends.cpu.get_cpu_capability(), "MKL_CBWR": "nothing"}[name]

    def work(transport: Transport) -> str:
        with opened(transport) as session:
            session.setup(build(transport), make_optimizer)
            with pytest.raises(
                Disagreement, match=rf"the numerics key's {name}: {was} on rank 0, but unlike on rank 2"
            ) as caught:
                next(session.batches(DATASET, BATCHING, steps=2))
            return str(caught.value)

    assert len(set(run_threads(work, 3, timeout_s=20))) == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"digest_every": -1}, "digest_every is -1"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"threads": 0}, "threads is 0"),
        ({"strategy": "zero9"}, "strategy is 'zero9'"),
        ({"reduction": "quick"}, "reduction is 'quick'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], reason: str, alone: Transport) -> None:
    with pytest.raises(ConfigError, match=reason), opened(alone, **settings) as session:
        session.setup(make_model(), make_optimizer)


@pytest.fixture
def alone() -> Transport:
    """Return a transport without peers."""
    return Alone()
