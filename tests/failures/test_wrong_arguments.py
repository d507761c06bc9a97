"""Wrong arguments of a script end before the first step, in one ConfigError that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from failures_inputs import Data, errors_of, fingerprints, loss, make_model, train, train_each
from torch import nn

import samestep
from samestep import Batching, ConfigError, LossError

pytestmark = pytest.mark.timeout(60)


def numbers() -> Iterator[int]:
    yield 1


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        yield 1


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"batching": 12}, ["batching is 12", "samestep.Batching(global_batch="]),
    ({"batching": {"global_batch": 12}}, ["batching is {", "samestep.Batching("]),
    ({"dataset": Data(0)}, ["no samples", "Check its path"]),
    ({"dataset": numbers()}, ["a generator", "no length", "map-style"]),
    ({"dataset": Stream()}, ["the data set is a stream", "Set shuffle to false"]),
    ({"dataset": None}, ["NoneType", "map-style"]),
    ({"steps": 3, "epochs": 1}, ["steps=3 and epochs=1", "Choose one"]),
    ({"steps": None}, ["neither is given"]),
    ({"steps": -1}, ["steps is -1", "0 or more"]),
    ({"steps": "3"}, ["steps is '3', a str", "whole number"]),
    ({"steps": 2.5}, ["steps is 2.5, a float", "whole number"]),
    ({"steps": True}, ["steps is True"]),
    ({"steps": None, "epochs": 1.5}, ["epochs is 1.5"]),
    ({"precision": "fp61"}, ["precision is 'fp61'. Did you mean fp16?"]),
    ({"precision": torch.bfloat16}, ["precision is torch.bfloat16", "'bf16'"]),
    ({"strategy": "replicated"}, ["strategy is 'replicated'. Did you mean replicate?", "zero1"]),
    ({"reduction": "orderd"}, ["reduction is 'orderd'. Did you mean ordered?"]),
    ({"seed": -1}, ["seed is -1"]),
    ({"seed": None}, ["seed is None"]),
    ({"threads": 0}, ["threads is 0", "1 or more"]),
    ({"threads": "2"}, ["threads is '2'"]),
    ({"clip_norm": -1.0}, ["clip_norm is -1.0", "None for no clipping"]),
    ({"clip_norm": "1"}, ["clip_norm is '1'"]),
    ({"digest_every": -1}, ["digest_every is -1"]),
    ({"timeout_s": 0}, ["timeout_s is 0"]),
    ({"timeout_s": "long"}, ["timeout_s is 'long'"]),
    ({"device": "cpu"}, ["device is 'cpu'", "torch.device('cpu')"]),
    ({"loader_workers": -1}, ["loader_workers is -1"]),
    ({"loader_workers": 1.5}, ["loader_workers is 1.5"]),
    ({"collate_fn": 3}, ["collate_fn is a int"]),
    ({"callbacks": print}, ["callbacks is a builtin_function_or_method", "list of functions"]),
    ({"callbacks": [3]}, ["callbacks[0] is a int"]),
    ({"listeners": [3]}, ["listeners[0] is a int"]),
    ({"loss": None}, ["loss is a NoneType", "samestep.weighted"]),
    ({"schedule": 0.1}, ["schedule", "map an update to a multiple"]),
    ({"schedule": lambda _: "half"}, ["schedule(0) returned 'half'"]),
    ({"schedule": lambda _: float("nan")}, ["schedule(0) returned nan"]),
    ({"optimizer": "adamw"}, ["optimizer is a str", "lambda params"]),
    ({"optimizer": lambda _: None}, ["returned a NoneType"]),
    ({"optimizer": torch.optim.LBFGS}, ["LBFGS", "AdamW or SGD"]),
    ({"optimizer": torch.optim.SparseAdam}, ["SparseAdam", "AdamW"]),
    ({"optimizer": torch.optim.SGD(make_model().parameters(), lr=1.0)}, ["none of them", "another model"]),
    ({"make_model": nn.Tanh}, ["a Tanh, has no parameters", "ModuleList"]),
    ({"make_model": lambda: make_model().requires_grad_(False)}, ["nothing to train", "4 of 4", "Unfreeze"]),
    ({"make_model": lambda: nn.Linear}, ["model is the class Linear", "already made"]),
    ({"make_model": lambda: print}, ["model is a builtin_function_or_method"]),
]


@pytest.mark.parametrize(("changes", "words"), WRONG, ids=[words[0][:40] for _, words in WRONG])
def test_one_clear_message(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        train(**changes)
    for word in words:
        assert word in str(caught.value)


def test_wrong_arguments_end_every_rank() -> None:
    for changes in ({"steps": "3"}, {"strategy": "zero"}, {"dataset": Data(0)}, {"schedule": lambda _: "x"}):
        with pytest.raises(ConfigError):
            train_each(lambda _, changes=changes: dict(changes))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"global_bach": 4}, ["unknown key global_bach. Did you mean global_batch?", "is missing"]),
        ({"global_batch": 4, "micro_batch": 8}, ["micro_batch is 8", "Lower micro_batch to 4"]),
        ({"global_batch": "many"}, ["global_batch is 'many'", "integer"]),
        ({"global_batch": 3.5}, ["global_batch is 3.5"]),
        ({"global_batch": 0}, ["global_batch is 0"]),
        ({"global_batch": 4, "last": "dorp"}, ["last is 'dorp'. Did you mean drop?"]),
    ],
)
def test_batching_names_key_and_value(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Batching(**settings)
    for word in words:
        assert word in str(caught.value)


def test_settings_without_names_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Batching was given 64 without a name\. Write Batching\(global_batch"
    ):
        Batching(64, 8)  # type: ignore[misc]


def test_no_steps_change_nothing() -> None:
    torch.manual_seed(0)
    untouched = samestep.train(
        make_model(), Data(), loss, optimizer=torch.optim.AdamW, batching=Batching(global_batch=2), steps=0
    )
    assert untouched.step == untouched.applied == 0
    assert fingerprints(lambda: {"steps": 0}) == [untouched.fingerprint] * 3


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda values: values.mean(), ["bare tensor of shape ()", "mean", "weighted(losses)"]),
        (lambda values: samestep.weighted(values.mean()), ["scalar without a weight", "reduction='none'"]),
        (lambda values: None, ["a NoneType", "samestep.weighted"]),
        (lambda values: 1.5, ["a float"]),
        (lambda values: (values.sum(), 2), ["a tuple"]),
        (lambda values: {}, ["empty dict"]),
        (lambda values: {"main": values.sum()}, ["loss term main is a tensor"]),
        (lambda values: samestep.weighted(values.long()), ["int64", "real numbers"]),
        (lambda values: samestep.weighted(values.detach()), ["has no gradient", "detach"]),
        (lambda values: samestep.weighted(values, torch.ones(5)), ["(2,)", "(5,)", "broadcast"]),
        (lambda values: samestep.weighted(values, -torch.ones(2)), ["add up to -12.0", "not negative"]),
        (lambda values: samestep.weighted(values, torch.full((2,), torch.nan)), ["add up to nan"]),
    ],
)
def test_a_loss_without_a_global_meaning_is_refused_on_every_rank(returned: Any, words: list[str]) -> None:
    changes = {"loss": lambda model, batch: returned(errors_of(model, batch))}
    for attempt in (lambda: train(**changes), lambda: train_each(lambda _: dict(changes))):
        with pytest.raises(LossError) as caught:
            attempt()
        for word in words:
            assert word in str(caught.value)
