"""Saying in few words what samples hold, for error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import numpy as np
import torch

_SHOWN: Final = 6  # entries of a list that are written out
_DEPTH: Final = 3


def list_ids(ids: Sequence[int], shown: int = _SHOWN) -> str:
    """Return the ids in their order, the later ones as a number.

    >>> list_ids([4, 2]), list_ids([5, 6, 7, 8], shown=2)
    ('4, 2', '5, 6 and 2 more')
    """
    text = ", ".join(str(sample_id) for sample_id in ids[:shown])
    return text if len(ids) <= shown else f"{text} and {len(ids) - shown} more"


def group_by_form(ids: Sequence[int], samples: Sequence[object]) -> str:
    """Return each form that occurs among the samples, with the ids that have it.

    >>> group_by_form([8, 3, 5], [torch.zeros(2), torch.zeros(3), torch.zeros(2)])
    'float32[2] (8, 5), float32[3] (3)'
    """
    groups: dict[str, list[int]] = {}
    for sample_id, sample in zip(ids, samples, strict=True):
        groups.setdefault(form(sample), []).append(sample_id)
    parts = [f"{name} ({list_ids(members)})" for name, members in groups.items()]
    rest = f" and {len(parts) - _SHOWN} more forms" if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + rest


def form(value: object, depth: int = _DEPTH) -> str:
    """Return shape and dtype of a tensor or an array, the parts of a collection, else the name of the type.

    >>> form({"image": np.zeros((3, 4)), "label": 1, "box": (torch.ones(2), None)})
    '{image: float64[3, 4], label: int, box: (float32[2], NoneType)}'
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if depth and isinstance(value, Mapping):
        parts = [f"{key}: {form(part, depth - 1)}" for key, part in islice(value.items(), _SHOWN)]
        return f"{{{_joined(parts, len(value))}}}"
    if depth and isinstance(value, tuple | list):
        left, right = "()" if isinstance(value, tuple) else "[]"
        return f"{left}{_joined([form(part, depth - 1) for part in value[:_SHOWN]], len(value))}{right}"
    return type(value).__name__


def _joined(parts: list[str], count: int) -> str:
    rest = f", and {count - len(parts)} more" if count > len(parts) else ""
    return ", ".join(parts) + rest
