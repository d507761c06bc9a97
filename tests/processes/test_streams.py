"""Captured output: whole lines with a prefix, a bounded memory, no waiting."""

from __future__ import annotations

import io
import os

from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.processes.streams import KEPT_BYTES, Capture


def capture_of(pieces: list[bytes], shown_on: io.StringIO | None) -> list[str]:
    reads, writes = os.pipe()
    capture = Capture(os.fdopen(reads, "rb", 0), prefix="[rank 2] ", shown_on=shown_on)
    for piece in pieces:
        os.write(writes, piece)
        capture.pump()
    os.close(writes)
    capture.close()
    return capture.last_lines(5)


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"a", b"bc\n", b"\n", "é".encode(), b"d\ne"])))
def test_lines_are_shown_whole_however_they_come(pieces: list[bytes]) -> None:
    shown = io.StringIO()
    last = capture_of(pieces, shown)
    text = b"".join(pieces).decode()
    lines = text.split("\n") if text else []
    lines = lines[:-1] if lines and not lines[-1] else lines
    assert shown.getvalue() == "".join(f"[rank 2] {line}\n" for line in lines)
    assert last == text.splitlines()[-5:]


def test_memory_is_bounded_and_a_line_without_end_is_shown_in_parts() -> None:
    shown = io.StringIO()
    last = capture_of([b"x" * 60_000] * 4 + [b"\nend"], shown)
    assert last[-1] == "end"
    assert sum(map(len, last)) <= KEPT_BYTES
    assert shown.getvalue().count("x") == 240_000


def test_reading_never_waits() -> None:
    reads, writes = os.pipe()
    capture = Capture(os.fdopen(reads, "rb", 0), prefix="", shown_on=None)
    assert not capture.pump()
    assert not capture.ended
    os.close(writes)
    assert not capture.pump()
    assert capture.ended
    capture.close()
