"""Which samples a step owns: arithmetic over sizes, settings and the seed, never a message between ranks.

What a program may use of it: sources on disk, mixtures, and shuffling of streams. Names are imported when
they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep.data.build_once import prepared, prepared_tokens
    from samestep.data.images import ImageFolder
    from samestep.data.mixture import Mixture, StreamMixture
    from samestep.data.row_files import rows
    from samestep.data.shuffled import Shuffled
    from samestep.data.stream import Streamed
    from samestep.data.tokens import TokenFile

__all__ = [
    "ImageFolder",
    "Mixture",
    "Shuffled",
    "StreamMixture",
    "Streamed",
    "TokenFile",
    "prepared",
    "prepared_tokens",
    "rows",
]


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    homes = {
        "ImageFolder": "images",
        "Mixture": "mixture",
        "Shuffled": "shuffled",
        "StreamMixture": "mixture",
        "Streamed": "stream",
        "TokenFile": "tokens",
        "prepared": "build_once",
        "prepared_tokens": "build_once",
        "rows": "row_files",
    }
    if name not in homes:
        raise AttributeError(f"module 'samestep.data' has no attribute {name!r}")
    return getattr(import_module(f"samestep.data.{homes[name]}"), name)
