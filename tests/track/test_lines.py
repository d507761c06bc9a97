"""Files of JSON lines: written whole, read in pieces, damaged ones passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.track import lines
from samestep.track.lines import LineReader, LineWriter, cut_torn_line


def read(reader: LineReader) -> list[dict[str, Any]]:
    return [values for _, values in reader.read()]


def test_lines_are_read_once_and_a_torn_one_waits(tmp_path: Path) -> None:
    path = tmp_path / "l"
    reader = LineReader(path)
    assert read(reader) == []
    path.write_bytes(b'{"a": 1}\n{"a"')
    assert read(reader) == [{"a": 1}]
    assert read(reader) == []
    with path.open("ab") as file:
        file.write(b': 2}\n{"a":3}\n')
    assert list(reader.read()) == [(b'{"a": 2}', {"a": 2}), (b'{"a":3}', {"a": 3})]
    assert reader.damaged == 0


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    (tmp_path / "l").write_bytes(b'{"a": 1}\n{"a"{"a": 2}\n[1]\n\xff\n{"a": 3}\n')
    reader = LineReader(tmp_path / "l")
    assert read(reader) == [{"a": 1}, {"a": 3}]
    assert reader.damaged == 3


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "l"
    reader = LineReader(path)
    assert not reader.begun_anew()
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n')
    assert len(read(reader)) == 2
    assert not reader.begun_anew()
    path.write_bytes(b'{"a": 1}\n')
    assert reader.begun_anew()
    assert read(reader) == [{"a": 1}]
    assert not reader.begun_anew()


def test_lines_longer_than_a_block_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK", 7)
    (tmp_path / "l").write_bytes(b'{"a": "0123456789"}\n{"a": "x"}\n{"torn')
    assert read(LineReader(tmp_path / "l")) == [{"a": "0123456789"}, {"a": "x"}]


@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize("content", [b"", b"a\n", b"a\nbc", b"abc", b"a\nbc\n\nd", b"\n"])
def test_a_torn_rest_is_cut_off(
    tmp_path: Path, content: bytes, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK", block)
    path = tmp_path / "l"
    path.write_bytes(content)
    cut_torn_line(path)
    assert path.read_bytes() == content[: content.rfind(b"\n") + 1]


def test_a_writer_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "l"
    for number in range(2):
        writer = LineWriter(path)
        writer.write({"é": number})
        writer.close()
        writer.close()
        with path.open("ab") as file:
            file.write(b'{"torn')
    assert read(LineReader(path)) == [{"é": 0}, {"é": 1}]
