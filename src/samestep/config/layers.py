"""One recipe out of its layers: defaults, then the file, then `--set`, then the options of the command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.config.plain_yaml import parse_yaml, read_yaml
from samestep.config.recipe import Recipe
from samestep.errors import ConfigError


def load_recipe(
    path: Path, assignments: Sequence[str] = (), *, steps: int | None = None, workers: int | None = None
) -> Recipe:
    """Return the recipe in the file `path`, under `assignments` ("key.path=value") and options.

    Law: a later layer replaces the value of an earlier one, key by key. `steps` also replaces `epochs`.
    Raises ConfigError, which names the file, the key and its nearest known one.
    """
    values = read_yaml(path)
    for assignment in assignments:
        assign(values, assignment)
    if steps is not None:
        values = {key: value for key, value in values.items() if key != "epochs"} | {"steps": steps}
    if workers is not None:
        values["workers"] = workers
    source = " ".join([str(path), *(f"--set {assignment}" for assignment in assignments)])
    recipe = Recipe.read(values, source=source)
    return recipe.anchored(path.absolute().parent)


def assign(values: dict[str, Any], assignment: str) -> None:
    """Put the value of "key.path=value", read as YAML, at its place in `values`.

    >>> values = {"optimizer": {"name": "adamw", "lr": 0.1}}
    >>> assign(values, "optimizer.lr=3e-4")
    >>> values
    {'optimizer': {'name': 'adamw', 'lr': 0.0003}}
    """
    key, found, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not found or not all(parts):
        raise ConfigError(f"--set {assignment}: expected key.path=value, such as optimizer.lr=3e-4.")
    for depth, part in enumerate(parts[:-1], start=1):
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            place = ".".join(parts[:depth])
            raise ConfigError(f"--set {assignment}: {place} is {inner!r} and has no key {parts[depth]}.")
        values = inner
    values[parts[-1]] = parse_yaml(text, f"--set {assignment}")
