"""`samestep train`: wrong settings start nothing, and a run leaves all that was promised."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch

from samestep.checkpoint.state import load_state, read_state
from samestep.cli import train as command
from samestep.cli.options import prepare_recipe
from samestep.cli.rank import Order, notices, take_part
from samestep.config import Recipe, Settings, load_recipe
from samestep.errors import ConfigError
from samestep.loop.parts import STRATEGIES
from samestep.numerics.fingerprint import model_fingerprint
from samestep.precision.policy import Precision
from samestep.tasks.assembly import assemble
from samestep.topology.environment import Place
from samestep.track.folder import LEDGER, RECIPE, RUN, STATE, read_fingerprint
from samestep.track.ledger import read_ledger

RECIPE_TEXT = """
task: lm
model: {layers: 1, width: 8, heads: 2, context: 7, dropout: 0.1}
data: {text: text.txt, sample: 12}
batching: {global_batch: 6, micro_batch: 2}
optimizer: {name: adamw, lr: 1e-2}
schedule: {name: warmup_cosine, warmup: 1}
clip_norm: 1.0
steps: 4
digest_every: 2
"""
ALONE = Place(reason="test")

Run = Callable[..., Path]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged. " * 8)
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE_TEXT)
    return path


def run_alone(recipe: Path, folder: Path, *assignments: str, place: Place = ALONE) -> None:
    prepared = prepare_recipe(recipe, assignments, steps=None)
    take_part(Order(path=recipe, assignments=assignments, steps=None, folder=folder), prepared, place)


def test_a_run_keeps_and_shows_what_was_promised(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run_alone(recipe, folder, "seed=3")
    lines = capsys.readouterr().out.splitlines()
    print_of_run = read_fingerprint(folder)
    assert lines[-1] == f"fingerprint: {print_of_run}"
    proof = f"samestep verify {recipe} --workers 1,2,3 --set seed=3 --steps 4"
    assert lines[-2] == f"the same bits on 1, 2 and 3 ranks: {proof}"
    assert lines[-3] == f"run folder: {folder}"
    assert sum(line.startswith("done: 4 steps, 4 updates, loss ") for line in lines) == 1
    steps = read_ledger(folder / LEDGER).steps
    assert [step.digest is not None for step in steps] == [False, True, False, True]
    facts = json.loads((folder / RUN).read_text())
    assert (facts["world_size"], facts["steps"], facts["versions"]["torch"]) == (1, 4, torch.__version__)

    again = load_recipe(folder / RECIPE)
    assert (again.seed, again.batching.micro_batch, again.model["tied"]) == (3, 2, True)
    model = assemble(prepare_recipe(folder / RECIPE, [], steps=None)).model
    assert model_fingerprint(model) != print_of_run
    load_state(model, folder / STATE)
    assert model_fingerprint(model) == print_of_run
    assert next(iter(read_state(folder / STATE))) == "bytes.weight"


def test_the_resolved_recipe_ends_in_the_same_bits(recipe: Path, tmp_path: Path) -> None:
    run_alone(recipe, tmp_path / "a")
    run_alone(tmp_path / "a" / RECIPE, tmp_path / "elsewhere" / "b")
    assert read_fingerprint(tmp_path / "a") == read_fingerprint(tmp_path / "elsewhere" / "b")


def test_epochs_give_the_steps_of_the_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(RECIPE_TEXT.replace("steps: 4", "epochs: 1"))
    run_alone(recipe, tmp_path / "run")
    steps = read_ledger(tmp_path / "run" / LEDGER).steps
    assert len(steps) == 7  # 40 windows of 8 bytes, 6 in a step
    assert "training on 1 rank, 7 steps" in capsys.readouterr().out


OWN_TASK = '''
import torch
from samestep import weighted
from samestep.config import Settings


class Line(Settings):
    points: int = 8


class Nothing(Settings):
    pass


class Slope:
    """Fit a line; joins its samples in a way of its own, and has nothing to show."""

    model_settings = Nothing
    data_settings = Line

    def __init__(self, model, data):
        self._points = data.points

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def build_dataset(self):
        return [(float(i), 2.0 * i) for i in range(self._points)]

    def collate(self, samples):
        return torch.tensor(samples)

    def loss(self, model, batch):
        return weighted((model(batch[:, :1]) - batch[:, 1:]).square().flatten())
'''


def test_a_task_of_the_users_is_found_beside_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_slope_task.py").write_text(OWN_TASK)
    path = tmp_path / "slope.yaml"
    path.write_text(
        "task: own_slope_task.Slope\n"
        "batching: {global_batch: 8}\n"
        "optimizer: {name: sgd, lr: 1e-3}\n"
        "steps: 3\n"
    )
    run_alone(path, tmp_path / "run")
    losses = [step.loss for step in read_ledger(tmp_path / "run" / LEDGER).steps]
    assert losses == sorted(losses, reverse=True)
    assert capsys.readouterr().out.splitlines()[-4].startswith("done: 3 steps")
    with pytest.raises(ConfigError, match=r"unknown key data\.pionts\. Did you mean points\?"):
        run_alone(path, tmp_path / "other", "data.pionts=3")


def start(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, **options: object
) -> list[tuple[list[str], int, object]]:
    """Run the command up to the start of ranks; return what would have been started."""
    started: list[tuple[list[str], int, object]] = []

    def run_ranks(
        ranks: list[str], workers: int, *, threads: int, all_ranks: bool, stop_grace_s: float
    ) -> int:
        started.append((ranks, workers, (threads, all_ranks)))
        return 0

    monkeypatch.setattr(command, "run_ranks", run_ranks)
    with pytest.raises(SystemExit) as ended:
        command.train(recipe, **options)  # type: ignore[arg-type]
    assert ended.value.code == 0
    return started


def test_ranks_get_the_same_recipe_and_folder(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = start(
        recipe,
        monkeypatch,
        workers=3,
        steps=2,
        assignments=["threads=2"],
        folder=tmp_path / "run",
        all_ranks=True,
    )
    ranks, workers, rest = found
    assert ranks[1:] == [
        *["-P", "-m", "samestep", "train", str(recipe), "--folder", str(tmp_path / "run")],
        *["--set", "threads=2", "--steps", "2"],
    ]
    assert (workers, rest) == (3, (2, True))


def test_the_run_folder_is_new_and_named_after_the_recipe(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.time, "strftime", lambda _: "now")
    (tmp_path / "runs" / "small-now").mkdir(parents=True)
    monkeypatch.setattr(command, "num_devices", lambda: 5)
    ((ranks, workers, _),) = start(recipe, monkeypatch)
    assert ranks[ranks.index("--folder") + 1] == "runs/small-now-2"
    assert workers == 5
    ((ranks, workers, _),) = start(recipe, monkeypatch, assignments=["folder=kept", "workers=2"])
    assert ranks[ranks.index("--folder") + 1] == str(tmp_path / "kept")
    assert workers == 2


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("model.layer=1", r"unknown key model\.layer\. Did you mean layers\?"),
        ("batching.micro_batch=7", r"batching\.micro_batch is 7, but the global batch is 6"),
        ("data.text=none.txt", "there is no such file"),
        ("task=ml.None", "there is no module ml"),
        ("workers=0", "workers is 0"),
    ],
)
def test_wrong_settings_start_nothing(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, assignment: str, expected: str
) -> None:
    monkeypatch.setattr(command, "run_ranks", lambda *_, **__: pytest.fail("a rank was started"))
    with pytest.raises(ConfigError, match=expected):
        command.train(recipe, assignments=[assignment])


def test_a_folder_with_a_run_is_not_used_again(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_alone(recipe, tmp_path / "run")
    monkeypatch.setattr(command, "run_ranks", lambda *_, **__: pytest.fail("a rank was started"))
    with pytest.raises(ConfigError, match="holds a run already"):
        command.train(recipe, folder=tmp_path / "run")
    with pytest.raises(ConfigError, match="holds a run already"):
        run_alone(recipe, tmp_path / "run")


def test_a_launcher_of_another_size_wins_and_that_is_said(recipe: Path) -> None:
    settings = load_recipe(recipe, workers=4)
    (notice,) = notices(settings, Place(world_size=2, launcher="torchrun", reason="test"))
    assert "workers is 4, but torchrun started 2 ranks" in str(notice)
    assert list(notices(settings, Place(world_size=4, launcher="torchrun", reason="test"))) == []
    assert list(notices(settings, Place(world_size=2, launcher="samestep", reason="test"))) == []


def test_a_recipe_names_what_the_engine_has() -> None:
    def choices(settings: type[Settings], key: str) -> set[str]:
        return set(get_args(settings.model_fields[key].annotation))

    assert choices(Recipe, "strategy") == set(STRATEGIES)
    assert choices(Recipe, "precision") == choices(Precision, "compute")


@pytest.mark.timeout(120)
def test_one_message_and_code_2_without_a_traceback(recipe: Path) -> None:
    wrong = [sys.executable, "-m", "samestep", "train", str(recipe), "--set", "stpes=3"]
    ended = subprocess.run(wrong, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "unknown key stpes. Did you mean steps?" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.timeout(120)
def test_what_fails_in_the_ranks_is_told_once(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    command = [sys.executable, "-m", "samestep", "train", str(recipe), "--workers", "2"]
    command += ["--folder", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count("the text has 5 bytes, but one sample takes 8") == 1


@pytest.mark.timeout(60)
def test_settings_are_checked_without_torch(recipe: Path) -> None:
    # The public door imports torch for its users; the command line must not need it before the ranks start.
    program = f"""
import sys, types, pathlib
door = types.ModuleType("samestep")
door.__path__ = [{str(Path(command.__file__).parents[1])!r}]
sys.modules["samestep"] = door
import samestep.cli.app
from samestep.cli.options import prepare_recipe
prepare_recipe(pathlib.Path({str(recipe)!r}), ["steps=2"], steps=None)
print("torch" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    assert ended.stdout == "False\n"
