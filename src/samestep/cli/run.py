"""`samestep run`: a user's script on N ranks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.options import GRACE_S, Grace
from samestep.errors import ConfigError
from samestep.processes.child import recording_failures, run_script, script_command
from samestep.processes.supervise import run_ranks
from samestep.topology.devices import num_devices
from samestep.topology.environment import Environment

# Everything after the script is the script's, options too.
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def run(
    script: Annotated[str, typer.Argument(help="The Python file to run.", show_default=False)],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of ranks.", show_default="all devices of this machine")
    ] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Show the output of every rank, not of the first alone.")
    ] = False,
    grace: Grace = GRACE_S,
) -> None:
    """Run a script on N ranks of this machine; under another launcher, as the rank that it made."""
    if not Path(script).is_file():
        raise ConfigError(f"There is no script {script!r} (looked in {Path.cwd()}).")
    place = Environment.current().place()
    if place.launcher != "none":
        with recording_failures():
            run_script(script, args or [])
        return
    count = num_devices() if workers is None else workers
    command = script_command(script, args or [])
    raise SystemExit(run_ranks(command, count, all_ranks=all_ranks, stop_grace_s=grace))
