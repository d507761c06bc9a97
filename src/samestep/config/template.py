"""A recipe to start from, made from the descriptions of its keys."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from samestep.config.recipe import Recipe
from samestep.config.settings import Settings

_COLUMN: Final = 44  # where explanations begin
# What a newcomer would begin with, where a key has no default, or one that says little.
_EXAMPLES: Final[Mapping[str, str]] = {
    "global_batch": "32",
    "optimizer": "{name: adamw, lr: 3.0e-4, weight_decay: 0.1}",
    "steps": "200",
    "text": "PATH/TO/TEXT.txt",
}
_NO_VALUE: Final = "VALUE"


def recipe_template(task: str, model: type[Settings], data: type[Settings]) -> str:
    """Return a commented recipe for a task.

    Keys that a run needs stand as keys, the others as comments with their defaults: without its `# ` such a
    line is a part of the recipe.
    """
    lines = [
        f"# A recipe of the task {task}. A key behind a # has the value shown, unless you set it.",
        "# See the plan:  samestep train THIS_FILE --dry-run",
        "# Train:         samestep train THIS_FILE",
        "",
    ]
    sections = {"model": model, "data": data}
    for name, field in Recipe.model_fields.items():
        if name == "task":
            lines.append(_line("", "task", task, field))
        elif name in sections:
            lines += _section("", name, sections[name], field)
        else:
            lines += _key("", name, field)
    return "\n".join([*lines, ""])


def _key(indent: str, name: str, field: FieldInfo, *, is_set: bool = True) -> Iterator[str]:
    inner = _settings_of(field.annotation)
    if name in _EXAMPLES and is_set:
        yield _line(indent, name, _EXAMPLES[name], field)
    elif len(inner) == 1:
        yield from _section(indent, name, inner[0], field)
    else:
        is_set = is_set and field.is_required()
        yield _line(indent if is_set else f"# {indent}", name, _default(field), field)


def _section(indent: str, name: str, settings: type[BaseModel], about: FieldInfo) -> Iterator[str]:
    """Yield a section: as comments all through where none of its keys is needed."""
    needed = any(field.is_required() for field in settings.model_fields.values())
    yield _line(indent if needed else f"# {indent}", name, "", about)
    for key, field in settings.model_fields.items():
        yield from _key(f"{indent}  ", key, field, is_set=needed)


def _line(indent: str, name: str, value: str, field: FieldInfo) -> str:
    about = " ".join((field.description or "").split())
    return f"{indent}{name}: {value}".rstrip().ljust(_COLUMN - 1) + f" # {about}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return _NO_VALUE
    value: Any = field.get_default(call_default_factory=True)
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000)
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    return json.dumps(value) if "\n" in text else text


def _settings_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the kinds of settings that a key may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _settings_of(part)]
    return []
