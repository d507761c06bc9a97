"""The flat memory behind a layout: parameters, their float32 masters, and gradient buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch.nn import Parameter

from samestep.sync.layout import Layout, Slot, sum_dtype


@final
class ParameterStore:
    """Parameters as views of flat buffers, so that tiles can be sent, digested and updated as they lie.

    All ranks get the same alignment, whatever loaded the model: kernels may round differently at another
    address. `release` gives each parameter memory of its own again.
    """

    def __init__(self, layout: Layout, parameters: Sequence[Parameter], *, masters: bool) -> None:
        self.layout = layout
        self.parameters = parameters
        self.flats = [
            torch.zeros(flat.numel, dtype=flat.dtype, device=layout.device) for flat in layout.flats
        ]
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            view = slot.view(self.flats[slot.flat])
            view.copy_(parameter.data)
            parameter.data = view
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        # Where there are float32 copies the optimizer updates those; the model's are rounded from them.
        self.masters = [
            flat.to(sum_dtype(flat.dtype)) if masters and sum_dtype(flat.dtype) != flat.dtype else flat
            for flat in self.flats
        ]
        self._versions = [parameter._version for parameter in parameters]

    def moved(self) -> list[Slot]:
        """Return the parameters that no longer lie in the flat buffers, because `.data` was replaced."""
        return [
            slot
            for slot, parameter, address in zip(
                self.layout.slots, self.parameters, self._addresses, strict=True
            )
            if parameter.data_ptr() != address
        ]

    def edited(self) -> list[Slot]:
        """Return the parameters with masters whose values were changed in place since the last call."""
        now = [parameter._version for parameter in self.parameters]
        found = [
            slot
            for slot, version, before in zip(self.layout.slots, now, self._versions, strict=True)
            if version != before and self.masters[slot.flat] is not self.flats[slot.flat]
        ]
        self._versions = now
        return found

    def follow(self, slot: Slot) -> None:
        """Take a parameter's new values over into its master, which the next update would round from."""
        slot.view(self.masters[slot.flat]).copy_(slot.view(self.flats[slot.flat]))

    def adopt(self, slot: Slot) -> None:
        """Take the values of a parameter whose `.data` was replaced, and make it a view again."""
        parameter = self.parameters[slot.index]
        view = slot.view(self.flats[slot.flat])
        view.copy_(parameter.data)
        parameter.data = view
        if self.masters[slot.flat] is not self.flats[slot.flat]:
            self.follow(slot)

    def round_masters(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy updated masters, (flat, start, stop) each, to the parameters that the model computes with."""
        for flat, start, stop in ranges:
            if self.masters[flat] is not self.flats[flat]:
                self.flats[flat][start:stop].copy_(self.masters[flat][start:stop])

    def release(self) -> None:
        """Give each parameter memory of its own again."""
        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()


@final
class GradientBuffer:
    """One flat copy of all gradients, with a view for each parameter."""

    def __init__(self, layout: Layout) -> None:
        # Zeros, because the gaps between parameters are sent and summed with the rest.
        self.flats = [torch.zeros(flat.numel, dtype=flat.sums, device=layout.device) for flat in layout.flats]
        self.views = [slot.view(self.flats[slot.flat]) for slot in layout.slots]
