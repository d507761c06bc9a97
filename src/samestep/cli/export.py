"""`samestep export`: the weights of a run as one file that other programs load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="A run folder, whose newest checkpoint is taken, or a checkpoint.",
            show_default=False,
        ),
    ],
    to: Annotated[Path, typer.Option(help="The safetensors file to write.", show_default=False)],
    ema: Annotated[bool, typer.Option("--ema", help="Write the averaged weights.")] = False,
    step: Annotated[
        int | None, typer.Option(help="Of the run's checkpoint after this step.", show_default="the newest")
    ] = None,
) -> None:
    """Write a run's weights under the model's own names, for plain torch and transformers."""
    # Only here, so that `samestep --help` does not wait for torch.
    from samestep.checkpoint.weights import export_weights

    found = export_weights(source, to, ema=ema, step=step)
    print(f"{to}: the {'averaged ' if ema else ''}weights of {found}")
