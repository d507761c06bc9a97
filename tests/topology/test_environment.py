"""Places from variables: the table of launchers, what contradicts, and what a child rank is given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import ConfigError
from samestep.topology.environment import Environment, Place, settle_interface
from samestep.topology.network import loopback_interface

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def place_of(variables: dict[str, str]) -> Place:
    return Environment.read(variables).place()


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in TORCHRUN.items() if key != name}


@pytest.mark.parametrize("variables", [{}, {"RANK": ""}, {"MASTER_ADDR": "h0", "MASTER_PORT": "1"}])
def test_without_a_launcher_there_is_one_rank(variables: dict[str, str]) -> None:
    assert place_of(variables) == Place(reason="no launcher's variables are set")


def test_torchrun() -> None:
    place = place_of(TORCHRUN)
    assert place == Place(
        rank=5,
        world_size=6,
        local_rank=1,
        local_world_size=2,
        launcher="torchrun",
        reason="RANK=5, WORLD_SIZE=6, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2",
        rendezvous="tcp://10.0.0.1:29500",
        agent_store=True,
        attempt=2,
    )


def test_the_four_variables_of_torch_are_enough() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"}
    place = place_of(variables)
    assert (place.local_rank, place.local_world_size, place.agent_store, place.attempt) == (1, 3, False, 0)
    assert place.rendezvous == "tcp://[fd00::1]:29500"
    assert not place.locality_known
    assert "who shares a machine is found when the ranks meet" in place.reason


def test_a_world_of_one_needs_no_rendezvous() -> None:
    place = place_of({"RANK": "0", "WORLD_SIZE": "1"})
    assert (place.world_size, place.rendezvous) == (1, None)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (without("WORLD_SIZE"), "RANK is 5, but WORLD_SIZE is not set"),
        (without("RANK"), "WORLD_SIZE is 6, but RANK is not set"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is 0, but RANK is not set"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but RANK is not set"),
        (without("MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without("MASTER_PORT"), "MASTER_PORT is not set"),
        (TORCHRUN | {"RANK": "6"}, "RANK is 6, but WORLD_SIZE is 6"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "7"}, "LOCAL_WORLD_SIZE is 7, but WORLD_SIZE is 6"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1'"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        (TORCHRUN | {"LOCAL_RANK": "1.0"}, r"LOCAL_RANK is '1\.0'"),
        (TORCHRUN | {"WORLD_SIZE": "٣"}, "WORLD_SIZE is '٣'"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT is 0"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT is 65536"),
        (TORCHRUN | {"SAMESTEP_RANK": "0"}, "SAMESTEP_RANK and TORCHELASTIC_RUN_ID"),
        ({"RANK": "1", "WORLD_SIZE": "8", "PET_NODE_RANK": "1"}, "RANK may count machines"),
        ({"SAMESTEP_RANK": "0", "SAMESTEP_WORLD_SIZE": "2"}, "SAMESTEP_RENDEZVOUS is not set"),
    ],
)
def test_what_is_incomplete_or_contradictory_is_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place_of(variables)


def test_a_cloud_that_counts_machines_is_no_launcher() -> None:
    assert place_of({"WORLD_SIZE": "16", "NODE_RANK": "0", "MASTER_ADDR": "h0"}).launcher == "none"


@settings(deadline=None)
@given(st.integers(1, 9), st.data())
def test_a_child_finds_the_place_it_was_given(world_size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    given_place = Place(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        launcher="samestep",
        reason="test",
        rendezvous="file:///a folder/50%/rendezvous" if world_size > 1 else None,
    )
    # A supervisor under a launcher: none of that launcher's variables may reach a child.
    variables = Environment.read(TORCHRUN).child(given_place, failures=Path("/failures"), threads=2)
    environment = Environment.read(variables)
    found = environment.place()
    for name in ("rank", "world_size", "local_rank", "local_world_size", "launcher", "rendezvous"):
        assert getattr(found, name) == getattr(given_place, name)
    assert environment.failures == Path("/failures")
    assert not set(TORCHRUN) & set(variables)


def test_what_the_user_set_stands_for_a_child() -> None:
    place = Place(world_size=2, local_world_size=2, launcher="samestep", reason="", rendezvous="file:///r")
    plain = Environment.read({"HOME": "/h"}).child(place, failures=Path("/f"), threads=2, unbuffered=True)
    assert plain["HOME"] == "/h"
    assert plain["OMP_NUM_THREADS"] == "2"
    assert plain["GLOO_SOCKET_IFNAME"] == loopback_interface()
    assert plain["PYTHONUNBUFFERED"] == plain["PYTHONFAULTHANDLER"] == "1"
    own = {"OMP_NUM_THREADS": "8", "GLOO_SOCKET_IFNAME": "ib0", "PYTHONFAULTHANDLER": "0"}
    assert own.items() <= Environment.read(own).child(place, failures=Path("/f"), threads=2).items()


def test_only_a_child_rank_has_a_failures_folder() -> None:
    assert Environment.read({"SAMESTEP_FAILURES": "/f"}).failures is None
    assert Environment.read({}).failures is None


def test_the_starter_of_ranks_is_the_nearest_parent_without_their_variable() -> None:
    """Shells between the launcher and a rank have the variable too."""
    ask = "import sys; from samestep.topology.environment import starter_of; print(starter_of('PMI_RANK'))"
    command = ["sh", "-c", f'"{sys.executable}" -c "{ask}"; true']  # `true`: else sh becomes python itself
    environ = {**os.environ, "PMI_RANK": "1"}
    told = subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=60)
    assert told.stdout.strip() == f"started by process {os.getpid()}"


def test_gloo_is_told_its_interface() -> None:
    here = Place(world_size=2, local_world_size=2, launcher="samestep", reason="", rendezvous="file:///r")
    environ: dict[str, str] = {}
    assert settle_interface(here, environ) == loopback_interface() == environ["GLOO_SOCKET_IFNAME"]
    environ = {"GLOO_SOCKET_IFNAME": "mine"}
    assert settle_interface(here, environ) == "mine" == environ["GLOO_SOCKET_IFNAME"]
    environ = {}
    assert settle_interface(Place(reason=""), environ) is None
    assert environ == {}
    torchrun = place_of(TORCHRUN | {"LOCAL_WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1"})
    assert settle_interface(torchrun, environ) == loopback_interface()


def test_ranks_of_several_machines_do_not_meet_on_loopback() -> None:
    place = place_of(TORCHRUN | {"MASTER_ADDR": "127.0.1.1"})
    assert settle_interface(place, {}) != loopback_interface()
