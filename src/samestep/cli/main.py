"""The console script."""

from __future__ import annotations

import sys

from samestep.errors import ConfigError


def main() -> None:
    """Run the command line; wrong settings end with one message and exit code 2."""
    try:
        # Imported here, so that a Ctrl-C during the imports ends as quietly as a later one.
        from samestep.cli.app import app

        app()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(1) from None
