"""The end of a step: norms against float64, one division, and clipping as torch does it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from samestep.errors import LossError
from samestep.precision.settle import TileNorms, divide, settle, total_norm
from samestep.sync.layout import Layout, lay_out
from samestep.sync.storage import GradientBuffer


def buffer_of(*gradients: Tensor, sums: torch.dtype | None = None) -> tuple[Layout, GradientBuffer]:
    named = [(f"p{n}", Parameter(torch.zeros_like(g))) for n, g in enumerate(gradients)]
    layout = lay_out(named, world_size=1, whole=False, sums=sums)
    buffer = GradientBuffer(layout)
    for view, gradient in zip(buffer.views, gradients, strict=True):
        view.copy_(gradient)
    return layout, buffer


def norm_of(layout: Layout, buffer: GradientBuffer) -> float:
    norms = TileNorms(layout)
    for flat, start, stop in layout.owned(0):
        norms.inspect(flat, start, buffer.flats[flat][start:stop])
    by_tile = dict(norms.measured())
    assert len(by_tile) == layout.first_tiles()[-1]
    assert norms.measured() == []  # and forgotten
    return total_norm([by_tile[tile] for tile in range(layout.first_tiles()[-1])])


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 3, 64, 1000, 20_000]), min_size=1, max_size=4),
    exponent=st.integers(-44, 37),
    seed=st.integers(0, 2**32),
)
def test_the_norm_is_that_of_float64_at_any_magnitude(sizes: list[int], exponent: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(size, generator=draw) * 10.0**exponent for size in sizes]
    everything = torch.cat([g.double().clamp(-3e38, 3e38) for g in gradients])
    gradients = [g.clamp(-3e38, 3e38) for g in gradients]
    # A float32 dot product over a tile of 20,000 numbers: rounding, relative.
    wanted = float(everything.norm())
    assert norm_of(*buffer_of(*gradients)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("magnitude", [1e-160, 1e-30, 1.0, 1e30, 1e150, 1e300])
def test_the_norm_of_float64_gradients(magnitude: float) -> None:
    gradient = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = norm_of(*buffer_of(gradient * magnitude))
    assert got == pytest.approx(float(gradient.norm()) * magnitude, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_sixteen_bit_sums(dtype: torch.dtype) -> None:
    gradient = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 100
    layout, buffer = buffer_of(gradient, sums=dtype)
    wanted = float(gradient.to(dtype).double().norm())
    assert norm_of(layout, buffer) == pytest.approx(wanted, rel=1e-3 if dtype == torch.float16 else 1e-6)


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
def test_the_norm_tells_what_is_not_finite(spoilt: float) -> None:
    gradient = torch.ones(500)
    gradient[77] = spoilt
    assert not math.isfinite(norm_of(*buffer_of(torch.ones(3), gradient)))
    both = torch.tensor([torch.nan, torch.inf])
    assert not math.isfinite(norm_of(*buffer_of(both, both.double())))


def test_the_norm_of_nothing_is_zero() -> None:
    assert norm_of(*buffer_of(torch.zeros(5), torch.empty(0))) == 0.0
    assert total_norm([]) == 0.0


@given(norms=st.lists(st.floats(0, 1e300), max_size=20), seed=st.randoms())
def test_no_order_of_tiles_changes_the_norm(norms: list[float], seed: object) -> None:
    shuffled = sorted(norms)
    assert total_norm(shuffled) == total_norm(shuffled[::-1]) == total_norm(norms)


@settings(max_examples=40, deadline=None)
@given(
    weight=st.floats(1e-3, 1e6),
    clip=st.floats(1e-3, 1e3),
    exponent=st.integers(-20, 20),
    multiplier=st.integers(-10, 24).map(lambda e: 2.0**e),
)
def test_divided_and_clipped_as_torch_does(
    weight: float, clip: float, exponent: int, multiplier: float
) -> None:
    mean = torch.randn(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 10.0**exponent
    theirs = Parameter(torch.zeros(300, dtype=torch.float64))
    theirs.grad = mean.clone()
    norm = float(torch.nn.utils.clip_grad_norm_([theirs], clip))
    layout, buffer = buffer_of(mean * weight * multiplier)
    settled = settle(
        weight=weight, summed_norm=norm_of(layout, buffer), multiplier=multiplier, clip_norm=clip
    )
    assert settled.applied
    assert settled.grad_norm == pytest.approx(norm, rel=1e-12)
    divide(buffer, layout.owned(0), settled.divisor)
    torch.testing.assert_close(buffer.views[0], theirs.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30, 3e37])
def test_huge_and_tiny_gradients_are_clipped_and_divided(magnitude: float) -> None:
    gradient = torch.randn(200, generator=torch.Generator().manual_seed(2)).clamp(-3, 3) * magnitude
    layout, buffer = buffer_of(gradient)
    norm = norm_of(layout, buffer)
    clip = norm / 8 / 1e5
    settled = settle(weight=8.0, summed_norm=norm, multiplier=1.0, clip_norm=clip if clip > 1e-3 else None)
    divide(buffer, layout.owned(0), settled.divisor)
    # Rounding to float32, twice where the divisor itself is beyond float32.
    torch.testing.assert_close(
        buffer.views[0].double(), gradient.double() / settled.divisor, rtol=3e-7, atol=1e-44
    )
    assert bool((buffer.views[0] != 0).any())


@pytest.mark.parametrize("divisor", [1e-300, 1e-50, 1e-40, 1e39, 1e60, 1e300])
def test_a_divisor_that_float32_cannot_hold(divisor: float) -> None:
    layout, buffer = buffer_of(torch.tensor([0.0, 1e-30, -1.0, 1e30]))
    divide(buffer, layout.owned(0), divisor)
    wanted = (torch.tensor([0.0, 1e-30, -1.0, 1e30]).double() / divisor).float()
    torch.testing.assert_close(buffer.views[0], wanted, rtol=1e-6, atol=1e-44)


def test_only_what_is_asked_for_is_divided() -> None:
    _, buffer = buffer_of(torch.ones(200))
    divide(buffer, [(0, 0, 64)], 4.0)
    assert torch.equal(buffer.views[0][:64], torch.full((64,), 0.25))
    assert torch.equal(buffer.views[0][64:], torch.ones(136))


def test_sixteen_bit_sums_are_divided_in_float32() -> None:
    layout, buffer = buffer_of(torch.full((3,), 2.0), sums=torch.bfloat16)
    (quotient,) = divide(buffer, layout.owned(0), 3.0)
    assert quotient.dtype == torch.float32
    assert float(quotient[0]) == float(torch.tensor(2.0) / 3.0)


@pytest.mark.parametrize("weight", [-1.0, -1e-300, math.nan, math.inf, -math.inf])
def test_weights_that_mean_nothing_are_refused(weight: float) -> None:
    with pytest.raises(LossError, match=f"add up to {weight!r}"):
        settle(weight=weight, summed_norm=1.0, multiplier=1.0, clip_norm=None)


def test_no_weight_no_step() -> None:
    settled = settle(weight=0.0, summed_norm=0.0, multiplier=1.0, clip_norm=1.0)
    assert (settled.applied, settled.skipped, settled.grad_norm) == (False, "weight zero", None)
    assert settled.finite


@pytest.mark.parametrize(("norm", "weight"), [(math.inf, 1.0), (math.nan, 1.0), (1e200, 1e-200)])
def test_what_is_not_finite_is_not_applied(norm: float, weight: float) -> None:
    settled = settle(weight=weight, summed_norm=norm, multiplier=1.0, clip_norm=1.0)
    assert not settled.applied
    assert not settled.finite
