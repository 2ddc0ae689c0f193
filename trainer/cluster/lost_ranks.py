"""The error of a rank whose collective failed because another rank, or its machine, was lost.

gloo names the address and the port of the lost connection, and ranks of one machine share an
address. So each rank tells the others the ports of its sockets, once all groups are connected.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...console.errors import RunError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOST = re.compile(
    r"gloo.*(Connection (closed|reset) by peer|Connection timed out|Broken pipe|No route to host)"
    r"|remote process exited",
    re.DOTALL,
)
"""Messages of gloo and of NCCL."""
ADDRESS = re.compile(r"\[(\d+(?:\.\d+){3}|[0-9a-f:.]+)\]:(\d+)")
SOCKETS = Path("/proc/self")
"""Where Linux lists the sockets of this process."""

Ports = dict[str, bytes]
"""Ports of the sockets of a rank by address: numbers of two bytes."""


class LostRankError(RunError):
    """Another rank, or its machine, was lost."""


@contextlib.contextmanager
def naming_lost_ranks(name: str, ports_by_rank: Sequence[Ports] = ()) -> Iterator[None]:
    """Raise a LostRankError of the rank `name` for a connection to another rank that was lost: no
    launcher that watches all ranks says which one ended first. `ports_by_rank` may be filled while
    the block runs."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError and DistBackendError too
        text = str(error)
        if LOST.search(text) is None:
            raise
        raise LostRankError(
            f"{name} lost its connection to {_peer(text, ports_by_rank)}: "
            "that rank has ended, or its machine or network failed",
            where=text.partition(". This is")[0].rpartition("gloo/")[2],
            hint="the log of that rank may say why it ended. The same command works on any number "
            "of ranks; a run resumes from its last checkpoint",
        ) from error


def gather_ports(group: ProcessGroup) -> list[Ports]:
    """Return the ports of each rank. Collective."""
    import torch.distributed as dist

    ports_by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ports_by_rank, own_ports(), group=group)
    return ports_by_rank


def own_ports() -> Ports:
    """Return the ports of this process's TCP sockets; none on another system than Linux."""
    sockets = set()
    for descriptor in (SOCKETS / "fd").glob("*"):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed
            sockets.add(str(descriptor.readlink()))
    ports: dict[str, array[int]] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (SOCKETS / "net" / table).read_text().splitlines()[1:]:
                _, local, *more = line.split()
                if f"socket:[{more[7]}]" in sockets:
                    address, port = local.split(":")
                    ports.setdefault(_address(address), array("H")).append(int(port, 16))
    return {address: numbers.tobytes() for address, numbers in ports.items()}


def _address(text: str) -> str:
    """Return an address that the kernel writes as words of 32 bits, least byte first."""
    packed = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    return _plain(ipaddress.ip_address(packed))


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    return str(getattr(address, "ipv4_mapped", None) or address)


def _peer(text: str, ports_by_rank: Sequence[Ports]) -> str:
    """Return the name of the rank whose connection a message of gloo names."""
    match = ADDRESS.search(text)
    if match is None:
        return "another rank"
    address = _plain(ipaddress.ip_address(match[1]))
    port = socket.ntohs(int(match[2]))  # gloo prints it as it travels
    ranks = [
        rank
        for rank, ports in enumerate(ports_by_rank)
        if port in array("H", ports.get(address, b""))
    ]
    return f"{f'rank {ranks[0]}' if len(ranks) == 1 else 'another rank'} at {match[1]}"
