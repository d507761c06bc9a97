"""What can be sent from a loader worker, found out before it is sent."""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import final

import numpy as np
import torch


def refusal(batch: object) -> str | None:
    """Return why a batch cannot be sent to another process, or None where it can.

    A queue pickles in a thread of its own: an error there is printed, the batch is lost, and the receiver
    waits for ever. So this is asked first. The contents of tensors and arrays are not touched.
    """
    try:
        _Trial(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(batch)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return None


@final
class _Trial(ForkingPickler):
    """The pickler of multiprocessing queues, which passes over the contents of tensors and arrays."""

    def persistent_id(self, value: object) -> str | None:
        if isinstance(value, torch.Tensor):
            if value.requires_grad and not value.is_leaf:
                raise pickle.PicklingError("a tensor still belongs to a graph: detach() it")
            return "tensor"
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return "array"
        return None
