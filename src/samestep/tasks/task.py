"""The interface of a task: settings, model, data set and loss under one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from samestep.config import Settings

# Note [no torch before the ranks]: to import torch takes seconds. The process that starts the ranks reads
# the recipe, makes the task and checks its settings, but it never needs torch. So the modules of tasks
# import torch inside the methods that only ranks call.
if TYPE_CHECKING:
    from torch import nn

    from samestep.loop.weighted import Weighted


class DataSet(Protocol):
    """A map-style data set: sample `index` is the same whenever it is asked for."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> object:
        """Return one sample."""


class Task(Protocol):
    """What a recipe trains: a class of this form, named by its dotted path, needs nothing else.

    It is called with `model=` and `data=`: its own two kinds of settings, made from the sections of these
    names in the recipe, paths made absolute. The constructor must be cheap, and raises ConfigError where the
    settings do not fit each other or a file is missing: the process that starts the ranks calls it too.
    """

    model_settings: ClassVar[type[Settings]]
    data_settings: ClassVar[type[Settings]]

    def build_model(self) -> nn.Module:
        """Return a new model. The generator is seeded from the recipe's seed before, alike on all ranks."""

    def build_dataset(self) -> DataSet:
        """Return the samples, the same on all ranks."""

    def loss(self, model: nn.Module, batch: object) -> Weighted | Mapping[str, Weighted]:
        """Return the loss of one collated micro-batch, as a sum and a weight."""


@runtime_checkable
class Collates(Protocol):
    """A task that joins samples to a micro-batch in its own way, not in PyTorch's default one."""

    def collate(self, samples: Sequence[object]) -> object:
        """Return the micro-batch of these samples, in their order."""


@runtime_checkable
class Describes(Protocol):
    """A task that has something to show at the end of a run."""

    def describe(self, model: nn.Module) -> str:
        """Return a few lines about the trained model; called on the first rank only."""


@runtime_checkable
class CountsTokens(Protocol):
    """A task whose samples are texts, which are counted in tokens."""

    def tokens_per_sample(self) -> int:
        """Return how many tokens of a sample are learnt."""


REQUIRED = ("model_settings", "data_settings", "build_model", "build_dataset", "loss")
