"""Experiments: embedding, gathering, scattering, sorting, counting, sparse gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from samestep.numerics.experiments.operation import Draw, Inputs, Operation


def _tokens(draw: Draw) -> dict[str, Tensor]:
    # 4,096 tokens of 100 words: every row of the gradient is a sum of about 41 terms.
    return {"ids": draw.ids(100, 32, 128), "weight": draw.normal(100, 64)}


def _bag(mode: str) -> Operation:
    return Operation(
        name=f"embedding_bag, {mode}",
        inputs=_tokens,
        run=lambda i: F.embedding_bag(i["ids"], i["weight"], mode=mode),
        rows=("ids",),
    )


def _lines(draw: Draw) -> dict[str, Tensor]:
    return {"x": draw.normal(100, 64), "source": draw.normal(4096, 64), "ids": draw.ids(100, 4096)}


def _flat(draw: Draw) -> dict[str, Tensor]:
    # Many additions into 100 places: enough for every thread to meet every place.
    return {"x": draw.normal(100), "source": draw.normal(400_000), "ids": draw.ids(100, 400_000)}


def _wide(inputs: Inputs) -> Tensor:
    return inputs["ids"].unsqueeze(-1).expand(-1, 64)


def _reduce(mode: str) -> Operation:
    return Operation(
        name=f"scatter_reduce, {mode}",
        inputs=_lines,
        run=lambda i: i["x"].scatter_reduce(0, _wide(i).contiguous(), i["source"], reduce=mode),
    )


def _table(draw: Draw) -> dict[str, Tensor]:
    return {"x": draw.normal(64, 500), "ids": draw.ids(500, 64, 2000)}


def _plain(name: str, run: Callable[[Tensor], Tensor | tuple[Tensor, ...]], *shape: int) -> Operation:
    return Operation(
        name=name, inputs=lambda draw: {"x": draw.normal(*shape)}, run=lambda inputs: run(inputs["x"])
    )


def _segments(mode: str) -> Operation:
    return Operation(
        name=f"segment_reduce, {mode}",
        inputs=lambda draw: {"x": draw.normal(1000, 64)},
        run=lambda i: torch.segment_reduce(
            i["x"], mode, lengths=torch.full((40,), 25, device=i["x"].device), axis=0
        ),
    )


def _index_reduce(inputs: Inputs) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"index_reduce\(\) is in beta")
        return inputs["x"].index_reduce(0, inputs["ids"], inputs["source"], "mean")


def _coalesce(inputs: Inputs) -> Tensor:
    rows = torch.sparse_coo_tensor(
        inputs["ids"].unsqueeze(0), inputs["source"].detach(), (100, 64), check_invariants=False
    )
    return rows.coalesce().values()


OPERATIONS = (
    Operation(
        name="embedding", inputs=_tokens, run=lambda i: F.embedding(i["ids"], i["weight"]), rows=("ids",)
    ),
    Operation(
        name="embedding, sparse gradient",
        inputs=_tokens,
        run=lambda i: F.embedding(i["ids"], i["weight"], sparse=True),
    ),
    _bag("sum"),
    _bag("mean"),
    _bag("max"),
    Operation(
        name="embedding_bag, weights of samples",
        inputs=lambda d: {**_tokens(d), "scale": d.normal(32, 128)},
        run=lambda i: F.embedding_bag(i["ids"], i["weight"], mode="sum", per_sample_weights=i["scale"]),
        rows=("ids", "scale"),
    ),
    Operation(
        name="embedding, max_norm",
        inputs=_tokens,
        run=lambda i: F.embedding(i["ids"], i["weight"].detach().clone(), max_norm=1.0),
        rows=("ids",),
    ),
    Operation(name="sparse coalesce", inputs=_lines, run=_coalesce),
    Operation(name="index_select", inputs=_lines, run=lambda i: i["x"].index_select(0, i["ids"])),
    Operation(name="x[ids]", inputs=_lines, run=lambda i: i["x"][i["ids"]]),
    Operation(name="x[ids], one number each", inputs=_flat, run=lambda i: i["x"][i["ids"]]),
    Operation(name="x[rows, columns]", inputs=_table, run=lambda i: i["x"][i["ids"] % 64, i["ids"]]),
    Operation(name="gather", inputs=_table, run=lambda i: i["x"].gather(1, i["ids"]), rows=("x", "ids")),
    Operation(name="take", inputs=_table, run=lambda i: i["x"].take(i["ids"] * 7)),
    Operation(
        name="take_along_dim",
        inputs=_table,
        run=lambda i: i["x"].take_along_dim(i["ids"], 1),
        rows=("x", "ids"),
    ),
    Operation(name="index_add", inputs=_lines, run=lambda i: i["x"].index_add(0, i["ids"], i["source"])),
    Operation(
        name="index_add, one number each",
        inputs=_flat,
        run=lambda i: i["x"].index_add(0, i["ids"], i["source"]),
    ),
    Operation(
        name="index_put, accumulate",
        inputs=_lines,
        run=lambda i: i["x"].index_put((i["ids"],), i["source"], accumulate=True),
    ),
    Operation(
        name="index_put, accumulate, one number each",
        inputs=_flat,
        run=lambda i: i["x"].index_put((i["ids"],), i["source"], accumulate=True),
    ),
    Operation(
        name="index_put, repeated ids",
        inputs=_flat,
        run=lambda i: i["x"].detach().index_put((i["ids"],), i["source"].detach()),
    ),
    Operation(
        name="index_copy, repeated ids",
        inputs=_lines,
        run=lambda i: i["x"].detach().index_copy(0, i["ids"], i["source"].detach()),
    ),
    Operation(
        name="put_, accumulate",
        inputs=_flat,
        run=lambda i: i["x"].detach().clone().put_(i["ids"], i["source"].detach(), accumulate=True),
    ),
    Operation(
        name="put_",
        inputs=_flat,
        run=lambda i: i["x"].detach().clone().put_(i["ids"], i["source"].detach()),
    ),
    Operation(
        name="scatter_add",
        inputs=_lines,
        run=lambda i: i["x"].scatter_add(0, _wide(i).contiguous(), i["source"]),
    ),
    Operation(
        name="scatter_add, one index a row",
        inputs=_lines,
        run=lambda i: i["x"].scatter_add(0, _wide(i), i["source"]),
    ),
    Operation(
        name="scatter_add, one number each",
        inputs=_flat,
        run=lambda i: i["x"].scatter_add(0, i["ids"], i["source"]),
    ),
    Operation(
        name="scatter, repeated ids",
        inputs=_flat,
        run=lambda i: i["x"].detach().scatter(0, i["ids"], i["source"].detach()),
    ),
    _reduce("sum"),
    _reduce("mean"),
    _reduce("prod"),
    _reduce("amax"),
    Operation(
        name="index_reduce, mean",
        inputs=_lines,
        run=_index_reduce,
    ),
    Operation(name="index_fill", inputs=_lines, run=lambda i: i["x"].index_fill(0, i["ids"][:50], 2.0)),
    _segments("sum"),
    _segments("max"),
    Operation(
        name="masked_scatter",
        inputs=lambda d: {"x": d.normal(400, 100), "source": d.normal(40_000)},
        run=lambda i: i["x"].masked_scatter(i["x"] > 0, i["source"]),
    ),
    Operation(name="repeat_interleave", inputs=_lines, run=lambda i: i["x"].repeat_interleave(50, 0)),
    _plain("sort", lambda x: tuple(x.sort(-1)), 200, 500),
    _plain("topk", lambda x: tuple(x.topk(10, -1)), 200, 500),
    _plain("median", lambda x: tuple(x.median(-1)), 200, 501),
    _plain("kthvalue", lambda x: tuple(x.kthvalue(7, -1)), 200, 501),
    _plain("mode", lambda x: tuple(x.round().mode(-1)), 100, 101),
    _plain("quantile", lambda x: x.quantile(0.3, -1), 200, 500),
    _plain("unique", lambda x: torch.unique(x.detach().round(decimals=1), return_counts=True), 100_000),
    _plain("histc", lambda x: x.detach().histc(50), 400_000),
    Operation(name="bincount", inputs=_flat, run=lambda i: torch.bincount(i["ids"], i["source"].detach())),
)
