"""Experiments: normalization, attention, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from samestep.numerics.experiments.operation import Draw, Inputs, Operation


def _affine(
    name: str, run: Callable[[Inputs], Tensor], *shape: int, size: int, rows: bool = True
) -> Operation:
    return Operation(
        name=name,
        inputs=lambda draw: {
            "x": draw.normal(*shape),
            "weight": draw.normal(size),
            "bias": draw.normal(size),
        },
        run=run,
        rows=("x",) if rows else (),
    )


def _heads(draw: Draw) -> dict[str, Tensor]:
    return {name: draw.normal(8, 4, 64, 32) for name in ("q", "k", "v")}


def _attend(inputs: Inputs, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(
        inputs["q"], inputs["k"], inputs["v"], attn_mask=mask, is_causal=causal
    )


def _masked(inputs: Inputs) -> Tensor:
    mask = torch.ones(64, 64, dtype=torch.bool, device=inputs["q"].device).tril(3)
    return _attend(inputs, mask)


def _math(inputs: Inputs) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return _attend(inputs)


def _attention_layer(draw: Draw) -> dict[str, Tensor]:
    return {
        "x": draw.normal(8, 32, 64),
        "in_weight": draw.normal(192, 64, scale=0.1),
        "in_bias": draw.normal(192),
        "out_weight": draw.normal(64, 64, scale=0.1),
        "out_bias": draw.normal(64),
    }


def _multi_head(inputs: Inputs) -> Tensor:
    x = inputs["x"].transpose(0, 1)
    out, _ = F.multi_head_attention_forward(
        x,
        x,
        x,
        64,
        4,
        inputs["in_weight"],
        inputs["in_bias"],
        None,
        None,
        False,
        0.0,
        inputs["out_weight"],
        inputs["out_bias"],
        need_weights=False,
    )
    return out.transpose(0, 1)


def _recurrent(gates: int) -> Operation:
    kind = {1: "rnn_tanh", 3: "gru", 4: "lstm"}[gates]

    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {
            "x": draw.normal(8, 24, 48),
            "w_ih": draw.normal(gates * 64, 48, scale=0.1),
            "w_hh": draw.normal(gates * 64, 64, scale=0.1),
            "b_ih": draw.normal(gates * 64),
            "b_hh": draw.normal(gates * 64),
        }

    def run(inputs: Inputs) -> Tensor:
        x, weights = inputs["x"], [inputs[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh")]
        zero = x.new_zeros(1, x.shape[0], 64)
        if kind == "lstm":
            return torch.lstm(x, [zero, zero], weights, True, 1, 0.0, False, False, True)[0]
        layer = torch.gru if kind == "gru" else torch.rnn_tanh
        return layer(x, zero, weights, True, 1, 0.0, False, False, True)[0]

    return Operation(name=kind, inputs=inputs, run=run, rows=("x",))


def _two_ways(draw: Draw) -> dict[str, Tensor]:
    inputs = {"x": draw.normal(8, 6, 48)}
    for layer, wide in enumerate((48, 128)):
        for way in ("", " back"):
            inputs[f"w_ih {layer}{way}"] = draw.normal(256, wide, scale=0.1)
            inputs[f"w_hh {layer}{way}"] = draw.normal(256, 64, scale=0.1)
    return inputs


def _lstm_two_ways(inputs: Inputs) -> Tensor:
    x, *weights = inputs.values()
    zero = x.new_zeros(4, x.shape[0], 64)
    return torch.lstm(x, [zero, zero], weights, False, 2, 0.0, False, True, True)[0]


_NORM_SHAPES = (("x", (16, 64, 256)), ("weight", (256,)), ("bias", (256,)))

OPERATIONS = (
    _affine(
        "layer_norm", lambda i: F.layer_norm(i["x"], (256,), i["weight"], i["bias"]), 16, 64, 256, size=256
    ),
    _affine("rms_norm", lambda i: F.rms_norm(i["x"], (256,), i["weight"]) + i["bias"], 16, 64, 256, size=256),
    _affine("group_norm", lambda i: F.group_norm(i["x"], 4, i["weight"], i["bias"]), 8, 16, 28, 28, size=16),
    _affine(
        "instance_norm",
        lambda i: F.instance_norm(i["x"], None, None, i["weight"], i["bias"]),
        *(8, 16, 28, 28),
        size=16,
    ),
    _affine(
        "batch_norm, images",
        lambda i: F.batch_norm(i["x"], None, None, i["weight"], i["bias"], training=True),
        *(16, 32, 28, 28),
        size=32,
        rows=False,
    ),
    _affine(
        "batch_norm, vectors",
        lambda i: F.batch_norm(i["x"], None, None, i["weight"], i["bias"], training=True),
        *(512, 200),
        size=200,
        rows=False,
    ),
    Operation(
        name="layer_norm, bfloat16",
        inputs=lambda d: {name: d.normal(*shape, dtype=torch.bfloat16) for name, shape in _NORM_SHAPES},
        run=lambda i: F.layer_norm(i["x"], (256,), i["weight"], i["bias"]),
        rows=("x",),
    ),
    Operation(
        name="weight_norm",
        inputs=lambda d: {"v": d.normal(256, 300), "g": d.normal(256, 1)},
        run=lambda i: torch._weight_norm(i["v"], i["g"], 0),  # noqa: SLF001 - as torch.nn.utils calls it
    ),
    Operation(
        name="local_response_norm",
        inputs=lambda d: {"x": d.normal(8, 16, 14, 14)},
        run=lambda i: F.local_response_norm(i["x"], 5),
        rows=("x",),
    ),
    Operation(
        name="scaled_dot_product_attention", inputs=_heads, run=lambda i: _attend(i), rows=("q", "k", "v")
    ),
    Operation(
        name="scaled_dot_product_attention, causal",
        inputs=_heads,
        run=lambda i: _attend(i, causal=True),
        rows=("q", "k", "v"),
    ),
    Operation(name="scaled_dot_product_attention, masked", inputs=_heads, run=_masked, rows=("q", "k", "v")),
    Operation(name="scaled_dot_product_attention, math", inputs=_heads, run=_math, rows=("q", "k", "v")),
    Operation(
        name="scaled_dot_product_attention, bfloat16",
        inputs=lambda d: {name: d.normal(8, 4, 64, 32, dtype=torch.bfloat16) for name in ("q", "k", "v")},
        run=lambda i: _attend(i, causal=True),
        rows=("q", "k", "v"),
    ),
    Operation(name="multi_head_attention", inputs=_attention_layer, run=_multi_head, rows=("x",)),
    _recurrent(4),
    _recurrent(3),
    _recurrent(1),
    Operation(name="lstm, two layers, both ways", inputs=_two_ways, run=_lstm_two_ways, rows=("x",)),
)
