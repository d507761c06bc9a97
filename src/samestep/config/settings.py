"""The base of all settings: frozen, validated, and plain in what it says about a wrong key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from samestep.errors import ConfigError


class Settings(BaseModel):
    """The base of all settings: keyword-only, frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), strict=False)

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        """Raise ConfigError, in plain words, where pydantic would raise its own error."""
        if unnamed:
            kind, known = type(self).__name__, list(type(self).model_fields)
            raise ConfigError(
                f"{kind} was given {unnamed[0]!r} without a name. Write "
                f"{kind}({known[0]}={unnamed[0]!r}, ...); known keys: {', '.join(known)}."
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self))) from None

    # Without this mark pydantic would call the constructor above for settings inside settings too, and
    # the ConfigError of the inner one would leave without the place of its key.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def read(cls, values: Mapping[str, object], *, source: str, place: Sequence[str] = ()) -> Self:
        """Make settings from what stands at `place` in `source`; a ConfigError names both."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(explain(error, cls, source=source, place=place)) from None

    def anchored(self, folder: Path) -> Self:
        """Return the same settings, with relative paths among their values taken as relative to `folder`."""
        paths = {name: value for name, value in self if isinstance(value, Path)}
        return self.model_copy(update={name: folder / path.expanduser() for name, path in paths.items()})


def explain(
    error: ValidationError,
    settings: type[BaseModel],
    *,
    source: str | None = None,
    place: Sequence[str] = (),
) -> str:
    """Turn pydantic's findings into sentences that name source, key, value and remedy."""
    return "\n".join(_sentence(finding, settings, source, place) for finding in error.errors())


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean X?" for the known word closest to `word`, or nothing where none is close."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _sentence(finding: Any, settings: type[BaseModel], source: str | None, place: Sequence[str]) -> str:
    keys, models = _walk(settings, finding["loc"])
    key = ".".join([*place, *keys])
    title = source or settings.__name__
    kind, value = finding["type"], finding["input"]
    if kind == "extra_forbidden":
        known = sorted({name for model in models for name in model.model_fields})
        hint = nearest(keys[-1], known)
        return f"{title}: unknown key {key}.{hint} Known keys: {', '.join(known)}."
    if kind == "missing":
        return f"{title}: the key {key} is missing."
    if kind == "value_error":
        problem = str(finding["ctx"]["error"])
        return f"{source}: {problem}" if source else problem
    if kind in ("union_tag_invalid", "union_tag_not_found", "literal_error"):
        known = _choices(models, finding)
        name = f"{key}.name" if kind == "union_tag_invalid" else key
        if kind == "union_tag_not_found":
            return f"{title}: the key {key}.name is missing. Known names: {', '.join(known)}."
        word = finding["ctx"]["tag"] if kind == "union_tag_invalid" else value
        return f"{title}: {name} is {word!r}.{nearest(str(word), known)} Known values: {', '.join(known)}."
    return f"{title}: {key or 'value'} is {value!r}: {finding['msg'].lower()}."


def _choices(models: Sequence[type[BaseModel]], finding: Any) -> list[str]:
    if finding["type"] != "literal_error":
        return [tag for model in models for tag in _tags(model)]
    return [part.strip().strip("'") for part in finding["ctx"]["expected"].replace(" or ", ", ").split(",")]


def _walk(settings: type[BaseModel], path: Sequence[str | int]) -> tuple[list[str], list[type[BaseModel]]]:
    """Follow pydantic's path of a finding; return the user's keys on it and the models at its end.

    Pydantic puts the tag of a union between the keys ("optimizer.adamw.lr"); no user wrote it there.
    For a key that is unknown, the models are those that do not know it.
    """
    keys: list[str] = []
    models = [settings]
    for part in path:
        tagged = [model for model in models if part in _tags(model)]
        if len(models) > 1 and tagged:
            models = tagged
            continue
        keys.append(str(part))
        fields = [model.model_fields[str(part)] for model in models if str(part) in model.model_fields]
        models = [model for field in fields for model in _models_of(field)] or models
    return keys, models


def _models_of(field: FieldInfo) -> Iterator[type[BaseModel]]:
    pending: list[Any] = [field.annotation]
    while pending:
        annotation = pending.pop(0)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        pending.extend(get_args(annotation))


def _tags(model: type[BaseModel]) -> tuple[str, ...]:
    field = model.model_fields.get("name")
    return get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
