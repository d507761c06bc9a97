"""Which network interface leads to an address."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from samestep.errors import ConfigError

UNUSED_PORT = 9  # a UDP socket must be connected to some port; nothing is sent to it


def interface_to(address: str) -> str | None:
    """Return the name of the interface on the route to `address`, or None where there is no route.

    A connected UDP socket is asked for its own address: the system chooses the route, no packet is sent.
    Raises ConfigError where the address has no meaning on this machine.
    """
    try:
        targets = socket.getaddrinfo(address, UNUSED_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"The address {address!r}, where the ranks are to meet, cannot be resolved on this machine "
            f"({error}). Give an IP address, or a name that every machine of the run resolves."
        ) from error
    for family, _, _, _, target in targets:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(target)
            except OSError:  # no route by this family: another may have one
                continue
            return interface_with(probe.getsockname()[0])
    return None


def interface_with(address: str) -> str | None:
    """Return the name of this machine's interface that has the IP address `address`, or None."""
    wanted = _plain(address)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and _plain(entry.address) == wanted:
                return name
    return None


def loopback_interface() -> str | None:
    """Return the name of the loopback interface ("lo" on Linux, "lo0" elsewhere), or None without one."""
    return interface_with("127.0.0.1") or interface_with("::1")


def is_loopback(interface: str) -> bool:
    """Say whether `interface` is the loopback interface."""
    return interface == loopback_interface()


def _plain(address: str) -> str:
    return str(ipaddress.ip_address(address.partition("%")[0]))
