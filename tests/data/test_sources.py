"""Sources on disk: token files, images in folders, rows, and files that are prepared once."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.data.build_once import prepared, prepared_tokens
from samestep.data.images import ImageFolder
from samestep.data.row_files import rows
from samestep.data.tokens import TokenFile
from samestep.errors import ConfigError, DataError


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_each_token_is_once_a_target(tmp_path, suffix):
    tokens = np.arange(1003, dtype=np.uint16)
    path = tmp_path / f"tokens{suffix}"
    np.save(path, tokens) if suffix == ".npy" else tokens.tofile(path)
    file = TokenFile(path, context=50)
    assert len(file) == 20
    assert np.concatenate([file[i][1:] for i in range(20)]).tolist() == list(range(1, 1001))
    assert all(file[i][0] == 50 * i for i in range(20))
    assert file[3].dtype == np.int64
    assert len(pickle.dumps(file)) < 1000
    assert pickle.loads(pickle.dumps(file))[19].tolist() == file[19].tolist()
    with pytest.raises(IndexError):
        file[20]


def test_files_that_hold_no_tokens(tmp_path):
    path = tmp_path / "tokens.bin"
    with pytest.raises(ConfigError, match="there is no such file"):
        TokenFile(path, context=4)
    path.write_bytes(b"\0" * 9)
    with pytest.raises(DataError, match="9 bytes, cannot be read as uint16"):
        TokenFile(path, context=4)
    path.write_bytes(b"\0" * 8)
    with pytest.raises(DataError, match="holds 4 tokens, and one sample takes 5"):
        TokenFile(path, context=4)
    np.save(tmp_path / "wide.npy", np.zeros((4, 4)))
    with pytest.raises(DataError, match=r"float64 of shape \(4, 4\)"):
        TokenFile(tmp_path / "wide.npy", context=1)


def test_images_are_listed_alike_everywhere(tmp_path):
    images = pytest.importorskip("PIL.Image")
    with pytest.raises(ConfigError, match="holds no images in folders"):
        ImageFolder(tmp_path)
    for number, name in enumerate(["dog/b.png", "cat/z.PNG", "dog/a/x.png", "cat/readme.txt"]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".txt":
            path.write_text("no image")
        else:
            images.new("RGB", (3, 2), (number, 0, 0)).save(path)
    folder = ImageFolder(tmp_path)
    assert folder.classes == ["cat", "dog"]
    assert [(int(image[0, 0, 0]), label) for image, label in folder] == [(1, 0), (2, 1), (0, 1)]
    assert folder[0][0].shape == (3, 2, 3)
    assert ImageFolder(tmp_path, transform=lambda image: image.size)[1] == ((3, 2), 1)
    (tmp_path / "cat/broken.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"broken.png cannot be read as an image"):
        ImageFolder(tmp_path)[0]


def test_rows_of_files(tmp_path):
    pytest.importorskip("datasets")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": str(i), "label": i}) + "\n" for i in range(5)))
    table = rows(path, cache=tmp_path / "cache")
    assert len(table) == 5
    assert table[3] == {"text": "3", "label": 3}


def test_rows_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match="files of one kind"):
        rows(tmp_path / "table.xlsx")
    with pytest.raises(ConfigError, match="there is no such file"):
        rows(tmp_path / "table.parquet")


def write_slowly(folder: Path, source: Path, started: Event, log: Path, pause_s: float) -> None:
    def build(file: Any) -> None:
        with log.open("a") as told:
            told.write(f"{os.getpid()}\n")
        file.write(b"half ")
        file.flush()
        started.set()
        time.sleep(pause_s)
        file.write(b"whole")

    path = prepared(folder, [source], "a test", build)
    assert path.read_bytes() == b"half whole"


@pytest.mark.timeout(60)
def test_a_file_is_built_once_by_many_and_again_after_a_kill(tmp_path):
    source, log, folder = tmp_path / "source", tmp_path / "log", tmp_path / "made"
    source.write_text("content")
    context = multiprocessing.get_context("fork")

    def start(pause_s: float) -> tuple[Any, Event]:
        started = context.Event()
        process = context.Process(target=write_slowly, args=(folder, source, started, log, pause_s))
        process.start()
        return process, started

    first, started = start(60)
    assert started.wait(20)
    others = [start(0.05)[0] for _ in range(4)]
    assert {entry.suffix for entry in folder.iterdir()} == {".part", ".lock"}
    assert not list(folder.glob("*.bin"))  # a half file has another name
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    for other in others:
        other.join(20)
        assert other.exitcode == 0
    assert len(log.read_text().splitlines()) == 2  # the one that was killed, and one that took over
    assert [entry.suffix for entry in folder.iterdir()] == [".bin"]  # nothing else is left


def test_a_prepared_file_belongs_to_contents_and_recipe(tmp_path):
    source = tmp_path / "text"
    source.write_text("abc")
    built: list[str] = []

    def tokenize(path: Path) -> Any:
        built.append(path.name)
        yield list(path.read_bytes())

    def make(recipe: str = "bytes 1") -> Path:
        return prepared_tokens(tmp_path / "made", [source], tokenize, recipe=recipe, dtype=np.uint8)

    path = make()
    assert make() == path
    assert built == ["text"]
    assert TokenFile(path, np.uint8, context=2)[0].tolist() == [97, 98, 99]
    assert make("bytes 2") != path
    source.write_text("abcd")
    assert make() != path
    assert len(built) == 3


def test_what_cannot_be_prepared(tmp_path):
    source = tmp_path / "text"
    with pytest.raises(DataError, match="text cannot be read"):
        prepared(tmp_path / "made", [source], "", lambda file: None)
    source.write_text("abc")
    with pytest.raises(DataError, match="the tokens up to 300 do not fit into uint8"):
        prepared_tokens(tmp_path / "made", [source], lambda path: [[300]], recipe="", dtype=np.uint8)
    with pytest.raises(ConfigError, match="cannot hold prepared files"):
        prepared(source, [source], "", lambda file: None)
    assert not list((tmp_path / "made").iterdir())
