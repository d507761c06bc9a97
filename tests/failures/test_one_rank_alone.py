"""What goes wrong on one rank only ends the run on all of them, with the cause and not its consequences."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from failures_inputs import Data, errors_of, loss, make_model, train, train_each
from torch import nn

import samestep
from samestep import Batching, CallbackError, DataError, Disagreement, LossError, NonFinite, StepReport

pytestmark = pytest.mark.timeout(60)

Make = Callable[[int], dict[str, Any]]


def adamw(**settings: Any) -> Any:
    return lambda params: torch.optim.AdamW(params, **settings)


def frozen_in_part() -> nn.Module:
    model = make_model()
    model[0].requires_grad_(False)
    return model


UNLIKE: list[tuple[str, Make, list[str]]] = [
    ("seed", lambda r: {"seed": r // 2}, ["the seed: 0 on rank 0, but 1 on rank 2"]),
    ("batching", lambda r: {"batching": Batching(global_batch=12 + r // 2)}, ["global_batch=13", "rank 2"]),
    ("steps", lambda r: {"steps": 3 + r // 2}, ["the number of steps: 3 on rank 0, but 4 on rank 2"]),
    ("length", lambda r: {"dataset": Data(24 + r // 2)}, ["the number of samples: 24", "25 on rank 2"]),
    (
        "rate",
        lambda r: {"optimizer": adamw(lr=0.1 + r // 2)},
        ["lr of optimizer group 0: 0.1", "1.1 on rank 2"],
    ),
    (
        "optimizer",
        lambda r: {"optimizer": torch.optim.SGD if r == 2 else torch.optim.AdamW},
        ["the optimizer: AdamW on rank 0, but SGD on rank 2"],
    ),
    ("precision", lambda r: {"precision": "bf16" if r == 2 else "fp32"}, ["precision: ", "'bf16'"]),
    (
        "clip",
        lambda r: {"clip_norm": 1.0 if r == 2 else None},
        ["clip_norm: None on rank 0, but 1.0 on rank 2"],
    ),
    ("digest", lambda r: {"digest_every": 3 + r // 2}, ["digest_every: 3 on rank 0, but 4 on rank 2"]),
    ("threads", lambda r: {"threads": 1 + r // 2}, ["threads", "2 on rank 2"]),
    ("strategy", lambda r: {"strategy": "zero1" if r == 2 else "replicate"}, ["the strategy: ", "zero1"]),
    ("shape", lambda r: {"make_model": (lambda: nn.Linear(4, 1)) if r == 2 else make_model}, ["on rank 2"]),
    (
        "dtype",
        lambda r: {"make_model": (lambda: make_model().double()) if r == 2 else make_model},
        ["float64"],
    ),
    ("frozen", lambda r: {"make_model": frozen_in_part if r == 2 else make_model}, ["trained parameters: 4"]),
    (
        "modes",
        lambda r: {"make_model": (lambda: make_model().eval()) if r == 2 else make_model},
        ["step 0: the training modes", "rank 2 is unlike rank 0", "on every rank alike"],
    ),
    (
        "schedule",
        lambda r: {"schedule": (lambda update: 0.5 if r == 2 and update else 1.0)},
        ["step 1: the settings of the optimizer's groups", "function of the update alone"],
    ),
    (
        "terms",
        lambda r: {"loss": (lambda m, b: {"a": loss(m, b)}) if r == 2 else loss},
        ["a single value on rank 0, but a dict of a on rank 2"],
    ),
]


@pytest.mark.parametrize(("make", "words"), [case[1:] for case in UNLIKE], ids=[case[0] for case in UNLIKE])
def test_ranks_that_are_unlike_are_told_so(make: Make, words: list[str]) -> None:
    with pytest.raises(Disagreement) as caught:
        train_each(make)
    for word in words:
        assert word in str(caught.value)


def test_models_built_differently_are_made_equal_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def other() -> nn.Module:
        model = make_model()
        nn.init.ones_(model[0].weight)
        return model

    ended = train_each(lambda rank: {"make_model": other if rank == 2 else make_model})
    assert [result.fingerprint for result in ended] == [train().fingerprint] * 3
    said = capsys.readouterr().err
    assert said.count("ranks built the model with different values") == 1
    assert "0.weight" in said


def changing(rank: int, change: Callable[[nn.Module], object]) -> dict[str, Any]:
    """Return a run in which a callback on rank 1 alone changes the model between the steps."""
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(make_model())
        return made[0]

    def callback(event: samestep.Event) -> None:
        if rank == 1 and isinstance(event, StepReport):
            with torch.no_grad():
                change(made[0])

    return {"make_model": build, "callbacks": [callback]}


def replace_data(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data * 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model[0].weight.mul_(0.5), "parameters were changed between the steps on some ranks"),
        (replace_data, "parameters were changed between the steps on some ranks"),
        (lambda model: model.eval(), "the training modes"),
        (lambda model: model[0].weight.data.mul_(0.5), "0.weight has other values on rank 1 than on rank 0"),
    ],
)
def test_a_callback_that_changes_the_model_on_one_rank(
    change: Callable[[nn.Module], object], words: str
) -> None:
    with pytest.raises(Disagreement, match=words):
        train_each(lambda rank: changing(rank, change))


class Broken(Data):
    def __getitem__(self, index: int) -> Any:
        if index == 11:
            raise ValueError("a broken file")
        return super().__getitem__(index)


class Ragged(Data):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(index + 1)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_sample_that_fails_is_named(loader_workers: int) -> None:
    # One epoch has each sample once, so one rank alone meets it.
    changes = {"dataset": Broken(), "steps": None, "epochs": 1, "loader_workers": loader_workers}
    for attempt in (lambda: train(**changes), lambda: train_each(lambda _: dict(changes))):
        with pytest.raises(DataError, match=r"sample 11 of the data set failed.*ValueError: a broken file"):
            attempt()


def test_samples_that_do_not_collate_are_named_with_their_shapes() -> None:
    with pytest.raises(DataError) as caught:
        train_each(lambda _: {"dataset": Ragged()})
    assert "do not collate" in str(caught.value)
    assert "They hold float32[" in str(caught.value)
    assert "collate_fn" in str(caught.value)


class Refusing(torch.optim.SGD):
    """An optimizer that fails on one rank."""

    refuses = False

    def step(self, closure: Any = None) -> Any:
        if self.refuses:
            raise RuntimeError("the optimizer broke")
        return super().step(closure)


def refusing(rank: int) -> dict[str, Any]:
    def make(params: Any) -> Refusing:
        optimizer = Refusing(params, lr=0.1)
        optimizer.refuses = rank == 2
        return optimizer

    return {"optimizer": make}


def breaking_callback(event: samestep.Event) -> None:
    if isinstance(event, StepReport):
        raise RuntimeError("the callback broke")


def breaking_loss(model: nn.Module, batch: Any) -> samestep.Weighted:
    raise KeyError("the loss broke")


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rank: {"loss": breaking_loss} if rank == 2 else {}, "the loss broke"),
        (lambda rank: {"callbacks": [breaking_callback]} if rank == 2 else {}, "the callback broke"),
        (refusing, "the optimizer broke"),
    ],
    ids=["loss", "callback", "optimizer"],
)
def test_the_error_of_one_rank_is_the_one_that_is_raised(make: Make, words: str, strategy: str) -> None:
    with pytest.raises((KeyError, RuntimeError, CallbackError), match=words) as caught:
        train_each(lambda rank: {**make(rank), "strategy": strategy})
    assert caught.value.__notes__ == ["on rank 2 of 3"]


def test_a_loss_without_a_gradient_on_one_rank() -> None:
    def detached(model: nn.Module, batch: Any) -> samestep.Weighted:
        return samestep.weighted(errors_of(model, batch).detach())

    with pytest.raises(LossError, match="has no gradient"):
        train_each(lambda rank: {"loss": detached} if rank == 2 else {})


def test_nan_in_the_loss_of_one_rank_names_its_samples() -> None:
    def nan(model: nn.Module, batch: Any) -> samestep.Weighted:
        return samestep.weighted(errors_of(model, batch) * torch.nan)

    with pytest.raises(NonFinite) as caught:
        train_each(lambda rank: {"loss": nan} if rank == 2 else {})
    assert "step 0: the gradient of 0.weight" in str(caught.value)
    assert "micro-batch 4 (samples " in str(caught.value)
    assert "nonfinite='skip'" in str(caught.value)


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_nan_in_the_gradient_alone_of_one_rank(strategy: str) -> None:
    def root(model: nn.Module, batch: Any) -> samestep.Weighted:
        return samestep.weighted((model(batch[0])[:, 0] * 0.0).sqrt())  # 0 forward, 0 x infinity backward

    with pytest.raises(NonFinite, match="The loss itself is finite in every micro-batch"):
        train_each(lambda rank: {"strategy": strategy, **({"loss": root} if rank == 2 else {})})
    skipping = samestep.Precision(nonfinite="skip")
    ended = train_each(lambda rank: {"precision": skipping, **({"loss": root} if rank == 2 else {})})
    assert [result.applied for result in ended] == [0, 0, 0]
    assert len({result.fingerprint for result in ended}) == 1


def test_loader_workers_end_with_the_run_that_failed() -> None:
    # The error keeps the frames of the run alive, and with them what nobody closed.
    with pytest.raises(CallbackError, match="callback breaking_callback on rank 0, at step 0, failed"):
        train(callbacks=[breaking_callback], loader_workers=2)
    assert multiprocessing.active_children() == []
