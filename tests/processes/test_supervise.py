"""Ranks that are started, fail, die and are stopped: real processes under a real supervisor."""

from __future__ import annotations

import signal
import socket
import time

import pytest

from samestep.errors import ConfigError
from samestep.processes.supervise import run_ranks

SLEEP = "time.sleep(60)\n"
STUBBORN = "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
GRANDCHILD = """
import multiprocessing
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(marks)])
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
worker.start()
"""


def test_all_done_is_0_and_early_ranks_are_no_failure(launch) -> None:
    run = launch("wait_for(marks / 'early-2') if place.rank != 2 else mark('early')\nmark('done')\n")
    assert run.wait() == 0
    assert (run.out, run.err) == ("", "")
    assert len(list(run.marks.glob("done-?"))) == 3


def test_runs_at_once_do_not_clash(launch) -> None:
    meet = """
here = Path(place.rendezvous.removeprefix("file://"))
(here.parent / f"met-{place.rank}").write_text(str(marks))
for rank in range(place.world_size):
    other = here.parent / f"met-{rank}"
    while not (other.exists() and other.read_text()):
        time.sleep(0.005)
    assert other.read_text() == str(marks)
mark("met", place.rendezvous)
"""
    runs = [launch(meet, 2), launch(meet, 2), launch(meet, 3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    rendezvous = [{path.read_text() for path in run.marks.glob("met-?")} for run in runs]
    assert all(len(names) == 1 for names in rendezvous)
    assert len(set.union(*rendezvous)) == 3


@pytest.mark.parametrize("others", [SLEEP, STUBBORN + SLEEP, "while True: pass\n"])
def test_one_error_is_shown_once_and_the_others_end(launch, others: str) -> None:
    run = launch(
        f"""
def work():
    raise ValueError("boom")
if place.rank == 1:
    wait_for(marks / "ready-0"); wait_for(marks / "ready-2")
    mark("failed", time.time())
    work()
exec({STUBBORN!r})
mark("ready")
exec({others!r})
"""
    )
    assert run.wait() == 1
    assert time.time() - float((run.marks / "failed-1").read_text()) < 5
    assert run.leftovers() == []
    first, header, frame, *_ = run.err.splitlines()
    assert first.startswith("rank 1 of 3 on host ")
    assert first.endswith(" failed:")
    assert header == "Traceback (most recent call last):"
    assert "script.py" in frame
    assert run.err.endswith('    raise ValueError("boom")\nValueError: boom\n')
    assert run.err.count("Traceback") == 1


def test_a_failed_rank_that_cannot_exit_does_not_hold_the_run(launch) -> None:
    run = launch(
        """
import threading
if place.rank == 1:
    threading.Thread(target=time.sleep, args=(60,)).start()
    mark("failed", time.time())
    raise ValueError("boom")
time.sleep(60)
"""
    )
    assert run.wait() == 1
    assert time.time() - float((run.marks / "failed-1").read_text()) < 5
    assert "ValueError: boom" in run.err


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "ended by SIGSEGV"),
        ("os._exit(5)", "exit code 5"),
    ],
)
def test_a_rank_that_dies_without_a_word_is_named(launch, way: str, words: str) -> None:
    run = launch(
        f"""
if place.rank == 2:
    print("a last word", file=sys.stderr)
    mark("failed", time.time())
    {way}
time.sleep(60)
"""
    )
    assert run.wait() == 1
    assert time.time() - float((run.marks / "failed-2").read_text()) < 5
    assert run.err.startswith("rank 2 of 3 on host ")
    assert words in run.err
    assert "\nthe last lines of its standard error:\n  a last word\n" in run.err


def test_a_broken_start_is_reported_with_what_the_interpreter_said(launch) -> None:
    run = launch(
        "", before="script_command = lambda *_: [sys.executable, '-c', 'import nowhere_to_be_found']"
    )
    assert run.wait() == 1
    assert "ModuleNotFoundError: No module named 'nowhere_to_be_found'" in run.err


def test_the_cause_is_shown_and_not_the_consequences_that_came_first(launch) -> None:
    run = launch(
        """
records = Environment.current().failures
if place.rank == 2:
    wait_for(records / "rank-0.json"); wait_for(records / "rank-1.json")
    raise ValueError("the cause")
if place.rank == 1:
    raise TimedOut("no answer")
try:
    raise PeerLost("rank 2 is gone")
except PeerLost as error:
    raise RuntimeError("wrapped by the user") from error
"""
    )
    assert run.wait() == 1
    assert run.err.startswith("rank 2 of 3")
    assert run.err.count("Traceback") == 1


def test_a_killed_rank_comes_before_the_errors_it_causes(launch) -> None:
    run = launch(
        """
import socket
ours, theirs = (marks / "socket").as_posix(), None
if place.rank == 1:
    listener = socket.socket(socket.AF_UNIX); listener.bind(ours); listener.listen(); mark("listening")
    connections = [listener.accept() for _ in range(2)]
    os.kill(os.getpid(), signal.SIGKILL)
wait_for(marks / "listening-1")
peer = socket.socket(socket.AF_UNIX); peer.connect(ours)
peer.recv(1)
raise RuntimeError("Connection closed by peer")
"""
    )
    assert run.wait() == 1
    assert run.err.startswith("rank 1 of 3")
    assert "SIGKILL" in run.err


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("sys.exit(0 if place.rank else None)", 0, ""),
        ("raise ConfigError('lr is -1. Use 0.')", 2, "lr is -1. Use 0.\n"),
        ("sys.exit(2)", 2, "rank 0 of 3 on HOST failed: exit code 2\n"),
        (
            "sys.exit(7) if place.rank == 1 else time.sleep(60)",
            1,
            "rank 1 of 3 on HOST failed: exit code 7\n",
        ),
        ("sys.exit('no data')", 1, "rank 0 of 3 on HOST failed: no data\n"),
        ("sys.exit(3)", 3, ""),
        (
            "sys.exit(3 if place.rank == 1 else 0)",
            1,
            "rank 1 of 3 on HOST failed: it stopped on request (exit code 3), but not all others did\n",
        ),
    ],
)
def test_exit_codes(launch, body: str, code: int, message: str) -> None:
    run = launch(body)
    assert (run.wait(), run.err) == (code, message.replace("HOST", f"host {socket.gethostname()}"))


def test_ranks_that_stop_wait_a_limited_time_for_the_others(launch) -> None:
    run = launch("sys.exit(3) if place.rank == 1 else time.sleep(60)", stop_grace_s=0.5)
    assert run.wait() == 1
    assert "rank 1 of 3" in run.err


def test_a_process_forked_by_a_rank_does_not_speak_for_it(launch) -> None:
    run = launch(
        "child = os.fork()\nif child == 0: sys.exit(5)\nassert os.waitpid(child, 0)[1] >> 8 == 5\n", 2
    )
    assert (run.wait(), run.err) == (0, "")


def test_what_all_ranks_say_is_said_once(launch) -> None:
    run = launch("raise ConfigError('the same everywhere')")
    assert run.wait() == 2
    assert run.err == "the same everywhere\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(launch, number: signal.Signals) -> None:
    run = launch(GRANDCHILD + "mark('ready')\n" + SLEEP)
    run.wait_for_marks("ready", 3)
    run.process.send_signal(number)
    assert run.wait(20) == 1
    assert run.leftovers() == []
    assert run.err == f"samestep: {number.name}: ending all ranks; once more kills them at once.\n"


def test_stubborn_ranks_are_killed_after_the_grace(launch) -> None:
    run = launch(STUBBORN + GRANDCHILD + "mark('ready')\n" + SLEEP, stop_grace_s=0.3)
    run.wait_for_marks("ready", 3)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(20) == 1
    assert run.leftovers() == []


def test_a_long_grace_is_only_for_ranks_that_stop_in_order(launch) -> None:
    stubborn_but_one = "if place.rank != 1:\n    " + STUBBORN
    run = launch(stubborn_but_one + "mark('ready')\n" + SLEEP, stop_grace_s=1000.0)
    run.wait_for_marks("ready", 3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(20) == 1
    assert run.leftovers() == []


def test_a_second_signal_kills_at_once(launch) -> None:
    run = launch(STUBBORN + "mark('ready')\n" + SLEEP, stop_grace_s=1000.0)
    run.wait_for_marks("ready", 3)
    run.process.send_signal(signal.SIGINT)
    assert run.process.stderr.readline().startswith("samestep: SIGINT:")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(20) == 1
    assert run.leftovers() == []


def test_an_orderly_stop_of_all_ranks_passes_through(launch) -> None:
    run = launch("signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\nmark('ready')\n" + SLEEP)
    run.wait_for_marks("ready", 3)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(20) == 3


def test_a_stop_reaches_the_ranks_and_not_their_workers(launch) -> None:
    run = launch(
        """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(marks)])
def stop(*_):
    mark("worker", child.poll())
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
mark("ready")
time.sleep(60)
""",
        2,
    )
    run.wait_for_marks("ready", 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(20) == 3
    assert [path.read_text() for path in run.marks.glob("worker-?")] == ["None", "None"]
    assert run.leftovers() == []


def test_a_killed_supervisor_leaves_nothing(launch) -> None:
    run = launch(STUBBORN + GRANDCHILD + "mark('ready')\n" + "while True: pass\n", 2)
    run.wait_for_marks("ready", 2)
    assert len(run.leftovers()) > 2
    run.process.kill()
    assert run.leftovers_after(5) == []


def test_a_killed_guardian_does_not_end_the_run(launch) -> None:
    run = launch("mark('ready')\nwait_for(marks / 'go')\n", 2)
    run.wait_for_marks("ready", 2)
    import psutil

    for child in psutil.Process(run.process.pid).children():
        if "guardian.py" in " ".join(child.cmdline()):
            child.kill()
    (run.marks / "go").touch()
    assert run.wait() == 0
    assert run.leftovers() == []


@pytest.mark.parametrize("body", ["mark('done')", "raise ValueError('boom')"])
def test_systems_without_exit_handles(launch, body: str) -> None:
    run = launch(body, before="spawn._exit_handle = lambda pid: None")
    assert run.wait() == ("ValueError" in body)
    assert run.err.count("boom") == 2 * ("ValueError" in body)


def test_a_supervisor_outside_the_main_thread(launch) -> None:
    before = """
import threading
def in_thread(*args, _run=run_ranks, **options):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(_run(*args, **options)))
    thread.start(); thread.join()
    return codes[0]
run_ranks = in_thread
"""
    run = launch("mark('done')\nsys.exit(3)", before=before)
    assert run.wait() == 3


def test_output_of_the_first_rank_alone_or_of_all(launch) -> None:
    body = "print('out', place.rank); print('err', place.rank, file=sys.stderr); sys.stdout.write('end')\n"
    run = launch(body)
    assert run.wait() == 0
    assert (run.out, run.err) == ("out 0\nend", "err 0\n")
    run = launch(body, all_ranks=True)
    assert run.wait() == 0
    lines = (run.out.replace("end[", "end\n[") + "\n").splitlines()
    assert sorted(line for line in lines if line) == sorted(
        ["out 0", "end", "[rank 1] out 1", "[rank 1] end", "[rank 2] out 2", "[rank 2] end"]
    )
    assert sorted(run.err.splitlines()) == ["[rank 1] err 1", "[rank 2] err 2", "err 0"]


def test_much_hidden_output_does_not_block_a_rank(launch) -> None:
    run = launch(
        "for line in range(20_000): print('x' * 100); print('y' * 100, file=sys.stderr)\nmark('done')", 2
    )
    run.wait()
    assert len(list(run.marks.glob("done-?"))) == 2


def test_the_variables_of_a_rank(launch) -> None:
    names = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE", "PYTHONFAULTHANDLER")
    body = f"mark('variables', [os.environ.get(name) for name in {names!r}])\n"
    run = launch(body, 1, threads=3, env={"GLOO_SOCKET_IFNAME": "mine", "RANK": "7", "WORLD_SIZE": "8"})
    assert run.wait() == 0
    assert (run.marks / "variables-0").read_text() == "['3', 'mine', None, None, '1']"


def test_a_run_needs_a_rank() -> None:
    with pytest.raises(ConfigError, match="workers is 0"):
        run_ranks(["true"], 0)
