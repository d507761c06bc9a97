"""The catalogue: the table, the instrument that made it, the page that shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from samestep.errors import ConfigError
from samestep.numerics import catalogue as module
from samestep.numerics.catalogue import COLUMNS, catalogue, hint_for, look_up, origin
from samestep.numerics.experiments.__main__ import DATA, END, START
from samestep.numerics.experiments.measure import REFUSED, fresh, measure
from samestep.numerics.experiments.operation import Inputs, Operation
from samestep.numerics.experiments.operations import OPERATIONS
from samestep.numerics.experiments.table import broken, differences, text

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[2] / "docs" / "catalogue.md"
BY_NAME = {operation.name: operation for operation in OPERATIONS}
RERUN = ("layer_norm", "conv2d, depthwise", "embedding", "index_put, accumulate", "linalg.lstsq", "softmax")


def made_up(run: Callable[[Tensor], Tensor]) -> Operation:
    """An operation of ours on eight rows of six, whose sensitivity is known."""
    return Operation(
        name="made up",
        inputs=lambda draw: {"x": draw.normal(8, 6)},
        run=lambda inputs: run(inputs["x"]),
        rows=("x",),
    )


def columns_moved_by(operation: Operation) -> set[str]:
    return {column for column, cell in measure(operation, CPU).items() if cell}


def test_the_table_covers_the_experiments() -> None:
    assert [entry.operation for entry in catalogue()] == [operation.name for operation in OPERATIONS]
    assert len(BY_NAME) == len(OPERATIONS) >= 60
    assert origin() is not None


def test_nothing_in_the_table_moves_in_exact_mode() -> None:
    assert {entry.exact for entry in catalogue()} == {"same", "refused"}


def test_what_is_refused_has_a_hint_and_the_rest_has_none() -> None:
    refused = {entry.operation: entry.hint for entry in catalogue() if entry.exact == "refused"}
    assert refused.keys() == {"put_", "max_unpool2d"}
    assert all(refused.values())
    assert not any(entry.hint for entry in catalogue() if entry.exact == "same")


def test_a_moving_column_names_the_results() -> None:
    for entry in catalogue():
        moving = {column for column in COLUMNS if getattr(entry, column) == "moves"}
        assert moving == set(entry.moved)
        assert all(entry.moved.values())


def test_notes_belong_to_operations() -> None:
    assert json.loads(DATA.with_name("hints.json").read_text())["notes"].keys() <= BY_NAME.keys()


def test_look_up_finds_by_name_and_corrects_a_slip() -> None:
    assert look_up("layer_norm").moved["threads"] == ("grad weight", "grad bias")
    with pytest.raises(ConfigError, match="Did you mean layer_norm"):
        look_up("layernorm")


def test_an_unmeasured_device_has_no_entries() -> None:
    assert catalogue("cuda") == ()
    assert origin("cuda") is None
    assert text("cuda") == "Not measured on cuda.\n"


def test_reading_the_catalogue_imports_no_torch() -> None:
    source = Path(module.__file__).read_text()
    assert "import torch" not in source
    assert "from torch" not in source


def test_the_nearest_kernel_name_gives_the_hint() -> None:
    assert "Scatter instead" in hint_for("max_unpooling2d_forward_out")
    assert "sort by index" in hint_for("scatter_reduce_cuda_kernel")
    assert hint_for("something_new_cuda").startswith("Replace it")


def test_the_hints_for_the_cpu_say_what_is_true() -> None:
    values, where = functional.max_pool2d(torch.randn(2, 3, 8, 8), 2, return_indices=True)
    scattered = torch.zeros(2, 3, 64).scatter(-1, where.flatten(2), values.flatten(2)).view(2, 3, 8, 8)
    assert torch.equal(scattered, functional.max_unpool2d(values, where, [2, 2]))
    tensor, ids, source = torch.randn(5, 7), torch.tensor([3, 30, 11]), torch.randn(3)
    put = tensor.clone().put_(ids, source)
    tensor.view(-1).index_put_((ids,), source)
    assert torch.equal(put, tensor)


@pytest.mark.parametrize("name", RERUN)
def test_a_rerun_here_never_moves_in_exact_mode(name: str) -> None:
    assert measure(BY_NAME[name], CPU)["exact"] == []


@pytest.mark.parametrize("name", ["put_", "max_unpool2d"])
def test_a_rerun_here_refuses_what_the_table_says(name: str) -> None:
    assert measure(BY_NAME[name], CPU)["exact"] == REFUSED


def test_a_fresh_process_repeats_the_bits_of_exact_mode() -> None:
    command = [
        sys.executable,
        "-m",
        "samestep.numerics.experiments",
        "--child",
        "hashes",
        "--only",
        "layer_norm",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout)
    assert len(found) == 2
    for name in found:
        assert found[name]["hashes"] == fresh(BY_NAME[name], CPU), name


def test_the_instrument_finds_nothing_in_what_is_steady() -> None:
    assert columns_moved_by(made_up(lambda x: x * 2 + 1)) == set()


def test_the_instrument_finds_each_kind_of_movement() -> None:
    calls: list[int] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x + len(calls)

    assert {"run_to_run", "exact"} <= columns_moved_by(made_up(counted))
    assert columns_moved_by(made_up(lambda x: x * torch.get_num_threads())) == {"threads"}
    assert columns_moved_by(made_up(lambda x: x * len(x))) == {"shape"}
    assert columns_moved_by(made_up(lambda x: x * (x.stride(0) + 1) if x.stride(1) > 1 else x)) == {"layout"}
    offset = made_up(lambda x: x * (x.data_ptr() % 64 + 1) if x.is_contiguous() else x)
    assert "alignment" in columns_moved_by(offset)


def test_the_instrument_sees_a_gradient_move_alone() -> None:
    def run(inputs: Inputs) -> Tensor:
        x = inputs["x"]
        scale = torch.get_num_threads()
        return x.detach() + (x - x.detach()) * scale

    operation = Operation(name="made up", inputs=lambda draw: {"x": draw.normal(8, 6)}, run=run)
    assert measure(operation, CPU)["threads"] == ["grad x"]


def test_differences_are_sentences() -> None:
    measured = json.loads(DATA.read_text())["cpu"]
    assert differences(measured, "cpu") == []
    assert broken(measured) == []
    measured["operations"]["softmax"]["exact"] = ["out"]
    measured["operations"]["softmax"]["threads"] = []
    assert differences(measured, "cpu") == [
        "softmax, exact: was same, is moves: out",
        "softmax, threads: was moves: grad x, is same",
    ]
    assert broken(measured) == ["softmax"]


def test_the_page_shows_the_committed_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.split(START)[1].split(END)[0] == text()
