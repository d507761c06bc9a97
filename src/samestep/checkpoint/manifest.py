"""The manifest of a checkpoint: what was stored where, and all of the state that is no tensor.

Note [names of tensors]: `model/NAME` are parameters and buffers under the model's own names, `beside/NAME`
parameters that only the optimizer knows, `master/NAME` the float32 copies of 16-bit parameters,
`optimizer/NAME/KEY` what the optimizer keeps for a parameter, `ema/NAME` the moving averages. A tensor is
stored as one or more pieces: runs of its elements in the order in which they lie in memory (`stride`, where
that is not row by row), complex numbers as two real ones. So the content does not depend on who wrote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from samestep.checkpoint.tensor_file import DTYPES, Written
from samestep.errors import CheckpointError

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of the state: what it is, and in which runs of elements it was stored."""

    dtype: str  # as the safetensors format names it; real
    shape: tuple[int, ...]  # logical; of a complex tensor its own, not that of the pairs
    stride: tuple[int, ...] | None = None  # where not row-major
    is_complex: bool = False
    on_cpu: bool = False  # of a run on another device
    pieces: tuple[tuple[str, int, int], ...] = ()  # file, first real element, the one after the last

    @property
    def numel(self) -> int:
        """Real elements in all."""
        count = 2 if self.is_complex else 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that is known of a checkpoint without opening its tensor files."""

    step: int
    update: int
    world_size: int
    digest: str  # 16 hex digits over parameters and buffers, as in the ledger
    numerics_key: dict[str, str | int]
    versions: dict[str, str]
    state: dict[str, Any]  # JSON: position in the data, loss scale, schedule, averages, callbacks
    metrics: dict[str, float]
    order: tuple[str, ...]  # all names of the model's parameters and buffers, in its order
    aliases: dict[str, str]  # name -> the name that holds its tensor
    tensors: dict[str, TensorEntry]
    values: dict[str, Any] = field(default_factory=dict)  # `optimizer/NAME/KEY` where it is no tensor
    files: dict[str, Written] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of all tensor files."""
        return sum(written.num_bytes for written in self.files.values())

    def text(self) -> str:
        """Return the manifest as JSON, with a hash over its own content."""
        # Hashed as it will be read: JSON makes keys of numbers into words, which sort otherwise.
        content: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        content["hash"] = _hash(content)
        return json.dumps(content, indent=1)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a checkpoint folder. Raises CheckpointError for any that cannot be trusted."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder}: there is no {MANIFEST}: this is no checkpoint, or one that was not finished."
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise CheckpointError(f"{path}: damaged, no JSON: {error}.") from None
        if not isinstance(content, dict) or not isinstance(content.get("format"), int):
            raise CheckpointError(f"{path}: this is no manifest of samestep's.")
        if content["format"] != FORMAT:
            age = "a newer" if content["format"] > FORMAT else "an older"
            versions = content.get("versions")
            writer = versions.get("samestep") if isinstance(versions, dict) else None
            raise CheckpointError(
                f"{path}: format {content['format']}, written by {age} version of samestep "
                f"({writer or 'unknown'}); this one reads {FORMAT}. Read it with that version."
            )
        if content.pop("hash", None) != _hash(content):
            raise CheckpointError(
                f"{path}: the manifest does not match its own hash: it was changed or damaged."
            )
        return cls._made_from(content, path)

    @classmethod
    def _made_from(cls, content: dict[str, Any], path: Path) -> Self:
        try:
            del content["format"]
            tensors = {name: _entry(values) for name, values in content.pop("tensors").items()}
            files = {name: Written(**values) for name, values in content.pop("files").items()}
            if strangers := [name for name in files if Path(name).name != name]:
                raise ValueError(f"{strangers[0]!r} is no file of this folder")
            return cls(**content | {"order": tuple(content["order"])}, tensors=tensors, files=files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: the manifest is not as it should be: {error}.") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """What one rank tells of the file that it wrote."""

    file: str
    written: Written
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """Return what `text` told."""
        content = json.loads(text)
        return cls(
            file=content["file"],
            written=Written(**content["written"]),
            tensors={name: _entry(values) for name, values in content["tensors"].items()},
            values=content["values"],
        )


def join_entries(told: Sequence[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Join what all ranks stored of each tensor. Raises CheckpointError where elements are missing."""
    pieces: dict[str, list[tuple[str, int, int]]] = {}
    entries: dict[str, TensorEntry] = {}
    for part in told:
        for name, entry in part.items():
            pieces.setdefault(name, []).extend(entry.pieces)
            entries.setdefault(name, entry)
    joined: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        runs = tuple(sorted(pieces[name], key=lambda piece: piece[1:]))
        covered = 0
        for _, start, stop in runs:
            if start != covered:
                break
            covered = stop
        if covered != entry.numel:
            raise CheckpointError(f"{name}: only {covered} of {entry.numel} elements were stored in a row.")
        joined[name] = replace(entry, pieces=runs)
    return joined


def _entry(values: dict[str, Any]) -> TensorEntry:
    if values["dtype"] not in DTYPES:
        raise ValueError(f"unknown dtype {values['dtype']}")
    stride = values["stride"]
    return TensorEntry(
        dtype=values["dtype"],
        shape=tuple(values["shape"]),
        stride=None if stride is None else tuple(stride),
        is_complex=values["is_complex"],
        on_cpu=values["on_cpu"],
        pieces=tuple((file, start, stop) for file, start, stop in values["pieces"]),
    )


def _hash(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
