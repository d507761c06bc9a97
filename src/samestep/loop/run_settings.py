"""The settings of a session, checked once, and never changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import torch

from samestep.comm.transport import Transport
from samestep.config.arguments import require_count, require_positive
from samestep.config.checkpointing import Checkpointing
from samestep.errors import ConfigError
from samestep.loop.walk import Plan
from samestep.optim.ema import EMA
from samestep.precision.policy import Precision


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What a session was asked for. Raises ConfigError."""

    seed: int
    precision: Precision
    strategy: str
    reduction: Literal["ordered", "fast"]
    clip_norm: float | None
    ema: EMA | None
    digest_every: int
    threads: int
    transport: Transport | None
    device: torch.device | None
    timeout_s: float
    checkpoint: Checkpointing | None
    resume: str | Path

    def __post_init__(self) -> None:
        """Refuse values that no run could follow."""
        if self.clip_norm is not None:
            require_positive("clip_norm", self.clip_norm, otherwise=", or None for no clipping")
        require_count("digest_every", self.digest_every, least=0)
        require_count("seed", self.seed, least=0)
        require_count("threads", self.threads, least=1)
        require_positive("timeout_s", self.timeout_s)
        if self.device is not None and not isinstance(self.device, torch.device):
            raise ConfigError(f"device is {self.device!r}. Give torch.device({str(self.device)!r}).")
        if self.checkpoint is not None and not isinstance(self.checkpoint, Checkpointing):
            raise ConfigError(
                f"checkpoint is {self.checkpoint!r}. Give samestep.Checkpointing(folder='...', every=500)."
            )
        if self.checkpoint is not None and self.checkpoint.folder is None:
            raise ConfigError(
                "checkpoint.folder is left out, and there is no run folder that could hold the checkpoints. "
                "Give samestep.Checkpointing(folder='...'), or train(..., folder='...')."
            )
        if not isinstance(self.resume, str | Path) or not str(self.resume):
            raise ConfigError(
                f"resume is {self.resume!r}. Give 'auto', 'never', or the path of a checkpoint."
            )

    def shared_facts(self, batches: Plan, num_steps: int | None) -> dict[str, object]:
        """Return what must be equal on all ranks before a batch is taken."""
        return {
            "the number of samples": batches.num_samples,
            "batching": batches.batching,
            "the seed": self.seed,
            "the number of steps": num_steps,
            "precision": self.precision,
            "clip_norm": self.clip_norm,
            "digest_every": self.digest_every,
            "the strategy": f"{self.strategy}, {self.reduction}",
            "the number of CPU threads per rank": self.threads,
            "ema": self.ema if self.ema is None else self.ema.model_dump(exclude={"decay"}),
            "checkpoint": self.checkpoint,
        }
