"""Lists of hosts as Slurm writes them: any list that is compressed comes out again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import ConfigError
from samestep.topology.host_lists import slurm_counts, slurm_hosts

plain = st.sampled_from(["n", "rack-", "gpu.", "127.0.0."])
numbers = st.sampled_from([0, 1, 7, 9, 98, 100])


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Draw the text inside of brackets, and the numbers that it stands for."""
    width = draw(st.integers(1, 5))
    first = draw(numbers)
    last = draw(st.none() | st.integers(first, first + 4))
    written = [str(number).zfill(width) for number in range(first, (first if last is None else last) + 1)]
    return (written[0] if last is None else f"{written[0]}-{str(last).zfill(width)}"), written


@st.composite
def elements(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Draw one element of a list, such as rack1-[2-3,7]b[0-1], and its hosts."""
    text = draw(plain)
    hosts = [text]
    for inside in draw(st.lists(st.lists(ranges(), min_size=1, max_size=3), max_size=2)):
        suffix = draw(st.sampled_from(["", "b", "-x"]))
        text += f"[{','.join(written for written, _ in inside)}]{suffix}"
        found = [number for _, numbers in inside for number in numbers]
        hosts = [f"{host}{number}{suffix}" for host in hosts for number in found]
    return text, hosts


@settings(max_examples=60, deadline=None)
@given(st.lists(elements(), min_size=1, max_size=3))
def test_every_host_comes_out_in_order(drawn: list[tuple[str, list[str]]]) -> None:
    text = ",".join(written for written, _ in drawn)
    assert list(slurm_hosts(text)) == [host for _, hosts in drawn for host in hosts]


@pytest.mark.parametrize(
    ("text", "first"),
    [("n[1-3,7]", "n1"), ("n[08-10]", "n08"), ("one", "one"), ("127.0.0.[1-2]", "127.0.0.1")],
)
def test_the_first_host(text: str, first: str) -> None:
    assert next(slurm_hosts(text)) == first


@pytest.mark.parametrize("text", ["", "n[1-3", "n1-3]", "n[a-b]", "n[1-]", "n[]", "a,,b", ",a", "n[[1]]"])
def test_what_slurm_does_not_write_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Set MASTER_ADDR to the host of the first rank"):
        list(slurm_hosts(text))


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1, max_size=5))
def test_counts_of_tasks(drawn: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in drawn)
    assert slurm_counts(text) == [count for count, times in drawn for _ in range(times)]
