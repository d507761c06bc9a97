"""Frozen, validated settings; every error names the key, its place and the nearest known key."""

from __future__ import annotations

import difflib
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from samestep.errors import ConfigError


class Settings(BaseModel):
    """The base of all settings: keyword-only, frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), strict=False)

    def __init__(self, **values: Any) -> None:
        """Raise ConfigError, in plain words, where pydantic would raise its own error."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self))) from None


def explain(error: ValidationError, settings: type[BaseModel]) -> str:
    """Turn pydantic's findings into sentences that name key, value and remedy."""
    return "\n".join(_sentence(finding, settings) for finding in error.errors())


def _sentence(finding: Any, settings: type[BaseModel]) -> str:
    place = ".".join(str(part) for part in finding["loc"])
    if finding["type"] == "extra_forbidden":
        known = _known_keys(settings, finding["loc"][:-1])
        near = difflib.get_close_matches(str(finding["loc"][-1]), known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"{settings.__name__}: unknown key {place}.{hint} Known keys: {', '.join(sorted(known))}."
    if finding["type"] == "missing":
        return f"{settings.__name__}: the key {place} is missing."
    if finding["type"] == "value_error":
        return str(finding["ctx"]["error"])
    value = finding["input"]
    return f"{settings.__name__}: {place or 'value'} is {value!r}: {finding['msg'].lower()}."


def _known_keys(settings: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    for part in path:
        field = settings.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        settings = inner
    return list(settings.model_fields)


class Batching(Settings):
    """Which samples make a step: the global batch, and the micro-batches it is cut into."""

    global_batch: int = Field(ge=1, description="samples in one step: the only number that defines it")
    micro_batch: int | None = Field(
        default=None, ge=1, description="samples in one forward and backward pass; chosen when left out"
    )
    last: Literal["keep", "drop", "wrap"] = Field(
        default="keep",
        description="the short end of an epoch: keep it as a step of its own, drop it, or fill it up "
        "from the next epoch",
    )
    shuffle: bool = Field(default=True, description="a new order in every epoch, from the seed")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise ValueError(
                f"batching.micro_batch is {self.micro_batch}, but the global batch is {self.global_batch} "
                f"samples. Lower micro_batch to {self.global_batch} or less, or leave it out and it will "
                "be chosen."
            )
        return self

    def resolved(self) -> Batching:
        """Return the same settings with a micro-batch: an eighth of the global batch, rounded up.

        The rule never looks at the number of ranks, since the micro-batch is part of the numbers. An
        eighth lets up to eight ranks share a step.
        """
        if self.micro_batch is not None:
            return self
        return self.model_copy(update={"micro_batch": -(-self.global_batch // 8)})
