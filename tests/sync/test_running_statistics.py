"""Running statistics: equal bits on any number of ranks, and a plain loop's values within rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samestep
from samestep.comm.transport import Transport
from samestep.testing.threads import run_threads
from samestep.testing.workloads import Drawn

CHANNELS = 3
STEPS = 3
BATCHING = samestep.Batching(global_batch=10, micro_batch=2, shuffle=False)  # five micro-batches
DATASET = Drawn(30, lambda g: torch.randn(CHANNELS, 4, 4, generator=g) + 1.0)


class Net(nn.Module):
    """A normalisation layer between two others."""

    def __init__(
        self, norm: nn.Module, *, kind: str = "image", twice: bool = False, again: bool = False
    ) -> None:
        super().__init__()
        self.norm = norm
        self.kind, self.twice, self.again = kind, twice, again
        self.head = nn.Linear(CHANNELS, 1)

    def forward(self, images: Tensor) -> Tensor:
        inputs = (
            images
            if self.kind == "image"
            else images.flatten(2)
            if self.kind == "line"
            else images[:, :, 0, 0]
        )
        hidden = inputs * self.head.weight.view(1, -1, *[1] * (inputs.dim() - 2))
        block: Callable[[Tensor], Tensor] = self.norm
        if self.again:
            block = lambda x: checkpoint(self.norm, x, use_reentrant=False)  # noqa: E731
        hidden = block(hidden)
        if self.twice:
            hidden = self.norm(hidden + 0.5)
        result: Tensor = self.head(hidden.flatten(2).mean(2) if hidden.dim() > 2 else hidden)
        return result


class FrozenNorm(Net):
    """Stays in evaluation mode inside a training model, as a fine-tuned backbone does."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self


def loss(model: nn.Module, images: Tensor) -> samestep.Weighted:
    return samestep.weighted((model(images).squeeze(1) - 0.3) ** 2)


def train(transport: Transport | None, make: Callable[[], nn.Module], **settings: Any) -> samestep.Result:
    torch.manual_seed(0)
    model = make()
    arguments: dict[str, Any] = {
        "loss": loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05),
        "batching": BATCHING,
        "steps": STEPS,
        "digest_every": 1,
        **settings,
    }
    return samestep.train(model, DATASET, transport=transport, **arguments)


def plain(make: Callable[[], nn.Module]) -> nn.Module:
    """Train as one would by hand: one forward and backward pass per micro-batch, then a step."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(5):
            first = 10 * step + 2 * micro
            (loss(model, torch.stack([DATASET[first], DATASET[first + 1]])).total / 10).backward()
        optimizer.step()
    return model


def everywhere(make: Callable[[], nn.Module]) -> samestep.Result:
    (alone,) = run_threads(lambda t: train_in_turn(t, make), 1)
    for world_size in (2, 3, 7):  # of seven ranks, two have no micro-batch
        for result in run_threads(lambda t: train_in_turn(t, make), world_size):
            assert result.fingerprint == alone.fingerprint, f"on {world_size} ranks"
            assert [r.digest for r in result.history] == [r.digest for r in alone.history]
    return alone


def train_in_turn(transport: Transport, make: Callable[[], nn.Module], **settings: Any) -> samestep.Result:
    with transport.turn():
        torch.manual_seed(0)
        model = make()
    return train(transport, lambda: model, **settings)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "batch norm 1d": lambda: Net(nn.BatchNorm1d(CHANNELS), kind="point"),
    "batch norm of lines": lambda: Net(nn.BatchNorm1d(CHANNELS, momentum=0.3), kind="line"),
    "batch norm 2d": lambda: Net(nn.BatchNorm2d(CHANNELS)),
    "average over all updates": lambda: Net(nn.BatchNorm2d(CHANNELS, momentum=None)),
    "no momentum": lambda: Net(nn.BatchNorm2d(CHANNELS, momentum=0.0)),
    "not affine": lambda: Net(nn.BatchNorm2d(CHANNELS, affine=False)),
    "no statistics": lambda: Net(nn.BatchNorm2d(CHANNELS, track_running_stats=False)),
    "instance norm": lambda: Net(nn.InstanceNorm2d(CHANNELS, track_running_stats=True)),
    "instance norm without momentum": lambda: Net(
        nn.InstanceNorm2d(CHANNELS, track_running_stats=True, momentum=None)
    ),
    "frozen": lambda: FrozenNorm(nn.BatchNorm2d(CHANNELS)).train(),
    "twice": lambda: Net(nn.BatchNorm2d(CHANNELS), twice=True),
    "twice, average": lambda: Net(nn.BatchNorm2d(CHANNELS, momentum=None), twice=True),
    "instance norm twice": lambda: Net(nn.InstanceNorm2d(CHANNELS, track_running_stats=True), twice=True),
    "recomputed": lambda: Net(nn.BatchNorm2d(CHANNELS), again=True),
    "instance norm recomputed": lambda: Net(
        nn.InstanceNorm2d(CHANNELS, track_running_stats=True), again=True
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_statistics_of_a_plain_loop_in_the_same_bits_on_any_number_of_ranks(kind: str) -> None:
    trained, wanted = everywhere(KINDS[kind]).model, plain(KINDS[kind])
    for (name, got), (_, by_hand) in zip(trained.named_buffers(), wanted.named_buffers(), strict=True):
        if by_hand.is_floating_point():
            # Rounding: shrinking by (1 - m) ** k at once is not shrinking k times.
            torch.testing.assert_close(got, by_hand, rtol=2e-6, atol=1e-6)
        else:
            assert torch.equal(got, by_hand), name


def test_a_frozen_layer_keeps_its_statistics() -> None:
    result = everywhere(KINDS["frozen"])
    fresh = nn.BatchNorm2d(CHANNELS)
    for name, buffer in result.model.norm.named_buffers():
        assert torch.equal(buffer, dict(fresh.named_buffers())[name])


def test_float64_statistics_are_kept_in_full() -> None:
    double = Drawn(30, lambda g: torch.randn(CHANNELS, 4, 4, generator=g).double() + 1.0)

    def run(transport: Transport) -> samestep.Result:
        with transport.turn():
            torch.manual_seed(0)
            model = Net(nn.BatchNorm2d(CHANNELS)).double()
        return samestep.train(
            model,
            double,
            loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
            transport=transport,
            batching=BATCHING,
            steps=1,
        )

    (alone,) = run_threads(run, 1)
    assert {result.fingerprint for result in run_threads(run, 3)} == {alone.fingerprint}
    torch.manual_seed(0)
    model = Net(nn.BatchNorm2d(CHANNELS)).double()
    for micro in range(5):
        loss(model, torch.stack([double[2 * micro], double[2 * micro + 1]]))
    torch.testing.assert_close(alone.model.norm.running_mean, model.norm.running_mean, rtol=1e-14, atol=0)


def test_two_layers_of_which_one_is_shared() -> None:
    def make() -> nn.Module:
        norm = nn.BatchNorm2d(CHANNELS)
        return nn.Sequential(
            norm,
            nn.Conv2d(CHANNELS, CHANNELS, 1),
            norm,
            nn.BatchNorm2d(CHANNELS),
            nn.Flatten(),
            nn.Linear(48, 1),
        )

    trained, wanted = everywhere(make).model, plain(make)
    for got, by_hand in zip(trained.buffers(), wanted.buffers(), strict=True):
        torch.testing.assert_close(got, by_hand, rtol=1e-5, atol=1e-5)
    assert int(trained[0].num_batches_tracked) == 2 * 5 * STEPS


def test_sync_batch_norm_is_refused_by_name() -> None:
    with pytest.raises(samestep.ConfigError, match=r"norm is a SyncBatchNorm.*Use BatchNorm"):
        train(None, lambda: Net(nn.SyncBatchNorm(CHANNELS)))


def test_several_terms_count_and_train_from_the_same_statistics() -> None:
    """The first pass of the first step breaks off, and a counting pass goes before each training pass."""

    def terms(model: nn.Module, images: Tensor) -> dict[str, samestep.Weighted]:
        one = loss(model, images)
        return {"one": one, "none": samestep.weighted(one.total * 0, weight=1)}

    def run(transport: Transport, function: Any) -> samestep.Result:
        with transport.turn():
            torch.manual_seed(0)
            model = Net(nn.BatchNorm2d(CHANNELS))
        return samestep.train(
            model,
            DATASET,
            function,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
            transport=transport,
            batching=BATCHING,
            steps=STEPS,
        )

    (single,) = run_threads(lambda t: run(t, loss), 1)
    for world_size in (1, 2, 3, 7):
        for result in run_threads(lambda t: run(t, terms), world_size):
            assert result.fingerprint == single.fingerprint, f"on {world_size} ranks"


def test_a_skipped_step_leaves_the_same_statistics_on_all_ranks() -> None:
    def spoilt(model: nn.Module, images: Tensor) -> samestep.Weighted:
        values = (model(images).squeeze(1) - 0.3) ** 2
        return samestep.weighted(values * torch.where(images[:, 0, 0, 0] > 2.8, torch.inf, 1.0))

    def run(transport: Transport) -> samestep.Result:
        with transport.turn():
            torch.manual_seed(0)
            model = Net(nn.BatchNorm2d(CHANNELS))
        return samestep.train(
            model,
            DATASET,
            spoilt,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
            transport=transport,
            batching=BATCHING,
            steps=STEPS,
            precision=samestep.Precision(nonfinite="skip"),
        )

    (alone,) = run_threads(run, 1)
    applied = [report.applied for report in alone.history]
    assert set(applied) == {True, False}
    assert {r.fingerprint for r in run_threads(run, 3)} == {alone.fingerprint}
    assert int(alone.model.norm.num_batches_tracked) == 5 * STEPS


def test_one_micro_batch_ends_in_the_bits_of_a_plain_loop() -> None:
    for kind in ("batch norm 2d", "average over all updates", "twice", "instance norm", "no momentum"):
        torch.manual_seed(0)
        wanted = KINDS[kind]()
        for step in range(STEPS):
            wanted(torch.stack([DATASET[10 * step + i] for i in range(10)]))
        result = train(
            None,
            KINDS[kind],
            batching=samestep.Batching(global_batch=10, micro_batch=10, shuffle=False),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        )
        for (name, got), (_, by_hand) in zip(
            result.model.named_buffers(), wanted.named_buffers(), strict=True
        ):
            assert torch.equal(got, by_hand), f"{kind}: {name}"


def test_a_teacher_in_evaluation_mode_reads_the_statistics_of_the_start_of_the_step() -> None:
    """The plain loop's pass for targets: evaluation mode inside a training loss."""
    read: list[tuple[int, bytes]] = []  # the first sample and what was read with it

    def taught(model: nn.Module, images: Tensor) -> samestep.Weighted:
        read.append((int(images[0, 0, 0, 0] * 1e6), model.norm.running_var.numpy().tobytes()))
        model.eval()
        with torch.no_grad():
            targets = model(images)
        model.train()
        return samestep.weighted((model(images) - targets).square().squeeze(1) + model(images).squeeze(1))

    for make in (KINDS["batch norm 2d"], KINDS["average over all updates"], KINDS["instance norm"]):
        ended: list[str] = []
        reads: list[list[tuple[int, bytes]]] = []
        for world_size in (1, 2, 3):
            read.clear()
            results = run_threads(lambda t, m=make: train_in_turn(t, m, loss=taught), world_size)
            ended += [result.fingerprint for result in results]
            reads.append(sorted(read))
            assert all(
                report.loss is not None and report.loss == report.loss for report in results[0].history
            )
        assert len(set(ended)) == 1
        assert reads[0] == reads[1] == reads[2]
        assert len({values for _, values in reads[0]}) == STEPS  # one start for all of a step's micro-batches


class Renorm(nn.BatchNorm2d):
    """Normalises by its running statistics while training, and counts no calls."""

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(images.mean((0, 2, 3)), 0.1)
                self.running_var.data.lerp_(images.var((0, 2, 3)), 0.1)
        mean, var = self.running_mean.clone()[:, None, None], self.running_var.clone()[:, None, None]
        return (images - mean) / (var + self.eps).sqrt()


class Replacing(Renorm):
    """Puts new tensors in place of the old ones instead of changing these."""

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.running_mean = self.running_mean + 0.1 * (
                images.detach().mean((0, 2, 3)) - self.running_mean
            )
        mean = self.running_mean[:, None, None]
        return images - mean


@pytest.mark.parametrize("kind", [Renorm, Replacing])
def test_a_layer_of_the_users_own_that_reads_what_it_keeps(kind: type[nn.BatchNorm2d]) -> None:
    result = everywhere(lambda: Net(kind(CHANNELS)))
    # By hand with no training in between, and by the linear rule that both follow.
    still = train(None, lambda: Net(kind(CHANNELS)), optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    torch.manual_seed(0)
    model = Net(kind(CHANNELS))
    for micro in range(5 * STEPS):
        model(torch.stack([DATASET[2 * micro], DATASET[2 * micro + 1]]))
    for (_, got), (_, by_hand) in zip(still.model.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(got, by_hand, rtol=2e-6, atol=1e-6)
    assert not torch.equal(result.model.norm.running_mean, torch.zeros(CHANNELS))


def loop(
    transport: Transport,
    *,
    before: Callable[[nn.Module, int, int], None] = lambda *_: None,
    after: Callable[[nn.Module, int, int], None] = lambda *_: None,
) -> tuple[str, list[str | None]]:
    """Train in a loop of one's own: `before` opens each step, `after` follows each collected micro-batch."""
    with transport.turn():
        torch.manual_seed(0)
        model: nn.Module = Net(nn.BatchNorm2d(CHANNELS))
    digests = []
    with samestep.Session(transport=transport, digest_every=1) as session:
        model, _ = session.setup(model, lambda params: torch.optim.SGD(params, lr=0.05))
        for batch in session.batches(DATASET, BATCHING, steps=STEPS):
            before(model, transport.rank, batch.step)
            for micro in batch:
                with micro.collect() as record:
                    record(loss(model, micro.data))
                after(model, transport.rank, batch.step)
            digests.append(session.step(batch).digest)
        return session.fingerprint(), digests


def test_what_every_rank_changes_before_a_step_is_its_start() -> None:
    def reset(model: nn.Module, rank: int, step: int) -> None:
        if step == 1:
            model.norm.running_mean = torch.full((CHANNELS,), 5.0)
            model.norm.running_var.data.fill_(2.0)
            model.norm(torch.ones(2, CHANNELS, 2, 2))

    (alone,) = run_threads(lambda t: loop(t, before=reset), 1)
    assert alone != run_threads(loop, 1)[0]
    for world_size in (2, 3, 7):  # a rank without a micro-batch too
        assert run_threads(lambda t: loop(t, before=reset), world_size) == [alone] * world_size


def test_a_pass_between_micro_batches_leaves_no_trace() -> None:
    def look(model: nn.Module, rank: int, step: int) -> None:
        model(torch.full((2, CHANNELS, 4, 4), float(rank)))

    (alone,) = run_threads(loop, 1)
    for world_size in (1, 2, 3, 7):
        assert run_threads(lambda t: loop(t, after=look), world_size) == [alone] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_a_pass_before_a_step_on_one_rank_alone_is_found_and_named(world_size: int) -> None:
    def look(model: nn.Module, rank: int, step: int) -> None:
        if step == 1 and rank == world_size - 1:
            with torch.no_grad():
                model(torch.ones(2, CHANNELS, 4, 4))

    words = rf"step 1: buffer norm.running_mean was changed .* rank {world_size - 1} is unlike rank 0"
    with pytest.raises(samestep.Disagreement, match=words):
        run_threads(lambda t: loop(t, before=look), world_size)


def test_a_layer_that_loses_its_statistics_is_refused() -> None:
    def drop(model: nn.Module, rank: int, step: int) -> None:
        model.norm.running_var = None

    with pytest.raises(samestep.ConfigError, match=r"norm had running statistics of 3 channels"):
        run_threads(lambda t: loop(t, before=drop), 1)


def test_an_evaluation_between_steps_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Net(nn.BatchNorm2d(CHANNELS))
    untouched = copy.deepcopy(model)

    def evaluate(event: samestep.Event) -> None:
        if isinstance(event, samestep.StepReport):
            model.eval()
            model(torch.zeros(2, CHANNELS, 4, 4))
            model.train()

    watched = train(None, lambda: model, callbacks=[evaluate])
    assert watched.fingerprint == train(None, lambda: untouched).fingerprint
