"""Trackers, each against its real package; and what happens when one is missing, fails, or hangs."""

from __future__ import annotations

import importlib
import math
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from told_runs import FACTS, Told, report

from samestep.errors import ConfigError
from samestep.events import Evaluated, Event, Resumed, RunEnded, RunStarted
from samestep.track.trackers.background import Background
from samestep.track.trackers.choose import trackers
from samestep.track.trackers.guard import Guard
from samestep.track.trackers.mlflow import MLflow
from samestep.track.trackers.scalars import scalars, settings
from samestep.track.trackers.tensorboard import TensorBoard
from samestep.track.trackers.wandb import WandB


def needs(extra: str, *modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if find_spec(module) is None]
    reason = f"{', '.join(missing)} is not installed: pip install 'samestep[{extra}]'"
    return pytest.mark.skipif(bool(missing), reason=reason)


def events(steps: range) -> list[Event]:
    """Return a run of these steps, the last of which is evaluated."""
    told = Told()
    told_steps: list[Event] = [report(step, 10, 3, told.chance) for step in steps]
    return [
        RunStarted(world_size=3, steps=10, facts=FACTS),
        *told_steps,
        Evaluated(step=steps.stop - 1, metrics={"accuracy": 0.5}),
        RunEnded(step=steps.stop, update=steps.stop, fingerprint="ab"),
    ]


def losses(steps: range) -> list[float]:
    found = [scalars(event) for event in events(steps)]
    return [numbers["loss"] for _, numbers in filter(None, found) if "loss" in numbers]


def test_the_numbers_of_a_step_have_their_names() -> None:
    found = scalars(report(3, 10, 3, Told().chance, seconds=0.5))
    assert found is not None
    step, numbers = found
    assert step == 3
    assert set(numbers) == {
        "loss",
        "learning_rate",
        "grad_norm",
        "loss_scale",
        "samples_per_second",
        "terms/cross_entropy",
        "terms/z_loss",
    }
    assert numbers["samples_per_second"] == 128.0
    assert scalars(Evaluated(step=1, metrics={"a": 2.0})) == (1, {"evaluation/a": 2.0})
    assert scalars(RunEnded(step=1, update=1, fingerprint="")) is None


def test_settings_are_flat_and_short() -> None:
    found = settings({"a": {"b": 1, "c": {"d": "e"}}, "f": "x" * 999})
    assert found == {"a.b": "1", "a.c.d": "e", "f": "x" * 500}


@needs("tensorboard", "tensorboard")
def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    warnings: list[str] = []
    with TensorBoard(tmp_path / "board", warn=warnings.append) as keep:
        for event in events(range(6)):
            keep(event)
    with TensorBoard(tmp_path / "board", warn=warnings.append) as keep:  # resumed at step 4
        keep(Resumed(step=4, update=4, folder="c", world_size_before=3))
        for event in events(range(4, 8)):
            keep(event)
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    board = accumulator.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    found = {one.step: one.value for one in board.Scalars("loss")}
    assert list(found) == list(range(8))
    assert [found[step] for step in range(4)] == pytest.approx(losses(range(4)), rel=1e-6)
    assert [found[step] for step in range(4, 8)] == pytest.approx(losses(range(4, 8)), rel=1e-6)
    assert board.Scalars("evaluation/accuracy")[-1].step == 7
    assert math.isinf(board.Scalars("grad_norm")[3].value)
    assert warnings == []


@needs("mlflow", "mlflow", "sqlalchemy", "alembic")
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of mlflow, with newer sqlalchemy
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # its database is closed with the process
def test_mlflow_reads_what_is_written_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    for steps in (range(4), range(4, 6)):
        with MLflow(tmp_path, closing_seconds=50, warn=warnings.append) as keep:
            for event in events(steps):
                keep(event)
    assert warnings == []
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "samestep"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == tmp_path.name
    assert run.data.tags["numerics_key.device_name"] == "Intel Xeon 2.00GHz"
    history = sorted(client.get_metric_history(run.info.run_id, "loss"), key=lambda one: one.step)
    assert [one.step for one in history] == list(range(6))
    assert [one.value for one in history] == [*losses(range(4)), *losses(range(4, 6))]
    assert client.get_metric_history(run.info.run_id, "evaluation/accuracy")[0].value == 0.5


@needs("wandb", "wandb")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_keeps_an_offline_run(tmp_path: Path) -> None:
    warnings: list[str] = []
    with WandB(tmp_path, warn=warnings.append) as keep:
        for event in events(range(4)):
            keep(event)
    wandb = importlib.import_module("wandb")
    wandb.teardown()
    assert warnings == []
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for text in (b"evaluation/accuracy", b"terms/z_loss", b"numerics_key.device_name", b"fingerprint"):
        assert text in content


@pytest.mark.parametrize(
    ("make", "extra"), [(TensorBoard, "tensorboard"), (MLflow, "mlflow"), (WandB, "wandb")]
)
def test_a_missing_package_is_named_with_the_remedy(
    make: Any, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.track.trackers.guard.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install 'samestep\[{extra}\]'"):
        make(tmp_path)


def test_names_lead_to_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.track.trackers.guard.find_spec", lambda name: object())
    made = trackers(["wandb", "tensorboard", "mlflow"], tmp_path)
    assert [type(one) for one in made] == [WandB, TensorBoard, MLflow]
    assert list(tmp_path.iterdir()) == []  # nothing before the first event
    for one in made:
        one.close()
    with pytest.raises(ConfigError, match=r"Did you mean tensorboard\?"):
        trackers(["tensorbord"], tmp_path)
    with pytest.raises(ConfigError, match="stands once"):
        trackers(["wandb", "wandb"], tmp_path)


def test_a_tracker_that_fails_is_off_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    tries: list[int] = []

    def fail() -> None:
        tries.append(1)
        raise OSError("no space left")

    guard = Guard("tensorboard")
    guard.run(fail)
    guard.run(fail)
    assert len(tries) == 1
    text = "tensorboard is off for the rest of the run: OSError: no space left. The run folder holds all."
    assert capsys.readouterr().err == f"samestep: warning: {text}\n"


@needs("tensorboard", "tensorboard")
def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / "board").write_text("a file")
    with TensorBoard(tmp_path / "board", warn=warnings.append) as keep:
        for event in events(range(4)):
            keep(event)
    assert len(warnings) == 1


def test_a_server_that_is_gone_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __init__(self, tracking_uri: str) -> None:
            raise ConnectionError(f"{tracking_uri} is down")

    monkeypatch.setattr("samestep.track.trackers.guard.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    warnings: list[str] = []
    with MLflow(tmp_path, tracking_uri="http://nowhere", warn=warnings.append) as keep:
        for event in events(range(4)):
            keep(event)
    (warning,) = warnings
    assert warning.startswith(
        "mlflow is off for the rest of the run: ConnectionError: http://nowhere is down"
    )


def test_a_server_that_hangs_holds_nobody_up() -> None:
    warnings: list[str] = []
    guard, hang = Guard("mlflow", warnings.append), threading.Event()
    background = Background(guard, most=3)
    background.put(lambda: hang.wait(60) and None)
    for _ in range(9):
        background.put(lambda: None)
    assert warnings == [
        "mlflow is off for the rest of the run: 3 actions wait for its server. The run folder holds all."
    ]
    background.close(seconds=0.05)
    assert len(warnings) == 1
    hang.set()


def test_closing_waits_for_what_was_put() -> None:
    done: list[int] = []
    background = Background(Guard("mlflow"))
    for number in range(100):
        background.put(lambda number=number: done.append(number))  # type: ignore[misc]
    background.close()
    assert done == list(range(100))
