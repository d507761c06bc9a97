"""The digest: order-free over tiles, and it notices changes."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.numerics.digest import Digest

CPU = torch.device("cpu")
TILE = 128


def digest_of(flat: torch.Tensor, edges: list[int]) -> int:
    """Add up the parts between tile edges, each by another holder, in reverse."""
    total = Digest(CPU)
    for first, last in reversed(list(itertools.pairwise(edges))):
        part = Digest(CPU)
        part.add_tiles(flat[first * TILE : last * TILE], first, TILE, salt=0)
        total.add_number(part.value)
    return total.value


@given(st.sets(st.integers(0, 9)), st.integers(0, 2**32))
def test_who_holds_which_tile_does_not_matter(cuts: set[int], seed: int) -> None:
    flat = torch.randn(9 * TILE, generator=torch.Generator().manual_seed(seed))
    assert digest_of(flat, sorted(cuts | {0, 9})) == digest_of(flat, [0, 9])


@given(st.integers(0, 9 * TILE - 1), st.integers(0, 31))
def test_one_flipped_bit_shows(element: int, bit: int) -> None:
    flat = torch.randn(9 * TILE, generator=torch.Generator().manual_seed(1))
    flipped = flat.clone()
    flipped.view(torch.int32)[element] ^= 1 << bit if bit < 31 else -(2**31)
    assert digest_of(flat, [0, 9]) != digest_of(flipped, [0, 9])


@given(st.integers(0, 8), st.integers(0, 8))
def test_swapped_tiles_show(first: int, second: int) -> None:
    flat = torch.randn(9 * TILE, generator=torch.Generator().manual_seed(2))
    rows = flat.view(9, TILE)
    order = list(range(9))
    order[first], order[second] = second, first
    swapped = rows[order].reshape(-1)
    assert (digest_of(flat, [0, 9]) == digest_of(swapped, [0, 9])) is (first == second)


def test_flats_are_told_apart_and_the_text_is_fixed_width() -> None:
    flat = torch.zeros(TILE)
    one, other = Digest(CPU), Digest(CPU)
    one.add_tiles(flat + 1, 0, TILE, salt=0)
    other.add_tiles(flat + 1, 0, TILE, salt=1)
    assert one.hex() != other.hex()
    assert len(Digest(CPU).hex()) == 16
