"""Which of this host's addresses everything listens at: found from the flags, checked before anything listens.

One address for all: the store (where this agent has it), the keeper, the journals, the messages between ranks, gloo.
Never all addresses at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912
_NAME_BYTES, _ENTRY_BYTES = 16, 40
_ROOM_BYTES = 1 << 16
_INET6 = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE, _HOST_SCOPE = "00", "10"

Addresses = dict[str, tuple[str, ...]]
"""By interface, those with which it can be reached: IPv4 first."""


def addresses() -> Addresses:
    """Return this host's interfaces; one that has no address is there as well."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name, address in [*_ipv4(), *_ipv6()]:
        found.setdefault(name, []).append(address)
    return {name: tuple(own) for name, own in found.items()}


def _ipv4() -> list[tuple[str, str]]:
    room = ctypes.create_string_buffer(_ROOM_BYTES)
    asked = struct.pack("@iP", _ROOM_BYTES, ctypes.addressof(room))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (count,) = struct.unpack_from("@i", fcntl.ioctl(probe, _SIOCGIFCONF, asked))
    entries = [room.raw[at : at + _ENTRY_BYTES] for at in range(0, count, _ENTRY_BYTES)]
    return [
        # an address may have a label of its own, like eth0:1
        (entry[:_NAME_BYTES].split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(entry[20:24]))
        for entry in entries
    ]


def _ipv6() -> list[tuple[str, str]]:
    """Without link-local ones, which mean nothing on another host."""
    try:
        lines = _INET6.read_text(encoding="ascii").splitlines()
    except OSError:  # a kernel without IPv6
        return []
    fields = [line.split() for line in lines]
    return [
        (name, str(ipaddress.IPv6Address(bytes.fromhex(digits))))
        for digits, _, _, scope, _, name in fields
        if scope in (_GLOBAL_SCOPE, _HOST_SCOPE)
    ]


def choose(
    there: Addresses,
    *,
    interface: str | None = None,
    host_addr: str | None = None,
    local_addr: str | None = None,
    gloo_interfaces: str = "",
) -> str | None:
    """Return the address that was asked for; ``None`` if none was. ``ValueError`` with one sentence if it cannot be.

    ``local_addr`` is torchrun's name for ``host_addr``. ``gloo_interfaces`` is what torch itself would listen at, and
    counts if nothing else was said.
    """
    if (
        host_addr is not None
        and local_addr is not None
        and _resolve("--host-addr", host_addr) != _resolve("--local-addr", local_addr)
    ):
        raise ValueError(f"--host-addr {host_addr} and --local-addr {local_addr} contradict each other: give one")
    flag, given = ("--local-addr", local_addr) if host_addr is None else ("--host-addr", host_addr)
    source = "--interface"
    if interface is None and given is None and gloo_interfaces:
        source, interface = "GLOO_SOCKET_IFNAME", gloo_interfaces.split(",")[0].strip()
    own = () if interface is None else _of(there, source, interface)
    if given is None:
        return own[0] if own else None
    address = _resolve(flag, given)
    if ipaddress.ip_address(address).is_unspecified:
        raise ValueError(f"{flag} {given} would be all of this host's addresses: name one of {_listed(there)}")
    if not is_ours(address):
        raise ValueError(f"{flag} {given} is not an address of this host, which has {_listed(there)}")
    if own and address not in own and not (_loopback(address) and _loopback(own[0])):
        raise ValueError(f"{flag} {given} and --interface {interface} contradict each other: it has {', '.join(own)}")
    return address


def _of(there: Addresses, source: str, interface: str) -> tuple[str, ...]:
    if interface not in there:
        raise ValueError(f"{source} {interface}: there is no such interface, this host has {_listed(there)}")
    if not there[interface]:
        raise ValueError(f"{source} {interface} has no address, this host has {_listed(there)}")
    return there[interface]


def _listed(there: Addresses) -> str:
    return ", ".join(f"{name} ({', '.join(own) or 'no address'})" for name, own in there.items()) or "none"


def _resolve(flag: str, name: str) -> str:
    try:
        return str(socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ValueError(f"{flag} {name} is not an address: {error.strerror}") from None


def is_ours(address: str) -> bool:
    """Whether this host can listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def outside(listening: list[str], host_addr: str) -> list[str]:
    """Return the addresses, of those that are listened at, that are neither this one nor loopback."""
    return [address for address in listening if address != host_addr and not _loopback(address)]
