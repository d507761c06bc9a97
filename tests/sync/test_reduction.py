"""The ordered sum over ranks, compared by bits with the pure fold, over healthy and over faulty links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from samestep.comm.faulty import Fault, Faulty
from samestep.comm.transport import Transport
from samestep.errors import InternalError, PeerLost
from samestep.numerics.fold import fold
from samestep.sync.collector import Collector
from samestep.sync.layout import lay_out
from samestep.sync.reduction import Fast, Ordered
from samestep.sync.replicate import Replicate
from samestep.sync.storage import ParameterStore
from samestep.sync.zero import Zero1
from samestep.testing.threads import run_threads

SPECIAL = torch.tensor(
    [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 1e-40, 3.4e38, -3.4e38, 1.0, 1 + 2.0**-23]
)
Gradients = list[list[Tensor]]  # by leaf, by parameter
Wrap = Callable[[Transport], Transport]


def draw_gradients(sizes: Sequence[int], num_leaves: int, seed: int) -> Gradients:
    """Draw numbers of many magnitudes, a quarter of them special."""
    generator = torch.Generator().manual_seed(seed)

    def one(size: int) -> Tensor:
        numbers = torch.randn(size, generator=generator) * 10.0 ** torch.randint(
            -40, 38, (size,), generator=generator
        )
        special = SPECIAL[torch.randint(len(SPECIAL), (size,), generator=generator)]
        return torch.where(torch.rand(size, generator=generator) < 0.25, special, numbers)

    return [[one(size) for size in sizes] for _ in range(num_leaves)]


def bits(tensor: Tensor) -> Tensor:
    """Return the bits, with one NaN for all: which payload survives a sum is the processor's choice."""
    return torch.where(tensor.isnan(), torch.nan, tensor).view(torch.int32)


def pure(gradients: Gradients) -> list[Tensor]:
    """Fold each parameter's gradients; every leaf enters as g + 0.0."""
    return [fold([g + 0.0 for g in leaves]) for leaves in zip(*gradients, strict=True)]


def reduced(
    transport: Transport,
    gradients: Gradients,
    runs: Sequence[range],
    *,
    kind: type[Replicate] | type[Zero1] = Replicate,
    fast: bool = False,
    steps: int = 2,
    skip: Callable[[int, int], bool] = lambda leaf, parameter: False,
) -> list[Tensor]:
    """Form the sum through real backward passes, `steps` times; return the last one, by parameter.

    With Zero1 only what is owned here is right; the rest is set to zero.
    """
    parameters = [Parameter(torch.zeros(len(g))) for g in gradients[0]]
    named = [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
    layout = lay_out(named, world_size=transport.world_size, whole=False, bucket=128)
    store = ParameterStore(layout, parameters, masters=False)
    collector = Collector(layout, parameters)
    strategy = kind(store, collector, Fast(transport) if fast else Ordered(layout, transport), transport)
    for _ in range(steps):
        strategy.begin(runs, len(gradients))
        for leaf in runs[transport.rank]:
            with strategy.collect(leaf):
                used = [
                    (p * g).sum()
                    for number, (p, g) in enumerate(zip(parameters, gradients[leaf], strict=True))
                    if not skip(leaf, number)
                ]
                if used:
                    torch.stack(used).sum().backward()
        result = strategy.reduce(lambda flat, start, part: None)
    strategy.close()
    if kind is Zero1:
        own = [torch.zeros_like(flat) for flat in result.gradient.flats]
        for flat, start, stop in layout.owned(transport.rank):
            own[flat][start:stop] = result.gradient.flats[flat][start:stop]
        return [slot.view(own[slot.flat]).clone() for slot in layout.slots]
    return [view.clone() for view in result.gradient.views]


@st.composite
def cases(draw: Any) -> tuple[list[int], list[range], int]:
    """Draw the sizes of parameters, a split of leaves into runs (some empty), and a seed."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 61, 64, 65, 127, 257]), min_size=1, max_size=4))
    num_leaves = draw(st.integers(1, 13))
    world_size = draw(st.integers(1, 5))
    cuts = sorted(
        draw(st.lists(st.integers(0, num_leaves), min_size=world_size - 1, max_size=world_size - 1))
    )
    runs = [range(start, stop) for start, stop in pairwise([0, *cuts, num_leaves])]
    return sizes, runs, draw(st.integers(0, 2**32))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_any_split_gives_the_bits_of_the_pure_fold(case: tuple[list[int], list[range], int]) -> None:
    sizes, runs, seed = case
    gradients = draw_gradients(sizes, runs[-1].stop, seed)
    wanted = pure(gradients)
    for result in run_threads(lambda t: reduced(t, gradients, runs), len(runs)):
        for got, want in zip(result, wanted, strict=True):
            assert torch.equal(bits(got), bits(want))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_owners_hold_the_same_sum_in_parts(case: tuple[list[int], list[range], int]) -> None:
    sizes, runs, seed = case
    gradients = draw_gradients(sizes, runs[-1].stop, seed)
    by_rank = run_threads(lambda t: reduced(t, gradients, runs, kind=Zero1), len(runs))
    for parts, want in zip(zip(*by_rank, strict=True), pure(gradients), strict=True):
        # Each element has one owner and is +0.0 elsewhere; an int64 sum of bits puts them together.
        together = torch.stack([bits(part).long() for part in parts]).sum(0)
        assert torch.equal(together, bits(want).long())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), unused=st.integers(0, 2**32))
def test_a_leaf_without_a_gradient_counts_as_zeros(
    case: tuple[list[int], list[range], int], unused: int
) -> None:
    sizes, runs, seed = case

    def skip(leaf: int, parameter: int) -> bool:
        return bool((unused >> ((leaf * 4 + parameter) % 32)) & 1)

    gradients = draw_gradients(sizes, runs[-1].stop, seed)
    with_zeros = [
        [torch.zeros_like(g) if skip(leaf, number) else g for number, g in enumerate(leaves)]
        for leaf, leaves in enumerate(gradients)
    ]
    for result in run_threads(lambda t: reduced(t, gradients, runs, skip=skip), len(runs)):
        for got, want in zip(result, pure(with_zeros), strict=True):
            assert torch.equal(bits(got), bits(want))


SIZES = [3, 130, 257]
SPLITS = [[range(7)], [range(5), range(5, 7)], [range(1), range(1, 1), range(1, 7)]]


@pytest.mark.parametrize("runs", SPLITS)
@pytest.mark.parametrize("kind", ["delay", "late"])
def test_slow_and_reordered_links_change_no_bit(runs: list[range], kind: Any) -> None:
    gradients = draw_gradients(SIZES, 7, seed=1)
    for call in range(12):

        def wrapped(t: Transport, call: int = call) -> list[Tensor]:
            # A late transfer must be late on every rank; a delay is one rank's.
            faults = {call: Fault(kind=kind, seconds=0.002)} if kind == "late" or t.rank == 0 else {}
            return reduced(Faulty(t, faults), gradients, runs)

        for result in run_threads(wrapped, len(runs)):
            for got, want in zip(result, pure(gradients), strict=True):
                assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("kind", [Replicate, Zero1])
@pytest.mark.parametrize("call", [0, 1, 3, 5])
def test_a_broken_link_ends_in_peer_lost_on_every_rank(kind: Any, call: int) -> None:
    gradients = draw_gradients(SIZES, 7, seed=2)
    runs = [range(3), range(3, 5), range(5, 7)]

    def work(transport: Transport) -> str:
        faults = {call: Fault(kind="break")} if transport.rank == 1 else {}
        faulty = Faulty(transport, faults)
        try:
            reduced(faulty, gradients, runs, kind=kind, steps=3)
        except PeerLost as error:
            return str(error)
        finally:
            faulty.close()
        return ""

    by_rank = run_threads(work, 3, timeout_s=5)
    assert "on purpose" in by_rank[1]
    assert "rank 0 waited for rank" in by_rank[0]
    assert "rank 2 waited for rank" in by_rank[2]


def test_fast_takes_the_sum_of_the_backend() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(130, generator=generator)] for _ in range(7)]
    wanted = torch.stack([g for (g,) in gradients]).double().sum(0)
    for runs in SPLITS:
        for (got,) in run_threads(lambda t, r=runs: reduced(t, gradients, r, fast=True), len(runs)):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_steps_out_of_order_are_refused() -> None:
    def work(transport: Transport) -> None:
        parameter = Parameter(torch.zeros(3))
        layout = lay_out([("p", parameter)], world_size=1, whole=False)
        store = ParameterStore(layout, [parameter], masters=False)
        strategy = Replicate(store, Collector(layout, [parameter]), Ordered(layout, transport), transport)
        with pytest.raises(InternalError, match="no step was begun"):
            strategy.reduce(lambda flat, start, part: None)
        with pytest.raises(InternalError, match="outside a step"):
            strategy.collect(0)
        strategy.begin([range(2)], 2)
        with pytest.raises(InternalError, match="micro-batch 2 is not among"), strategy.collect(2):
            pass

    run_threads(work, 1)
