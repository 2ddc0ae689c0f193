"""Name the rank that was lost, or whose machine was lost, when a collective fails.

gloo names the lost connection's address and port, and ranks on a machine share the address. So all
ranks exchange their sockets' ports once the groups are connected.
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
"""Messages from gloo and NCCL."""
ADDRESS = re.compile(r"\[(\d+(?:\.\d+){3}|[0-9a-f:.]+)\]:(\d+)")
SOCKETS = Path("/proc/self")
"""Where Linux lists this process's sockets."""

Ports = dict[str, bytes]
"""A rank's socket ports by address: two bytes per port."""


class LostRankError(RunError):
    """Another rank, or its machine, was lost."""


@contextlib.contextmanager
def naming_lost_ranks(rank_name: str, ports_by_rank: Sequence[Ports] = ()) -> Iterator[None]:
    """Raise a LostRankError from the rank `rank_name` when it loses a connection: an external
    launcher does not say which rank ended first. `ports_by_rank` may be filled while the block
    runs."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError and DistBackendError too
        message = str(error)
        if LOST.search(message) is None:
            raise
        raise LostRankError(
            f"{rank_name} lost its connection to {_name_peer(message, ports_by_rank)}: "
            "that rank has ended, or its machine or network failed",
            where=message.partition(". This is")[0].rpartition("gloo/")[2],
            hint="the log of that rank may say why it ended. The same command works on any number "
            "of ranks; a run resumes from its last checkpoint",
        ) from error


def gather_ports(group: ProcessGroup) -> list[Ports]:
    """Gather socket ports by rank. Collective."""
    import torch.distributed as dist

    ports_by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ports_by_rank, local_ports(), group=group)
    return ports_by_rank


def local_ports() -> Ports:
    """Return the ports of this process's TCP sockets; empty on systems without /proc."""
    sockets = set()
    for descriptor in (SOCKETS / "fd").glob("*"):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed
            sockets.add(str(descriptor.readlink()))
    ports: dict[str, array[int]] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (SOCKETS / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if f"socket:[{fields[9]}]" in sockets:
                    address, port = fields[1].split(":")
                    ports.setdefault(_parse_address(address), array("H")).append(int(port, 16))
    return {address: numbers.tobytes() for address, numbers in ports.items()}


def _parse_address(digits: str) -> str:
    """Parse an address in the kernel's notation: hexadecimal words with 32 bits, little-endian."""
    packed = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
    return _format_address(ipaddress.ip_address(packed))


def _format_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    return str(getattr(address, "ipv4_mapped", None) or address)


def _name_peer(message: str, ports_by_rank: Sequence[Ports]) -> str:
    """Name the rank at the remote end of the connection in a gloo message."""
    match = ADDRESS.search(message)
    if match is None:
        return "another rank"
    address = _format_address(ipaddress.ip_address(match[1]))
    port = socket.ntohs(int(match[2]))  # gloo prints it in network byte order
    ranks = [
        rank
        for rank, ports in enumerate(ports_by_rank)
        if port in array("H", ports.get(address, b""))
    ]
    return f"{f'rank {ranks[0]}' if len(ranks) == 1 else 'another rank'} at {match[1]}"
