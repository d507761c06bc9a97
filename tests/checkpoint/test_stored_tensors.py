"""What is written is what is read: all dtypes and shapes, by any number of ranks, and nothing unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from stored_models import Motley, storage_of, store_model, store_tensors

from samestep.checkpoint.manifest import MANIFEST, Manifest, TensorEntry, join_entries
from samestep.checkpoint.reader import StoredCheckpoint
from samestep.checkpoint.restore import require_fit, restore_others, restore_parameters
from samestep.checkpoint.tensor_file import NAMES, hash_file, write_tensors
from samestep.errors import CheckpointError, InternalError
from samestep.numerics.fingerprint import model_fingerprint, raw_bytes

BITS = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(7)).to(torch.uint8)


@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 2)], ids=str)
def test_any_bits_of_any_dtype_come_back(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    source = BITS % 2 if dtype is torch.bool else BITS  # NaNs of any payload, subnormals, -0.0
    numel = torch.Size(shape).numel()
    tensor = source.view(dtype)[:numel].reshape(shape)
    written = write_tensors(tmp_path / "file", {"one": tensor, "other": tensor.clone()})
    assert written == hash_file(tmp_path / "file")
    assert written.num_bytes == (tmp_path / "file").stat().st_size
    for found in safetensors.torch.load_file(tmp_path / "file").values():
        assert (found.dtype, found.shape) == (dtype, shape)
        assert bytes(raw_bytes(found)) == bytes(raw_bytes(tensor)) if numel else True
    place = store_tensors(tmp_path / "kept", {"one": tensor})
    with StoredCheckpoint(place) as stored:
        found = stored.whole("model/one")
        assert (found.dtype, found.shape) == (dtype, shape)
        assert bytes(raw_bytes(found)) == bytes(raw_bytes(tensor)) if numel else True


def test_what_is_not_ready_is_refused_and_an_existing_file_too(tmp_path: Path) -> None:
    with pytest.raises(InternalError):
        write_tensors(tmp_path / "a", {"turned": torch.zeros(2, 3).t()})
    with pytest.raises(InternalError):
        write_tensors(tmp_path / "b", {"complex": torch.zeros(2, dtype=torch.complex64)})
    write_tensors(tmp_path / "c", {})
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "c", {})


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=some.integers(1, 5), after=some.integers(1, 5), seed=some.integers(0, 9))
def test_a_model_comes_back_on_any_number_of_ranks(
    before: int, after: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, other = Motley(seed), Motley(seed + 1)
    wanted = model_fingerprint(model)
    place = store_model(tmp_path_factory.mktemp("kept"), model, step=3, world_size=before)
    store = storage_of(other, after)
    with StoredCheckpoint(place) as stored:
        stored.require_whole(stored.manifest.files)
        require_fit(other, store, stored)
        restore_parameters(store, stored)
        restore_others(other, [slot.name for slot in store.layout.slots], stored)
        state = stored.model_state()
        assert list(state) == list(stored.manifest.order)
        assert state["tied"] is state["plain"]
        assert "passing" not in state
    assert model_fingerprint(other) == wanted
    for name, tensor in other.state_dict().items():
        assert bytes(raw_bytes(state[name])) == bytes(raw_bytes(tensor)) if tensor.numel() else True
    assert state["image"].stride() == model.image.stride()


def test_the_content_does_not_depend_on_who_wrote_it(tmp_path: Path) -> None:
    states = []
    for world_size in (1, 3):
        place = store_model(tmp_path / str(world_size), Motley(5), step=1, world_size=world_size)
        with StoredCheckpoint(place) as stored:
            states.append(
                {name: bytes(raw_bytes(t)) for name, t in stored.model_state().items() if t.numel()}
            )
            assert len(stored.manifest.files) == world_size
    assert states[0] == states[1]


def test_any_run_of_elements_is_read_alone(tmp_path: Path) -> None:
    model = Motley(2)
    place = store_model(tmp_path, model, step=1, world_size=4)
    whole = model.plain.detach().reshape(-1)
    with StoredCheckpoint(place) as stored:
        for start, stop in [(0, 35), (0, 0), (3, 4), (7, 30), (34, 35)]:
            assert torch.equal(stored.run("model/plain", start, stop), whole[start:stop])
        with pytest.raises(CheckpointError, match="holds no model/other"):
            stored.run("model/other", 0, 1)


def test_elements_that_nobody_stored_are_missed() -> None:
    def entry(*pieces: tuple[str, int, int]) -> dict[str, TensorEntry]:
        return {"x": TensorEntry(dtype="F32", shape=(5,), pieces=pieces)}

    whole = join_entries([entry(("b", 3, 5)), entry(("a", 0, 3))])
    assert whole["x"].pieces == (("a", 0, 3), ("b", 3, 5))
    for pieces in ([("a", 0, 3)], [("a", 0, 2), ("b", 3, 5)], [("a", 1, 5)]):
        with pytest.raises(CheckpointError, match=r"x: only \d of 5 elements were stored in a row"):
            join_entries([entry(*pieces)])


Damage = Callable[[Path], object]


def _drop(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_drop, r"rank-00001.safetensors: cannot be read: No such file"),
        (_cut, r"rank-00001.safetensors: damaged: \d+ bytes, but \d+ were written"),
        (_flip, r"rank-00001.safetensors: damaged: its content does not match the hash in the manifest"),
    ],
)
def test_a_damaged_file_is_named(damage: Damage, told: str, tmp_path: Path) -> None:
    place = store_model(tmp_path, Motley(0), step=1, world_size=2)
    damage(place / "rank-00001.safetensors")
    with StoredCheckpoint(place) as stored, pytest.raises(CheckpointError, match=told):
        stored.require_whole(sorted(stored.manifest.files))


def _rewrite(**changes: object) -> Damage:
    def write(path: Path) -> None:
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps(content))

    return write


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_drop, r"there is no manifest.json: this is no checkpoint, or one that was not finished"),
        (_cut, r"manifest.json: damaged, no JSON"),
        (lambda path: path.write_text('{"a": 1}'), r"manifest.json: this is no manifest of samestep's"),
        (lambda path: path.write_text("[]"), r"manifest.json: this is no manifest of samestep's"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), r"manifest.json: damaged, no JSON"),
        (_rewrite(format=2), r"format 2, written by a newer version of samestep \(0\); this one reads 1"),
        (_rewrite(format=0), r"format 0, written by an older version of samestep \(0\); this one reads 1"),
        (_rewrite(format=7, versions=None), r"format 7, written by a newer version of samestep \(unknown\)"),
        (_rewrite(step=2), r"the manifest does not match its own hash: it was changed or damaged"),
        (_rewrite(hash=None), r"the manifest does not match its own hash: it was changed or damaged"),
    ],
)
def test_a_manifest_that_cannot_be_trusted_says_why(damage: Damage, told: str, tmp_path: Path) -> None:
    place = store_tensors(tmp_path, {"x": torch.zeros(2)})
    damage(place / MANIFEST)
    with pytest.raises(CheckpointError, match=told):
        Manifest.read(place)


def test_a_foreign_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="this is no checkpoint, or one that was not finished"):
        Manifest.read(tmp_path / "nowhere")
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        Manifest.read(tmp_path)


def test_no_flipped_byte_is_overlooked(tmp_path: Path) -> None:
    place = store_model(tmp_path, Motley(0), step=1, world_size=2)
    draw = Random(0)
    paths = sorted(place.iterdir())
    assert [path.name for path in paths] == [MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors"]
    for _ in range(150):
        path = draw.choice(paths)
        whole = path.read_bytes()
        content = bytearray(whole)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        if path.name == MANIFEST and _means_the_same(whole, bytes(content)):
            continue  # another kind of white space
        with pytest.raises(CheckpointError), StoredCheckpoint(place) as stored:
            stored.require_whole(sorted(stored.manifest.files))
        path.write_bytes(whole)


def _means_the_same(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {"average": None, "callbacks": {"x": {"2": 1, "10": float("nan")}}, "word": "ä\ud800\n"}
    place = store_tensors(
        tmp_path, {"x": torch.zeros(2)}, step=123456789, state=state, metrics={"a": float("inf"), "b": 0.1}
    )
    assert place.name == "step-123456789"
    found = Manifest.read(place)
    assert repr(found.state) == repr(state)
    assert found.metrics == {"a": float("inf"), "b": 0.1}
    assert found.num_bytes == (place / "rank-00000.safetensors").stat().st_size


def test_a_file_elsewhere_is_not_read(tmp_path: Path) -> None:
    place = store_tensors(tmp_path, {"x": torch.zeros(2)})
    manifest = Manifest.read(place)
    (written,) = manifest.files.values()
    for name in ("../x", "/etc/passwd", "a/b"):
        (place / MANIFEST).write_text(replace(manifest, files={name: written}).text())
        with pytest.raises(CheckpointError, match=r"manifest is not as it should be: .* is no file of this"):
            Manifest.read(place)


def test_keys_that_are_numbers_do_not_break_the_hash(tmp_path: Path) -> None:
    place = store_tensors(tmp_path, {"x": torch.zeros(2)}, state={"average": None, "seen": {10: 1, 2: 2}})
    assert Manifest.read(place).state["seen"] == {"10": 1, "2": 2}
