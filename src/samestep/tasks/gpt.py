"""A small GPT over bytes: pre-norm blocks, learnt positions, causal attention."""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_BYTES: Final = 256


@final
class Attention(nn.Module):
    """Causal attention with several heads: (samples, time, width) to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.project = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        """Let each position look at itself and those before it."""
        samples, time, width = states.shape
        parts = self.project(states).view(samples, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (samples, heads, time, width / heads)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        joined: Tensor = self.join(seen.transpose(1, 2).reshape(samples, time, width))
        return joined


@final
class Block(nn.Module):
    """Attention, then an MLP of four times the width; each reads the norm of the sum and adds to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Return the states after this block, (samples, time, width)."""
        states = states + self.drop(self.attention(self.attention_norm(states)))
        hidden = functional.gelu(self.widen(self.mlp_norm(states)))
        mixed: Tensor = states + self.drop(self.narrow(hidden))
        return mixed


@final
class Gpt(nn.Module):
    """Bytes, (samples, time) of any integer dtype, to logits, (samples, time, 256); time <= context."""

    def __init__(
        self, *, layers: int, width: int, heads: int, context: int, dropout: float = 0.0, tied: bool = True
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, NUM_BYTES, bias=False)
        self._initialize(layers)
        if tied:
            self.output.weight = self.bytes.weight

    def _initialize(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each block adds twice to the states: undivided, their spread would grow with depth.
                adds = name.endswith(("join.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, content: Tensor) -> Tensor:
        """Return the logits of the byte after each position."""
        places = torch.arange(content.shape[1], device=content.device)
        states = self.drop(self.bytes(content.long()) + self.positions(places))
        for block in self.blocks:
            states = block(states)
        logits: Tensor = self.output(self.norm(states))
        return logits


def next_byte_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the cross-entropy of each next byte, in nats, (samples * (length - 1),), float32.

    `windows`: uint8, (samples, length); all but the last byte go in, all but the first are the targets.
    """
    logits = model(windows[:, :-1]).flatten(0, 1).float()
    return functional.cross_entropy(logits, windows[:, 1:].flatten().long(), reduction="none")


@torch.no_grad()
def write(model: nn.Module, prompt: bytes, length: int, *, context: int, temperature: float) -> bytes:
    """Return `length` bytes that the model writes after `prompt`.

    Law: the same weights write the same bytes on the same kind of device, for the draws come from a
    generator of their own. At temperature 0 the likeliest byte is taken.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    training = model.training
    model.eval()
    written = list(prompt)
    for _ in range(length):
        seen = torch.tensor([written[-context:]], device=device)
        logits = model(seen)[0, -1].float().cpu()
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            chances = functional.softmax(logits / temperature, dim=0)
            chosen = int(torch.multinomial(chances, 1, generator=generator))
        written.append(chosen)
    model.train(training)
    return bytes(written[len(prompt) :])
