"""Which optimizers treat every element by itself, so that they may run on parts of parameters."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from samestep.errors import ConfigError

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Say whether the optimizer is known to update every element by itself.

    Only the classes themselves count: a subclass may do anything in its step. What is not known gets whole
    parameters, which is right for every optimizer. A class of one's own says it with the attribute
    `elementwise = True`.
    """
    return type(optimizer) in ELEMENTWISE or getattr(type(optimizer), "elementwise", False) is True


def couples_parameters(optimizer: Optimizer) -> bool:
    """Say whether a step of the optimizer may mix parameters, as a global norm or a shared step size does.

    Where each rank updates only what it owns, such a mixture would see only this rank's part. Not known to
    be free of it is every class that torch does not come with; one's own class says so with the attribute
    `per_parameter = True`.
    """
    known = is_elementwise(optimizer) or type(optimizer) in (torch.optim.Adafactor, torch.optim.Muon)
    return not known and getattr(type(optimizer), "per_parameter", False) is not True


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ConfigError for optimizers whose step does not fit one gradient per global batch."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss several times in one step, so a step is not one global batch. "
            "Use a first-order optimizer such as AdamW or SGD."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "SparseAdam needs sparse gradients, which samestep makes dense before it sums them. "
            "Use Adagrad or SGD, whose updates are then the same as with sparse ones, or AdamW."
        )
