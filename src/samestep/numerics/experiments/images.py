"""Experiments: pooling, resizing, sampling, padding."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from samestep.numerics.experiments.operation import Operation


def _picture(name: str, run: Callable[[Tensor], Tensor], *shape: int) -> Operation:
    return Operation(
        name=name,
        inputs=lambda draw: {"x": draw.normal(*(shape or (8, 16, 28, 28)))},
        run=lambda inputs: run(inputs["x"]),
        rows=("x",),
    )


def _unpool(x: Tensor) -> Tensor:
    values, where = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, where, [2, 2])


OPERATIONS = (
    _picture("max_pool1d", lambda x: F.max_pool1d(x, 3, 2), 8, 64, 128),
    _picture("max_pool2d", lambda x: F.max_pool2d(x, 3, 2)),
    _picture("max_pool3d", lambda x: F.max_pool3d(x, 3, 2), 4, 8, 8, 16, 16),
    _picture("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2)),
    _picture("avg_pool3d", lambda x: F.avg_pool3d(x, 3, 2), 4, 8, 8, 16, 16),
    _picture("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 5)),
    _picture("adaptive_avg_pool2d, to one", lambda x: F.adaptive_avg_pool2d(x, 1)),
    _picture("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 5)),
    _picture("max_unpool2d", _unpool),
    _picture("unfold windows (overlapping views)", lambda x: x.unfold(-1, 5, 2) * 1.5),
    _picture(
        "interpolate, trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), 4, 4, 8, 8, 8
    ),
    _picture("interpolate, nearest", lambda x: F.interpolate(x, scale_factor=2)),
    _picture("interpolate, bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    _picture("interpolate, bicubic", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")),
    _picture(
        "interpolate, antialiased", lambda x: F.interpolate(x, size=(13, 13), mode="bilinear", antialias=True)
    ),
    Operation(
        name="grid_sample",
        inputs=lambda d: {"x": d.normal(8, 8, 28, 28), "grid": d.uniform(8, 40, 40, 2, low=-1)},
        run=lambda i: F.grid_sample(i["x"], i["grid"], align_corners=False),
        rows=("x", "grid"),
    ),
    Operation(
        name="affine_grid",
        inputs=lambda d: {"theta": d.normal(8, 2, 3)},
        run=lambda i: F.affine_grid(i["theta"], [i["theta"].shape[0], 3, 28, 28], align_corners=False),
        rows=("theta",),
    ),
    _picture("pad, reflect", lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect")),
    _picture("pad, replicate", lambda x: F.pad(x, (3, 3, 3, 3), mode="replicate")),
    _picture("pad, circular", lambda x: F.pad(x, (3, 3, 3, 3), mode="circular")),
    _picture("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2)),
)
