"""Environment variables as values and numbers; empty ones count as not set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from samestep.errors import ConfigError


@final
class Variables:
    """A frozen copy of environment variables."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.all = dict(variables)

    def value(self, name: str | None) -> str | None:
        """Return the value of a variable, or None where it is not set or empty."""
        return (self.all.get(name, "").strip() or None) if name else None

    def found(self, names: Iterable[str | None]) -> list[str]:
        """Return those of the names that are set, in their order."""
        return [name for name in names if name and self.value(name)]

    def told(self, names: Iterable[str | None]) -> str:
        """Write those of the variables that are set as "NAME=value, ..."."""
        return ", ".join(f"{name}={self.value(name)}" for name in self.found(names))

    def number(self, name: str | None) -> int | None:
        """Return the whole number that a variable holds, or None where it is not set.

        Raises ConfigError for anything but decimal digits.
        """
        value = self.value(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal()):
            raise ConfigError(
                f"{name} is {value!r}; it must be a whole number, 0 or more. Correct or unset it."
            )
        return int(value)

    def port(self, name: str) -> int | None:
        """Return the port that a variable holds, or None where it is not set."""
        port = self.number(name)
        if port is not None and not 0 < port < 65536:
            raise ConfigError(f"{name} is {port}; a port is between 1 and 65535.")
        return port
