"""Evidence of what samples hold: short hashes, to notice that data are not those of before."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final, final

import numpy as np

from samestep.data.content import content_hash
from samestep.data.fetch import MapDataset, count_samples
from samestep.data.global_batch import MicroBatch
from samestep.data.loader import Loader
from samestep.errors import DataError

_LOOKED_AT: Final = 4  # samples
_WITHIN_S: Final = 5.0  # for all of them


def look_at(dataset: MapDataset[Any], *, in_worker: bool) -> dict[str, str]:
    """Return the hash of a few samples at fixed places, by id.

    Each is read twice under one seed: where the two differ, or a sample fails, it is left out. Bounded by 4
    samples, and by 5 seconds after the first. With `in_worker` a process of its own reads them: a data set
    may open files when it is first used, and loader workers that are started afterwards must not share them.
    """
    num_samples = count_samples(dataset)
    ids = sorted({(num_samples - 1) * part // (_LOOKED_AT - 1) for part in range(_LOOKED_AT)})
    loader = Loader(_Hashes(dataset), seed=0, collate_fn=_only, workers=int(in_worker), prefetch=2)
    found: dict[str, str] = {}
    deadline = time.monotonic() + _WITHIN_S
    try:
        with closing(loader.load(_request(sample, turn) for sample in ids for turn in range(2))) as hashes:
            for sample in ids:
                first, second = next(hashes), next(hashes)
                if isinstance(first, str) and first == second:
                    found[str(sample)] = first
                if time.monotonic() > deadline:
                    break
    except DataError:  # a worker that cannot be started: training will say so
        return {}
    return found


def changed_samples(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the ids of samples that held something else before.

    >>> changed_samples({"0": "a", "5": "b"}, {"0": "a", "5": "c", "9": "d"})
    ['5']
    """
    return [sample for sample, told in before.items() if sample in now and now[sample] != told]


@final
class _Hashes:
    """The hashes of the samples of a data set, in place of the samples."""

    def __init__(self, dataset: MapDataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return count_samples(self._dataset)

    def __getitem__(self, index: int) -> str | None:
        try:
            return content_hash(self._dataset[index])
        except Exception:  # training says what is wrong with it, should it be used
            return None


def _only(samples: list[Any]) -> Any:
    return samples[0]


def _request(sample: int, turn: int) -> MicroBatch:
    ids = np.array([sample], dtype=np.int64)
    return MicroBatch(step=0, index=turn, ids=ids, epochs=np.zeros(1, dtype=np.int64))
