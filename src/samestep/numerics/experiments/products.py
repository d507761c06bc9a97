"""Experiments: matrix products, convolutions, linear algebra, Fourier transforms."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from samestep.numerics.experiments.operation import Draw, Inputs, Operation


def _linear(name: str, samples: int, wide: int, out: int, dtype: torch.dtype = torch.float32) -> Operation:
    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {
            "x": draw.normal(samples, wide, dtype=dtype),
            "weight": draw.normal(out, wide, dtype=dtype, scale=wide**-0.5),
            "bias": draw.normal(out, dtype=dtype),
        }

    return Operation(
        name=name, inputs=inputs, run=lambda i: F.linear(i["x"], i["weight"], i["bias"]), rows=("x",)
    )


def _sequence(draw: Draw) -> dict[str, Tensor]:
    return {
        "x": draw.normal(8, 32, 128),
        "weight": draw.normal(512, 128, scale=0.1),
        "bias": draw.normal(512),
    }


def _image(draw: Draw, out: int = 32, inside: int = 16, kernel: int = 3) -> dict[str, Tensor]:
    return {
        "x": draw.normal(8, 16, 28, 28),
        "weight": draw.normal(out, inside, kernel, kernel, scale=0.1),
        "bias": draw.normal(out),
    }


def _line(draw: Draw) -> dict[str, Tensor]:
    return {
        "x": draw.normal(8, 64, 128),
        "weight": draw.normal(64, 64, 5, scale=0.1),
        "bias": draw.normal(64),
    }


def _upward(draw: Draw) -> dict[str, Tensor]:
    return {
        "x": draw.normal(8, 32, 14, 14),
        "weight": draw.normal(32, 16, 4, 4, scale=0.1),
        "bias": draw.normal(16),
    }


def _volume(draw: Draw) -> dict[str, Tensor]:
    return {"x": draw.normal(4, 8, 8, 16, 16), "weight": draw.normal(16, 8, 3, 3, 3, scale=0.1)}


def _square(draw: Draw) -> dict[str, Tensor]:
    return {"x": (draw.normal(96, 96) + 10 * torch.eye(96)).detach().requires_grad_()}


def _positive(inputs: Inputs) -> Tensor:
    return inputs["x"] @ inputs["x"].T + torch.eye(96, device=inputs["x"].device)


def _pair(draw: Draw) -> dict[str, Tensor]:
    return {"x": draw.normal(8, 96, 48), "y": draw.normal(8, 48, 64)}


def _points(draw: Draw) -> dict[str, Tensor]:
    return {"x": draw.normal(96, 40), "y": draw.normal(80, 40)}


def _sparse(draw: Draw) -> dict[str, Tensor]:
    return {"values": draw.normal(4000), "y": draw.normal(200, 64), "where": draw.ids(200, 2, 4000)}


def _compressed_rows(inputs: Inputs) -> Tensor:
    rows = torch.sparse_coo_tensor(
        inputs["where"], inputs["values"].detach(), (200, 200), check_invariants=False
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return rows.coalesce().to_sparse_csr() @ inputs["y"].detach()


OPERATIONS = (
    _linear("linear", 64, 512, 256),
    _linear("linear, narrow", 16, 33, 7),
    _linear("linear, one output", 64, 512, 1),
    _linear("linear, bfloat16", 64, 512, 256, torch.bfloat16),
    _linear("linear, float64", 64, 512, 256, torch.float64),
    Operation(
        name="linear over a sequence",
        inputs=_sequence,
        run=lambda i: F.linear(i["x"], i["weight"], i["bias"]),
        rows=("x",),
    ),
    Operation(
        name="matmul",
        inputs=lambda d: {"x": d.normal(128, 384), "y": d.normal(384, 200)},
        run=lambda i: i["x"] @ i["y"],
        rows=("x",),
    ),
    Operation(
        name="matmul, long sums",
        inputs=lambda d: {"x": d.normal(32, 40_000), "y": d.normal(40_000, 16)},
        run=lambda i: i["x"] @ i["y"],
        rows=("x",),
    ),
    Operation(
        name="mv",
        inputs=lambda d: {"x": d.normal(300, 500), "y": d.normal(500)},
        run=lambda i: torch.mv(i["x"], i["y"]),
        rows=("x",),
    ),
    Operation(
        name="dot",
        inputs=lambda d: {"x": d.normal(100_000), "y": d.normal(100_000)},
        run=lambda i: torch.dot(i["x"], i["y"]),
    ),
    Operation(
        name="addmm",
        inputs=lambda d: {"x": d.normal(64, 128), "y": d.normal(128, 96), "bias": d.normal(96)},
        run=lambda i: torch.addmm(i["bias"], i["x"], i["y"]),
        rows=("x",),
    ),
    Operation(name="bmm", inputs=_pair, run=lambda i: torch.bmm(i["x"], i["y"]), rows=("x", "y")),
    Operation(
        name="baddbmm",
        inputs=lambda d: {**_pair(d), "z": d.normal(8, 96, 64)},
        run=lambda i: torch.baddbmm(i["z"], i["x"], i["y"]),
        rows=("x", "y", "z"),
    ),
    Operation(
        name="einsum",
        inputs=lambda d: {"x": d.normal(8, 4, 40, 16), "y": d.normal(8, 4, 24, 16)},
        run=lambda i: torch.einsum("bhqd,bhkd->bhqk", i["x"], i["y"]),
        rows=("x", "y"),
    ),
    Operation(
        name="bilinear",
        inputs=lambda d: {"x": d.normal(32, 24), "y": d.normal(32, 20), "weight": d.normal(16, 24, 20)},
        run=lambda i: F.bilinear(i["x"], i["y"], i["weight"]),
        rows=("x", "y"),
    ),
    Operation(
        name="conv1d",
        inputs=_line,
        run=lambda i: F.conv1d(i["x"], i["weight"], i["bias"], padding=2),
        rows=("x",),
    ),
    Operation(
        name="conv2d",
        inputs=_image,
        run=lambda i: F.conv2d(i["x"], i["weight"], i["bias"], padding=1),
        rows=("x",),
    ),
    Operation(
        name="conv2d, one by one",
        inputs=lambda d: _image(d, kernel=1),
        run=lambda i: F.conv2d(i["x"], i["weight"], i["bias"]),
        rows=("x",),
    ),
    Operation(
        name="conv2d, depthwise",
        inputs=lambda d: _image(d, out=16, inside=1),
        run=lambda i: F.conv2d(i["x"], i["weight"], i["bias"], padding=1, groups=16),
        rows=("x",),
    ),
    Operation(
        name="conv2d, strided and dilated",
        inputs=_image,
        run=lambda i: F.conv2d(i["x"], i["weight"], i["bias"], stride=2, dilation=2),
        rows=("x",),
    ),
    Operation(
        name="conv2d, bfloat16",
        inputs=lambda d: {
            "x": d.normal(8, 16, 28, 28, dtype=torch.bfloat16),
            "weight": d.normal(32, 16, 3, 3, dtype=torch.bfloat16, scale=0.1),
        },
        run=lambda i: F.conv2d(i["x"], i["weight"], padding=1),
        rows=("x",),
    ),
    Operation(
        name="conv_transpose1d",
        inputs=_line,
        run=lambda i: F.conv_transpose1d(i["x"], i["weight"], i["bias"], stride=2),
        rows=("x",),
    ),
    Operation(
        name="tensordot",
        inputs=lambda d: {"x": d.normal(16, 12, 20), "y": d.normal(12, 20, 30)},
        run=lambda i: torch.tensordot(i["x"], i["y"], dims=2),
        rows=("x",),
    ),
    Operation(
        name="conv3d", inputs=_volume, run=lambda i: F.conv3d(i["x"], i["weight"], padding=1), rows=("x",)
    ),
    Operation(
        name="conv_transpose2d",
        inputs=_upward,
        run=lambda i: F.conv_transpose2d(i["x"], i["weight"], i["bias"], stride=2, padding=1),
        rows=("x",),
    ),
    Operation(
        name="unfold and fold",
        inputs=lambda d: {"x": d.normal(8, 8, 28, 28)},
        run=lambda i: F.fold(F.unfold(i["x"], 3, padding=1), (28, 28), 3, padding=1),
        rows=("x",),
    ),
    Operation(name="linalg.inv", inputs=_square, run=lambda i: torch.linalg.inv(i["x"])),
    Operation(
        name="linalg.solve",
        inputs=lambda d: {**_square(d), "y": d.normal(96, 16)},
        run=lambda i: torch.linalg.solve(i["x"], i["y"]),
    ),
    Operation(name="linalg.cholesky", inputs=_square, run=lambda i: torch.linalg.cholesky(_positive(i))),
    Operation(name="linalg.qr", inputs=_square, run=lambda i: tuple(torch.linalg.qr(i["x"]))),
    Operation(name="linalg.svd", inputs=_square, run=lambda i: tuple(torch.linalg.svd(i["x"]))),
    Operation(name="linalg.eigh", inputs=_square, run=lambda i: tuple(torch.linalg.eigh(_positive(i)))),
    Operation(name="linalg.slogdet", inputs=_square, run=lambda i: torch.linalg.slogdet(i["x"])[1]),
    Operation(
        name="fft.rfft",
        inputs=lambda d: {"x": d.normal(16, 1000)},
        run=lambda i: torch.view_as_real(torch.fft.rfft(i["x"])),
        rows=("x",),
    ),
    Operation(
        name="fft.fft2",
        inputs=lambda d: {"x": d.normal(8, 64, 64)},
        run=lambda i: torch.view_as_real(torch.fft.fft2(i["x"])),
        rows=("x",),
    ),
    Operation(name="cdist", inputs=_points, run=lambda i: torch.cdist(i["x"], i["y"]), rows=("x",)),
    Operation(name="pdist", inputs=_points, run=lambda i: F.pdist(i["x"])),
    Operation(
        name="sparse matrix times dense",
        inputs=_sparse,
        run=lambda i: torch.sparse.mm(
            torch.sparse_coo_tensor(i["where"], i["values"], (200, 200), check_invariants=False), i["y"]
        ),
    ),
    Operation(name="sparse rows (CSR) times dense", inputs=_sparse, run=_compressed_rows),
    Operation(
        name="linalg.lstsq",
        inputs=lambda d: {"x": d.normal(200, 40), "y": d.normal(200, 8)},
        run=lambda i: torch.linalg.lstsq(i["x"], i["y"]).solution,
    ),
    Operation(name="linalg.pinv", inputs=_square, run=lambda i: torch.linalg.pinv(i["x"])),
    Operation(name="linalg.matrix_exp", inputs=_square, run=lambda i: torch.linalg.matrix_exp(i["x"] * 0.1)),
    Operation(
        name="linalg.eigvals", inputs=_square, run=lambda i: torch.view_as_real(torch.linalg.eigvals(i["x"]))
    ),
)
