"""A tracker that fails is switched off with one warning: training goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeAlias, final

from samestep.errors import ConfigError

Warn: TypeAlias = Callable[[str], None]


def require(extra: str, *modules: str) -> None:
    """Raise ConfigError, which names the remedy, where a module of an optional extra is not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"track names {extra}, but {', '.join(missing)} is not installed. Run "
            f"`pip install 'samestep[{extra}]'`, or leave {extra} out."
        )


@final
class Guard:
    """Run what a tracker does, until it fails for the first time.

    Decision: no error of a tracker ends or slows the run, and none is told twice. The rest of the run is not
    tracked there; the run folder holds all of it.
    """

    def __init__(self, name: str, warn: Warn | None = None) -> None:
        self._name = name
        self._warn = warn or to_stderr
        self.off = False

    def run(self, action: Callable[[], None]) -> None:
        """Run an action, or nothing once one has failed."""
        if self.off:
            return
        try:
            action()
        except Exception as error:
            self.switch_off(f"{type(error).__name__}: {error}")

    def switch_off(self, reason: str) -> None:
        """Warn, once, and run nothing any more."""
        if not self.off:
            self.off = True
            self._warn(f"{self._name} is off for the rest of the run: {reason}. The run folder holds all.")


def to_stderr(message: str) -> None:
    """Print a warning where no listener of the run's own can be told."""
    sys.stderr.write(f"samestep: warning: {message}\n")
