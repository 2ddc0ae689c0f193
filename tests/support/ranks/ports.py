"""Ports for servers that a test starts later."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 10_000, 32_000
"""Below the ports that the kernel gives to sockets of other programs."""


def free_ports(count: int = 1) -> int:
    """Return the first of `count` consecutive free ports, another one at each call."""
    for _ in range(1000):
        first = random.SystemRandom().randrange(FIRST, LAST - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")
