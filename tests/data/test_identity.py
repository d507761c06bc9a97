"""Evidence of what a data set holds: the same for the same content, at a bounded cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samestep.data.content import content_hash, content_word
from samestep.data.identity import changed_samples, look_at


class Table:
    def __init__(self, make, num_samples=1000):
        self.make, self.num_samples, self.read = make, num_samples, []

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        self.read.append(index)
        return self.make(index)


KINDS = [
    lambda i: torch.full((2, 3), i, dtype=torch.bfloat16),
    lambda i: {"ids": np.arange(i), "text": f"sample {i}", "weight": 0.5 * i, "none": None},
    lambda i: (torch.tensor(i), [i, b"x"], np.float32(i)),
    lambda i: torch.randn(3) + i,  # augmentation: seeded like a sample of training
]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("in_worker", [False, True])
def test_the_same_content_gives_the_same_evidence(make, in_worker):
    table = Table(make)
    found = look_at(table, in_worker=in_worker)
    assert list(found) == ["0", "333", "666", "999"]
    assert found == look_at(Table(make), in_worker=False)
    assert len(table.read) == (0 if in_worker else 8)
    moved = look_at(Table(lambda i: make(i + (i == 666))), in_worker=in_worker)
    assert changed_samples(found, moved) == ["666"]


def test_what_cannot_be_told_is_left_out():
    def make(index):
        if index == 0:
            raise OSError("broken")
        return object() if index == 333 else torch.randn(2, generator=torch.Generator().manual_seed(index))

    assert list(look_at(Table(make), in_worker=False)) == ["666", "999"]
    unsteady = np.random.default_rng()
    assert look_at(Table(lambda i: unsteady.normal()), in_worker=False) == {}
    assert list(look_at(Table(make, num_samples=1), in_worker=False)) == []
    assert list(look_at(Table(KINDS[0], num_samples=2), in_worker=True)) == ["0", "1"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
        ([1, 2], (1, 2)),
        ([[1], 2], [1, [2]]),
        ("1", b"1"),
        (1, True),
        ({"a": 1}, {"b": 1}),
        (["ab", "c"], ["a", "bc"]),
        (0.0, -0.0),
    ],
)
def test_different_contents_have_different_hashes(one, other):
    assert content_hash(one) != content_hash(other)
    assert 0 < content_word(one) < 2**63


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.array([object()]), torch.zeros(2, device="meta"), [object()]]
)
def test_kinds_without_a_hash(value):
    assert content_hash(value) is None
    assert content_word(value) == 0


def test_an_image_is_hashed_by_its_pixels():
    images = pytest.importorskip("PIL.Image")
    hashes = [content_hash(images.new("RGB", (2, 2), color)) for color in ("red", "red", "blue")]
    assert hashes[0] == hashes[1] != hashes[2]
