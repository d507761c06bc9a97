"""Experiments: sums of all kinds, losses, pointwise functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from samestep.numerics.experiments.operation import Draw, Inputs, Operation


def _one(name: str, run: Callable[[Tensor], Tensor], *shape: int, rows: bool = True) -> Operation:
    return Operation(
        name=name,
        inputs=lambda draw: {"x": draw.normal(*shape)},
        run=lambda inputs: run(inputs["x"]),
        rows=("x",) if rows else (),
    )


def _positive(name: str, run: Callable[[Tensor], Tensor], *shape: int) -> Operation:
    return Operation(
        name=name,
        inputs=lambda draw: {"x": draw.uniform(*shape, low=0.5, high=1.5)},
        run=lambda inputs: run(inputs["x"]),
        rows=("x",),
    )


def _logits(draw: Draw) -> dict[str, Tensor]:
    return {"x": draw.normal(512, 1000), "target": draw.ids(1000, 512)}


def _planes(draw: Draw) -> dict[str, Tensor]:
    return {"x": draw.normal(8, 10, 32, 32), "target": draw.ids(10, 8, 32, 32)}


def _values(draw: Draw) -> dict[str, Tensor]:
    return {"x": draw.normal(64, 200), "target": draw.uniform(64, 200).detach()}


def _ctc(inputs: Inputs) -> Tensor:
    lengths = torch.full((8,), 60), torch.full((8,), 12)
    logits = inputs["x"].log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logits, inputs["target"] + 1, *lengths, reduction="none")


OPERATIONS = (
    _one("sum", torch.sum, 1000, 1000, rows=False),
    _one("sum over samples", lambda x: x.sum(0), 4096, 200, rows=False),
    _one("sum over features", lambda x: x.sum(-1), 512, 1000),
    _one("mean", torch.mean, 1000, 1000, rows=False),
    _one("mean over samples", lambda x: x.mean(0), 4096, 200, rows=False),
    _one("var", torch.var, 1000, 1000, rows=False),
    _one("var over features", lambda x: x.var(-1), 512, 1000),
    _one("prod over features", lambda x: (x * 0.1 + 1).prod(-1), 512, 100),
    _one("amax over features", lambda x: x.amax(-1), 512, 1000),
    _one("linalg.vector_norm", torch.linalg.vector_norm, 1000, 1000, rows=False),
    _one("linalg.vector_norm over features", lambda x: torch.linalg.vector_norm(x, dim=-1), 512, 1000),
    _one("logsumexp", lambda x: x.logsumexp(-1), 512, 1000),
    _one("cumsum over features", lambda x: x.cumsum(-1), 256, 1000),
    _one("cumsum", lambda x: x.cumsum(0), 200_000, rows=False),
    _positive("cumprod over features", lambda x: x.cumprod(-1), 256, 100),
    _one("logcumsumexp", lambda x: x.logcumsumexp(-1), 64, 200),
    _one("softmax", lambda x: x.softmax(-1), 512, 1000),
    _one("log_softmax", lambda x: x.log_softmax(-1), 512, 1000),
    _one("normalize", F.normalize, 512, 128),
    _one("cummax", lambda x: x.cummax(-1)[0], 128, 500),
    _one("cov", torch.cov, 100, 500, rows=False),
    _one("std_mean", lambda x: torch.stack(torch.std_mean(x, 0)), 2048, 100, rows=False),
    _one("renorm", lambda x: x.renorm(2, 0, 1.0), 256, 200),
    Operation(
        name="cosine_similarity",
        inputs=lambda d: {"x": d.normal(256, 200), "y": d.normal(256, 200)},
        run=lambda i: F.cosine_similarity(i["x"], i["y"]),
        rows=("x", "y"),
    ),
    Operation(
        name="cross_entropy, one loss a sample",
        inputs=_logits,
        run=lambda i: F.cross_entropy(i["x"], i["target"], reduction="none"),
        rows=("x", "target"),
    ),
    Operation(
        name="cross_entropy, sum",
        inputs=_logits,
        run=lambda i: F.cross_entropy(i["x"], i["target"], reduction="sum"),
    ),
    Operation(
        name="cross_entropy, class weights",
        inputs=lambda d: {**_logits(d), "weight": d.uniform(1000).detach()},
        run=lambda i: F.cross_entropy(i["x"], i["target"], i["weight"], label_smoothing=0.1),
    ),
    Operation(
        name="nll_loss2d",
        inputs=_planes,
        run=lambda i: F.nll_loss(i["x"].log_softmax(1), i["target"], reduction="none"),
        rows=("x", "target"),
    ),
    Operation(
        name="nll_loss2d, sum",
        inputs=_planes,
        run=lambda i: F.nll_loss(i["x"].log_softmax(1), i["target"], reduction="sum"),
    ),
    Operation(
        name="binary_cross_entropy_with_logits",
        inputs=_values,
        run=lambda i: F.binary_cross_entropy_with_logits(i["x"], i["target"], reduction="none"),
        rows=("x", "target"),
    ),
    Operation(
        name="mse_loss, sum", inputs=_values, run=lambda i: F.mse_loss(i["x"], i["target"], reduction="sum")
    ),
    Operation(
        name="smooth_l1_loss",
        inputs=_values,
        run=lambda i: F.smooth_l1_loss(i["x"], i["target"], reduction="none"),
        rows=("x", "target"),
    ),
    Operation(
        name="kl_div",
        inputs=_values,
        run=lambda i: F.kl_div(i["x"].log_softmax(-1), i["target"], reduction="none"),
        rows=("x", "target"),
    ),
    Operation(
        name="ctc_loss",
        inputs=lambda d: {"x": d.normal(8, 60, 30), "target": d.ids(29, 8, 12)},
        run=_ctc,
    ),
    *(
        _one(name, run, 256, 501)
        for name, run in (
            ("exp", torch.exp),
            ("sigmoid", torch.sigmoid),
            ("tanh", torch.tanh),
            ("gelu", F.gelu),
            ("gelu, tanh", lambda x: F.gelu(x, approximate="tanh")),
            ("silu", F.silu),
            ("mish", F.mish),
            ("softplus", F.softplus),
            ("elu", F.elu),
            ("sin", torch.sin),
            ("erf", torch.erf),
        )
    ),
    _positive("log", torch.log, 256, 501),
    _positive("pow", lambda x: x.pow(2.5), 256, 501),
    _positive("rsqrt", torch.rsqrt, 256, 501),
    Operation(
        name="prelu",
        inputs=lambda d: {"x": d.normal(16, 32, 20, 20), "weight": d.normal(32)},
        run=lambda i: F.prelu(i["x"], i["weight"]),
        rows=("x",),
    ),
    Operation(
        name="bias added to samples (broadcast)",
        inputs=lambda d: {"x": d.normal(2048, 200), "bias": d.normal(200)},
        run=lambda i: i["x"] * 1.5 + i["bias"],
        rows=("x",),
    ),
)
