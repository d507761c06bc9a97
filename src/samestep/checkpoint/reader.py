"""Reading a checkpoint: any run of elements of any tensor, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from samestep.checkpoint.manifest import Manifest, TensorEntry
from samestep.checkpoint.snapshot import row_major
from samestep.checkpoint.tensor_file import DTYPES, hash_file
from samestep.errors import CheckpointError


@final
class StoredCheckpoint:
    """One checkpoint that is open for reading. Nothing in it is executed: tensors and JSON only."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest. Raises CheckpointError where it cannot be trusted."""
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._open: dict[str, Any] = {}
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._open = {}
        self._resources.close()

    def require_whole(self, files: Iterable[str]) -> None:
        """Read these files through. Raises CheckpointError where one is not what was written."""
        for file in files:
            path, expected = self.folder / file, self.manifest.files[file]
            try:
                found = hash_file(path)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None
            if found.num_bytes != expected.num_bytes:
                raise CheckpointError(
                    f"{path}: damaged: {found.num_bytes} bytes, but {expected.num_bytes} were written."
                )
            if found != expected:
                raise CheckpointError(
                    f"{path}: damaged: its content does not match the hash in the manifest."
                )

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.tensors

    def entry(self, name: str) -> TensorEntry:
        """Return what is known of a tensor. Raises CheckpointError where there is none of this name."""
        found = self.manifest.tensors.get(name)
        if found is None:
            raise CheckpointError(f"{self.folder}: holds no {name}.")
        return found

    def run(self, name: str, start: int, stop: int) -> Tensor:
        """Return real elements of a tensor, in the order in which it lay in memory: 1-D, on the CPU."""
        entry = self.entry(name)
        out = torch.empty(stop - start, dtype=DTYPES[entry.dtype])
        for file, first, last in entry.pieces:
            low, high = max(start, first), min(stop, last)
            if low < high:
                stored = self._file(file).get_slice(f"{name}@{first}")
                out[low - start : high - start] = stored[low - first : high - first]
        return out

    def whole(self, name: str) -> Tensor:
        """Return a tensor in its own shape, on the CPU, with its first memory order."""
        entry = self.entry(name)
        flat = self.run(name, 0, entry.numel)
        if entry.is_complex:
            flat = torch.view_as_complex(flat.view(-1, 2))
        return flat.as_strided(entry.shape, entry.stride or row_major(entry.shape))

    def model_state(self) -> dict[str, Tensor]:
        """Return the model's tensors under all of their names, in its order; tied ones are one object."""
        first: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name in self.manifest.order:
            source = self.manifest.aliases.get(name, name)
            if source not in first:
                first[source] = self.whole(f"model/{source}")
            state[name] = first[source]
        return state

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            try:
                handle = self._resources.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}.") from None
            self._open[name] = handle
        return self._open[name]
