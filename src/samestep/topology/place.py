"""Where a process stands among the ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where this process stands among the ranks of a run, and who said so.

    Note [rendezvous]: it is None for a world of one, else one of

    | text | the ranks meet |
    |---|---|
    | `file://PATH` | at a file, the path as it is |
    | `tcp://HOST:PORT` | at a store on that very port |
    | `here://` | on this machine, at a socket named after the job |
    | `door://HOST:PORT` | at the first of some ports from PORT on where the first rank of the job answers |
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"  # the row of the table that was chosen
    reason: str  # why, for people
    rendezvous: str | None = None  # see Note [rendezvous]
    agent_store: bool = False  # the launcher already serves the TCP store
    attempt: int = 0  # restarts by the launcher; keys of an agent store must carry it
    job: str = ""  # which run of the launcher this is: ranks of another are not met
    locality_known: bool = True  # False: local rank and local world size are guesses until the ranks met
