"""Run folders as real runs leave them, made by telling their events to the listeners."""

from __future__ import annotations

import math
import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from samestep.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    Notice,
    Phases,
    Quarantined,
    Resumed,
    RunEnded,
    RunStarted,
    StepReport,
    Stopping,
    TermReport,
)
from samestep.track.folder import RECIPE, RunFolder
from samestep.track.ranks import RankFile
from samestep.track.resources import Gpu, Resources

FINGERPRINT = "3f" * 32
FACTS: dict[str, object] = {
    "versions": {"python": "3.11.7", "samestep": "0.1.0", "torch": "2.13.0+cpu", "numpy": "2.4.6"},
    "launcher": "samestep: SAMESTEP_RANK=0, SAMESTEP_WORLD_SIZE=3",
    "device": "cpu",
    "threads": 1,
    "seed": 0,
    "batching": {"global_batch": 64, "micro_batch": 8, "last": "keep", "shuffle": True},
    "strategy": "zero1",
    "reduction": "ordered",
    "precision": {"compute": "fp16", "parameters": None, "masters": True},
    "numerics_key": {
        "torch": "2.13.0+cpu",
        "device_name": "Intel Xeon 2.00GHz",
        "cpu_capability": "AVX512",
        "threads": 1,
        "precision": '{"compute":"fp16","masters":true}',
        "micro_batch": 8,
    },
}
RECIPE_TEXT = """\
task: lm
model:
  layers: 4
  width: 256
batching:
  global_batch: 64
  micro_batch: 8
optimizer:
  name: adamw
  lr: 0.003
schedule:
  name: warmup_cosine
  warmup: 100
steps: {steps}
seed: 0
"""


@dataclass(kw_only=True)
class Told:
    """Clock and chances of a told run."""

    now: float = 1_796_000_000.0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self) -> float:
        return self.now


class Readings:
    """Resources as a rank of a real run has them, in place of those of the test."""

    def __init__(self, gpu_uuid: str | None) -> None:
        self.chance = random.Random(gpu_uuid)
        self.memory = 412_000_000 + self.chance.randrange(20_000_000)

    def read(self) -> Resources:
        self.memory += self.chance.randrange(90_000)
        return Resources(
            cpu_percent=96 + self.chance.random() * 6,
            memory_bytes=self.memory,
            machine_cpu_percent=71 + self.chance.random() * 9,
            machine_memory_percent=23.5 + self.chance.random(),
            sent_bytes=2_400_000 + self.chance.randrange(200_000),
            received_bytes=2_500_000 + self.chance.randrange(200_000),
            read_bytes=0,
            written_bytes=4096 + (self.chance.random() < 0.03) * 48_213_904,
            gpu=Gpu(used_percent=88 + self.chance.random() * 9, memory_bytes=31_400_000_000),
        )


def report(step: int, steps: int, world_size: int, chance: random.Random, seconds: float = 0.1) -> StepReport:
    """Return a step of a run that learns."""
    loss = 2.1 + 3.6 * math.exp(-step / 180) + 0.4 * math.exp(-step / 900) + chance.gauss(0, 0.05)
    skipped = "overflow" if step in (3, 700) else None
    warm = min(1.0, (step + 1) / 100)
    return StepReport(
        step=step,
        update=step + 1,
        epoch=step // 500,
        cursor=64 * (step + 1),
        samples=64,
        sample_hash=f"{step:016x}",
        micro_batches=9,
        weight=4096.0,
        loss=loss,
        terms={
            "cross_entropy": TermReport(loss=loss - 0.03, weight=4096.0, contribution=loss - 0.03),
            "z_loss": TermReport(loss=0.3 + chance.random() / 9, weight=4096.0, contribution=0.03),
        },
        grad_norm=math.inf if skipped else 0.6 + 3 * math.exp(-step / 90) + abs(chance.gauss(0, 0.15)),
        learning_rate=0.003 * warm * 0.5 * (1 + math.cos(math.pi * step / steps)),
        applied=skipped is None,
        skipped=skipped,
        loss_scale=65536.0 if step < 4 else 32768.0 if step < 701 else 16384.0,
        world_size=world_size,
        seconds=seconds,
    )


def phases(step: int, rank: int, chance: random.Random, *, slow_rank: int | None = 2) -> Phases:
    """Return where the time of a step went; the slow rank computes half as long again."""
    slow = 1.5 if rank == slow_rank else 1.0
    forward, backward = 0.021 * slow * (0.9 + chance.random() / 5), 0.043 * slow * (0.9 + chance.random() / 5)
    data = 0.004 * (0.6 + chance.random())
    seconds = {
        "data": data,
        "forward": forward,
        "backward": backward,
        "communication": max(0.002, 0.112 - forward - backward - data),
        "update": 0.006,
        "other": 0.001,
    }
    if step % 250 == 249:
        seconds["checkpoint"] = 0.03
    return Phases(step=step, rank=rank, seconds=seconds)


def saved(step: int, reason: str = "every 250 steps") -> CheckpointSaved:
    return CheckpointSaved(
        step=step,
        folder=f"checkpoints/step-{step:08}",
        num_bytes=48_213_904,
        stall_seconds=0.031,
        write_seconds=0.42,
        reason=reason,
    )


def tell(
    folder: Path, *, steps: int = 2000, stop: int = 1200, end: str = "done", told: Told | None = None
) -> Path:
    """Tell a run on 3 ranks that is stopped, and resumed on 2 ranks; `end`: done, running or failed."""
    told = told or Told()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECIPE).write_text(RECIPE_TEXT.format(steps=steps))
    leg(folder, told, range(stop), steps, 3, end="stopped")
    told.now += 1800
    leg(folder, told, range(stop, steps if end == "done" else steps * 9 // 10), steps, 2, end=end)
    return folder


def leg(folder: Path, told: Told, span: range, steps: int, world_size: int, *, end: str) -> None:
    """Tell a run from its start to one of its ends."""
    with ExitStack() as kept:
        kept.enter_context(patch("time.time", told))
        kept.enter_context(patch("samestep.track.ranks.Sampler", Readings))
        keep = kept.enter_context(RunFolder(folder))
        ranks = [
            kept.enter_context(RankFile(folder, rank, gpu_uuid=str(rank), clock=told))
            for rank in range(world_size)
        ]

        def say(event: Event) -> None:
            for rank in ranks:
                rank(event)
            keep(event)

        say(RunStarted(world_size=world_size, steps=steps, facts=FACTS))
        if span.start:
            say(
                Resumed(
                    step=span.start,
                    update=span.start - 2,
                    folder=f"checkpoints/step-{span.start:08}",
                    world_size_before=3,
                    broken_key={"torch": "2.13.0 became 2.13.1"},
                )
            )
        for step in span:
            told.now += 0.118
            one = report(step, steps, world_size, told.chance, seconds=0.11 + told.chance.random() / 60)
            for number, rank in enumerate(ranks):
                rank(one)
                rank(phases(step, number, told.chance))
            keep(one)
            for event in around(step):
                say(event)
        if end == "stopped":
            say(Stopping(step=span.stop, reason="SIGTERM"))
            say(saved(span.stop, "SIGTERM"))
            keep.__exit__(SystemExit, SystemExit(3), None)
        if end == "done":
            say(RunEnded(step=steps, update=steps - 2, fingerprint=FINGERPRINT))
        if end == "failed":
            keep.__exit__(RuntimeError, RuntimeError("rank 1 was lost: <signal 9>"), None)


def around(step: int) -> list[Event]:
    """Return what happens after a step of the told run."""
    found: list[Event] = []
    if step % 100 == 99:
        accuracy = 0.62 - 0.5 * math.exp(-step / 400)
        found.append(
            Evaluated(step=step, metrics={"accuracy": accuracy, "perplexity": 9 + 80 / (1 + step / 90)})
        )
    if step % 250 == 249 and step != 1499:
        found.append(saved(step + 1))
    if step == 1499:
        problem = "[Errno 28] No space left on device. 48.2 MB are needed, 1.1 MB are free."
        found.append(CheckpointFailed(step=1500, folder="checkpoints/step-00001500", problem=problem))
    if step == 1612:
        found.append(Quarantined(step=1613, ids=(10233, 481, 77120), reason="loss 41.2 is a spike"))
    if step == 40:
        found.append(Notice(level="warning", message="the models were built unlike: rank 0's is used"))
        found.append(Notice(level="info", message="micro_batch is 8, chosen by samestep"))
    return found
