"""The console script."""

from __future__ import annotations

import sys

from samestep.errors import ConfigError, SamestepError


def main() -> None:
    """Run the command line; errors that explain themselves end with one message.

    Exit codes: 2 for wrong settings, 1 for any other.
    """
    try:
        # Imported here, so that a Ctrl-C during the imports ends as quietly as a later one.
        from samestep.cli.app import app

        app()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    except SamestepError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(1) from None
