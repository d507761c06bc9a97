"""Images in folders, one folder for each class."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch

from samestep.errors import ConfigError, DataError

ENDINGS: Final = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@final
class ImageFolder:
    """The images below a folder; the folders in it are the classes, in the order of their names.

    Samples: (image, class number), the image as uint8 of shape (3, height, width), or what `transform` makes
    of the opened RGB image. The listing is sorted by path, so it is the same on every machine. Needs Pillow.

    Raises ConfigError where there is no such folder, no class or no image.
    """

    def __init__(self, root: Path | str, transform: Callable[[Any], Any] | None = None) -> None:
        self._root = Path(root)
        self._transform = transform
        if not self._root.is_dir():
            raise ConfigError(f"{self._root}: there is no such folder of images.")
        _pillow()
        self.classes = sorted(entry.name for entry in self._root.iterdir() if entry.is_dir())
        self._files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted(
                (file for file in (self._root / name).rglob("*") if file.suffix.lower() in ENDINGS),
                key=lambda file: file.as_posix(),
            )
        ]
        if not self._files:
            raise ConfigError(
                f"{self._root} holds no images in folders. Expected: a folder for each class, with files "
                f"that end in {', '.join(ENDINGS)}."
            )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self._files[index]
        try:
            with _pillow().open(path) as image:
                rgb = image.convert("RGB")
        except OSError as error:
            raise DataError(f"{path} cannot be read as an image: {error}") from error
        if self._transform is not None:
            return self._transform(rgb), label
        return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous(), label


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError("reading images needs Pillow: pip install pillow") from error
