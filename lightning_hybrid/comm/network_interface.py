"""On which network interface this process listens: no other than the run needs.

The store and the groups of ``torch.distributed`` authenticate nobody. Where all ranks are on one
host, they listen on the loopback interface; else on the one that leads to the main host. (By
default the store listens on all interfaces, and gloo where the host's own name leads, which on many
machines is the loopback interface, where ranks of other hosts do not find it.)
"""

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address

_VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # Linux: SIOCGIFADDR
_ADDRESS_AT = 20  # in its answer
_LOOPBACK = "127.0.0.1"


class _Process:
    """What this process has chosen for its groups.

    Attributes:
        interface: name of the interface for gloo; ``None``: gloo's own choice, or the user's.
    """

    interface: str | None = None


@contextmanager
def chosen_interface() -> Iterator[None]:
    """Inside, groups of gloo are made on the interface that was chosen last.

    gloo knows no other way than the environment, which is the user's again afterwards.
    """
    name = _Process.interface
    if name is None or _VARIABLE in os.environ:
        yield
        return
    os.environ[_VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


def choose_interface(address: str, port: int, hosts: int) -> None:
    """Choose which interface gloo uses in :func:`chosen_interface`, unless the user has done so.

    Args:
        address: of the main host.
        port: any.
        hosts: number of hosts. If there are several and ``address`` leads to the loopback
            interface, as a host's own name often does, nothing is chosen.
    """
    _Process.interface = None
    if _VARIABLE in os.environ or sys.platform != "linux":
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing
        own = probe.getsockname()[0]
        if ip_address(own).is_loopback:
            if hosts > 1:
                return
            own = _LOOPBACK
        for _, name in socket.if_nameindex():
            if _address_of(name, probe) == own:
                _Process.interface = name


def bound_to(address: str, port: int, hosts: int) -> int | None:
    """A socket that listens for the store, on the interface of ``address`` alone.

    Args:
        address: of the main host, which this process runs on.
        port: port of the store.
        hosts: number of hosts.

    Returns:
        Its file descriptor, which the store takes over. ``None``: ``address`` is not one of this
        host's, or leads to the loopback interface though there are several hosts; then the store is
        to listen on all interfaces, as it does by itself.
    """
    with suppress(OSError):
        # the address may be a name, and of either version of IP
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if hosts > 1 and ip_address(place[0]).is_loopback:
            return None
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            # a run may follow another one at once, whose port is still waiting to be free
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen()
        except OSError:
            listening.close()
            raise
        return listening.detach()
    return None


def _address_of(name: str, probe: socket.socket) -> str | None:
    import fcntl  # not on every system

    try:
        # Linux has 15 characters and a zero for the name
        request = struct.pack("256s", name.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
    except OSError:  # it has no address
        return None
    return socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4])
