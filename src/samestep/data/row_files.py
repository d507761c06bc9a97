"""Rows of JSON-lines, Parquet and CSV files, through the package `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from samestep.errors import ConfigError, DataError

_KINDS: Final = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def rows(paths: Path | str | Sequence[Path | str], *, cache: Path | str | None = None) -> Any:
    """Return the rows of files of one kind as a map-style data set; a row is a dict.

    `datasets` prepares them once, in `cache` or its own place, and maps them into memory: ranks on one host
    share the pages. Raises ConfigError where a file or the package is missing, DataError where a file does
    not hold rows.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    kinds = {_KINDS.get(_ending(path)) for path in files}
    if len(kinds) != 1 or None in kinds:
        known = ", ".join(_KINDS)
        raise ConfigError(f"rows: give files of one kind, with or without .gz: {known}; found {files}.")
    for path in files:
        if not path.is_file():
            raise ConfigError(f"rows: {path}: there is no such file.")
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise ConfigError("reading rows needs the package datasets: pip install datasets") from error
    named = [str(path.absolute()) for path in files]
    try:
        return datasets.load_dataset(
            kinds.pop(), data_files=named, split="train", cache_dir=str(cache) if cache else None
        )
    except Exception as error:
        raise DataError(f"{', '.join(named)}: cannot be read as rows: {error}") from error


def _ending(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix
