"""The smallest training: tell which quadrant a point lies in."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
points = torch.randn(512, 2)
labels = (points[:, 0] * points[:, 1] > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))


def loss(model, batch):
    points, labels = batch
    return samestep.weighted(cross_entropy(model(points), labels, reduction="none"))


result = samestep.train(
    model,
    TensorDataset(points, labels),
    loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    batching=samestep.Batching(global_batch=64, micro_batch=8),
    epochs=5,
)
print(f"loss: {result.loss:.2f}")
print(f"fingerprint: {result.fingerprint}")
