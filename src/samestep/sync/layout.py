"""Where each parameter lies in the flat buffers, which tiles there are, and who owns them.

Pure arithmetic: nothing here holds a tensor's memory. Everything but `Bucket.cuts` is independent of the
number of ranks, because tiles and buckets decide in which order the gradient norm is added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.errors import ConfigError

ALIGNMENT = 64  # elements: every parameter starts on a cache line and a vector boundary, for every dtype
LARGEST_TILE = 65536
BUCKET = 1 << 20  # elements of one bucket, rounded to whole tiles

_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a complex number's two parts, or the dtype itself."""
    return _REAL.get(dtype, dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that gradients of such parameters are added in: float32 at least."""
    real = real_dtype(dtype)
    return _SUMMED_IN.get(real, real)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of one parameter in its flat buffer."""

    index: int
    name: str
    flat: int
    start: int  # in real elements
    numel: int  # real elements: a complex number counts two
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # the parameter's own, where its memory has no gaps; else row-major
    is_complex: bool

    @property
    def stop(self) -> int:
        """The real element after the last one."""
        return self.start + self.numel

    def view(self, flat: Tensor) -> Tensor:
        """Return this parameter's part of a flat buffer, in its own shape, strides and kind of number."""
        if not self.is_complex:
            return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)
        pairs = torch.view_as_complex(flat.view(-1, 2))
        return pairs.as_strided(self.shape, self.stride, pairs.storage_offset() + self.start // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """One flat buffer: all parameters of one dtype whose gradients are summed in one dtype."""

    dtype: torch.dtype  # of the parameters; real
    sums: torch.dtype  # of their gradients' sums
    numel: int  # whole tiles
    tile: int  # elements


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A run of tiles that travels as one message, and who owns which part of it."""

    index: int
    flat: int
    start: int
    stop: int
    slots: tuple[int, ...]  # the parameters that lie in it, wholly or in part
    cuts: tuple[tuple[int, int], ...]  # by rank: the elements it owns, whole tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All slots, flat buffers and buckets of a model."""

    slots: tuple[Slot, ...]
    flats: tuple[Flat, ...]
    buckets: tuple[Bucket, ...]  # in the order they are sent: the reverse order of registration
    device: torch.device

    def first_tiles(self) -> list[int]:
        """Number the tiles of all flats through: the first tile of each flat, then the number of tiles."""
        return list(accumulate((flat.numel // flat.tile for flat in self.flats), initial=0))

    def owned(self, rank: int) -> list[tuple[int, int, int]]:
        """Return the non-empty (flat, start, stop) that a rank owns."""
        cuts = [(bucket.flat, *bucket.cuts[rank]) for bucket in self.buckets]
        return [(flat, start, stop) for flat, start, stop in cuts if start < stop]


def lay_out(
    named: Sequence[tuple[str, Parameter]],
    *,
    world_size: int,
    whole: bool,
    sums: torch.dtype | None = None,
    bucket: int = BUCKET,
) -> Layout:
    """Lay parameters out in the order given.

    `whole` keeps each parameter with one owner, for optimizers that need whole parameters: each then
    starts at a tile of its own. `sums` is the dtype gradients are added in, if not the usual one.
    Raises ConfigError for parameters that cannot be laid out.
    """
    _check(named)
    flats: list[Flat] = []
    slots: list[Slot] = []
    kinds = list(dict.fromkeys(_kind(parameter, sums) for _, parameter in named))
    for number, kind in enumerate(kinds):
        members = [
            (index, name, parameter)
            for index, (name, parameter) in enumerate(named)
            if _kind(parameter, sums) == kind
        ]
        tile = _tile(sum(_real_numel(parameter) for _, _, parameter in members), whole=whole)
        start = 0
        for index, name, parameter in members:
            slots.append(_slot(index, name, parameter, flat=number, start=start))
            start = _round_up(start + _real_numel(parameter), tile if whole else ALIGNMENT)
        flats.append(
            Flat(
                dtype=kind[0],
                sums=kind[1],
                numel=max(tile, _round_up(start, tile)),
                tile=tile,
            )
        )
    slots.sort(key=lambda slot: slot.index)
    device = named[0][1].device if named else torch.device("cpu")
    buckets = _buckets(slots, flats, world_size=world_size, whole=whole, bucket=bucket)
    return Layout(slots=tuple(slots), flats=tuple(flats), buckets=tuple(buckets), device=device)


def _kind(parameter: Parameter, sums: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """Return the real dtypes of a parameter and of its gradient's sums: what shares a flat buffer."""
    usual = sum_dtype(parameter.dtype)
    if sums is torch.bfloat16 and parameter.is_complex():
        sums = usual  # there is no complex bfloat16
    return real_dtype(parameter.dtype), sums or usual


def _slot(index: int, name: str, parameter: Parameter, *, flat: int, start: int) -> Slot:
    # empty_like keeps the strides of dense tensors (channels-last, transposed) and makes the rest row-major.
    stride = torch.empty_like(parameter, device="meta").stride()
    return Slot(
        index=index,
        name=name,
        flat=flat,
        start=start,
        numel=_real_numel(parameter),
        shape=tuple(parameter.shape),
        stride=tuple(stride),
        is_complex=parameter.is_complex(),
    )


def _tile(numel: int, *, whole: bool) -> int:
    # About 256 tiles, so that small models too are spread evenly over ranks. Where each parameter fills
    # whole tiles, smaller ones waste less. The model alone decides, never the number of ranks.
    wanted = numel // (1024 if whole else 256)
    largest = LARGEST_TILE // 4 if whole else LARGEST_TILE
    return max(ALIGNMENT, min(largest, 1 << max(0, wanted - 1).bit_length()))


def _buckets(
    slots: Sequence[Slot], flats: Sequence[Flat], *, world_size: int, whole: bool, bucket: int
) -> list[Bucket]:
    found: list[Bucket] = []
    for number in reversed(range(len(flats))):
        flat = flats[number]
        members = [slot for slot in slots if slot.flat == number]
        edges = [slot.start for slot in members if slot.numel] if whole else []
        edges = edges or list(range(0, flat.numel, flat.tile))
        for start, stop in reversed(_runs(edges, flat.numel, bucket)):
            inside = [edge for edge in edges if start <= edge < stop]
            found.append(
                Bucket(
                    index=len(found),
                    flat=number,
                    start=start,
                    stop=stop,
                    slots=tuple(s.index for s in members if s.start < stop and s.stop > start),
                    cuts=_cuts(inside, stop, world_size, first=len(found)),
                )
            )
    return found


def _runs(edges: list[int], end: int, bucket: int) -> list[tuple[int, int]]:
    """Join neighbouring pieces into runs of about `bucket` elements."""
    runs: list[tuple[int, int]] = []
    start = 0
    for edge in [*edges[1:], end]:
        if edge - start >= bucket or edge == end:
            runs.append((start, edge))
            start = edge
    return runs


def _cuts(edges: list[int], stop: int, world_size: int, *, first: int) -> tuple[tuple[int, int], ...]:
    """Split a bucket among ranks at the given edges, as evenly as they allow.

    Which rank takes the first part rotates by bucket, so that a remainder does not always fall on rank 0.
    """
    start = edges[0]
    bounds = [start]
    for part in range(1, world_size):
        goal = start + (stop - start) * part // world_size
        nearest = min([*edges, stop], key=lambda edge: (abs(edge - goal), edge))
        bounds.append(max(bounds[-1], nearest))
    bounds.append(stop)
    parts = [(bounds[part], bounds[part + 1]) for part in range(world_size)]
    return tuple(parts[(rank + first) % world_size] for rank in range(world_size))


def _check(named: Sequence[tuple[str, Parameter]]) -> None:
    devices = {parameter.device for _, parameter in named}
    if len(devices) > 1:
        raise ConfigError(
            f"the parameters are on several devices ({', '.join(sorted(map(str, devices)))}). "
            "Move the whole model to one device per rank."
        )
    for name, parameter in named:
        if parameter.is_meta or type(parameter.data) is not Tensor:
            kind = "on the meta device" if parameter.is_meta else f"a {type(parameter.data).__name__}"
            raise ConfigError(f"parameter {name} is {kind}; samestep needs ordinary tensors with values.")
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ConfigError(f"parameter {name} has dtype {parameter.dtype}, which has no gradient.")
    _check_no_overlap(named)


def _check_no_overlap(named: Sequence[tuple[str, Parameter]]) -> None:
    spans = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + _extent(parameter) * parameter.element_size(), name)
        for name, parameter in named
        if parameter.numel()
    )
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ConfigError(
                f"parameters {name} and {other} share memory but are two parameters. To tie them, assign "
                f"one Parameter to both places: module.{other} = module.{name}."
            )


def _extent(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _real_numel(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
