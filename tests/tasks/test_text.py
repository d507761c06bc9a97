"""Text is read from each of its formats, and cut without loss or overlap."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import DataError
from samestep.tasks.text import ByteWindows, format_of, read_text

LINES = "\n".join(json.dumps({"text": text, "title": "t"}) for text in ("Ab é", "c\u2028d")) + "\n\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "é\nb", "é\nb"),
        ("a.txt.gz", "é\nb", "é\nb"),
        ("a.jsonl", LINES, "Ab é\nc\u2028d"),
        ("a.b.jsonl.gz", LINES, "Ab é\nc\u2028d"),
    ],
)
def test_every_format_is_read(tmp_path: Path, name: str, content: str, expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    assert format_of(path) == name[1:].removeprefix(".b")
    assert read_text(path) == expected.encode()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"text": "a"}\n{', "line 2: this is not JSON"),
        ("a.jsonl", b"[1]", "line 1: expected an object with a string under the key text"),
        ("a.jsonl", b'\n{"txt": "a"}', "line 2: expected an object"),
        ("a.txt.gz", b"no gzip", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"abc" * 100, mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=expected):
        read_text(tmp_path / name)


@given(st.binary(min_size=1, max_size=200), st.integers(min_value=1, max_value=20))
def test_windows_cover_the_text_once_and_in_order(content: bytes, length: int) -> None:
    if len(content) < length:
        with pytest.raises(DataError, match="Give a longer text"):
            ByteWindows(content, length)
        return
    windows = ByteWindows(content, length)
    assert len(windows) == len(content) // length
    assert b"".join(windows[i].tobytes() for i in range(len(windows))) == content[: len(windows) * length]
    assert all(windows[i].dtype == np.uint8 and windows[i].shape == (length,) for i in range(len(windows)))


def test_a_format_that_is_not_known_has_no_name() -> None:
    assert format_of(Path("a.pdf")) is None
