"""Failure records: what they say, and which of several is the cause."""

from __future__ import annotations

import signal
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import ConfigError, Disagreement, PeerLost, TimedOut
from samestep.processes.child import run_script
from samestep.processes.failure import (
    DEATH_S,
    Failure,
    Kind,
    death_of,
    describe,
    failure_of,
    first_cause,
    read_records,
    write_record,
)

failures = st.builds(
    Failure,
    rank=st.integers(0, 7),
    host=st.just("here"),
    time=st.floats(0, 100),
    kind=st.sampled_from(Kind),
    message=st.sampled_from(["a", "b"]),
)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@settings(deadline=None)
@given(st.lists(failures, min_size=1, unique_by=lambda failure: failure.rank), st.randoms())
def test_the_cause_does_not_depend_on_who_is_heard_first(found: list[Failure], random) -> None:
    cause = first_cause(found)
    shuffled = list(found)
    random.shuffle(shuffled)
    primary = [failure for failure in found if failure.kind is not Kind.CONSEQUENCE]
    earliest = min(failure.time for failure in (primary or found))
    alike = [failure for failure in found if (failure.kind, failure.message) == (cause.kind, cause.message)]
    if len({failure.time for failure in found}) == len(found):
        assert first_cause(shuffled) == cause
    assert earliest in [failure.time for failure in alike]
    assert cause.rank == min(failure.rank for failure in alike)


def test_a_death_comes_before_the_errors_it_causes_but_an_abort_is_a_reaction() -> None:
    seen = 100.0
    peer = Failure(rank=0, host="here", time=seen - 0.1, kind=Kind.ERROR, message="connection reset")
    assert first_cause([peer, death_of(1, -signal.SIGKILL, seen)]).rank == 1
    assert first_cause([peer, death_of(1, 7, seen)]).rank == 1
    assert first_cause([peer, death_of(1, -signal.SIGABRT, seen)]).rank == 0
    assert death_of(1, -signal.SIGKILL, seen).time == seen - DEATH_S


def test_records_survive_the_way_through_a_file(tmp_path: Path) -> None:
    written = [failure_of(rank, raised(ValueError("boom\nand more"))) for rank in (3, 1)]
    for failure in written:
        write_record(tmp_path, failure)
    assert read_records(tmp_path) == sorted(written, key=lambda failure: failure.rank)


def test_the_kind_of_a_failure() -> None:
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = PeerLost("gone")
    cases: list[tuple[BaseException, Kind, int, int]] = [
        (ConfigError("bad"), Kind.SETTINGS, 2, 2),
        (PeerLost("gone"), Kind.CONSEQUENCE, 1, 1),
        (TimedOut("late"), Kind.CONSEQUENCE, 1, 1),
        (wrapped, Kind.CONSEQUENCE, 1, 1),
        (Disagreement("differ"), Kind.ERROR, 1, 1),
        (KeyboardInterrupt(), Kind.ERROR, 1, 1),
        (SystemExit(2), Kind.EXIT, 2, 2),
        (SystemExit(9), Kind.EXIT, 9, 1),
        (SystemExit("words"), Kind.EXIT, 1, 1),
    ]
    for error, kind, code, exit_code in cases:
        failure = failure_of(0, raised(error))
        assert (failure.kind, failure.code, failure.exit_code) == (kind, code, exit_code)


def test_a_traceback_starts_in_the_user_s_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "def work():\n    try:\n        1 / 0\n    except ZeroDivisionError:\n        {}[1]\nwork()\n"
    )
    text = failure_of(1, caught_from(script)).traceback
    assert "child.py" not in text
    assert text.startswith("Traceback (most recent call last):\n  File")
    assert "During handling of the above exception" in text
    assert text.index("script.py") < text.index("in work")
    script.write_text("def work(:\n")
    text = failure_of(1, caught_from(script)).traceback
    assert "child.py" not in text
    assert "def work(:" in text


def caught_from(script: Path) -> BaseException:
    import sys

    main, argv, path = sys.modules["__main__"], sys.argv, list(sys.path)
    try:
        run_script(str(script), [])
    except Exception as error:
        # The frame of this function is not the script's, but neither is it samestep's.
        return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = main, argv, path
    raise AssertionError("the script was to fail")


def test_what_people_read() -> None:
    settings = failure_of(0, raised(ConfigError("one. two.")))
    assert describe(settings, 3, ["hidden"]) == "one. two."
    death = death_of(2, -signal.SIGKILL, 0.0)
    assert describe(death, 3).startswith(
        f"rank 2 of 3 on host {death.host} failed: its process was ended by SIGKILL"
    )
    assert describe(death, 3, ["x", "y"]).endswith("\nthe last lines of its standard error:\n  x\n  y")
