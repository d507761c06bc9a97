"""The moving average: one formula, with the same bits however tensors are cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import ConfigError
from samestep.optim import ema as module
from samestep.optim.ema import EMA, average_dtype, move, resolve_ema


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(0, 300),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    decay=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    part=st.sampled_from([7, 64, 1 << 20]),
)
def test_the_move_is_that_of_a_plain_loop_however_it_is_cut(
    numel: int, cuts: list[int], decay: float, dtype: torch.dtype, part: int
) -> None:
    generator = torch.Generator().manual_seed(numel)
    average = torch.randn(numel, generator=generator, dtype=torch.float64).to(average_dtype(dtype))
    value = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    wanted = decay * average + (1 - decay) * value.to(average.dtype)
    bounds = sorted({0, numel, *(cut for cut in cuts if cut <= numel)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PART", part)
        for start, stop in pairwise(bounds):
            move(average[start:stop], value[start:stop], decay)
    assert torch.equal(average, wanted)


def test_an_average_is_float32_at_least() -> None:
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float64: torch.float64}
    assert {dtype: average_dtype(dtype) for dtype in wide} == wide


def test_the_decay_grows_where_it_is_asked_to() -> None:
    assert [EMA(decay=0.9).decay_at(moves) for moves in (0, 5)] == [0.9, 0.9]
    growing = EMA(decay=0.9, warmup=True)
    assert [growing.decay_at(moves) for moves in (0, 1, 80, 81)] == [1 / 10, 2 / 11, 81 / 90, 0.9]
    own = EMA(decay=lambda moves: min(0.9, (1 + moves) / (10 + moves)))
    assert [own.decay_at(moves) for moves in range(100)] == [growing.decay_at(moves) for moves in range(100)]
    assert [update for update in range(1, 8) if EMA(every=3).due(update)] == [3, 6]


def test_the_short_form_is_a_decay() -> None:
    assert resolve_ema(None) is None
    assert resolve_ema(0.99) == EMA(decay=0.99)
    assert resolve_ema(EMA(every=2)) == EMA(every=2)


BAD: list[tuple[Any, str]] = [
    (lambda: EMA(decay=1.0), "ema.decay is 1.0. Give a number in"),
    (lambda: EMA(decay=-0.1), "ema.decay is -0.1"),
    (lambda: EMA(every=0), "every is 0"),
    (lambda: EMA(buffers="none"), "buffers is 'none'"),
    (lambda: resolve_ema(True), "ema is True. Give a decay such as 0.999"),
    (lambda: resolve_ema("0.9"), "ema is '0.9'"),
    (lambda: EMA(decay=lambda moves: 1.5).decay_at(3), "returned 1.5 after 3 moves"),
    (lambda: EMA(decay=lambda moves: None).decay_at(0), "returned None after 0 moves"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_settings_that_keep_nothing_or_all_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
