"""Ports for stores that are made some seconds later."""

import random
import socket
from contextlib import suppress

_BELOW_EPHEMERAL = (20_000, 32_000)
"""Else the system may have given the port to a connection by then (Linux: from 32,768 on)."""


def free_port() -> int:
    """A port of this host that nobody uses."""
    while True:
        port = random.SystemRandom().randrange(*_BELOW_EPHEMERAL)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
