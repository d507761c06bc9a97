"""The layout is arithmetic: it covers everything once, and only the cuts know the number of ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from samestep.errors import ConfigError
from samestep.sync.layout import ALIGNMENT, Layout, lay_out
from samestep.sync.storage import GradientBuffer, ParameterStore

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=12)
DTYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
)


@st.composite
def named_parameters(draw: st.DrawFn) -> list[tuple[str, Parameter]]:
    shapes = draw(SHAPES)
    return [
        (f"p{number}", Parameter(torch.ones(shape, dtype=draw(DTYPES))))
        for number, shape in enumerate(shapes)
    ]


def laid_out(named: list[tuple[str, Parameter]], world_size: int, *, whole: bool, bucket: int) -> Layout:
    return lay_out(named, world_size=world_size, whole=whole, bucket=bucket)


@settings(deadline=None)
@given(named_parameters(), st.integers(1, 9), st.booleans(), st.sampled_from([64, 300, 5000]))
def test_slots_buckets_and_cuts_cover_everything_once(
    named: list[tuple[str, Parameter]], world_size: int, whole: bool, bucket: int
) -> None:
    layout = laid_out(named, world_size, whole=whole, bucket=bucket)
    for number, flat in enumerate(layout.flats):
        taken = torch.zeros(flat.numel, dtype=torch.int64)
        for slot in layout.slots:
            if slot.flat == number:
                taken[slot.start : slot.stop] += 1
                assert slot.start % ALIGNMENT == 0
        assert taken.max() <= 1
        owners = torch.zeros(flat.numel, dtype=torch.int64)
        for rank in range(world_size):
            for owned_flat, start, stop in layout.owned(rank):
                if owned_flat == number:
                    owners[start:stop] += 1
                    assert start % flat.tile == 0
                    assert stop % flat.tile == 0
        assert (owners == 1).all()
    assert sum(slot.numel for slot in layout.slots) == sum(
        p.numel() * (2 if p.is_complex() else 1) for _, p in named
    )


@settings(deadline=None)
@given(named_parameters(), st.integers(2, 9), st.booleans())
def test_only_the_cuts_know_the_number_of_ranks(
    named: list[tuple[str, Parameter]], world_size: int, whole: bool
) -> None:
    one = laid_out(named, 1, whole=whole, bucket=300)
    many = laid_out(named, world_size, whole=whole, bucket=300)
    assert (one.slots, one.flats) == (many.slots, many.flats)
    uncut = [[dataclasses.replace(b, cuts=()) for b in layout.buckets] for layout in (one, many)]
    assert uncut[0] == uncut[1]


@settings(deadline=None)
@given(named_parameters(), st.integers(1, 9))
def test_whole_parameters_have_one_owner(named: list[tuple[str, Parameter]], world_size: int) -> None:
    layout = laid_out(named, world_size, whole=True, bucket=300)
    for slot in layout.slots:
        owners = [
            rank
            for rank in range(world_size)
            for flat, start, stop in layout.owned(rank)
            if flat == slot.flat and start < slot.stop and stop > slot.start
        ]
        if slot.numel:
            assert len(owners) == 1


def test_views_keep_shape_strides_and_values() -> None:
    torch.manual_seed(0)
    originals = [
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(5, dtype=torch.complex64),
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(6, 2)[::2],  # gaps: becomes row-major
        torch.randn(1, 3).expand(4, 3),  # overlaps itself: becomes row-major
    ]
    parameters = [Parameter(t.clone(memory_format=torch.preserve_format)) for t in originals]
    parameters[5].data = originals[5]
    parameters[6].data = originals[6]
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    store = ParameterStore(lay_out(named, world_size=3, whole=False), parameters, masters=False)
    gradients = GradientBuffer(store.layout)
    for parameter, original, gradient in zip(parameters, originals, gradients.views, strict=True):
        assert torch.equal(parameter.data, original)
        assert parameter.shape == gradient.shape
        assert parameter.stride() == gradient.stride()
        assert parameter.numel() == 0 or parameter.data_ptr() % 64 == 0
    assert parameters[1].is_contiguous(memory_format=torch.channels_last)
    store.release()
    assert all(torch.equal(p.data, o) for p, o in zip(parameters, originals, strict=True))
    assert len({p.untyped_storage().data_ptr() for p in parameters if p.numel()}) == 6


def test_replaced_data_is_noticed_and_adopted() -> None:
    parameter = Parameter(torch.zeros(5))
    layout = lay_out([("p", parameter)], world_size=1, whole=False)
    store = ParameterStore(layout, [parameter], masters=False)
    assert store.moved() == []
    parameter.data = torch.arange(5.0)
    (slot,) = store.moved()
    store.adopt(slot)
    assert store.moved() == []
    assert torch.equal(store.flats[0][:5], torch.arange(5.0))


def test_what_cannot_be_laid_out_is_refused_by_name() -> None:
    shared = torch.zeros(4)
    first, second = Parameter(shared), Parameter(shared)
    with pytest.raises(ConfigError, match=r"a and b share memory.*one Parameter"):
        lay_out([("a", first), ("b", second)], world_size=1, whole=False)
    with pytest.raises(ConfigError, match="w is on the meta device"):
        lay_out([("w", Parameter(torch.zeros(2, device="meta")))], world_size=1, whole=False)


def test_neighbours_in_one_storage_are_not_tied() -> None:
    storage = torch.zeros(8)
    named = [("a", Parameter(storage[:4])), ("b", Parameter(storage[4:]))]
    assert len(lay_out(named, world_size=1, whole=False).slots) == 2
