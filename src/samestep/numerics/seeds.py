"""Randomness by position: every generator is seeded from where the run is, never from what ran before.

The mix is the output function of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014; constants of Stafford's variant 13), with one word absorbed per round. Streams are
part of the numbers: a change here changes every run, and the test of pinned values says so.

PyTorch's CPU generator uses the lower 32 bits of a seed, numpy's global one is given the upper 32, and those
of Python and CUDA use all 64.
"""

from __future__ import annotations

import random
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a stream is for: absorbed into its seed, so that no two purposes ever share a stream."""

    MICRO_BATCH = 1  # dropout and whatever else the model draws
    SAMPLE = 2  # augmentation
    COLLATE = 3  # draws of the collate function
    ORDER = 4  # the shuffle of an epoch
    EVALUATION = 5  # all that an evaluation draws, under a seed of its own


def derive(*words: int) -> int:
    """Mix integers, in their order, into 64 bits.

    Law: where all words but one are equal, different values of that one give different results. Words are
    taken modulo 2**64.

    >>> hex(derive(0))
    '0xe220a8397b1dcdaf'
    >>> derive(1, 2) == derive(2, 1)
    False
    """
    state = 0
    for word in words:
        state = (state + word + _GAMMA) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state


def derive_each(state: int | NDArray[np.uint64], words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Absorb one more word per element: `derive_each(derive(a), [b, c])` is `[derive(a, b), derive(a, c)]`.

    Shapes broadcast. Unsigned overflow is wanted, and numpy does not warn of it in arrays.
    """
    start = np.asarray(state, dtype=np.uint64)
    mixed: NDArray[np.uint64] = np.atleast_1d(words) + start
    mixed += np.uint64(_GAMMA)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def seed_micro_batch(seed: int, step: int, index: int, device: torch.device) -> None:
    """Seed all that a model may draw from before the micro-batch `index` of a step is computed.

    Law: the draws of a micro-batch depend on (seed, step, index) alone, not on the rank that computes it.
    Touches the default generators of PyTorch (CPU and `device`), Python and numpy. A generator that the
    model built itself is its own affair.
    """
    word = derive(seed, Purpose.MICRO_BATCH, step, index)
    _seed_cpu(word)
    _seed_device(word, device)


def seed_sample(seed: int, epoch: int, sample_id: int) -> None:
    """Seed all that a data set may draw from before it makes a sample.

    Law: the augmentation of a sample depends on (seed, epoch, sample id) alone: not on the loader worker,
    the rank, the micro-batch, or the samples made before. Only CPU generators: samples are made on the CPU.
    """
    _seed_cpu(derive(seed, Purpose.SAMPLE, epoch, sample_id))


def seed_collate(seed: int, step: int, index: int) -> None:
    """Seed all that a collate function may draw from before it joins the micro-batch `index` of a step."""
    _seed_cpu(derive(seed, Purpose.COLLATE, step, index))


def evaluation_seed(seed: int) -> int:
    """Return the seed for all that an evaluation draws, so that it repeats nothing that training drew."""
    return derive(seed, Purpose.EVALUATION)


def _seed_cpu(word: int) -> None:
    # torch.manual_seed looks for every kind of device first, which costs a hundred times the seeding itself.
    torch.default_generator.manual_seed(word)
    # All three are Mersenne twisters. PyTorch and numpy fill theirs in the same way, from 32 bits: with the
    # same half of the word they would hand out the same bits. Python fills its own in another way, from 64.
    np.random.seed(word >> 32)
    random.seed(word)


def _seed_device(word: int, device: torch.device) -> None:
    if device.type == "cpu":
        return
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before it, there are no default generators
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(word)
        return
    torch.get_device_module(device).manual_seed(word)
