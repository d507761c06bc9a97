"""The commands: one a file, registered here."""

from __future__ import annotations

import typer

from samestep.cli import compare, doctor, export, init, report, run, train, verify

app = typer.Typer(
    name="samestep",
    help="Train PyTorch models on any number of devices, and end in the same bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback is for the user's own tools to read
)
app.command()(init.init)
app.command()(train.train)
app.command(context_settings=run.CONTEXT)(run.run)
app.command()(verify.verify)
app.command()(compare.compare)
app.command()(doctor.doctor)
app.command()(report.report)
app.command()(export.export)
