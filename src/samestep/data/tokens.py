"""Files of tokens that lie ready on disk: read through a memory map, not copied into each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from samestep.config.arguments import require_count
from samestep.errors import ConfigError, DataError


@final
class TokenFile:
    """Windows of a file of tokens: window i begins at token i x context, and has context + 1 tokens.

    So each token but the first is once a target, with the `context` tokens of its window as inputs; a short
    end is left out. Samples: int64, (context + 1,). The file is raw (`dtype`, in the byte order of the
    machine unless it says another) or .npy (one axis). Ranks and loader workers on one host share its pages.

    Raises ConfigError for a file that is not there, DataError for one that holds no such tokens.
    """

    def __init__(self, path: Path | str, dtype: npt.DTypeLike = np.uint16, *, context: int) -> None:
        require_count("context", context, least=1)
        self._path, self._dtype, self._context = Path(path).absolute(), np.dtype(dtype), context
        if not self._path.is_file():
            raise ConfigError(f"{self._path}: there is no such file of tokens.")
        self._tokens: npt.NDArray[Any] | None = None
        count = len(self._open())
        self._length = (count - 1) // context
        if self._length < 1:
            raise DataError(
                f"{self._path} holds {count} tokens, and one sample takes {context + 1}: context and one "
                "more. Give a longer file or a smaller context."
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        begin = index * self._context
        return self._open()[begin : begin + self._context + 1].astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the map behind: each process makes its own."""
        return {**self.__dict__, "_tokens": None}

    def _open(self) -> npt.NDArray[Any]:
        if self._tokens is None:
            self._tokens = self._map()
            if self._tokens.ndim != 1 or self._tokens.dtype.kind not in "iu":
                raise DataError(
                    f"{self._path} holds {self._tokens.dtype} of shape {self._tokens.shape}. A file of "
                    "tokens has whole numbers along one axis."
                )
        return self._tokens

    def _map(self) -> npt.NDArray[Any]:
        try:
            if self._path.suffix == ".npy":
                mapped: npt.NDArray[Any] = np.load(self._path, mmap_mode="r")
                return mapped
            return np.memmap(self._path, dtype=self._dtype, mode="r")
        except (OSError, ValueError) as error:
            found = f"{self._path}, {self._path.stat().st_size} bytes,"
            raise DataError(f"{found} cannot be read as {self._dtype}: {error}.") from error
