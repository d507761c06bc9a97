"""A stored state has the bits, names and ties of the model it came from."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from samestep.checkpoint.state import load_state, named_state, read_state, save_state
from samestep.errors import ConfigError


class Odd(nn.Module):
    """One tensor of every awkward kind."""

    def __init__(self, fill: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(fill)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.z_first = nn.Parameter(draw(3, 4).t())  # not contiguous
        self.brain = nn.Parameter(draw(5).bfloat16())
        self.scalar = nn.Parameter(draw(1).squeeze())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.other_empty = nn.Parameter(torch.empty(0, 3))
        self.complex = nn.Parameter(torch.complex(draw(2, 2), draw(2, 2)))
        self.wide = nn.Parameter(torch.complex(draw(2).double(), draw(2).double()))
        self.special = nn.Parameter(torch.tensor([float("nan"), -0.0, float("inf")]))
        self.register_buffer("count", torch.tensor(7 + fill))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("hidden", draw(2), persistent=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


def bits(tensor: Tensor) -> bytes:
    plain = tensor.detach().contiguous()
    return (
        (torch.view_as_real(plain) if plain.is_complex() else plain)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert list(first) == list(second)
    for name, tensor in first.items():
        other = second[name]
        assert (name, tensor.dtype, tensor.shape) == (name, other.dtype, other.shape)
        assert bits(tensor) == bits(other), name


def test_every_kind_of_tensor_is_read_back_bit_by_bit_in_the_order_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.safetensors"
    model = Odd()
    save_state(model, path)
    assert_same(named_state(model), read_state(path))
    other = Odd(fill=1)
    load_state(other, path)
    assert_same(named_state(model), named_state(other))
    assert not other.z_first.is_contiguous()
    assert [entry.name for entry in path.parent.iterdir()] == ["state.safetensors"]


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    path = tmp_path / "s"
    model = Tied()
    save_state(model, path)
    assert list(load_file(path)) == ["first.weight"]
    state = read_state(path)
    assert state["second.weight"] is state["first.weight"]
    other = Tied()
    load_state(other, path)
    assert other.second.weight is other.first.weight
    assert_same(named_state(model), named_state(other))


def test_views_of_one_flat_buffer_are_stored_apart(tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    model = nn.Module()
    model.one = nn.Parameter(flat[:3])
    model.two = nn.Parameter(flat[3:])
    model.again = nn.Parameter(flat[:3])
    save_state(model, tmp_path / "s")
    stored = load_file(tmp_path / "s")
    assert {name: tensor.tolist() for name, tensor in stored.items()} == {"one": [0, 1, 2], "two": [3, 4, 5]}
    flat.zero_()
    load_state(model, tmp_path / "s")
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]


def test_ties_of_the_file_need_no_ties_in_the_model(tmp_path: Path) -> None:
    save_state(Tied(), tmp_path / "s")
    untied = Tied()
    untied.second.weight = nn.Parameter(torch.zeros(3, 3))
    load_state(untied, tmp_path / "s")
    assert torch.equal(untied.first.weight, untied.second.weight)


def test_other_values_for_a_tie_are_refused(tmp_path: Path) -> None:
    untied = Tied()
    untied.second.weight = nn.Parameter(torch.zeros(3, 3))
    save_state(untied, tmp_path / "s")
    with pytest.raises(ConfigError, match=r"second\.weight and first\.weight are one tensor in the model"):
        load_state(Tied(), tmp_path / "s")


def test_every_mismatch_is_named_and_the_model_is_left_alone(tmp_path: Path) -> None:
    def build(**sizes: int) -> nn.Module:
        return nn.Sequential(OrderedDict((name, nn.Linear(size, 1)) for name, size in sizes.items()))

    save_state(build(a=1, b=2, c=3), tmp_path / "s")
    model = build(a=1, b=4, d=3)
    model.a.half()
    before = {name: tensor.clone() for name, tensor in named_state(model).items()}
    with pytest.raises(ConfigError) as caught:
        load_state(model, tmp_path / "s")
    text = str(caught.value)
    for problem in (
        "missing in the file: d.weight",
        "not in the model: c.weight",
        "b.weight: shape (1, 2) in the file, (1, 4) in the model",
        "a.weight: dtype torch.float32 in the file, torch.float16 in the model",
    ):
        assert problem in text
    assert_same(before, named_state(model))


def test_a_file_of_another_writer_is_read(tmp_path: Path) -> None:
    save_file({"b": torch.ones(2), "a": torch.zeros(1)}, tmp_path / "s")
    assert list(read_state(tmp_path / "s")) == ["a", "b"]


@pytest.mark.parametrize("damage", ["missing", "torn", "noise"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "s"
    if damage != "missing":
        save_state(Tied(), path)
        path.write_bytes(path.read_bytes()[:-4] if damage == "torn" else b"\xff" * 100)
    with pytest.raises(
        ConfigError, match="no such state file" if damage == "missing" else "no whole state file"
    ):
        read_state(path)


def test_a_failed_save_keeps_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    save_state(Tied(), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        save_state(Tied(), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
