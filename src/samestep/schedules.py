"""Learning-rate schedules, counted in applied updates."""

from samestep.optim.schedules import constant, inverse_sqrt, linear, warmup_cosine, wsd

__all__ = ["constant", "inverse_sqrt", "linear", "warmup_cosine", "wsd"]
