"""The test kit: ranks as real processes."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from samestep.errors import ClusterError, ConfigError, DataError, PeerLost, TimedOut
from samestep.testing.processes import run_processes
from samestep.topology.environment import Place


def standing(place: Place, factor: int) -> tuple[int, int, int, int]:
    return place.rank * factor, place.world_size, place.local_rank, torch.get_num_threads()


def sum_of_ranks(place: Place) -> torch.Tensor:
    assert place.rendezvous is not None
    store = torch.distributed.FileStore(place.rendezvous.removeprefix("file://"), place.world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    total = torch.full((100_000,), float(place.rank))
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return total


def fail_on_one(place: Place, marks: str) -> None:
    if place.rank == 1:
        Path(marks, "failed").write_text(str(time.time()))
        raise DataError("sample 7 is broken")
    time.sleep(60)


def lose_a_peer(place: Place) -> None:
    if place.rank == 2:
        time.sleep(0.2)
        raise ValueError("the cause")
    raise PeerLost("rank 2 is gone")


def die(place: Place, how: int) -> None:
    if place.rank == 1:
        os.kill(os.getpid(), how)
    time.sleep(60)


def leave(place: Place, code: int) -> None:
    sys.exit(code)


class UnfriendlyError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_unfriendly(place: Place) -> None:
    raise UnfriendlyError(1, 2)


def hang_in_one_place(place: Place) -> None:
    if place.rank > 0:
        time.sleep(60)


def start_grandchild(place: Place, marks: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(marks, f"pid-{place.rank}").write_text(str(child.pid))


def no_result(place: Place) -> object:
    return lambda: None


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every call must leave no private folder and no process, but for the fork server."""
    # The fork server keeps the first folder it was given, and a socket's path there must stay short.
    multiprocessing.util.get_temp_dir()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = set(psutil.Process().children(recursive=True))
    yield
    assert list(temporary.glob("samestep-*")) == []
    after = set(psutil.Process().children(recursive=True)) - before
    servers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    lines = [" ".join(child.cmdline()) for child in after]
    assert [line for line in lines if not any(server in line for server in servers)] == []


def test_results_come_by_rank() -> None:
    assert run_processes(standing, 3, 10) == [(rank * 10, 3, rank, 1) for rank in range(3)]


def test_ranks_meet_by_their_rendezvous_and_large_results_travel() -> None:
    for total in run_processes(sum_of_ranks, 3):
        assert torch.equal(total, torch.full((100_000,), 3.0))


def test_one_rank_needs_no_rendezvous() -> None:
    assert run_processes(standing, 1, 10) == [(0, 1, 0, 1)]


def test_the_error_of_a_rank_is_raised_and_the_others_are_ended(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^sample 7 is broken\n") as raised:
        run_processes(fail_on_one, 3, str(tmp_path))
    assert time.time() - float((tmp_path / "failed").read_text()) < 5
    (note,) = raised.value.__notes__
    assert note.startswith("rank 1 of 3 on host ")
    assert "test_run_processes.py" in note  # where it was raised


def test_the_cause_is_raised_and_not_its_consequences() -> None:
    with pytest.raises(ValueError, match="the cause"):
        run_processes(lose_a_peer, 3)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_is_named(how: signal.Signals) -> None:
    with pytest.raises(PeerLost, match=rf"rank 1 of 3 on host .* failed: .*{how.name}"):
        run_processes(die, 3, int(how))


def test_an_exit_is_an_error() -> None:
    with pytest.raises(ClusterError, match=r"rank 0 of 2 .*exit code 7"):
        run_processes(leave, 2, 7)


def test_an_exception_that_cannot_travel_is_told() -> None:
    with pytest.raises(ClusterError, match="UnfriendlyError: 1 and 2"):
        run_processes(raise_unfriendly, 2)


def test_a_hang_ends_at_the_limit_and_says_where() -> None:
    with pytest.raises(TimedOut, match=r"(?s)3 s; still running: rank 1, rank 2\..*in hang_in_one_place"):
        run_processes(hang_in_one_place, 3, timeout_s=3)


def test_grandchildren_end_too(tmp_path: Path) -> None:
    run_processes(start_grandchild, 2, str(tmp_path))
    for mark in tmp_path.glob("pid-*"):
        pid = int(mark.read_text())
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_result_that_does_not_pickle_is_the_rank_s_error() -> None:
    with pytest.raises((AttributeError, ClusterError), match="lambda"):
        run_processes(no_result, 2)


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match="top of a module"):
        run_processes(lambda _place: None, 2)
    with pytest.raises(ConfigError, match="world_size is 0"):
        run_processes(standing, 0, 1)
