"""A run on one host listens on the loopback interface alone."""

import os
import socket
import sys
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from ranks import gloo_groups

from lightning_hybrid.comm.network_interface import bound_to, choose_interface, chosen_interface

VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
linux = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are chosen on Linux only")


def listening() -> set[str]:
    """Addresses that this process listens on."""
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # restored afterwards, whatever the test makes of it
    del os.environ[VARIABLE]


@linux
def test_groups_of_one_host_listen_on_the_loopback_interface() -> None:
    before = listening()
    choose_interface(LOOPBACK, 1234, hosts=1)
    with chosen_interface():
        assert os.environ[VARIABLE] in {name for _, name in socket.if_nameindex()}
        groups = gloo_groups(30)
    assert listening() - before <= {LOOPBACK}
    assert VARIABLE not in os.environ  # programs that the user starts later have their own
    for group in groups:
        group.shutdown()


def test_a_loopback_address_tells_nothing_where_there_are_several_hosts() -> None:
    choose_interface(LOOPBACK, 1234, hosts=1)
    choose_interface(LOOPBACK, 1234, hosts=2)
    with chosen_interface():
        assert VARIABLE not in os.environ
    assert bound_to(LOOPBACK, free_port(), hosts=2) is None


def test_the_users_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "eth7")
    choose_interface(LOOPBACK, 1234, hosts=1)
    with chosen_interface():
        assert os.environ[VARIABLE] == "eth7"
    assert os.environ[VARIABLE] == "eth7"


def test_the_store_of_one_host_listens_on_the_loopback_interface() -> None:
    before, port = listening(), free_port()
    timeout = timedelta(seconds=30)
    store = dist.TCPStore(
        LOOPBACK, port, None, True, timeout, master_listen_fd=bound_to(LOOPBACK, port, hosts=1)
    )
    other = dist.TCPStore(LOOPBACK, port, None, False, timeout)
    other.set("key", "value")
    assert store.get("key") == b"value"
    assert listening() - before <= {LOOPBACK}


def test_an_address_of_another_host_or_in_use_is_left_to_the_store() -> None:
    assert bound_to("192.0.2.1", free_port(), hosts=2) is None  # of nobody: RFC 5737
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        assert bound_to(LOOPBACK, taken.getsockname()[1], hosts=1) is None
