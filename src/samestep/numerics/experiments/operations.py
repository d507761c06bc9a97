"""All operations of the catalogue, in its order."""

from __future__ import annotations

from samestep.numerics.experiments import draws, images, indexing, layers, products, reductions
from samestep.numerics.experiments.operation import Operation

OPERATIONS: tuple[Operation, ...] = (
    *products.OPERATIONS,
    *layers.OPERATIONS,
    *reductions.OPERATIONS,
    *indexing.OPERATIONS,
    *images.OPERATIONS,
    *draws.OPERATIONS,
)
