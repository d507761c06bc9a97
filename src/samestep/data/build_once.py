"""Files that are made once, by whichever process comes first, and used by all.

Note [one builder]: a lock that the system takes back when its holder dies stands for the right to build. The
builder writes under a name of its own and renames at the end, so that the file is there whole or not at all;
when the builder is killed, another process gets the lock and starts anew. Where a file system has no locks,
each process builds, and the last rename wins: the contents are the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from samestep.errors import ConfigError, DataError

_CHUNK: Final = 1 << 20  # bytes


def prepared(
    folder: Path | str, sources: Iterable[Path | str], recipe: str, build: Callable[[BinaryIO], None]
) -> Path:
    """Return the file that `build` writes, made once for these contents of the sources and this recipe.

    Safe with any number of processes at once, and with the builder killed at any moment: a file that is
    there is whole. Its name holds a hash over the contents of the sources and over `recipe`, which names
    whatever else decides on the contents. Raises ConfigError for a folder that cannot be used, DataError for
    a source that cannot be read; what `build` raises comes through.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{place} cannot hold prepared files: {error}.") from error
    path = place / f"{hash_of(sources, recipe)}.bin"
    if path.exists():
        return path
    with _right_to_build(path.with_suffix(".lock")):
        if not path.exists():
            _build(path, build)
    return path


def prepared_tokens(
    folder: Path | str,
    sources: Iterable[Path | str],
    tokenize: Callable[[Path], Iterable[npt.ArrayLike]],
    *,
    recipe: str,
    dtype: npt.DTypeLike = np.uint16,
) -> Path:
    """Return a raw file of tokens for TokenFile, made once: see `prepared`.

    `tokenize(path)` yields runs of tokens of one source; `recipe` names the tokenizer and its version.
    Raises DataError for a token that `dtype` does not hold.
    """
    files, kind = [Path(source) for source in sources], np.dtype(dtype)

    def build(file: BinaryIO) -> None:
        for source in files:
            for tokens in tokenize(source):
                run = np.asarray(tokens)
                if run.size and not np.array_equal(run.astype(kind), run):
                    raise DataError(f"{source}: the tokens up to {run.max()} do not fit into {kind}.")
                file.write(run.astype(kind).tobytes())

    return prepared(folder, files, f"tokens {kind.str} {recipe}", build)


def hash_of(sources: Iterable[Path | str], recipe: str) -> str:
    """Return 32 hex digits over the contents of files and over a recipe."""
    hashed = hashlib.blake2b(recipe.encode(), digest_size=16)
    for source in sources:
        content = hashlib.blake2b()
        try:
            with Path(source).open("rb") as file:
                while chunk := file.read(_CHUNK):
                    content.update(chunk)
        except OSError as error:
            raise DataError(f"{source} cannot be read: {error}.") from error
        hashed.update(content.digest())
    return hashed.hexdigest()


def _build(path: Path, build: Callable[[BinaryIO], None]) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            build(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} could not be prepared: {error}. Make room, or name another folder."
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _right_to_build(lock: Path) -> Iterator[None]:
    """Hold the lock inside the block; see Note [one builder]."""
    import fcntl  # not there on Windows

    while True:
        with lock.open("wb") as file:
            has_locks = False
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
                has_locks = True
            if not _is_at(lock, file):  # the holder before took it away
                continue
            for left in lock.parent.glob(f"{lock.stem}.*.part") if has_locks else ():  # of killed builders
                left.unlink(missing_ok=True)
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(file.fileno())
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)
