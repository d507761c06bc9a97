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
_NONE = 0  # nothing to compare on this rank
_MODES = "the training modes of the model's modules (train() and eval()) differ"
_WHAT = (
    "the settings of the optimizer's groups (learning rates among them) differ",
    _MODES,
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
        self._ended = self._now()  # at the end of the last step
        self._versions = self._ended  # at the first micro-batch of this one
        self._modes_before: bytes | None = None  # None until then: a rank may have no micro-batch at all
        self._num_replaced = 0

    def begin(self) -> None:
        """Begin a step; changes still count as made before it until the first micro-batch."""
        self._modes_before = None

    @property
    def is_first(self) -> bool:
        """Whether no micro-batch of the step was started on this rank."""
        return self._modes_before is None

    def replaced(self, names: Sequence[str]) -> None:
        """Count parameters whose `.data` was exchanged between the steps."""
        self._num_replaced += len(names)

    def enter(self, index: int, moved: Sequence[str]) -> None:
        """Start a micro-batch; raise LossError where something changed since the one before it."""
        if self._modes_before is None:
            self._versions, self._modes_before = self._now(), self._modes()
            return
        if changed := self._touched(moved):
            raise LossError(
                f"the parameter {', '.join(changed[:3])} was changed between two micro-batches, before "
                f"micro-batch {index}. Which of them this rank has depends on the number of ranks. Change "
                "parameters before the first micro-batch of a batch, or after session.step(batch)."
            )
        if self._modes() != self._modes_before:
            raise LossError(
                f"the training mode of the model was changed between two micro-batches, before micro-batch "
                f"{index}. Call train() and eval() before the first micro-batch of a batch."
            )

    def leave(self, index: int, moved: Sequence[str]) -> None:
        """Raise LossError where micro-batch `index` changed what the next one sees: its rank would matter."""
        if changed := self._touched(moved):
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

    def end(self) -> None:
        """End a step: what its own update changed is no change between steps."""
        self._ended = self._now()
        self._num_replaced = 0

    def words(self) -> list[int]:
        """Return this rank's words for the ballot; 0 for the modes where there was no micro-batch."""
        settings = [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        modes = _NONE if self._modes_before is None else _word(self._modes_before)
        changed = self._num_replaced + sum(self._now()) - sum(self._ended)
        return [_word(repr(settings).encode()), modes, changed]

    def require(self, by_rank: Sequence[Sequence[int]], step: int) -> None:
        """Raise Disagreement, on every rank alike, where ranks brought different words."""
        for what, remedy, column in zip(_WHAT, _REMEDY, zip(*by_rank, strict=True), strict=True):
            told = [(rank, word) for rank, word in enumerate(column) if word != _NONE or what != _MODES]
            for rank, word in told:
                first, wanted = told[0]
                if word != wanted:
                    raise Disagreement(f"step {step}: {what}: rank {rank} is unlike rank {first}. {remedy}")

    def _touched(self, moved: Sequence[str]) -> list[str]:
        now = self._now()
        changed = [*moved]
        if now != self._versions:
            pairs = zip(self._named, self._versions, now, strict=True)
            changed += [name for (name, _), was, is_ in pairs if was != is_]
        return changed

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
