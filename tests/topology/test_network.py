"""Interfaces by address: asked of the system, never by name."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import subprocess
import sys
import uuid

import psutil
import pytest

from samestep.errors import ConfigError
from samestep.topology.network import interface_to, interface_with, is_loopback, loopback_interface

ASK = "from samestep.topology.network import interface_to; print(interface_to({address!r}))"


def own_addresses() -> list[tuple[str, str]]:
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and psutil.net_if_stats()[name].isup
    ]


def test_loopback_is_found_by_its_address() -> None:
    name = loopback_interface()
    assert name is not None
    assert is_loopback(name)
    assert interface_to("127.0.0.1") == interface_to("localhost") == name


@pytest.mark.parametrize(("name", "address"), own_addresses())
def test_an_own_address_leads_to_its_interface(name: str, address: str) -> None:
    assert ipaddress.ip_address(address)
    assert interface_with(address) == name
    assert interface_to(address) == name


def test_an_address_of_nobody_here() -> None:
    assert interface_with("192.0.2.77") is None


@pytest.mark.parametrize("address", ["no.such.host.invalid", "", "x" * 300])
def test_an_address_without_meaning_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="cannot be resolved"):
        interface_to(address)


def test_the_route_decides_and_no_route_is_said() -> None:
    """Two interfaces in a network of its own: each address leads to its own, and others nowhere."""
    space = f"samestep-{uuid.uuid4().hex[:8]}"
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", space], check=False).returncode:
        pytest.skip("a network of one's own needs the right to make it, and iproute2")
    try:
        for index in (0, 1):
            for words in (
                f"link add v{index} type veth peer name w{index}",
                f"addr add 10.7{index}.0.1/24 dev v{index}",
                f"link set w{index} up",
                f"link set v{index} up",
            ):
                subprocess.run(["ip", "-n", space, *words.split()], check=True)
        for address, expected in [("10.70.0.9", "v0"), ("10.71.0.9", "v1"), ("10.72.0.9", "None")]:
            command = ["ip", "netns", "exec", space, sys.executable, "-c", ASK.format(address=address)]
            told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            assert told.stdout.strip() == expected
    finally:
        subprocess.run(["ip", "netns", "del", space], check=True)
