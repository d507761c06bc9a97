"""Several loss terms, each divided by its own global weight, against float64 over the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.comm.transport import Transport
from samestep.errors import Disagreement, LossError
from samestep.loop.terms import TermWeights, agree_on_terms
from samestep.testing.threads import run_threads
from samestep.testing.workloads import Drawn

CPU = torch.device("cpu")
COEFFICIENTS = {"fit": 1.0, "size": 0.25, "rare": -3.0}
BATCHING = samestep.Batching(global_batch=7, micro_batch=2, shuffle=False)  # four micro-batches


def draw_ragged(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "inputs": torch.randn(3, generator=generator, dtype=torch.float64),
        "target": torch.randn((), generator=generator, dtype=torch.float64),
        "fit": torch.rand((), generator=generator, dtype=torch.float64),
        "size": torch.randint(0, 4, (), generator=generator),
        "rare": torch.rand((), generator=generator) < 0.3,
    }


DATASET = Drawn(21, draw_ragged)


def values(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    out = model(batch["inputs"]).squeeze(1)
    return {"fit": (out - batch["target"]) ** 2, "size": out.abs(), "rare": out.exp()}


def loss(model: nn.Module, batch: Any) -> dict[str, samestep.Weighted]:
    return {
        name: samestep.weighted(value, batch[name], coefficient=COEFFICIENTS[name])
        for name, value in values(model, batch).items()
    }


def count_weights(batch: Any) -> dict[str, float]:
    return {name: float(batch[name].double().sum()) for name in COEFFICIENTS}


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def train(transport: Transport | None, **settings: Any) -> samestep.Result:
    arguments: dict[str, Any] = {
        "dataset": DATASET,
        "loss": loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batching": BATCHING,
        "steps": 3,
        "make": make_model,
        **settings,
    }
    make = arguments.pop("make")
    if transport is None:
        model = make()
    else:
        with transport.turn():
            model = make()
    return samestep.train(model, transport=transport, **arguments)


def oracle(steps: int) -> tuple[nn.Module, list[float]]:
    """Train on whole global batches: each term its own weighted mean."""
    model, losses = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        samples = [DATASET[i] for i in range(7 * step, 7 * step + 7)]
        batch = {key: torch.stack([s[key] for s in samples]) for key in samples[0]}
        parts = []
        for name, value in values(model, batch).items():
            weight = batch[name].double()
            if weight.sum() > 0:
                parts.append(COEFFICIENTS[name] * (value * weight).sum() / weight.sum())
        total = torch.stack(parts).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    return model, losses


@pytest.mark.parametrize("weights", [None, count_weights], ids=["counted by a pass", "from the data"])
def test_the_sum_of_the_terms_means_over_the_global_batch(weights: Any) -> None:
    wanted, losses = oracle(3)
    (alone,) = run_threads(lambda t: train(t, weights=weights), 1)
    for got, want in zip(alone.model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    for report, loss_value in zip(alone.history, losses, strict=True):
        assert report.loss == pytest.approx(loss_value, rel=1e-12)
        parts = [term.contribution for term in report.terms.values()]
        assert report.loss == pytest.approx(sum(parts), rel=1e-12)
        assert set(report.terms) == set(COEFFICIENTS)
    for strategy in ("replicate", "zero1"):
        for world_size in (1, 2, 3, 5):  # of five ranks, one has no micro-batch
            for result in run_threads(
                lambda t, s=strategy: train(t, weights=weights, strategy=s), world_size
            ):
                assert result.fingerprint == alone.fingerprint, f"{strategy} on {world_size} ranks"
                assert [(r.loss, r.terms) for r in result.history] == [
                    (r.loss, r.terms) for r in alone.history
                ]


def test_both_ways_of_counting_give_the_same_bits() -> None:
    assert train(None).fingerprint == train(None, weights=count_weights).fingerprint


def test_a_term_of_weight_zero_adds_nothing_in_that_step() -> None:
    def sometimes(model: nn.Module, batch: Any) -> dict[str, samestep.Weighted]:
        terms = loss(model, batch)
        first = torch.equal(batch["target"][0], DATASET[0]["target"])
        rare = torch.full_like(batch["target"], 1.0 if first else 0.0)
        # Infinite where it does not count.
        value = values(model, batch)["rare"] * (1.0 if first else torch.inf)
        return {"fit": terms["fit"], "rare": samestep.weighted(value, rare)}

    (alone,) = run_threads(lambda t: train(t, loss=sometimes), 1)
    assert [r.terms["rare"].weight for r in alone.history] == [2.0, 0.0, 0.0]
    assert [r.applied for r in alone.history] == [True] * 3
    assert [r.terms["rare"].contribution != 0 for r in alone.history] == [True, False, False]
    for world_size in (2, 3, 5):
        for result in run_threads(lambda t: train(t, loss=sometimes), world_size):
            assert result.fingerprint == alone.fingerprint


def test_weights_from_the_data_spare_the_counting_pass() -> None:
    calls: list[bool] = []

    def watched(model: nn.Module, batch: Any) -> dict[str, samestep.Weighted]:
        calls.append(torch.is_grad_enabled())
        return loss(model, batch)

    train(None, loss=watched, weights=count_weights)
    assert calls == [True] * 4 * 3


def test_a_step_in_which_no_term_counts_is_skipped() -> None:
    def nothing(model: nn.Module, batch: Any) -> dict[str, samestep.Weighted]:
        return {"a": samestep.weighted(values(model, batch)["fit"], torch.zeros(1))}

    result = train(None, loss=nothing)
    assert [(r.applied, r.skipped, r.loss) for r in result.history] == [(False, "weight zero", None)] * 3
    start = make_model()
    for got, want in zip(result.model.parameters(), start.parameters(), strict=True):
        assert torch.equal(got, want)


def test_one_term_in_a_dict_is_the_single_loss_within_rounding() -> None:
    single = train(None, loss=lambda model, batch: loss(model, batch)["fit"])
    named = train(None, loss=lambda model, batch: {"fit": loss(model, batch)["fit"]})
    for got, want in zip(named.model.parameters(), single.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_the_counting_pass_draws_the_same_masks_and_leaves_no_trace() -> None:
    seen: list[tuple[int, bytes]] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((int(torch.is_grad_enabled()), x.detach().numpy().tobytes()))
            return x

    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), Watch(), nn.Linear(64, 1)).double()

    train(None, make=make, steps=2)
    counted = [mask for grad, mask in seen if not grad]
    trained = [mask for grad, mask in seen if grad]
    # The very first pass breaks off at the first micro-batch, to ask the other ranks.
    assert trained[1:] == counted
    assert trained[0] == trained[1]
    assert len(set(counted)) == len(counted) == 8

    def with_single(transport: Transport) -> samestep.Result:
        return train(transport, make=make, loss=lambda m, b: loss(m, b)["fit"])

    def with_terms(transport: Transport) -> samestep.Result:
        def fit_alone(model: nn.Module, batch: Any) -> dict[str, samestep.Weighted]:
            return {"fit": loss(model, batch)["fit"]}

        return train(transport, make=make, loss=fit_alone)

    (single,), (named,) = run_threads(with_single, 1), run_threads(with_terms, 1)
    for got, want in zip(named.model.parameters(), single.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def later(model: nn.Module, batch: Any) -> Any:
    """Return other terms from the third micro-batch on."""
    terms = loss(model, batch)
    return terms if float(batch["target"][0]) in FIRST else {"fit": terms["fit"]}


def dict_later(model: nn.Module, batch: Any) -> Any:
    terms = loss(model, batch)
    return terms["fit"] if float(batch["target"][0]) in FIRST else terms


def single_later(model: nn.Module, batch: Any) -> Any:
    terms = loss(model, batch)
    return terms if float(batch["target"][0]) in FIRST else terms["fit"]


FIRST = {float(DATASET[0]["target"]), float(DATASET[2]["target"])}


@pytest.mark.parametrize("changing", [later, dict_later, single_later])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_terms_that_differ_between_micro_batches_are_refused(changing: Any, world_size: int) -> None:
    with pytest.raises((LossError, Disagreement), match=r"the same terms|weights for"):
        run_threads(lambda t: train(t, loss=changing), world_size, timeout_s=10)


@pytest.mark.parametrize("world_size", [1, 3])
def test_terms_that_come_only_in_a_later_step_are_refused_without_a_hang(world_size: int) -> None:
    def sometimes(model: nn.Module, batch: Any) -> Any:
        terms = loss(model, batch)
        return terms if float(batch["target"][0]) == float(DATASET[7]["target"]) else terms["fit"]

    with pytest.raises(LossError, match="terms"):
        run_threads(lambda t: train(t, loss=sometimes), world_size, timeout_s=10)


def test_a_single_loss_on_one_rank_and_terms_on_another_is_told_to_all() -> None:
    told: list[str] = []

    def work(transport: Transport) -> None:
        def own(model: nn.Module, batch: Any) -> Any:
            terms = loss(model, batch)
            return terms if transport.rank == 1 else terms["fit"]

        try:
            train(transport, loss=own)
        except Disagreement as error:
            told.append(str(error))

    run_threads(work, 3, timeout_s=10)
    assert (
        told
        == [
            (
                "the loss is a single value on rank 0, but a dict of fit, size, rare on rank 1. It must "
                "return the same terms for every micro-batch."
            )
        ]
        * 3
    )


def test_agreement_without_any_micro_batch() -> None:
    assert run_threads(lambda t: agree_on_terms(None, t, device=CPU), 2) == [[], []]
    names = {0: None, 1: ["b", "a"], 2: ["a", "b"]}
    assert run_threads(lambda t: agree_on_terms(names[t.rank], t, device=CPU), 3) == [["b", "a"]] * 3


def test_weights_given_by_a_function_must_name_the_terms() -> None:
    with pytest.raises(
        LossError, match="returned the terms fit, size, rare, but the weights counted before are of fit"
    ):
        train(None, weights=lambda batch: {"fit": 1.0})
    counted = TermWeights(["fit"])
    with pytest.raises(LossError, match="micro-batch 3 has weights for no term, but the loss terms are fit"):
        counted.add(3, {})


@pytest.mark.parametrize("world_size", [1, 3, 5])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda w: {**w, "size": w["size"] + 1},
            r"step 0: loss term size was divided by 15, .* weights of 11",
        ),
        (lambda w: {**w, "size": 0.0}, r"step 0: loss term size was divided by 0, .* weights of 11"),
        (lambda w: dict.fromkeys(w, 1.0), r"step 0: loss term fit was divided by 4, "),
    ],
)
def test_weights_that_are_not_those_of_the_loss_are_refused(wrong: Any, words: str, world_size: int) -> None:
    def weights(batch: Any) -> dict[str, float]:
        return wrong(count_weights(batch))

    told: list[str] = []

    def work(transport: Transport) -> None:
        with pytest.raises(LossError, match=words) as caught:
            train(transport, weights=weights)
        told.append(str(caught.value))

    run_threads(work, world_size, timeout_s=10)
    assert len(set(told)) == 1
    assert "leave weights= out" in told[0]


def test_weights_added_in_another_way_are_taken() -> None:
    def weights(batch: Any) -> dict[str, float]:
        return {name: float(batch[name].float().flip(0).sum()) for name in COEFFICIENTS}

    assert all(report.applied for report in train(None, weights=weights).history)


def test_half_precision_scales_a_mean_not_a_sum() -> None:
    """Terms are divided before the backward pass, so their scale must not be divided once more."""

    def run(function: Any, **settings: Any) -> samestep.Result:
        torch.manual_seed(0)
        return samestep.train(
            nn.Linear(3, 1),
            Drawn(21, lambda g: torch.randn(3, generator=g)),
            function,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
            batching=BATCHING,
            steps=2,
            precision="fp16",
            **settings,
        )

    def tiny(model: nn.Module, batch: Tensor) -> samestep.Weighted:
        # 2**-24 per sample and its weight of 2**20: a mean that float16 holds only with the full scale.
        return samestep.weighted(model(batch).squeeze(1) * 2.0**-24, torch.full((1,), 2**20))

    gradients = [r.grad_norm for r in run(lambda m, b: {"one": tiny(m, b)}).history]
    single = [r.grad_norm for r in run(tiny).history]
    assert all(norm is not None and norm > 0 for norm in gradients)
    assert gradients[1] == pytest.approx(single[1], rel=0.05)
