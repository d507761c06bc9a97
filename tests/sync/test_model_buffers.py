"""Buffers that a forward pass changes: one rule for each kind, whoever computes which micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.comm.alone import Alone
from samestep.comm.transport import Transport
from samestep.errors import LossError
from samestep.sync.model_buffers import ModelBuffers
from samestep.testing.threads import run_threads
from samestep.testing.workloads import Drawn

DATASET = Drawn(30, lambda g: torch.randn(2, generator=g))
BATCHING = samestep.Batching(global_batch=10, micro_batch=2, shuffle=False)  # five micro-batches
Change = Callable[["Watcher", Tensor], None]


class Watcher(nn.Module):
    """Has a buffer of each kind and changes what it is told to."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.change = change
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("small", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("latest", torch.zeros(2))
        self.register_buffer("brain", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("flag", torch.tensor([False, True, False]))
        self.register_buffer("spin", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.change(self, inputs)
        result: Tensor = self.linear(inputs).squeeze(1)
        return result


def loss(model: nn.Module, inputs: Tensor) -> samestep.Weighted:
    return samestep.weighted((model(inputs) - 1.0) ** 2)


def terms(model: nn.Module, inputs: Tensor) -> dict[str, samestep.Weighted]:
    one = loss(model, inputs)
    return {"one": one, "none": samestep.weighted(one.total * 0, weight=1)}


def train(transport: Transport, change: Change, function: Any = loss, **settings: Any) -> samestep.Result:
    with transport.turn():
        torch.manual_seed(0)
        model = Watcher(change)
    arguments: dict[str, Any] = {"batching": BATCHING, "steps": 2, "digest_every": 1, **settings}
    return samestep.train(
        model,
        DATASET,
        function,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        transport=transport,
        **arguments,
    )


def everywhere(change: Change, function: Any = loss, **settings: Any) -> Any:
    """Run on several numbers of ranks, all to the same bits; return the model of one rank."""
    (alone,) = run_threads(lambda t: train(t, change, function, **settings), 1)
    for world_size in (2, 3, 7):
        for result in run_threads(lambda t: train(t, change, function, **settings), world_size):
            assert result.fingerprint == alone.fingerprint, f"on {world_size} ranks"
            assert [r.digest for r in result.history] == [r.digest for r in alone.history]
    return alone.model


def count(model: Watcher, inputs: Tensor) -> None:
    model.count += len(inputs)
    model.small[1] += 1


def count_in_place_of(model: Watcher, inputs: Tensor) -> None:
    model.count = model.count + len(inputs)


def count_unseen(model: Watcher, inputs: Tensor) -> None:
    model.count.data.add_(len(inputs))
    model.latest.data.copy_(inputs[-1])


def keep(model: Watcher, inputs: Tensor) -> None:
    model.latest.copy_(inputs[-1])
    model.brain.copy_(inputs[-1])
    model.spin.copy_(torch.complex(inputs[0], inputs[1]))
    model.cache.add_(1)


def keep_in_place_of(model: Watcher, inputs: Tensor) -> None:
    model.latest = 0.5 * model.latest + inputs[-1]


def keep_some(model: Watcher, inputs: Tensor) -> None:
    """Change the buffer in the first micro-batches of the first step only."""
    if torch.equal(inputs[0], DATASET[0]) or torch.equal(inputs[0], DATASET[4]):
        model.latest.add_(1.0)


def turn(model: Watcher, inputs: Tensor) -> None:
    if torch.equal(inputs[0], DATASET[2]):
        model.flag[0] = True
    if torch.equal(inputs[0], DATASET[2]) or torch.equal(inputs[0], DATASET[6]):
        model.flag[1] = False


def test_counters_sum_over_all_micro_batches() -> None:
    model = everywhere(count)
    assert int(model.count) == 20
    assert model.small.tolist() == [0, 10, 0]
    assert int(everywhere(count_in_place_of).count) == 20


def test_a_write_to_data_is_noticed_though_it_counts_no_version() -> None:
    model = everywhere(count_unseen)
    assert int(model.count) == 20
    assert torch.equal(model.latest, DATASET[19])


def test_other_buffers_take_the_value_of_the_last_micro_batch() -> None:
    model = everywhere(keep)
    assert torch.equal(model.latest, DATASET[19])
    assert torch.equal(model.brain, DATASET[19].bfloat16())
    assert torch.equal(model.spin, torch.complex(DATASET[18], DATASET[19]))
    # Each micro-batch starts from the value at the start of the step.
    wanted = 0.5 * (0.5 * torch.zeros(2) + DATASET[9]) + DATASET[19]
    assert torch.equal(everywhere(keep_in_place_of).latest, wanted)


def test_a_change_that_the_last_micro_batch_does_not_make_is_none() -> None:
    assert torch.equal(everywhere(keep_some).latest, torch.zeros(2))


def test_a_flag_is_turned_where_any_micro_batch_turned_it() -> None:
    assert everywhere(turn).flag.tolist() == [True, False, False]


def test_a_cache_is_left_alone() -> None:
    (result,) = run_threads(lambda t: train(t, keep), 1)
    assert torch.equal(result.model.cache, torch.full((2,), 10.0))


def test_the_buffer_stays_the_same_tensor_when_the_forward_pass_replaces_it() -> None:
    torch.manual_seed(0)
    model = Watcher(keep_in_place_of)
    buffer = model.latest
    samestep.train(
        model,
        DATASET,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batching=BATCHING,
        steps=1,
    )
    assert model.latest is buffer


@pytest.mark.parametrize("how", ["in place", "replaced", "data"])
def test_a_change_between_steps_counts(how: str) -> None:
    def run(transport: Transport) -> samestep.Result:
        with transport.turn():
            torch.manual_seed(0)
            model = Watcher(keep_in_place_of)

        def between(event: samestep.Event) -> None:
            if isinstance(event, samestep.StepReport) and event.step == 0:
                if how == "in place":
                    model.latest.fill_(8.0)
                elif how == "data":
                    model.latest.data.fill_(8.0)
                else:
                    model.latest = torch.full((2,), 8.0)

        return samestep.train(
            model,
            DATASET,
            loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
            transport=transport,
            batching=BATCHING,
            steps=2,
            callbacks=[between],
        )

    for world_size in (1, 3):
        for result in run_threads(run, world_size):
            assert torch.equal(result.model.latest, 4.0 + DATASET[19])


def loop(transport: Transport, touch: Callable[[Watcher, str, int], None]) -> None:
    """Train in a loop of one's own that touches the model before each step and after its micro-batches."""
    with transport.turn():
        torch.manual_seed(0)
        made = Watcher(keep_in_place_of)
    with samestep.Session(transport=transport, digest_every=1) as session:
        model, _ = session.setup(made, lambda params: torch.optim.SGD(params, lr=0.1))
        for batch in session.batches(DATASET, BATCHING, steps=3):
            touch(made, f"before {batch.step}", transport.rank)
            for micro in batch:
                with micro.collect() as record:
                    record(loss(model, micro.data))
            touch(made, f"after {batch.step}", transport.rank)
            session.step(batch)
        session.agreed_fingerprint()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("before 0", "step 0: buffer flag was changed before this step, but not to the same values"),
        ("before 2", "step 2: buffer flag was changed before this step, but not to the same values"),
        ("after 1", "the digest: buffer flag does not have the same values"),
    ],
)
def test_a_change_on_one_rank_alone_is_found_and_named(when: str, words: str, world_size: int) -> None:
    last = world_size - 1

    def touch(model: Watcher, now: str, rank: int) -> None:
        if now == when and rank == last:
            model.flag.data.logical_not_()

    with pytest.raises(samestep.Disagreement, match=rf"{words} on every rank: rank {last} is unlike rank 0"):
        run_threads(lambda t: loop(t, touch), world_size)


def test_other_changes_on_each_rank_are_found() -> None:
    with pytest.raises(samestep.Disagreement, match="buffer count was changed"):
        run_threads(lambda t: loop(t, lambda model, now, rank: model.count.add_(rank + 1)), 3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_a_change_on_all_ranks_before_a_step_is_its_start(world_size: int) -> None:
    def touch(model: Watcher, now: str, rank: int) -> None:
        if now == "before 2":
            model.latest = torch.full((2,), 8.0)
            model.spin.data.fill_(torch.nan)
        if now == "after 2" and rank < 5:  # the rest have no micro-batch and find it in their start
            seen.append(model.latest.tolist())

    seen: list[list[float]] = []
    run_threads(lambda t: loop(t, touch), world_size)
    assert seen == [[8.0, 8.0]] * min(world_size, 5)


def test_a_buffer_set_to_none_between_steps_is_refused_by_name() -> None:
    with pytest.raises(samestep.ConfigError, match=r"buffer latest is None since session.setup"):
        run_threads(lambda t: loop(t, lambda model, now, rank: setattr(model, "latest", None)), 1)


def grow(model: Watcher, inputs: Tensor) -> None:
    model.latest = torch.cat([model.latest, inputs[0]])


def retype(model: Watcher, inputs: Tensor) -> None:
    model.latest = model.latest.double()


def drop(model: Watcher, inputs: Tensor) -> None:
    model.latest = None


@pytest.mark.parametrize(
    ("change", "found"),
    [(grow, r"\(4,\) torch.float32"), (retype, r"\(2,\) torch.float64"), (drop, "None")],
)
def test_another_shape_or_dtype_is_refused_by_name(change: Change, found: str) -> None:
    with pytest.raises(LossError, match=rf"buffer latest went from \(2,\) torch.float32 to {found}"):
        run_threads(lambda t: train(t, change), 3)


@pytest.mark.parametrize("change", [count, count_unseen, keep, keep_in_place_of, turn])
def test_the_counting_pass_leaves_no_trace(change: Change) -> None:
    single, several = everywhere(change), everywhere(change, terms)
    for (name, one), (_, other) in zip(single.named_buffers(), several.named_buffers(), strict=True):
        if name != "cache":
            assert torch.equal(one, other), name


def test_a_buffer_of_two_modules_is_counted_once() -> None:
    def run(transport: Transport) -> int:
        with transport.turn():
            torch.manual_seed(0)
            first, second = Watcher(count), Watcher(lambda model, inputs: None)
            second.count = first.count
        model = nn.Sequential(first, nn.Unflatten(0, (-1, 1)), nn.Linear(1, 2), second)
        samestep.train(
            model,
            DATASET,
            loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            transport=transport,
            batching=BATCHING,
            steps=2,
        )
        return int(first.count)

    for world_size in (1, 3):
        assert set(run_threads(run, world_size)) == {20}


def test_a_buffer_that_holds_a_nan_does_not_disturb() -> None:
    def spoil(model: Watcher, inputs: Tensor) -> None:
        model.latest.fill_(torch.nan)

    assert bool(everywhere(spoil).latest.isnan().all())


def test_buffers_alone(alone: Transport) -> None:
    model = Watcher(count)
    buffers = ModelBuffers(model, alone, besides=[model.small])
    assert buffers.num_buffers == 6  # neither the one handled elsewhere nor the cache
    buffers.begin()
    buffers.before_leaf()
    model(torch.ones(2, 2))
    buffers.after_leaf(is_last=False)
    assert int(model.count) == 0  # the next micro-batch starts anew
    assert sum(buffers.changed()) == 1
    buffers.settle([buffers.changed()])
    assert int(model.count) == 2
    buffers.begin()
    assert not any(buffers.changed())
    model(torch.ones(2, 2))
    buffers.restore()
    assert int(model.count) == 2


@pytest.fixture
def alone() -> Transport:
    """Return a transport without peers."""
    return Alone()
