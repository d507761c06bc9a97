"""What must be alike on all ranks at each step although no gradient shows it, and must not move within one.

A schedule that reads the rank, a callback that changes the model on one rank only, a module that one rank put
into evaluation: each leaves every rank with a run of its own, without any error. Three words per step on the
ballot find them all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import Disagreement, LossError

NUM_WORDS = 3  # what `Alike.words` brings to the ballot
_WHAT = (
    "the settings of the optimizer's groups (learning rates among them) differ",
    "the training modes of the model's modules (train() and eval()) differ",
    "parameters were changed between the steps on some ranks but not on all",
)
_REMEDY = (
    "A schedule must be a function of the update alone, and a callback must set the same on every rank.",
    "Call train() and eval() on every rank alike.",
    "What changes parameters, in a callback or between the steps, must run on every rank, not on one alone.",
)


@final
class Alike:
    """Watches what a step takes for granted: optimizer settings, training modes, untouched parameters."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._modules = list(model.modules())
        self._named = list(model.named_parameters())
        self._versions = self._now()
        self._modes_before = self._modes()
        self._changed = 0

    def begin(self, replaced: Sequence[str]) -> None:
        """Start a step: count what was changed since the last one; `replaced` had `.data` exchanged."""
        now = self._now()
        self._changed = len(replaced) + sum(now) - sum(self._versions)
        self._versions = now
        self._modes_before = self._modes()

    def end(self) -> None:
        """End a step: what its own update changed is no change between steps."""
        self._versions = self._now()

    def require_untouched(self, index: int, replaced: Sequence[str]) -> None:
        """Raise LossError where micro-batch `index` changed what the next one sees: its rank would matter."""
        now = self._now()
        changed = [*replaced]
        if now != self._versions:
            pairs = zip(self._named, self._versions, now, strict=True)
            changed += [name for (name, _), was, is_ in pairs if was != is_]
        if changed:
            raise LossError(
                f"the forward pass of micro-batch {index} changed the parameter {', '.join(changed[:3])}. "
                "Other micro-batches may be computed on other ranks, which would not see it. Change "
                "parameters between steps, in a callback. (nn.Embedding does it where max_norm is set: leave "
                "that out.)"
            )
        if self._modes() != self._modes_before:
            raise LossError(
                f"micro-batch {index} left the model in another training mode than it found. Other "
                "micro-batches may be computed on other ranks, which would not see it. Call train() and "
                "eval() between steps, or put the mode back before the loss returns."
            )

    def words(self) -> list[int]:
        """Return this rank's words for the ballot."""
        settings = [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        return [_word(repr(settings).encode()), _word(self._modes_before), self._changed]

    def require(self, by_rank: Sequence[Sequence[int]], step: int) -> None:
        """Raise Disagreement, on every rank alike, where ranks brought different words."""
        for rank, words in enumerate(by_rank):
            for what, remedy, word, first in zip(_WHAT, _REMEDY, words, by_rank[0], strict=True):
                if word != first:
                    raise Disagreement(f"step {step}: {what}: rank {rank} is unlike rank 0. {remedy}")

    def _now(self) -> list[int]:
        return [parameter._version for _, parameter in self._named]  # noqa: SLF001  no public name

    def _modes(self) -> bytes:
        return bytes(module.training for module in self._modules)


def _plain(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().tolist()
    return value


def _word(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
