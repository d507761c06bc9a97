"""The task `lm`: a language model over bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, ClassVar, Literal, Self, cast, final

from pydantic import Field, model_validator

from samestep.config import Settings
from samestep.data.build_once import prepared
from samestep.errors import ConfigError
from samestep.tasks.text import FORMATS, ByteWindows, format_of, read_text

if TYPE_CHECKING:  # see Note [no torch before the ranks]
    from torch import Tensor, nn

    from samestep.loop.weighted import Weighted


class GptSettings(Settings):
    """The shape of a GPT over bytes."""

    layers: int = Field(default=4, ge=1, description="blocks of attention and MLP")
    width: int = Field(default=128, ge=1, description="elements of the vector of one byte")
    heads: int = Field(default=4, ge=1, description="attention heads; they divide the width")
    context: int = Field(default=128, ge=1, description="bytes that the model sees at most")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="share dropped in training")
    tied: bool = Field(default=True, description="one matrix as embedding and as output")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"model.width is {self.width}, which {self.heads} heads do not divide. "
                f"Set model.width to {self.width // self.heads * self.heads or self.heads}, for example."
            )
        return self


class TextSettings(Settings):
    """The text a model learns from."""

    text: Path = Field(description=f"a file: {', '.join(FORMATS)} (JSON lines: the key text)")
    tokenizer: Literal["bytes"] = Field(default="bytes", description="how text becomes numbers")
    cache: Path | None = Field(
        default=None, description="a folder for the text made into bytes: made once, shared by ranks and runs"
    )
    prompt: str = Field(default="\n", min_length=1, description="what the sample at the end begins with")
    sample: int = Field(default=200, ge=0, description="bytes of the sample at the end; 0: none")
    temperature: float = Field(default=0.7, ge=0, description="of the sample; 0: always the likeliest byte")


def _write_text(text: Path, file: BinaryIO) -> None:
    file.write(read_text(text))


@final
class LanguageModel:
    """Predict each byte of a text from those before it. Every byte counts 1."""

    model_settings: ClassVar = GptSettings
    data_settings: ClassVar = TextSettings

    def __init__(self, model: GptSettings, data: TextSettings) -> None:
        if not data.text.is_file():
            raise ConfigError(f"data.text is {data.text}: there is no such file.")
        if format_of(data.text) is None:
            raise ConfigError(f"data.text is {data.text}: known are files that end in {', '.join(FORMATS)}.")
        self._model = model
        self._data = data

    def tokens_per_sample(self) -> int:
        """Return the bytes that a sample has as targets."""
        return self._model.context

    def build_model(self) -> nn.Module:
        """Return a GPT in float32."""
        from samestep.tasks.gpt import Gpt

        return Gpt(**self._model.model_dump())

    def build_dataset(self) -> ByteWindows:
        """Return windows of context + 1 bytes: inputs and, one further, targets."""
        text, length = self._data.text, self._model.context + 1
        if self._data.cache is None:
            return ByteWindows(read_text(text), length)
        recipe = f"UTF-8 bytes, version 1, of {format_of(text)}"
        path = prepared(self._data.cache, [text], recipe, lambda file: _write_text(text, file))
        return ByteWindows(path, length)

    def loss(self, model: nn.Module, batch: object) -> Weighted:
        """Return the cross-entropy of every next byte, in nats. Batch: uint8, (samples, context + 1)."""
        from samestep.loop.weighted import weighted
        from samestep.tasks.gpt import next_byte_losses

        return weighted(next_byte_losses(model, cast("Tensor", batch)))

    def describe(self, model: nn.Module) -> str:
        """Return a text that the model wrote; the same weights write the same text."""
        if not self._data.sample:
            return ""
        from samestep.tasks.gpt import write

        text = write(
            model,
            self._data.prompt.encode(),
            self._data.sample,
            context=self._model.context,
            temperature=self._data.temperature,
        )
        # A model that has learnt little writes control characters too, and terminals obey them.
        return "".join(
            c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in text.decode(errors="replace")
        )
