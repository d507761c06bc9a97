"""Batches as bytes: what is put together again is what was taken apart."""

from __future__ import annotations

import collections
import pickle
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.data import parcel as parcel_module
from samestep.data.parcel import Parcel, take_apart

Pair = collections.namedtuple("Pair", "first second")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
)


def parcel_of(batch: object) -> Parcel:
    apart = take_apart(batch)
    sizes = tuple(len(part) for part in apart.parts)
    return Parcel(sizes, apart.of_tensors, b"".join(apart.parts))


def sent(batch: object) -> object:
    return pickle.loads(pickle.dumps(parcel_of(batch))).open()


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    form, other = ((tensor.dtype, tensor.shape, tensor.stride()) for tensor in (first, second))
    flat = [tensor.reshape(-1).as_strided((tensor.numel(),), (1,)) for tensor in (first, second)]
    return form == other and torch.equal(*(values.view(torch.uint8) for values in flat))


def with_bits(dtype: torch.dtype, *size: int) -> torch.Tensor:
    count = int(np.prod(size)) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64).mul(37).remainder(2 if dtype is torch.bool else 251)
    return raw.to(torch.uint8).view(dtype).reshape(size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(3, 5), (1,), (0,), (2, 0, 3)], ids=str)
def test_every_dtype_and_size_keeps_its_bits(dtype, size):
    tensor = with_bits(dtype, *size)
    assert same_bits(sent(tensor), tensor)


def test_a_number_without_dims_and_nans_keep_their_bits():
    for value in (torch.tensor(7), torch.tensor(float("nan")), torch.tensor(-0.0), torch.tensor(True)):
        assert same_bits(sent(value), value)


@given(st.data())
def test_strides_of_views_are_kept(data):
    size = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    tensor = with_bits(torch.int16, *size)
    tensor = tensor.permute(data.draw(st.permutations(range(len(size)))))
    for dim in range(tensor.dim()):
        start = data.draw(st.integers(0, tensor.size(dim) - 1))
        tensor = tensor.narrow(dim, start, data.draw(st.integers(0, tensor.size(dim) - start)))
        if tensor.size(dim):
            tensor = tensor[(slice(None),) * dim + (slice(None, None, data.draw(st.integers(1, 3))),)]
    assert same_bits(sent(tensor), tensor)


def test_only_the_part_that_a_view_shows_travels():
    big = torch.zeros(1_000_000)
    assert take_apart(big[10:20]).num_bytes < 1000
    assert take_apart(big[:1].expand(1000)).num_bytes < 1000
    assert sent(big[10:20]).untyped_storage().nbytes() == 40
    channels_last = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert take_apart(channels_last).num_bytes < channels_last.nbytes + 300


def test_two_views_of_one_storage_keep_their_values_but_share_no_more():
    whole = torch.arange(10)
    head, tail, again = sent([whole[:6], whole[4:], whole])
    assert (head.tolist(), tail.tolist(), again.tolist()) == ([*range(6)], [*range(4, 10)], [*range(10)])
    head.fill_(-1)
    assert again.tolist() == [*range(10)]


def test_one_tensor_in_two_places_stays_one():
    tensor, array = torch.arange(3), np.arange(3)
    first, second = sent([{"t": tensor, "a": array}, (tensor, array)])
    assert first["t"] is second[0]
    assert first["a"] is second[1]
    assert take_apart([tensor] * 50).num_bytes < 1000


@dataclass
class Record:
    pixels: torch.Tensor
    notes: list[object] = field(default_factory=list)


def test_what_holds_the_tensors_does_not_matter():
    batch = collections.OrderedDict(
        pair=Pair(torch.arange(2), np.arange(2.0)), record=Record(torch.ones(2), [None, "x", b"y", 1 + 2j])
    )
    arrived = sent(batch)
    assert type(arrived) is collections.OrderedDict
    assert type(arrived["pair"]) is Pair
    assert arrived["pair"].first.tolist() == [0, 1]
    assert arrived["pair"].second.tolist() == [0.0, 1.0]
    assert arrived["record"].pixels.tolist() == [1.0, 1.0]
    assert arrived["record"].notes == [None, "x", b"y", 1 + 2j]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(24).reshape(4, 6)[::2, ::3],
        np.empty((0, 3), dtype=np.float16),
        np.array(3.5),
        np.array(["a", "longer"]),
        np.array([(1, 2.5)], dtype=[("a", "i2"), ("b", "f8")]),
        np.array(["2026-01-02"], dtype="datetime64[D]"),
        np.array(["a", None, 3], dtype=object),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_keep_values_dtype_and_order(array):
    arrived = sent({"array": array})["array"]
    assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
    assert np.array_equal(arrived, array)
    assert arrived.flags.writeable
    assert arrived.flags.f_contiguous == array.flags.f_contiguous or not array.flags.contiguous


def test_an_array_that_may_not_be_written_stays_so():
    array = np.arange(3)
    array.flags.writeable = False
    assert not sent(array).flags.writeable


def test_a_tensor_that_arrived_is_like_any_other():
    leaf = sent(torch.ones(3, requires_grad=True))
    assert leaf.is_leaf
    assert leaf.requires_grad
    with torch.no_grad():
        leaf.add_(1)
    leaf.square().sum().backward()
    assert leaf.grad.tolist() == [4.0, 4.0, 4.0]
    plain = sent(torch.ones(3))
    assert not plain.requires_grad
    assert not plain._is_view()


def test_other_tensors_travel_as_torch_pickles_them():
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.tensor([1.5, 2.5]), (4,), check_invariants=True
    )
    noted = torch.arange(3)
    noted.note = "kept"
    conjugate = torch.tensor([1 + 2j]).conj()
    arrived = sent(
        {
            "sparse": sparse,
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "buffer": torch.nn.Buffer(torch.ones(2)),
            "meta": torch.empty(4, device="meta"),
            "noted": noted,
            "conjugate": conjugate,
        }
    )
    assert torch.equal(arrived["sparse"].to_dense(), sparse.to_dense())
    assert type(arrived["parameter"]) is torch.nn.Parameter
    assert arrived["parameter"].requires_grad
    assert type(arrived["buffer"]) is type(torch.nn.Buffer(torch.ones(2)))
    assert arrived["meta"].device.type == "meta"
    assert (arrived["noted"].tolist(), arrived["noted"].note) == ([0, 1, 2], "kept")
    assert torch.equal(arrived["conjugate"], conjugate)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: torch.ones(2, requires_grad=True) * 2, "still belongs to a graph: detach"),
        (lambda: torch.nn.Parameter(torch.ones(2)) * 2, "still belongs to a graph: detach"),
        (threading.Lock, "cannot pickle"),
    ],
    ids=["graph", "parameter", "lock"],
)
def test_what_cannot_be_pickled_is_refused(made, reason):
    with pytest.raises((pickle.PicklingError, TypeError), match=reason):
        take_apart([made()])


def test_deterministic_algorithms_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *args, _empty=torch.empty, **kw: _limited(_empty, *args, **kw))
    assert sent(torch.arange(3)).tolist() == [0, 1, 2]


def _limited(empty, size, **kwargs):
    assert size == 0
    return empty(size, **kwargs)


def test_pinned_is_what_the_batch_keeps(monkeypatch):
    asked = []
    memory = parcel_module._memory
    monkeypatch.setattr(
        parcel_module, "_memory", lambda size, pin: (asked.append((size, pin)), memory(size, False))[1]
    )
    opened = parcel_of([torch.arange(2), np.arange(3)]).pin_memory()
    assert [part.tolist() for part in opened] == [[0, 1], [0, 1, 2]]
    assert asked[1:] == [(16, True), (24, True)]
    assert asked[0][1] is False
