"""Choose the network interface that the store and gloo listen on: only one that the run needs.

The store and the groups of ``torch.distributed`` authenticate nobody. If all ranks are on one host,
they listen on the loopback interface; otherwise on the interface that leads to the main host. (By
default the store listens on all interfaces, and gloo on the interface of the host's own name. On
many machines that is the loopback interface, where ranks of other hosts do not find it.)
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
_ADDRESS_AT = 20  # offset of the IPv4 address in the answer
_LOOPBACK = "127.0.0.1"


class _ChosenInterface:
    """The choice of this process, which :func:`choose_interface` sets.

    Attributes:
        interface: name of the interface for gloo; ``None`` leaves the choice to gloo or the user.
    """

    interface: str | None = None


@contextmanager
def chosen_interface() -> Iterator[None]:
    """Context in which gloo makes groups on the interface of the last :func:`choose_interface`.

    The variable ``GLOO_SOCKET_IFNAME`` is set in the environment, the only way that gloo has, and
    removed at the end. Does nothing if no interface was chosen, or if the user has set the
    variable.
    """
    name = _ChosenInterface.interface
    if name is None or _VARIABLE in os.environ:
        yield
        return
    os.environ[_VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


def choose_interface(address: str, port: int, hosts: int) -> None:
    """Choose for :func:`chosen_interface` the interface by which this host reaches ``address``.

    Called by each rank before the store and the groups are made. Nothing is chosen if the user has
    set ``GLOO_SOCKET_IFNAME`` in the environment, or if the system is not Linux.

    Args:
        address: address or name of the main host.
        port: any port; nothing is sent to it.
        hosts: number of hosts. If there are several and ``address`` leads to the loopback
            interface, as a host's own name often does, nothing is chosen.
    """
    _ChosenInterface.interface = None
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
                _ChosenInterface.interface = name


def bound_to(address: str, port: int, hosts: int) -> int | None:
    """Make a listening socket for the store, only on the interface that has ``address``.

    Args:
        address: address or name of the main host; called on that host.
        port: port of the store.
        hosts: number of hosts.

    Returns:
        The socket's file descriptor, which the store takes over. ``None`` if this host cannot
        listen there (it has no such address), or if the address is the loopback interface's though
        there are several hosts; then the store is to listen on all interfaces, its default.
    """
    with suppress(OSError):
        # the address may be a name, and of either version of IP
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if hosts > 1 and ip_address(place[0]).is_loopback:
            return None
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            # the port may still be in TIME_WAIT after an earlier run
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen()
        except OSError:
            listening.close()
            raise
        return listening.detach()
    return None


def _address_of(name: str, probe: socket.socket) -> str | None:
    """Ask the system (Linux) for the IPv4 address of the interface ``name``; ``None``: it has none.

    Args:
        name: name of the interface.
        probe: any open socket.
    """
    import fcntl  # here, since not every system has it

    try:
        # a name has at most 15 characters, and a zero behind them
        request = struct.pack("256s", name.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
    except OSError:  # the interface has no address
        return None
    return socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4])
