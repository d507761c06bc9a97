"""Two loss terms, each divided by its own global weight: labels for some samples, targets for all.

`samestep.train` counts the weights of a step by a forward pass of its own before the first backward pass.
`weights=` gives them from the data alone, and saves that pass.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import samestep

NO_LABEL = -100

torch.manual_seed(0)
inputs = torch.randn(120, 4)
targets = inputs.sum(1, keepdim=True)
labels = torch.where(torch.rand(120) < 0.3, (targets[:, 0] > 0).long(), NO_LABEL)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.kind = nn.Linear(16, 2)
        self.size = nn.Linear(16, 1)

    def forward(self, inputs):
        hidden = self.body(inputs)
        return self.kind(hidden), self.size(hidden)


def loss(model, batch):
    inputs, targets, labels = batch
    kinds, sizes = model(inputs)
    return {
        "kind": samestep.weighted(
            cross_entropy(kinds, labels, reduction="none", ignore_index=NO_LABEL), labels != NO_LABEL
        ),
        "size": samestep.weighted(mse_loss(sizes, targets, reduction="none"), coefficient=0.5),
    }


def weights(batch):
    _, targets, labels = batch
    return {"kind": int((labels != NO_LABEL).sum()), "size": targets.numel()}


result = samestep.train(
    TwoHeads(),
    TensorDataset(inputs, targets, labels),
    loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    batching=samestep.Batching(global_batch=20, micro_batch=4),
    epochs=4,
    weights=weights,
)
for name, term in result.history[-1].terms.items():
    print(f"{name}: loss {term.loss:.3f} over {term.weight:g}, adds {term.contribution:.3f}")
print(f"fingerprint: {result.fingerprint}")
