"""Schedules, counted in applied updates: multiples of the learning rate, and sizes of the global batch."""

from samestep.config.batch_sizes import batch_size
from samestep.optim.schedules import constant, inverse_sqrt, linear, warmup_cosine, wsd

__all__ = ["batch_size", "constant", "inverse_sqrt", "linear", "warmup_cosine", "wsd"]
