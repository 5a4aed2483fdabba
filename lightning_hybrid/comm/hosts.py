"""Which network interface leads to the other hosts.

gloo listens where the host's own name leads, which on many machines is the loopback interface:
ranks on other hosts then knock at their own door.
"""

import os
import socket
import struct
import sys
from contextlib import suppress

_VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # Linux: SIOCGIFADDR
_ADDRESS_AT = 20  # in its answer


def choose_interface(address: str, port: int) -> None:
    """Tell gloo to use the interface that leads to the main host, unless the user has chosen one.

    Args:
        address: of the main host. If it leads to the loopback interface, all ranks are on one
            host, and nothing is chosen.
        port: any.
    """
    if _VARIABLE in os.environ or sys.platform != "linux":
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing
        own = probe.getsockname()[0]
        if own.startswith("127."):
            return
        for _, name in socket.if_nameindex():
            if _address_of(name, probe) == own:
                os.environ[_VARIABLE] = name


def _address_of(name: str, probe: socket.socket) -> str | None:
    import fcntl  # not on every system

    try:
        request = struct.pack("256s", name.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
    except OSError:  # it has no address
        return None
    return socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4])
