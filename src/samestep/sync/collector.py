"""Takes each micro-batch's gradient as it is made, and adds up the subtrees of this rank's run.

Note [no negative zero]: a leaf is written as g + 0.0, so no -0.0 enters any sum, and no sum of other
numbers makes one. Adding the zero of a parameter that a leaf did not use is then exactly no change, and
the bits do not depend on whether it was added. A plain copy would break that: -0.0 + 0.0 is 0.0.

Note [gradients in parts]: reentrant checkpointing runs backward passes inside the backward pass, and a
parameter used in two of them gets its gradient in two parts. A part must not be added to a sum before its
leaf is complete, else the tree changes. So the first leaf is watched: only if no pass was nested and each
parameter's gradient came at once are gradients taken, and buckets sent, while backward goes on.

Note [squares of leaves]: a leaf's gradient lives only until it is added to a sum, so its norm is taken right
before: of each parameter over its whole gradient in a way that only the shape decides on, then in the order
of the parameters. Nothing of that depends on who computes the leaf. A large gradient is measured in rows,
each in its own dtype, float32 at least: a conversion of it all to float64 takes eight times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, final

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.errors import InternalError, LossError
from samestep.sync.layout import Bucket, Layout
from samestep.sync.partial_sums import LeafPlan, RunPlan
from samestep.sync.storage import GradientBuffer

_ROW: Final = 1024  # elements that are measured together
_SMALL: Final = 1 << 16


@final
class Collector:
    """Fills gradient buffers from hooks, one leaf after the other."""

    def __init__(self, layout: Layout, parameters: Sequence[Parameter]) -> None:
        self._layout = layout
        self._parameters = parameters
        self._buckets_of: list[list[int]] = [[] for _ in layout.slots]
        for bucket in layout.buckets:
            for slot in bucket.slots:
                self._buckets_of[slot].append(bucket.index)
        self.buffers: list[GradientBuffer] = [GradientBuffer(layout)]
        self.used = bytearray(len(layout.slots))  # 1 where some leaf of this step made a gradient
        self._plan: RunPlan | None = None
        self._ready: Callable[[Bucket], None] | None = None
        self._leaf: LeafPlan | None = None
        self._is_last = False
        self._watched_one_leaf = False
        self._in_parts = False  # see Note [gradients in parts]
        self._passes: set[int] = set()
        self._fires = bytearray(0)
        self._missing: list[int] = []
        self._completed: set[int] = set()
        self._measures = False
        self._norms: dict[int, Tensor] = {}  # by leaf: of each parameter's gradient, float64
        self._norms_of_leaf: Tensor | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]

    def begin(self, plan: RunPlan, ready: Callable[[Bucket], None]) -> None:
        """Start a step; `ready` is called when a bucket of the last leaf holds its final sums."""
        self._plan = plan
        self._ready = ready
        self.used = bytearray(len(self._layout.slots))
        self._norms = {}
        while len(self.buffers) < plan.num_buffers:
            self.buffers.append(GradientBuffer(self._layout))
        self._clear()

    def end(self) -> None:
        """End the step: gradients that are made from now on are the user's own."""
        self._plan = None

    def measure_leaves(self) -> None:
        """Take the squared norm of each leaf's gradient from the next step on."""
        self._measures = True

    def squares(self) -> dict[int, float]:
        """Return the squared norm of the gradient of each leaf of this rank's last step, as it was summed.

        See Note [squares of leaves].
        """
        return {leaf: _sum_of_squares(norms.tolist()) for leaf, norms in self._norms.items()}

    @contextmanager
    def leaf(self, index: int) -> Iterator[None]:
        """Take the gradients made inside the block as those of one leaf of this rank's run.

        Leaves come in the order of the run. If the block raises, the step's sums are void. Raises LossError
        for a parameter that brings a gradient along: it would count as made here.
        """
        if self._plan is None or index not in self._plan.leaves:
            raise InternalError(f"micro-batch {index} is not among those of this rank.")
        for slot, parameter in zip(self._layout.slots, self._parameters, strict=True):
            if parameter.grad is not None:
                raise LossError(_made_outside(slot.name))
        self._leaf = self._plan.leaves[index]
        self._is_last = index == self._plan.last
        self._fires = bytearray(len(self._layout.slots))
        self._missing = [len(bucket.slots) for bucket in self._layout.buckets]
        self._completed = set()
        self._passes = set()
        if self._measures:
            num_slots, device = len(self._layout.slots), self._layout.device
            self._norms_of_leaf = torch.zeros(num_slots, dtype=torch.float64, device=device)
        try:
            yield
            self._finish(self._leaf)
            if self._norms_of_leaf is not None:
                self._norms[index] = self._norms_of_leaf
        finally:
            self._leaf = self._norms_of_leaf = None
            self._clear()

    def close(self) -> None:
        """Take the hooks off the model again."""
        for hook in self._hooks:
            hook.remove()

    @property
    def _takes_at_once(self) -> bool:
        return self._watched_one_leaf and not self._in_parts

    def _arrived(self, index: int, parameter: Tensor) -> None:
        leaf = self._leaf
        if leaf is None:
            if self._plan is not None:
                raise LossError(_made_outside(self._layout.slots[index].name))
            return
        self._fires[index] = min(2, self._fires[index] + 1)  # more than one is all that matters
        if not self._takes_at_once:
            # The id of the running backward pass: a nested one has another. The same call serves
            # torch's own non-reentrant checkpointing to tell passes apart.
            self._passes.add(torch._C._current_graph_task_id())
            return
        if self._fires[index] > 1:
            raise LossError(
                f"parameter {self._layout.slots[index].name} got its gradient in two parts within one "
                "micro-batch, but in one part in the first micro-batch of the run. Use "
                "checkpoint(..., use_reentrant=False), or make the first micro-batch run the same way."
            )
        self._take(leaf, index, parameter)
        for bucket in self._buckets_of[index]:
            self._missing[bucket] -= 1
            if not self._missing[bucket]:
                self._complete(leaf, bucket)

    def _take(self, leaf: LeafPlan, index: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        if gradient.layout != torch.strided:
            gradient = gradient.coalesce().to_dense()
        view = self.buffers[leaf.target].views[index]
        # First, where sums are narrower than gradients: rounding after an addition may make a -0.0.
        rounded = gradient.to(view.dtype)
        if self._norms_of_leaf is not None:  # Note [squares of leaves]
            self._norms_of_leaf[index] = _norm(rounded.detach())
        if leaf.fresh:
            torch.add(rounded, 0.0, out=view)  # Note [no negative zero]
        else:
            view.add_(rounded)

    @torch.no_grad()
    def _finish(self, leaf: LeafPlan) -> None:
        if not self._takes_at_once:
            self._watched_one_leaf = True
            self._in_parts |= len(self._passes) > 1 or max(self._fires, default=0) > 1
            for index, parameter in enumerate(self._parameters):
                if self._fires[index]:
                    self._take(leaf, index, parameter)
        if leaf.fresh:
            views = self.buffers[leaf.target].views
            for index, fires in enumerate(self._fires):
                if not fires:
                    views[index].zero_()
        for bucket in range(len(self._layout.buckets)):
            if bucket not in self._completed:
                self._complete(leaf, bucket)
        self.used = bytearray(a | (b > 0) for a, b in zip(self.used, self._fires, strict=True))

    def _complete(self, leaf: LeafPlan, index: int) -> None:
        """Add up what this leaf completes, in one bucket, and hand the bucket on after the last leaf."""
        bucket = self._layout.buckets[index]
        self._completed.add(index)
        for left, right in leaf.merges:
            into = self.buffers[left].flats[bucket.flat][bucket.start : bucket.stop]
            into.add_(self.buffers[right].flats[bucket.flat][bucket.start : bucket.stop])
        if self._is_last and self._ready is not None:
            self._ready(bucket)

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _norm(gradient: Tensor) -> Tensor:
    """Return the length of a gradient in float64: see Note [squares of leaves]."""
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).reshape(-1)
    if flat.numel() >= _SMALL:
        in_rows = flat.numel() // _ROW * _ROW
        wide = torch.promote_types(flat.dtype, torch.float32)
        rows = torch.linalg.vector_norm(flat[:in_rows].view(-1, _ROW), dim=1, dtype=wide)
        rest = torch.linalg.vector_norm(flat[in_rows:], dtype=wide)
        flat = torch.cat([rows, rest.view(1)])
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return norm


def _sum_of_squares(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:
        total += value * value
    return total


def _made_outside(name: str) -> str:
    return (
        f"parameter {name} got a gradient outside of micro.collect(), between the start of a batch and its "
        "step. It would count once for each rank, or be lost. Add such a term to the loss that is recorded, "
        "or differentiate it after session.step(batch)."
    )
