"""Everything that a session builds around a model and its optimizer, made in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.comm.transport import Transport
from samestep.config.settings import nearest
from samestep.errors import ConfigError
from samestep.events import Event, Notice
from samestep.loop.trainables import BESIDE_MODEL, left_out, trainables
from samestep.optim.elementwise import check_optimizer, couples_parameters, is_elementwise
from samestep.precision.policy import Precision
from samestep.sync.agreement import make_model_equal, require_equal, short_hash
from samestep.sync.collector import Collector
from samestep.sync.layout import Layout, lay_out
from samestep.sync.model_buffers import ModelBuffers
from samestep.sync.pieces import Held, Piece, cut_pieces, give_back, retarget
from samestep.sync.reduction import Fast, Ordered, Reduction
from samestep.sync.replicate import Replicate
from samestep.sync.running_statistics import RunningStatistics
from samestep.sync.storage import ParameterStore
from samestep.sync.strategy import Strategy
from samestep.sync.zero import Zero1

STRATEGIES: dict[str, type[Replicate] | type[Zero1]] = {"replicate": Replicate, "zero1": Zero1}


@final
@dataclass(kw_only=True, slots=True)
class Parts:
    """The finished parts around one model."""

    model: nn.Module
    optimizer: Optimizer
    device: torch.device
    layout: Layout
    store: ParameterStore
    strategy: Strategy
    collector: Collector
    statistics: RunningStatistics
    buffers: ModelBuffers
    pieces: list[Piece]
    updated: list[tuple[int, int, int]]  # (flat, start, stop) that this rank's optimizer updates
    untrained: list[tuple[str, Parameter]]  # need a gradient but are in no optimizer group
    frozen: list[tuple[str, Parameter]]  # needed no gradient when the session was set up
    held: Held  # what the optimizer's groups held before

    def apply(self, quotient: Sequence[Tensor], used: Sequence[bool]) -> None:
        """Collective. Update the parameters from the divided gradient; unused ones are left alone."""
        for piece in self.pieces:
            gradient = piece.view(quotient[piece.slot.flat]) if used[piece.slot.index] else None
            if gradient is not None and gradient.dtype != piece.target.dtype:
                gradient = gradient.to(piece.target.dtype)
            piece.target.grad = gradient
        for slot in self.store.edited():
            self.store.follow(slot)
        self.optimizer.step()
        for piece in self.pieces:
            piece.target.grad = None
        self.store.round_masters(self.updated)
        self.strategy.publish()

    def require_frozen(self) -> None:
        """Raise ConfigError where a parameter that was frozen at set-up now needs a gradient."""
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name} was frozen when the session was set up, and now needs a gradient: "
                    "it has no place in the sum of all ranks. Freeze it only after setup (a frozen parameter "
                    "is left alone), or set up a new session."
                )

    def names_of_bad_tiles(self, tile_norms: Sequence[float]) -> list[str]:
        """Name the parameters that lie in tiles whose norm is not finite."""
        names: list[str] = []
        bounds = pairwise(self.layout.first_tiles())
        for number, (flat, (first, last)) in enumerate(zip(self.layout.flats, bounds, strict=True)):
            tiles = tile_norms[first:last]
            bad = [tile for tile, norm in enumerate(tiles) if not norm < float("inf")]
            names += [
                slot.name
                for slot in self.layout.slots
                if slot.flat == number
                and any(slot.start < (t + 1) * flat.tile and slot.stop > t * flat.tile for t in bad)
            ]
        return names

    def close(self) -> None:
        """Take the hooks off, and give parameters and optimizer back."""
        self.strategy.close()
        give_back(self.optimizer, self.store, self.pieces, self.held)
        self.store.release()


def build_parts(
    model: nn.Module,
    optimizer: Optimizer,
    transport: Transport,
    *,
    device: torch.device,
    precision: Precision,
    strategy: str,
    reduction: str,
    notify: Callable[[Event], None],
) -> Parts:
    """Collective. Check that all ranks have the same model, and build what the step needs around it."""
    check_optimizer(optimizer)
    precision.cast(model)
    named = trainables(model, optimizer)
    require_equal(transport, _facts(named, optimizer), device=device)
    beside = [(name, parameter) for name, parameter in named if name.startswith(BESIDE_MODEL)]
    differing = make_model_equal(model, transport, beside=beside, device=device)
    if differing:
        notify(Notice(level="warning", message=_made_equal(differing)))
    if strategy == "zero1" and couples_parameters(optimizer):
        notify(Notice(level="warning", message=_may_couple(optimizer)))
    untrained = left_out(model, named)
    if untrained:
        notify(Notice(level="warning", message=_untrained(untrained)))
    parameters = [parameter for _, parameter in named]
    layout = lay_out(
        named,
        world_size=transport.world_size,
        whole=not is_elementwise(optimizer),
        sums=precision.sums,
    )
    store = ParameterStore(layout, parameters, masters=precision.masters)
    statistics = RunningStatistics(model, transport)
    buffers = ModelBuffers(model, transport, besides=statistics.tensors)
    collector = Collector(layout, parameters)
    chosen = _strategy(strategy, reduction, store, collector, transport)
    updated = chosen.updated(transport.rank)
    pieces = cut_pieces(store, updated)
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    held = retarget(optimizer, store, pieces)
    return Parts(
        model=model,
        optimizer=optimizer,
        device=device,
        layout=layout,
        store=store,
        strategy=chosen,
        collector=collector,
        statistics=statistics,
        buffers=buffers,
        pieces=pieces,
        updated=_joined(updated),
        untrained=untrained,
        frozen=frozen,
        held=held,
    )


def _strategy(
    name: str, reduction: str, store: ParameterStore, collector: Collector, transport: Transport
) -> Strategy:
    if name not in STRATEGIES:
        hint = nearest(str(name), STRATEGIES)
        raise ConfigError(f"strategy is {name!r}.{hint} Known strategies: {', '.join(STRATEGIES)}.")
    if reduction not in ("ordered", "fast"):
        hint = nearest(str(reduction), ("ordered", "fast"))
        raise ConfigError(
            f"reduction is {reduction!r}.{hint} Use 'ordered' (the same bits always) or 'fast'."
        )
    adding: Reduction = Ordered(store.layout, transport) if reduction == "ordered" else Fast(transport)
    return STRATEGIES[name](store, collector, adding, transport)


def _joined(ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbouring ranges, so that one call serves many tiles."""
    joined: list[tuple[int, int, int]] = []
    for flat, start, stop in sorted(ranges):
        if joined and joined[-1][0] == flat and joined[-1][2] == start:
            joined[-1] = (flat, joined[-1][1], stop)
        else:
            joined.append((flat, start, stop))
    if any(a[0] == b[0] and a[2] > b[1] for a, b in pairwise(joined)):
        raise AssertionError("owned ranges overlap")
    return joined


def _facts(named: Sequence[tuple[str, Parameter]], optimizer: Optimizer) -> dict[str, object]:
    facts: dict[str, object] = {"the optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in sorted(group.items()):
            if key != "params":
                facts[f"{key} of optimizer group {number}"] = _told(value)
        facts[f"the number of parameters in optimizer group {number}"] = len(group["params"])
    facts["the number of trained parameters"] = len(named)
    for index, (name, parameter) in enumerate(named):
        facts[f"trained parameter {index}"] = f"{name} {tuple(parameter.shape)} {parameter.dtype}"
        for key, value in optimizer.state.get(parameter, {}).items():
            told = short_hash(value).hex() if isinstance(value, Tensor) else _told(value)
            facts[f"the optimizer's {key} of {name}"] = told
    return facts


def _told(value: object) -> str:
    """Describe a setting in words that are the same in every process: no addresses."""
    if callable(value):
        return f"{type(value).__name__} {getattr(value, '__qualname__', '')}"
    return type(value).__name__ if " at 0x" in repr(value) else repr(value)


def _made_equal(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"ranks built the model with different values in {len(names)} tensors ({shown}); all now have those "
        "of rank 0. Seed the generator before building the model to make them equal from the start."
    )


def _may_couple(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    return (
        f"{name} is not known to update each parameter by itself. If its step mixes parameters (a global "
        "norm, a step size of its own for all), zero1 gives other numbers on other numbers of ranks: use "
        "strategy='replicate'. If it does not, say so in the class: per_parameter = True."
    )


def _untrained(named: Sequence[tuple[str, Parameter]]) -> str:
    shown = ", ".join(name for name, _ in named[:3]) + (", ..." if len(named) > 3 else "")
    return (
        f"{len(named)} parameters need a gradient but are in no optimizer group and will not change: "
        f"{shown}. Give them to the optimizer, or set requires_grad to False."
    )
