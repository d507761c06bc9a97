"""Exact mode: it pins, it refuses with a hint, and it leaves nothing behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._inductor.config as inductor
import torch.utils.deterministic
from torch.nn import functional

from samestep.errors import ConfigError, NotReproducible
from samestep.numerics.exact import explain, numerics_key, pin

CPU = torch.device("cpu")
LONG = torch.randn(64, 40_000), torch.randn(40_000, 32)


def switches() -> tuple[object, ...]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        inductor.deterministic,
        torch.backends.cudnn.benchmark,
    )


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    before = switches()
    yield
    assert switches() == before


def in_thread(run: Callable[[], bytes]) -> bytes:
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join(60)
    return found[0]


def bits(value: torch.Tensor) -> bytes:
    return bytes(value.detach().contiguous().numpy().tobytes())


def unpool() -> None:
    values, where = functional.max_pool2d(torch.randn(1, 1, 4, 4), 2, return_indices=True)
    functional.max_unpool2d(values, where, [2, 2])


def test_inside_all_is_pinned() -> None:
    with pin(threads=1, device=CPU) as pinned:
        assert switches() == (1, True, False, True, True, False)
        assert (pinned.threads, pinned.device) == (1, CPU)


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize(("deterministic", "warn_only"), [(False, False), (True, False), (True, True)])
def test_afterwards_all_is_as_before(deterministic: bool, warn_only: bool, failing: bool) -> None:
    old = switches()
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(3)
    inductor.deterministic = not deterministic
    try:
        before = switches()
        try:
            with pin(threads=2, device=CPU):
                assert switches() != before
                if failing:
                    raise KeyError("of the user's")
        except KeyError:
            assert failing
        assert switches() == before
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.backends.cudnn.benchmark = False
        torch.set_num_threads(int(str(old[0])))


def test_overlapping_blocks_stay_pinned_until_the_last_is_left() -> None:
    entered, leave = threading.Event(), threading.Event()
    seen: list[bool] = []

    def other() -> None:
        with pin(threads=1, device=CPU):
            entered.set()
            leave.wait(60)
            seen.append(torch.are_deterministic_algorithms_enabled())

    thread = threading.Thread(target=other)
    with pin(threads=1, device=CPU):
        thread.start()
        assert entered.wait(60)
    assert torch.are_deterministic_algorithms_enabled()
    leave.set()
    thread.join(60)
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_nested_blocks_give_back_the_outer_threads() -> None:
    with pin(threads=2, device=CPU):
        with pin(threads=1, device=CPU):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        assert torch.are_deterministic_algorithms_enabled()


def test_a_thread_that_pins_itself_has_the_bits_of_the_main_thread() -> None:
    def product() -> bytes:
        with pin(threads=1, device=CPU):
            return bits(LONG[0] @ LONG[1])

    assert in_thread(product) == product()


@pytest.mark.parametrize("threads", [0, -2])
def test_a_thread_count_below_one_is_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match=f"threads is {threads}"), pin(threads=threads, device=CPU):
        pass


@pytest.mark.parametrize("workspace", [None, ":0:0"])
def test_cuda_without_a_cublas_workspace_is_refused(workspace: str | None) -> None:
    with (
        pytest.raises(ConfigError, match=r"Set it to :4096:8"),
        pin(threads=1, device=torch.device("cuda"), cublas_workspace=workspace),
    ):
        pass


def test_a_refused_operation_is_named_with_what_to_do() -> None:
    refused = pytest.raises(NotReproducible, match=r"max_unpooling2d.*Scatter instead")
    with refused as caught, pin(threads=1, device=CPU):
        unpool()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_refusal_in_backward_is_named_too() -> None:
    class Put(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return torch.zeros(4).put_(torch.tensor([0, 0]), gradient)

    with pytest.raises(NotReproducible, match=r"put_: .*index_put_"), pin(threads=1, device=CPU):
        Put.apply(torch.ones(2, requires_grad=True)).sum().backward()


def test_other_errors_pass_unchanged() -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert explain(error) is None
    with pytest.raises(RuntimeError, match="mat1") as caught, pin(threads=1, device=CPU):
        raise error
    assert caught.value is error


def test_torchs_words_are_understood() -> None:
    refusals = {
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set ...": "cumsum",
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
        "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it "
        "uses CuBLAS and you have CUDA >= 10.2.": "CUBLAS_WORKSPACE_CONFIG=:4096:8",
    }
    for text, expected in refusals.items():
        assert expected in str(explain(RuntimeError(text)))


def test_memory_that_nobody_wrote_moves_nothing() -> None:
    matrix, right = torch.randn(200, 40), torch.randn(200, 8)
    found = set()
    with pin(threads=1, device=CPU):
        for size in range(1, 60):
            _ = torch.randn(size), torch.full((size,), size)
            found.add(bits(torch.linalg.lstsq(matrix, right).solution))
    assert len(found) == 1


def test_repeated_ids_move_nothing_with_two_threads() -> None:
    values = torch.randn(100, requires_grad=True)
    ids, incoming = torch.randint(100, (200_000,)), torch.randn(200_000)
    with pin(threads=2, device=CPU):
        found = {bits(torch.autograd.grad(values[ids], values, incoming)[0]) for _ in range(20)}
    assert len(found) == 1


def key_with(threads: int = 1, **more: dict[str, str]) -> dict[str, str | int]:
    with pin(threads=threads, device=CPU) as pinned:
        return numerics_key(pinned, **more)


def test_the_key_repeats_and_can_be_stored() -> None:
    assert key_with() == key_with()
    assert json.loads(json.dumps(key_with())) == key_with()
    assert key_with()["deterministic"] == 1


def test_the_key_changes_with_what_changes_bits() -> None:
    assert key_with(threads=2) == key_with() | {"threads": 2}
    torch.set_flush_denormal(True)
    try:
        assert key_with() != key_with() | {"flush_denormal": 0}
    finally:
        torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("medium")
    try:
        assert key_with()["float32_matmul_precision"] == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_key_takes_settings_and_only_variables_that_choose_kernels() -> None:
    more = key_with(environment={"MKL_CBWR": "AVX2", "HOME": "/"}, settings={"precision": "bf16"})
    assert more == key_with() | {"MKL_CBWR": "AVX2", "precision": "bf16"}
