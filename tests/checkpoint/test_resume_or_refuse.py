"""What a run may go on from, what is refused, and what is said."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import DATA, STEPS, make_model, of_kind, steps_on, train, warnings_of
from torch import nn

import samestep
from samestep.errors import CheckpointError, ConfigError
from samestep.testing.workloads import Drawn


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints of steps 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("stored")
    train(folder, 2, steps=5)
    return folder


@pytest.fixture
def kept(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "kept"))


def damage(folder: Path, *steps: int) -> None:
    for step in steps:
        file = folder / f"step-{step:08}" / "rank-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")


def refused(folder: Path, told: str, **changes: Any) -> None:
    with pytest.raises(CheckpointError) as raised:
        train(folder, 2, **changes)
    assert re.search(told, str(raised.value), re.DOTALL), str(raised.value)


def test_a_run_goes_on_and_says_from_where(kept: Path) -> None:
    expected = train(None)
    events: list[list[samestep.Event]] = []
    assert train(kept, 3, strategy="zero1", events=events).fingerprint == expected.fingerprint
    for rank in events:
        (resumed,) = of_kind(rank, samestep.Resumed)
        assert (resumed.step, resumed.update, resumed.world_size_before) == (5, 5, 2)
        assert resumed.folder == str(kept / "step-00000005")
        assert resumed.broken_key == {}
        assert warnings_of(rank) == []


def test_a_run_that_is_complete_stays_as_it_is(kept: Path) -> None:
    events: list[list[samestep.Event]] = []
    result = train(kept, 1, steps=5, events=events)
    assert result.step == 5
    assert of_kind(events[0], samestep.StepReport, samestep.CheckpointSaved) == []
    assert result.fingerprint == train(None, steps=5).fingerprint


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1), nn.BatchNorm1d(1))


def halves() -> nn.Module:
    return make_model().to(torch.float64)


def test_another_model_is_refused_with_what_differs(kept: Path) -> None:
    refused(
        kept,
        r"step-00000005 is the checkpoint of another model:\n  not in the checkpoint: 3.weight\n"
        r".*0.weight: shape \(5, 3\) in the checkpoint, \(6, 3\) in the model.*"
        r"Build the model as it was.*load_weights\(model, path, partial=True\)",
        make=wider,
    )
    refused(kept, r"0.weight: dtype torch.float32 in the checkpoint, torch.float64 in the model", make=halves)
    assert steps_on(kept) == [5, 4, 2]


def test_another_optimizer_is_refused(kept: Path) -> None:
    refused(
        kept,
        r"was written with the optimizer AdamW, and this run has SGD: .* Use AdamW, or start a run",
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


def test_changed_settings_of_the_optimizer_count_and_are_said(kept: Path) -> None:
    events: list[list[samestep.Event]] = []
    train(
        kept,
        2,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.99)),
        events=events,
    )
    assert warnings_of(events[0]) == [
        "resume: lr of optimizer group 0 was 0.05 and is now 0.01: the new value counts.",
        "resume: betas of optimizer group 0 was [0.9, 0.999] and is now [0.8, 0.99]: the new value counts.",
    ]
    reports = of_kind(events[0], samestep.StepReport)
    assert {report.learning_rate for report in reports} == {0.01}


def test_other_parameter_groups_are_said(kept: Path) -> None:
    def two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=0.05)

    events: list[list[samestep.Event]] = []
    train(kept, 2, optimizer=two_groups, events=events)
    assert warnings_of(events[0]) == [
        "resume: the optimizer had 1 parameter group and has 2: those that are new keep their own settings."
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batching": samestep.Batching(global_batch=10, micro_batch=2)}, "was .*8.* and is now .*10"),
        ({"seed": 1}, "the seed was 0 and is now 1"),
        ({"dataset": Drawn(39, lambda _: None)}, "the number of samples was 40 and is now 39"),
    ],
)
def test_another_order_of_samples_is_refused(changes: dict[str, Any], told: str, kept: Path) -> None:
    if "dataset" in changes:
        changes = {"dataset": [DATA[number] for number in range(39)]}
    refused(kept, f"{told}.*some twice, some never", **changes)


def test_another_numerics_key_goes_on_and_is_said_in_one_line(kept: Path) -> None:
    events: list[list[samestep.Event]] = []
    train(kept, 2, reduction="fast", events=events)
    for rank in events:
        (resumed,) = of_kind(rank, samestep.Resumed)
        assert resumed.broken_key == {"reduction": "ordered before, fast now"}
        (told,) = warnings_of(rank)
        assert told.startswith("resume under another numerics key, so bits may differ from here on: ")
        assert told.endswith("from here on: reduction: ordered before, fast now.")


def test_averages_that_come_or_go_are_said(kept: Path, tmp_path: Path) -> None:
    events: list[list[samestep.Event]] = []
    train(kept, 2, ema=0.9, events=events)
    assert warnings_of(events[0]) == [
        "resume: no average of the weights is stored: it starts from the weights as they are."
    ]
    train(kept, 2, steps=STEPS + 1, events=events)
    assert warnings_of(events[0]) == [
        "resume: the stored average of the weights is left out: ema is None now."
    ]


def test_a_damaged_one_is_passed_over_with_a_warning(kept: Path) -> None:
    damage(kept, 5, 4)
    events: list[list[samestep.Event]] = []
    result = train(kept, 3, events=events)
    assert result.fingerprint == train(None).fingerprint
    for rank in events:
        assert [event.step for event in of_kind(rank, samestep.Resumed)] == [2]
        passed = warnings_of(rank)
        assert len(passed) == 2
        for step, message in zip((5, 4), passed, strict=True):
            assert message.startswith("checkpoint passed over, taking the next older: ")
            assert (
                f"step-0000000{step}/rank-00001.safetensors: damaged: its content does not match" in message
            )
    assert steps_on(kept) == [8, 6, 4]
    assert train(kept, 1, resume=kept / "step-00000004").fingerprint == result.fingerprint


def test_all_damaged_is_an_error(kept: Path) -> None:
    damage(kept, 2, 4, 5)
    refused(kept, r"step-00000002/.*damaged.* No older checkpoint is whole either. Restore the folder from a")


def test_a_damaged_one_that_was_named_offers_the_next_older(kept: Path) -> None:
    damage(kept, 5, 4)
    told = rf"step-00000005/.*damaged: .* The next older whole one is {kept}/step-00000002."
    refused(kept, told, resume=kept / "step-00000005")
    damage(kept, 2)
    with pytest.raises(CheckpointError) as raised:
        train(kept, 2, resume=kept / "step-00000002")
    assert "next older" not in str(raised.value)


@pytest.mark.parametrize("name", ["nowhere", "n" * 300])
def test_a_named_place_without_a_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    refused(tmp_path / "new", name, resume=tmp_path / name)


def test_a_run_that_goes_back_replaces_what_came_after(kept: Path) -> None:
    events: list[list[samestep.Event]] = []
    policy = samestep.Checkpointing(folder=kept, every=1, keep=2)
    train(kept, 2, resume=kept / "step-00000002", steps=4, events=events, checkpoint=policy)
    assert [event.step for event in of_kind(events[1], samestep.CheckpointSaved)] == [3, 4]
    assert steps_on(kept) == [4, 3]


def test_from_another_folder(kept: Path, tmp_path: Path) -> None:
    for source in (kept, kept / "step-00000005"):
        folder = tmp_path / f"new-{source.name}"
        assert train(folder, 2, resume=str(source)).fingerprint == train(None).fingerprint
        assert steps_on(folder) == [8, 6]
    assert steps_on(kept) == [5, 4, 2]


def test_a_new_run_does_not_write_among_the_checkpoints_of_another(kept: Path) -> None:
    refused(
        kept,
        r"holds checkpoints of a run \(step-00000005 is the newest\), and resume is 'never'",
        resume="never",
    )
    assert steps_on(kept) == [5, 4, 2]


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(
        tmp_path / "file" / "below", r"checkpoint.folder is .*below, which cannot be written: Not a directory"
    )


def test_a_folder_that_another_rank_does_not_see_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts that share no disk: rank 1 has a folder of its own under the same name."""
    import threading

    is_dir: Callable[[Path], bool] = Path.is_dir

    def blind(self: Path) -> bool:
        return is_dir(self) and not (self == tmp_path / "x" and threading.current_thread().name == "rank 1")

    monkeypatch.setattr(Path, "is_dir", blind)
    with pytest.raises(ConfigError, match=r"but rank 1 does not see it. Every rank writes its part there"):
        train(tmp_path / "x", 2)


def test_data_that_changed_since_are_said(kept: Path) -> None:
    changed = [(inputs + 1, target) for inputs, target in (DATA[number] for number in range(40))]
    events: list[list[samestep.Event]] = []
    train(kept, 2, dataset=changed, events=events)
    (message,) = warnings_of(events[1])
    assert message.startswith("resume: the data set has changed since the checkpoint: sample 0 does not hold")


def test_a_state_that_is_not_what_was_stored_is_refused(kept: Path) -> None:
    """The hashes of the files are right, but the state as a whole has another digest than the run's."""
    from dataclasses import replace

    from samestep.checkpoint.manifest import MANIFEST, Manifest

    path = kept / "step-00000005" / MANIFEST
    path.write_text(replace(Manifest.read(path.parent), digest="0" * 16).text())
    refused(
        kept, r"the state has the digest \w{16} after loading, but 0{16} was stored: .* Take an older one"
    )
