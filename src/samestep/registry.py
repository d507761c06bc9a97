"""Names of tasks: the ones that come with samestep, those of installed packages, and dotted paths."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Final

from samestep.config import nearest
from samestep.errors import ConfigError

GROUP: Final = "samestep.tasks"
BUILT_IN: Final[Mapping[str, str]] = MappingProxyType({"lm": "samestep.tasks.lm:LanguageModel"})


def task_names() -> dict[str, str]:
    """Return every registered name with the place of its class, "package.module:Class".

    Another package registers a task as an entry point of the group "samestep.tasks". A name that comes
    with samestep cannot be taken over. Raises ConfigError where two packages claim one name.
    """
    names = dict(BUILT_IN)
    for entry in entry_points(group=GROUP):
        if names.setdefault(entry.name, entry.value) != entry.value:
            raise ConfigError(
                f"the task {entry.name} is registered twice: {names[entry.name]} and {entry.value}. "
                "Remove one of the packages, or give the dotted path of the class."
            )
    return names


def find_task(name: str) -> type[object]:
    """Return the class of a task by its registered name or dotted path.

    Only the module of that class is imported. Raises ConfigError, which names the nearest known task.
    """
    names = task_names()
    if name in names:
        return _class_at(names[name], name)
    if "." not in name and ":" not in name:
        known = ", ".join(sorted(names))
        raise ConfigError(
            f"task is {name!r}.{nearest(name, names)} Known: {known}; or a class, by its dotted path."
        )
    return _class_at(name, name)


def _class_at(place: str, name: str) -> type[object]:
    module_name, _, class_name = place.rpartition(":" if ":" in place else ".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"task is {name!r}, but there is no module {error.name}. It is looked for beside "
            "the recipe and among the installed packages."
        ) from None
    found = vars(module).get(class_name)
    if not isinstance(found, type):
        known = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(
            f"task is {name!r}, but {module_name} has no class {class_name}.{nearest(class_name, known)}"
        )
    return found
