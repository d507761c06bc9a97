"""A loop of one's own around a session: clipping, a schedule, BatchNorm, and a line for each epoch."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
images = torch.randn(96, 1, 8, 8)
labels = (images.mean((1, 2, 3)) > 0).long()
dataset = TensorDataset(images, labels)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3, stride=2),
    torch.nn.BatchNorm2d(8),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(72, 2),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = samestep.schedules.warmup_cosine(updates=18, warmup=3)
batching = samestep.Batching(global_batch=32, micro_batch=4)

with samestep.Session(seed=1, clip_norm=1.0) as session:
    model, optimizer = session.setup(model, optimizer, schedule)
    for batch in session.batches(dataset, batching, epochs=6):
        for micro in batch:  # this rank's micro-batches, and no others
            with micro.collect() as record:
                images, labels = micro.data
                record(samestep.weighted(cross_entropy(model(images), labels, reduction="none")))
        report = session.step(batch)
        if session.first and (report.step + 1) % 3 == 0:
            print(f"epoch {report.epoch}: loss {report.loss:.3f}, gradient norm {report.grad_norm:.3f}")
    fingerprint = session.fingerprint()
    if session.first:
        print(f"fingerprint: {fingerprint}")
