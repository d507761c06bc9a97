"""Which parameters a run trains, under which names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from samestep.errors import ConfigError

OptimizerLike: TypeAlias = Optimizer | Callable[[Iterable[Parameter]], Optimizer]


BESIDE_MODEL = "optimizer.group"  # how names begin of parameters that only the optimizer knows


def make_optimizer(optimizer: OptimizerLike, model: nn.Module) -> Optimizer:
    """Return the optimizer, building it from the model's parameters where a callable was given."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch optimizer, or a function that "
            "takes the parameters and returns one: lambda params: torch.optim.AdamW(params, lr=3e-4)."
        )
    parameters = list(model.parameters())
    if not parameters:
        raise ConfigError(
            f"the model, a {type(model).__name__}, has no parameters: there is nothing to train. Are its "
            "parts kept in a plain list or dict? nn.ModuleList and nn.ModuleDict make them known."
        )
    made: Any = optimizer(parameters)
    if not isinstance(made, Optimizer):
        raise ConfigError(f"the optimizer function returned a {type(made).__name__}, not a torch optimizer.")
    return made


def trainables(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, Parameter]]:
    """Name the parameters that are trained: in the optimizer and not frozen, in the model's order.

    Parameters that only the optimizer knows (of a loss module, say) follow under names of their own.
    Raises ConfigError where nothing is left to train.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"parameter {name} has no shape yet, as in a lazy module. Run a batch through it first."
            )
    in_optimizer: dict[Parameter, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            in_optimizer[parameter] = f"{BESIDE_MODEL}{number}.{position}"
    named = [
        (name.replace("_orig_mod.", ""), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter in in_optimizer
    ]
    of_model = set(model.parameters())
    open_to_training = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if open_to_training and in_optimizer and not of_model & set(in_optimizer):
        raise ConfigError(
            f"the optimizer holds {len(in_optimizer)} parameters, and none of them is one of the model's "
            f"{len(of_model)}: it was built from another model, or before this one was copied or converted. "
            "Build it from this model, or give a function: lambda params: torch.optim.AdamW(params, lr=3e-4)."
        )
    named += [
        (name, parameter)
        for parameter, name in in_optimizer.items()
        if parameter.requires_grad and parameter not in of_model
    ]
    if not named:
        num_frozen = sum(not parameter.requires_grad for parameter in of_model)
        raise ConfigError(
            f"there is nothing to train: {num_frozen} of {len(of_model)} parameters of the model are frozen "
            "(requires_grad is False), and the optimizer holds none that is not. Unfreeze some, and build "
            "the optimizer from this model's parameters."
        )
    return named


def left_out(model: nn.Module, trained: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    """Name the model's parameters that need a gradient but are in no optimizer group."""
    known = {parameter for _, parameter in trained}
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter not in known
    ]
