"""Parameters of every kind, used by all, some or none: right, and the same on any number of ranks."""

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
from samestep.numerics.fingerprint import fingerprint
from samestep.optim.elementwise import ELEMENTWISE
from samestep.testing.threads import run_threads
from samestep.testing.workloads import Drawn


class Mixed(nn.Module):
    """Dtypes, layouts and uses that a flat buffer might get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        self.brain = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.narrow = nn.Parameter(torch.randn(3, dtype=torch.float16))
        self.spin = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.none = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.table = nn.Embedding(7, 3, sparse=True)
        self.conv = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor, ids: Tensor) -> Tensor:
        hidden = inputs @ self.turned + self.table(ids) + self.scalar
        hidden = hidden + (inputs.double() @ self.wide).float() + self.none.sum()
        hidden = hidden * (1 + self.brain.float()) * (1 + self.narrow.float())
        hidden = hidden + torch.view_as_real(self.spin * hidden).sum(-1)
        image = hidden.view(-1, 1, 1, 3).expand(-1, 1, 3, 3)
        result: Tensor = hidden.sum(1) + self.conv(image).flatten(1).mean(1)
        return result


def draw_mixed(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(4, generator=generator),
        torch.randint(0, 7, (), generator=generator),
        torch.randn((), generator=generator),
    )


def mixed_loss(model: nn.Module, batch: Any) -> samestep.Weighted:
    inputs, ids, targets = batch
    return samestep.weighted((model(inputs, ids) - targets) ** 2)


def train(
    transport: Transport, make: Callable[[], nn.Module], dataset: Any, loss: Any, **settings: Any
) -> samestep.Result:
    with transport.turn():
        torch.manual_seed(1)
        model = make()
    arguments: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "batching": samestep.Batching(global_batch=8, micro_batch=1),
        "steps": 4,
    }
    return samestep.train(model, dataset, loss, transport=transport, **{**arguments, **settings})


def same_everywhere(run: Callable[[Transport, str], samestep.Result]) -> samestep.Result:
    """Run on several numbers of ranks and both strategies; all must end in the same bits."""
    (alone,) = run_threads(lambda t: run(t, "replicate"), 1)
    for strategy in ("replicate", "zero1"):
        for world_size in (1, 2, 3, 5):
            for result in run_threads(lambda t, s=strategy: run(t, s), world_size):
                assert result.fingerprint == alone.fingerprint, f"{strategy} on {world_size} ranks"
                assert [r.grad_norm for r in result.history] == [r.grad_norm for r in alone.history]
    return alone


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.AdamW(params, lr=0.01),
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
        lambda params: torch.optim.Adagrad(params, lr=0.01),  # has state before its first step
        lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
        lambda params: torch.optim.Adamax(params, lr=0.01),
        lambda params: torch.optim.NAdam(params, lr=0.01),
    ],
    ids=["adamw", "sgd", "adagrad", "rmsprop", "adamax", "nadam"],
)
def test_every_kind_of_parameter(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    result = same_everywhere(
        lambda t, s: train(t, Mixed, Drawn(20, draw_mixed), mixed_loss, optimizer=optimizer, strategy=s)
    )
    torch.manual_seed(1)
    start = dict(Mixed().named_parameters())
    for name, parameter in result.model.named_parameters():
        moved = not torch.equal(parameter, start[name])
        assert moved is (name not in ("unused", "none")), name
        assert parameter.dtype == start[name].dtype
        assert parameter.stride() == start[name].stride()


def test_param_groups_keep_their_settings() -> None:
    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": params[:3], "lr": 0.01}, {"params": params[3:], "lr": 0.1, "momentum": 0.9}], lr=1.0
        )

    same_everywhere(
        lambda t, s: train(
            t,
            Mixed,
            Drawn(20, draw_mixed),
            mixed_loss,
            optimizer=optimizer,
            strategy=s,
            schedule=samestep.schedules.constant(warmup=3),
        )
    )


class Branches(nn.Module):
    """Expert k is used by samples of kind k only, so by some micro-batches and some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 1) for _ in range(4)])

    def forward(self, inputs: Tensor, kinds: Tensor) -> Tensor:
        outputs = [self.experts[int(k)](x) for x, k in zip(inputs, kinds, strict=True)]
        return torch.stack(outputs).squeeze(-1)


def test_what_no_sample_used_is_left_alone_as_in_a_plain_loop() -> None:
    kinds_of_step = [[0, 0, 1, 1], [1, 1, 1, 1], [0, 2, 0, 2], [2, 2, 2, 2]]  # expert 3: never
    kinds = [kind for step in kinds_of_step for kind in step]
    inputs = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))

    class Data:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return inputs[i], kinds[i]

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)  # would decay what it should not touch

    result = same_everywhere(
        lambda t, s: train(
            t,
            Branches,
            Data(),
            lambda model, batch: samestep.weighted(model(*batch) ** 2),
            optimizer=optimizer,
            batching=samestep.Batching(global_batch=4, micro_batch=1, shuffle=False),
            strategy=s,
        )
    )
    torch.manual_seed(1)
    plain = Branches()
    reference = optimizer(plain.parameters())
    for step in range(4):
        ids = slice(4 * step, 4 * step + 4)
        reference.zero_grad()
        (plain(inputs[ids], torch.tensor(kinds[ids])) ** 2).mean().backward()
        reference.step()
    for name, parameter in plain.named_parameters():
        # Rounding: the plain loop divides before it sums.
        torch.testing.assert_close(
            dict(result.model.named_parameters())[name], parameter, rtol=1e-5, atol=1e-6
        )
    torch.manual_seed(1)
    assert torch.equal(result.model.experts[3].weight, Branches().experts[3].weight)


class Recomputed(nn.Module):
    """One tied table and one block used twice, with or without recomputation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(6, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh())
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        for _ in range(2):
            if self.kind == "plain":
                hidden = hidden + self.block(hidden)
            else:
                again = checkpoint(self.block, hidden, use_reentrant=self.kind == "reentrant")
                hidden = hidden + again
        logits: Tensor = self.head(hidden)
        return logits


def test_recomputation_changes_no_bit() -> None:
    def loss(model: nn.Module, ids: Tensor) -> samestep.Weighted:
        losses = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none")
        return samestep.weighted(losses)

    dataset = Drawn(20, lambda g: torch.randint(0, 6, (3,), generator=g))
    ended = {
        kind: same_everywhere(
            lambda t, s, k=kind: train(t, lambda: Recomputed(k), dataset, loss, strategy=s)
        ).fingerprint
        for kind in ("plain", "nonreentrant", "reentrant")
    }
    assert ended["nonreentrant"] == ended["plain"]
    # Reentrant recomputation hands over the reused block's gradient in two parts, each rounded.
    assert isinstance(ended["reentrant"], str)


class Constant(nn.Module):
    """A weight of 1 whose gradient is 1, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight.sum() * torch.ones_like(inputs[:, 0])


def test_masters_keep_what_bfloat16_would_lose() -> None:
    def run(transport: Transport, strategy: str, masters: bool = True) -> samestep.Result:
        return train(
            transport,
            Constant,
            Drawn(32, lambda g: torch.randn(4, generator=g)),
            lambda model, inputs: samestep.weighted(model(inputs)),
            # A quarter of the distance to the next bfloat16 below 1: lost in bfloat16, kept in float32.
            optimizer=lambda params: torch.optim.SGD(params, lr=2.0**-10),
            precision=samestep.Precision(parameters="bf16", masters=masters),
            strategy=strategy,
            steps=16,
        )

    kept = same_everywhere(run)
    (lost,) = run_threads(lambda t: run(t, "replicate", masters=False), 1)
    assert kept.model.weight.dtype == torch.bfloat16
    assert torch.equal(lost.model.weight, torch.ones(300, dtype=torch.bfloat16))
    assert torch.equal(kept.model.weight, torch.full((300,), 1 - 2.0**-6, dtype=torch.bfloat16))


@pytest.mark.parametrize("reduce_dtype", ["bf16", "fp64"])
def test_a_chosen_dtype_of_sums_keeps_the_law(reduce_dtype: Any) -> None:
    precision = samestep.Precision(reduce_dtype=reduce_dtype)
    result = same_everywhere(
        lambda t, s: train(t, Mixed, Drawn(20, draw_mixed), mixed_loss, precision=precision, strategy=s)
    )
    (usual,) = run_threads(lambda t: train(t, Mixed, Drawn(20, draw_mixed), mixed_loss), 1)
    assert result.fingerprint != usual.fingerprint


def test_the_model_and_its_optimizer_come_back_usable() -> None:
    dataset = Drawn(20, draw_mixed)
    torch.manual_seed(1)
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    result = samestep.train(
        model,
        dataset,
        mixed_loss,
        optimizer=optimizer,
        batching=samestep.Batching(global_batch=8, micro_batch=1),
        steps=2,
    )
    assert result.model is model
    assert all(p.grad is None for p in model.parameters())
    storages = [p.untyped_storage() for p in model.parameters()]
    assert all(
        s.nbytes() == p.numel() * p.element_size() for s, p in zip(storages, model.parameters(), strict=True)
    )
    copied = copy.deepcopy(model)
    assert fingerprint(copied.named_parameters()) == fingerprint(model.named_parameters())
    before = fingerprint(model.named_parameters())
    mixed_loss(model, [x[None] for x in dataset[0]]).total.backward()  # no hook of ours is left
    assert fingerprint(model.named_parameters()) == before
    assert model.wide.grad is not None


class Spread(nn.Module):
    """Complex parameters large enough that tiles cut them."""

    def __init__(self) -> None:
        super().__init__()
        self.spin = nn.Parameter(torch.randn(4, 300, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(300, 5, dtype=torch.complex128).t())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.view_as_real(inputs.to(torch.complex64) @ self.spin).sum((1, 2))
        return hidden + torch.view_as_real(self.turned).sum() * inputs[:, 0]


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_a_cut_complex_parameter_gets_the_bits_of_a_whole_one(kind: Any) -> None:
    settings = {"momentum": 0.87, "weight_decay": 0.011, "lr": 0.013} if kind is torch.optim.SGD else {}
    dataset = Drawn(20, lambda generator: torch.randn(4, generator=generator))
    same_everywhere(
        lambda t, s: train(
            t,
            Spread,
            dataset,
            lambda model, inputs: samestep.weighted((model(inputs) - 1) ** 2),
            optimizer=lambda params: kind(params, **settings),
            strategy=s,
            steps=3,
        )
    )


def test_parameters_changed_between_steps_count_although_there_are_masters() -> None:
    def run(transport: Transport, strategy: str) -> samestep.Result:
        with transport.turn():
            torch.manual_seed(1)
            model = nn.Linear(4, 1)

        def set_all(event: samestep.Event) -> None:
            if isinstance(event, samestep.StepReport) and event.step == 1:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(0.5)

        return train(
            transport,
            lambda: model,
            Drawn(20, lambda generator: torch.randn(4, generator=generator)),
            lambda model, x: samestep.weighted(model(x.to(model.weight.dtype)).float().squeeze(-1) ** 2),
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-4),
            precision=samestep.Precision(parameters="bf16"),
            strategy=strategy,
            callbacks=[set_all],
            steps=3,
        )

    result = same_everywhere(run)
    assert all(bool((p.float() - 0.5).abs().max() < 0.01) for p in result.model.parameters())


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
@pytest.mark.parametrize("parameters", [None, "bf16"])
def test_the_optimizer_holds_the_model_again(strategy: str, parameters: Any) -> None:
    dataset = Drawn(20, lambda generator: torch.randn(40, generator=generator))

    def run(transport: Transport) -> tuple[str, bool]:
        with transport.turn():
            torch.manual_seed(1)
            model = nn.Linear(40, 30)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            result = samestep.train(
                model,
                dataset,
                lambda model, x: samestep.weighted(model(x.to(model.weight.dtype)).float().square().sum(1)),
                optimizer=optimizer,
                batching=samestep.Batching(global_batch=8, micro_batch=2),
                steps=2,
                precision=samestep.Precision(parameters=parameters),
                strategy=strategy,
                transport=transport,
            )
        held = optimizer.param_groups[0]["params"]
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        return result.fingerprint, bool(optimizer.state)

    for world_size in (1, 2, 3):
        ended = run_threads(run, world_size)
        assert len(set(ended)) == 1
        assert ended[0][1] is (strategy == "replicate" or world_size == 1)


def test_a_parameter_unfrozen_after_setup_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)

    def unfreeze(event: samestep.Event) -> None:
        if isinstance(event, samestep.StepReport):
            model[0].requires_grad_(True)

    with pytest.raises(samestep.ConfigError, match=r"0\.weight was frozen when the session was set up"):
        samestep.train(
            model,
            Drawn(20, lambda generator: torch.randn(4, generator=generator)),
            lambda model, x: samestep.weighted(model(x).square()),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            batching=samestep.Batching(global_batch=8),
            steps=3,
            callbacks=[unfreeze],
        )


def test_what_only_the_optimizer_knows_is_made_equal_too() -> None:
    def run(transport: Transport) -> float:
        with transport.turn():
            torch.manual_seed(1)
            model = nn.Linear(4, 1)
        scale = nn.Parameter(torch.tensor(1.0 + transport.rank))
        samestep.train(
            model,
            Drawn(20, lambda generator: torch.randn(4, generator=generator)),
            lambda model, x: samestep.weighted((model(x).squeeze(-1) * scale) ** 2),
            optimizer=torch.optim.SGD([*model.parameters(), scale], lr=0.01),
            batching=samestep.Batching(global_batch=8, micro_batch=1),
            steps=2,
            callbacks=[lambda event: None],
            listeners=[lambda event: None],
            transport=transport,
        )
        return scale.item()

    (alone,) = run_threads(run, 1)
    assert run_threads(run, 3) == [alone] * 3


def test_state_of_an_optimizer_that_differs_is_refused() -> None:
    def run(transport: Transport) -> None:
        with transport.turn():
            torch.manual_seed(1)
            model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model(torch.full((2, 4), 1.0 + transport.rank)).sum().backward()
        with torch.no_grad():
            optimizer.step()
            for parameter in model.parameters():
                parameter.fill_(1.0)
        train(
            transport,
            lambda: model,
            [torch.ones(4)],
            lambda m, x: samestep.weighted(m(x)),
            optimizer=optimizer,
        )

    with pytest.raises(samestep.Disagreement, match="the optimizer's momentum_buffer of weight"):
        run_threads(run, 3)
