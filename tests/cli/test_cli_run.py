"""`samestep run` as users call it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.topology.devices import num_devices
from samestep.topology.network import loopback_interface

SAMESTEP = [sys.executable, "-m", "samestep"]
TELL = """
import os, sys
from samestep.topology.environment import Environment, settle_interface
place = Environment.current().place()
words = [place.rank, place.world_size, place.local_rank, place.local_world_size, place.launcher]
words += [place.agent_store, settle_interface(place), *sys.argv[1:]]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def call(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TMPDIR": str(folder), **variables}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert list(folder.glob("samestep-*")) == []
    return done


def script_in(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def test_help_lists_the_commands_and_needs_no_torch(tmp_path: Path) -> None:
    told = call([*SAMESTEP, "--help"], tmp_path)
    assert told.returncode == 0
    for command in ("run", "train", "verify", "compare"):
        assert command in told.stdout
    loaded = "import samestep.cli.app, sys; print('torch' in sys.modules)"
    assert call([sys.executable, "-c", loaded], tmp_path).stdout == "False\n"


def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "beside.py").write_text("word = 'from beside'\n")
    # A file of the user's where he stands, not beside the script, must not shadow the standard library.
    (tmp_path / "selectors.py").write_text("raise RuntimeError('shadowed')\n")
    text = """
import os, pickle, sys
import beside
class Mine: pass
os.chdir("/")
print(__name__, sys.argv, beside.word, os.path.isfile(__file__), os.path.basename(sys.path[0]))
print(type(pickle.loads(pickle.dumps(Mine()))) is sys.modules["__main__"].Mine)
"""
    (folder / "script.py").write_text(text)
    arguments = ["project/script.py", "--lr", "0.1", "data", "--workers", "7", "--help"]
    done = call([sys.executable, "-P", *SAMESTEP[1:], "run", "--workers", "1", *arguments], tmp_path)
    assert done.stderr == ""
    assert done.stdout == f"__main__ {arguments} from beside True project\nTrue\n"


def test_all_devices_unless_told_otherwise(tmp_path: Path) -> None:
    text = "import os; print(os.environ['SAMESTEP_WORLD_SIZE'])"
    assert call([*SAMESTEP, "run", script_in(tmp_path, text)], tmp_path).stdout == f"{num_devices()}\n"


def test_ranks_and_their_output(tmp_path: Path) -> None:
    done = call([*SAMESTEP, "run", "--workers", "3", "--all-ranks", script_in(tmp_path, TELL), "x"], tmp_path)
    lines = [f"{rank} 3 {rank} 3 samestep False {loopback_interface()} x" for rank in range(3)]
    prefixed = [lines[0], *(f"[rank {rank}] {lines[rank]}" for rank in (1, 2))]
    assert sorted(done.stdout.splitlines()) == sorted(prefixed)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("", 0, ""),
        ("raise ValueError('boom')", 1, "boom\n"),
        ("from samestep.errors import ConfigError; raise ConfigError('lr is -1.')", 2, "lr is -1.\n"),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit(4)", 1, "exit code 4\n"),
    ],
)
def test_exit_codes(tmp_path: Path, body: str, code: int, message: str) -> None:
    done = call([*SAMESTEP, "run", "--workers", "2", script_in(tmp_path, body)], tmp_path)
    assert done.returncode == code
    assert done.stderr.endswith(message)
    assert done.stderr.count("boom") == (2 if "boom" in message else 0)  # source line and error, of one rank


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["nowhere.py"], {}, "There is no script 'nowhere.py'"),
        (["--workers", "0", "script.py"], {}, "workers is 0"),
        (["--workers", "many", "script.py"], {}, "--workers"),
        ([], {}, "Missing argument"),
        (["script.py"], {"RANK": "1"}, "RANK is 1, but WORLD_SIZE is not set"),
        (["script.py"], {"RANK": "2", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
    ],
)
def test_wrong_settings_are_2_and_one_message(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], words: str
) -> None:
    script_in(tmp_path, "")
    done = call([*SAMESTEP, "run", *arguments], tmp_path, **variables)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_that_is_a_rank_already_runs_the_script_itself(tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    text = TELL + "from samestep.errors import ConfigError\nraise ConfigError('once')\n"
    done = call([*SAMESTEP, "run", "--workers", "5", script_in(tmp_path, text), "x"], tmp_path, **variables)
    assert (done.returncode, done.stdout) == (2, "0 1 0 1 variables of torch False None x\n")
    assert done.stderr == "once\n"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("through", [[], ["-m", "samestep", "run", "--workers", "5"]])
def test_torchrun_starts_the_same_script(tmp_path: Path, through: list[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = call([*torchrun, *through, script_in(tmp_path, TELL), "--x"], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [f"{rank} 2 {rank} 2 torchrun True" for rank in (0, 1)]
    told = sorted(done.stdout.splitlines())
    assert [line.rsplit(" ", 2)[0] for line in told] == lines
    assert all(line.endswith(" --x") for line in told)
