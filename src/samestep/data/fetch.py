"""Making a micro-batch out of its samples: seeded by position, with errors that name the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar, final

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from samestep.data.describe import group_by_form, list_ids
from samestep.data.global_batch import MicroBatch
from samestep.errors import ConfigError, DataError
from samestep.numerics.seeds import seed_collate, seed_sample

Sample = TypeVar("Sample")
Sample_co = TypeVar("Sample_co", covariant=True)


class MapDataset(Protocol[Sample_co]):
    """A map-style data set: it knows its length and gives sample i."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Sample_co:
        """Return sample `index`, of 0..len-1."""


def count_samples(dataset: MapDataset[object]) -> int:
    """Return len(dataset). Raises ConfigError where it is not map-style, DataError where len() fails."""
    kind = type(dataset).__name__
    need = "samestep needs a map-style data set: len(dataset) samples, of which dataset[i] gives number i."
    if isinstance(dataset, IterableDataset):
        raise ConfigError(f"the data set is a {kind}, which is read as a stream. {need}")
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as exc:
        raise ConfigError(f"the data set, a {kind}, has no length ({exc}). {need}") from exc
    except Exception as exc:
        raise DataError(f"len() of the data set, a {kind}, failed: {_name(exc)}") from exc


@final
class Fetch(Dataset[object], Generic[Sample]):
    """Make the micro-batches that are asked for.

    Law: the samples are those of one seed, whatever was drawn before, whichever process makes them. A
    sample's generators are seeded from (seed, epoch, sample id), those of the collation from (seed, step,
    micro-batch index), and both run in one thread, as they do in a loader worker.
    """

    def __init__(
        self,
        dataset: MapDataset[Sample],
        *,
        seed: int,
        collate_fn: Callable[[list[Sample]], object] | None,
    ) -> None:
        """Keep what is needed. Raises ConfigError where the data set is not map-style."""
        self._dataset = dataset
        self._num_samples = count_samples(dataset)
        self._seed = seed
        self._collate_fn = collate_fn

    def __getitem__(self, request: MicroBatch) -> object:
        """Return the collated micro-batch. Raises DataError where a sample or the collation fails."""
        with one_thread():
            pairs = zip(request.ids.tolist(), request.epochs.tolist(), strict=True)
            samples = [self._sample(request, sample_id, epoch) for sample_id, epoch in pairs]
            return collate_samples(self._seed, self._collate_fn, request, samples)

    def _sample(self, request: MicroBatch, sample_id: int, epoch: int) -> Sample:
        seed_sample(self._seed, epoch, sample_id)
        try:
            return self._dataset[sample_id]
        except (Exception, SystemExit) as exc:  # a library's sys.exit must not end a rank without a word
            remedy = f"Try dataset[{sample_id}] alone; correct the sample, or leave it out of the data set."
            if isinstance(exc, IndexError):
                remedy = (
                    f"len(dataset) promises {self._num_samples} samples, 0 to {self._num_samples - 1}: "
                    "correct the length, or what dataset[i] does."
                )
            raise DataError(
                f"sample {sample_id} of the data set failed (epoch {epoch}, step {request.step}, micro-batch "
                f"{request.index}): {_name(exc)}\n{remedy}"
            ) from exc


def collate_samples(
    seed: int, collate_fn: Callable[[list[Sample]], object] | None, request: MicroBatch, samples: list[Sample]
) -> object:
    """Join the samples of a micro-batch under its own seed. Raises DataError where that fails."""
    seed_collate(seed, request.step, request.index)
    try:
        return default_collate(samples) if collate_fn is None else collate_fn(samples)
    except (Exception, SystemExit) as exc:
        ids = request.ids.tolist()
        remedy = "Correct the collate_fn: it is given the list of these samples."
        if collate_fn is None:
            remedy = "Give a collate_fn that joins such samples (that pads them, for instance)."
        raise DataError(
            f"samples {list_ids(ids)} of micro-batch {request.index} of step {request.step} do not "
            f"collate: {_name(exc)}\nThey hold {group_by_form(ids, samples)}.\n{remedy}"
        ) from exc


def _name(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread: the number of threads moves the bits of large sums, and a worker has one."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
