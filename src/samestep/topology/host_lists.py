"""Lists of hosts as batch systems write them: the first one is where ranks meet."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from samestep.errors import ConfigError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def slurm_hosts(text: str) -> Iterator[str]:
    """Yield the hosts of Slurm's compressed list, in its order.

    >>> list(slurm_hosts("login,n[08-10,12],rack[1-2]-[0,1]"))[:5]
    ['login', 'n08', 'n09', 'n10', 'n12']
    """
    for element in _split(text):
        parts = re.split(r"\[([^\[\]]*)\]", element)
        if any(bracket in part for part in parts for bracket in "[]"):
            raise _unreadable(text)
        # Even parts are plain text, odd ones were in brackets.
        choices = [_numbers(part, text) if index % 2 else [part] for index, part in enumerate(parts)]
        yield from ("".join(chosen) for chosen in itertools.product(*choices))


def slurm_counts(text: str) -> list[int]:
    """Return the number of tasks on each node.

    >>> slurm_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ConfigError(
                f"Slurm's tasks per node are {text!r}, which is not a list such as 2(x3),1. "
                "Set MASTER_ADDR and MASTER_PORT, or start the ranks with torchrun."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """Split at the commas that are outside of brackets."""
    elements = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text.strip())
    if not elements or ",".join(elements) != text.strip():
        raise _unreadable(text)
    return elements


def _numbers(ranges: str, text: str) -> list[str]:
    """Return the numbers of "1-3,07" as they are written: a range keeps the width of its first number."""
    numbers: list[str] = []
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _unreadable(text)
        first, last = found[1], found[2] or found[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _unreadable(text: str) -> ConfigError:
    return ConfigError(
        f"The list of hosts {text!r} is not one that Slurm writes, such as n[1-3,7]. "
        "Set MASTER_ADDR to the host of the first rank."
    )
