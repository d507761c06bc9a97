"""Metrics that need all predictions get them in sample order, and have the same bits on any ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from evaluations_on_processes import evaluate_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import samestep
from samestep.comm.transport import Transport
from samestep.loop import metrics_rows
from samestep.loop.metrics_rows import Rows
from samestep.testing.processes import run_processes
from samestep.testing.threads import run_threads

NUM_SAMPLES, NUM_CLASSES = 23, 3
CPU = torch.device("cpu")


class Points:
    """Points with a label each, and their own number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        return {
            "number": torch.tensor(index),
            "x": torch.randn(4, generator=draw),
            "y": torch.randint(0, NUM_CLASSES, (), generator=draw),
        }


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, NUM_CLASSES)


def predict(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    assert not model.training
    assert not torch.is_grad_enabled()
    logits = model(batch["x"])
    return {
        "preds": logits.softmax(1),
        "target": batch["y"],
        "number": batch["number"],
        "words": [f"w{number}" * (number % 3) for number in batch["number"].tolist()],
    }


def macro_f1(preds: Tensor, target: Tensor) -> float:
    scores = []
    for label in range(NUM_CLASSES):
        found, wanted = preds.argmax(1) == label, target == label
        hits, misses = int((found & wanted).sum()), int((found ^ wanted).sum())
        scores.append(2 * hits / (2 * hits + misses) if hits + misses else 0.0)
    return sum(scores) / NUM_CLASSES


def evaluate(transport: Transport, **changes: Any) -> dict[str, float]:
    with transport.turn():
        model = make_model()
    asked: dict[str, Any] = {"dataset": Points(), "predict": predict, "micro_batch": 2}
    with samestep.Session(transport=transport) as session:
        session.setup(model, lambda params: torch.optim.SGD(params, lr=0.1))
        before = session.fingerprint()
        measured = session.evaluate(samestep.Evaluation(**{**asked, **changes}))
        assert session.fingerprint() == before
    return measured


def on_ranks(world_size: int, **changes: Any) -> dict[str, float]:
    told = run_threads(lambda t: evaluate(t, **changes), world_size)
    assert told == [told[0]] * world_size
    return told[0]


def test_means_and_metrics_of_all_predictions_are_those_of_a_plain_loop() -> None:
    batch = {key: torch.stack([sample[key] for sample in map(Points().__getitem__, range(NUM_SAMPLES))])
             for key in ("x", "y")}  # fmt: skip
    with torch.no_grad():
        logits = make_model()(batch["x"])

    def metric(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, samestep.Weighted]:
        logits = model(batch["x"])
        return {
            "loss": samestep.weighted(cross_entropy(logits, batch["y"], reduction="none")),
            "accuracy": samestep.weighted((logits.argmax(1) == batch["y"]).float()),
        }

    seen: list[list[int]] = []

    def order(number: Tensor) -> dict[str, Any]:
        seen.append(number.tolist())
        return {"first": number[0], "last": {"one": np.float32(number[-1])}}

    measured = [
        on_ranks(world_size, metric=metric, gathered={"f1": macro_f1, "order": order})
        for world_size in (1, 2, 3, 4)
    ]
    assert measured == [measured[0]] * 4
    assert seen == [list(range(NUM_SAMPLES))] * 4  # once for each world, on its first rank only
    assert measured[0]["loss"] == pytest.approx(float(cross_entropy(logits, batch["y"])), rel=1e-6)
    assert measured[0]["accuracy"] == pytest.approx(float((logits.argmax(1) == batch["y"]).double().mean()))
    assert measured[0]["f1"] == macro_f1(logits, batch["y"])
    assert measured[0]["order/first"] == 0.0
    assert measured[0]["order/last/one"] == NUM_SAMPLES - 1


def test_words_of_any_length_travel_as_lists() -> None:
    wanted = [f"w{number}" * (number % 3) for number in range(NUM_SAMPLES)]
    for world_size in (1, 3, 13):  # of thirteen ranks, one has nothing to predict
        assert on_ranks(world_size, gathered={"same": lambda words: float(words == wanted)}) == {"same": 1.0}


def test_a_metric_that_draws_draws_the_same_and_moves_nothing() -> None:
    def bootstrap(target: Tensor) -> float:
        return float(target[torch.randint(0, len(target), (5,))].float().mean()) + np.random.rand()

    (first, second), third = (
        (on_ranks(n, gathered={"b": bootstrap}) for n in (1, 2)),
        on_ranks(1, gathered={"b": bootstrap}),
    )
    assert first == second == third


@pytest.mark.parametrize("num_samples", [3, 31])  # of three ranks, one has nothing to send, or not
def test_rows_are_gathered_over_real_links(num_samples: int) -> None:
    (alone,) = run_processes(evaluate_rows, 1, num_samples)
    assert len(alone) == 8  # four numbers, of raw and of averaged weights
    assert run_processes(evaluate_rows, 3, num_samples) == [alone] * 3


def torchmetrics_of(name: str) -> Any:
    return pytest.importorskip("torchmetrics", reason="torchmetrics is not installed").__dict__[name]


def test_torchmetrics_objects_are_fed_in_sample_order_to_a_fresh_copy() -> None:
    classification = pytest.importorskip(
        "torchmetrics.classification", reason="torchmetrics is not installed", exc_type=ImportError
    )
    auc = classification.MulticlassAUROC(num_classes=NUM_CLASSES)
    auc.update(torch.eye(NUM_CLASSES), torch.tensor([1, 2, 0]))  # must be forgotten
    used = auc.update_count
    both = torchmetrics_of("MetricCollection")(
        {
            "f1": classification.MulticlassF1Score(NUM_CLASSES),
            "acc": classification.MulticlassAccuracy(NUM_CLASSES),
        }
    )
    gathered = {"auc": auc, "both": both}
    measured = [on_ranks(world_size, gathered=gathered) for world_size in (1, 2, 3)]
    assert measured == [measured[0]] * 3
    assert auc.update_count == used
    plain = classification.MulticlassAUROC(num_classes=NUM_CLASSES)
    model = make_model()
    for start in range(0, NUM_SAMPLES, 2):
        samples = [Points()[index] for index in range(start, min(start + 2, NUM_SAMPLES))]
        with torch.no_grad():
            scores = model(torch.stack([sample["x"] for sample in samples])).softmax(1)
        plain.update(scores, torch.stack([sample["y"] for sample in samples]))
    assert measured[0]["auc"] == float(plain.compute())
    assert measured[0]["both/f1"] == pytest.approx(on_ranks(1, gathered={"f1": macro_f1})["f1"], rel=1e-6)


def test_a_metric_of_torchmetrics_does_not_meet_other_ranks_by_itself() -> None:
    classification = pytest.importorskip(
        "torchmetrics.classification", reason="torchmetrics is not installed", exc_type=ImportError
    )

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the metric called a collective")

    metric = classification.MulticlassAccuracy(
        NUM_CLASSES, dist_sync_fn=refuse, distributed_available_fn=lambda: True
    )
    assert on_ranks(2, gathered={"a": metric})["a"] > 0


BAD_ROWS: list[tuple[Callable[..., Any], str]] = [
    (lambda model, batch: model(batch["x"]), "predict returned a Tensor for micro-batch"),
    (lambda model, batch: {}, "predict returned a dict for micro-batch"),
    (lambda model, batch: {"a": 3.0}, "predict returned a float as a for micro-batch"),
    (lambda model, batch: {"a": batch["x"].sum()}, "a tensor without dims as a"),
    (
        lambda model, batch: {"a": batch["x"][:1]},
        r"returned 1 rows of a for micro-batch \d+, which has 2 samples",
    ),
    (lambda model, batch: {"a": list(batch["x"])}, r"cannot be stored as JSON.*tensor\.tolist\(\)"),
    (
        lambda model, batch: {"a": torch.zeros(len(batch["x"]), 1 + int(batch["number"][0] > 3))},
        r"a as float32 rows of shape \(1,\) for micro-batch 0, but a as float32 rows of shape \(2,\) for",
    ),
    (
        lambda model, batch: {"a" if batch["number"][0] < 8 else "b": batch["y"]},
        "returned a as int64 rows of shape .* for micro-batch 0, but b as",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), BAD_ROWS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_that_do_not_fit_are_refused(wrong: Any, message: str, world_size: int) -> None:
    with pytest.raises(samestep.LossError, match=message):
        on_ranks(world_size, predict=wrong, gathered={"m": lambda a: 0.0})


def failing(preds: Tensor) -> float:
    raise KeyError("no such label")


BAD_METRICS: list[tuple[Any, str]] = [
    (failing, "metric m failed over the gathered rows: KeyError: 'no such label'"),
    (lambda preds: preds, "it returned a Tensor. Return a number"),
    (lambda preds: None, "it returned a NoneType"),
    (lambda scores, target: 0.0, "it takes scores, target, but predict returns preds, target"),
]


@pytest.mark.parametrize(("metric", "message"), BAD_METRICS)
def test_a_metric_that_fails_is_named_on_every_rank(metric: Any, message: str) -> None:
    def run(transport: Transport) -> str:
        with pytest.raises(samestep.LossError, match=message) as caught:
            evaluate(transport, gathered={"m": metric})
        return str(caught.value)

    told = run_threads(run, 3)
    assert told == [told[0]] * 3


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"predict": None}, "measures nothing"),
    ({"predict": None, "gathered": {"a": macro_f1}}, "give both or neither"),
    ({"metric": lambda m, b: None}, "give both or neither"),
    ({"gathered": {"a": 3}}, r"evaluate.gathered\['a'\] is a int"),
    ({"gathered": {"a": nn.Linear}}, r"is a class. Give Linear\(...\)"),
    ({"gathered": {"a": macro_f1}, "weights": "mean"}, "evaluate.weights is 'mean'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(samestep.ConfigError, match=message):
        samestep.Evaluation(**{"dataset": Points(), "predict": predict, **changes})


def test_one_name_for_two_metrics_is_refused() -> None:
    metric = lambda model, batch: {"f1": samestep.weighted(batch["x"])}  # noqa: E731
    with pytest.raises(samestep.ConfigError, match="has the metric f1 twice"):
        on_ranks(1, metric=metric, gathered={"f1": macro_f1})
    with pytest.raises(samestep.ConfigError, match="keeps no averages"):
        on_ranks(1, gathered={"f1": macro_f1}, weights="ema")


REAL = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8]
DTYPES = [*REAL, torch.complex64]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=9),
    world_size=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    tail=st.sampled_from([(), (3,), (2, 0), (2, 3)]),
    part=st.sampled_from([1, 7, 64, 4 << 20]),
)
def test_rows_arrive_with_their_bits_in_order(
    sizes: list[int], world_size: int, dtype: torch.dtype, tail: tuple[int, ...], part: int
) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    real = torch.randn(sum(sizes), *tail, 2, generator=generator) * 3
    all_rows = torch.view_as_complex(real) if dtype.is_complex else real[..., 0].to(dtype)
    by_leaf = list(all_rows.split(sizes))
    bounds = [len(sizes) * rank // world_size for rank in range(world_size + 1)]

    def run(transport: Transport) -> dict[str, Any] | None:
        rows = Rows(transport, device=CPU)
        for leaf in range(bounds[transport.rank], bounds[transport.rank + 1]):
            own = by_leaf[leaf].clone()
            rows.add(leaf, len(own), {"a": own, "b": [[leaf]] * len(own)})
            own.zero_()  # memory of a batch is used again
        return rows.gathered()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_rows, "_PART", part)
        first, *others = run_threads(run, world_size)
    assert others == [None] * (world_size - 1)
    assert first is not None
    assert torch.equal(first["a"], all_rows)
    assert first["a"].dtype == dtype
    assert first["a"].shape[1:] == tail
    assert first["b"] == [[leaf] for leaf, size in enumerate(sizes) for _ in range(size)]
