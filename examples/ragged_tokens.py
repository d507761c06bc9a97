"""Sequences of unequal length: each counted token weighs 1, wherever it stands."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import samestep

PADDING = -100

torch.manual_seed(0)
sequences = [torch.arange(length) % 5 for length in torch.randint(2, 12, (60,)).tolist()]


def collate(samples):
    tokens = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
    targets = pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=PADDING)
    return tokens, targets


class NextToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 16)
        self.drop = nn.Dropout(0.1)
        self.output = nn.Linear(16, 5)

    def forward(self, tokens):
        return self.output(self.drop(self.tokens(tokens)))


def loss(model, batch):
    tokens, targets = batch
    losses = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    return samestep.weighted(losses, weight=targets.flatten() != PADDING)


result = samestep.train(
    NextToken(),
    sequences,
    loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.02),
    batching=samestep.Batching(global_batch=16, micro_batch=2),
    epochs=5,
    collate_fn=collate,
)
last = result.history[-1]
print(f"loss: {last.loss:.3f} over {last.weight:g} tokens of {last.samples} samples")
print(f"fingerprint: {result.fingerprint}")
