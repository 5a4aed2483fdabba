"""A server loads neither Lightning nor TorchDynamo, and carries out the orders of rank 0."""

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from torch import nn
from torch.distributed import TCPStore

from lightning_hybrid.comm import ConnectionLost, Coordinates
from lightning_hybrid.process import (
    EndOrder,
    JoinOrder,
    Meeting,
    Order,
    RestOrder,
    ServeOrder,
    give,
    latest_order,
    orders,
    start_server,
)
from lightning_hybrid.stage import StageOptions
from lightning_hybrid.worker.server import Server

LOADED = """
import sys
from lightning_hybrid.worker.server import Server
names = ("lightning", "pytorch_lightning", "lightning_fabric", "torch._dynamo", "torch._inductor")
print(*[name for name in names if name in sys.modules])
"""
LASTS = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True)
store.wait(["server 1 listens"], timedelta(seconds=60))
"""


def test_a_server_loads_neither_lightning_nor_torchdynamo() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def connections(port: int) -> int:
    """How many clients the store at a port of this host has."""
    tables = (Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    fields = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sum(f[1].endswith(f":{port:04X}") and f[3] == "01" for f in fields)


def test_a_server_whose_store_is_gone_ends_without_a_word() -> None:
    port = free_port()
    host = subprocess.Popen([sys.executable, "-c", LASTS, f"{port}"])
    TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))  # (it is there)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-P", "-m", "lightning_hybrid.worker", "1"]
    server = subprocess.Popen(
        command, env=os.environ | place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    alone = connections(port)
    while connections(port) < alone + 2:  # the server's, by which it waits for an order too
        time.sleep(0.05)
    host.kill()
    said, _ = server.communicate(timeout=60)
    host.wait()
    assert (server.returncode, said) == (1, b"")


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True)


def test_a_server_imports_nothing_that_lies_where_the_script_was_started(
    store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lightning_hybrid.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", f"{store.port}")
    give(store, EndOrder(0))
    assert start_server(1).wait(timeout=60) == 0


def test_orders_arrive_as_they_were_given(store: TCPStore) -> None:
    order = ServeOrder.of(nn.Linear(2, 3), StageOptions(), timed=True)
    assert order.dtype == torch.get_default_dtype()
    sent: list[Order] = [order, replace(order, timed=False), EndOrder(0)]
    for each in sent:
        give(store, each)
    assert [*islice(orders(store, 1, after=0), len(sent))] == sent
    assert store.check(["server 1 ends"])  # so that the host of the store may go


def test_a_rank_that_becomes_a_server_hears_what_comes_from_then_on(store: TCPStore) -> None:
    give(store, RestOrder())
    later = orders(store, 1, latest_order(store))
    give(store, EndOrder(1))
    assert next(later) == EndOrder(1)


def test_a_server_that_has_failed_keeps_nothing_of_the_run_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No connection ends with this process, and the other ranks of the run wait at those."""

    class Transfer:
        pass

    held: list[weakref.ref[Transfer]] = []

    def fails(*_: object) -> None:
        transfer = Transfer()
        cycle: list[object] = [transfer]
        cycle.append(cycle)
        held.append(weakref.ref(transfer))
        raise ConnectionLost("on purpose")

    def given() -> Iterator[Order]:
        yield order
        assert held[0]() is None
        yield EndOrder(3)

    order: Any = JoinOrder(
        history=None,
        coordinates=Coordinates(0, 1, 2),
        backend="gloo",
        timeout=timedelta(seconds=1),
        devices=(),
        surveys=False,
        capacity=None,
    )
    monkeypatch.setattr(Server, "_join", fails)
    monkeypatch.setattr(Server, "_fail", lambda *_: None)
    gc.disable()
    try:
        assert Server(1, 1, Meeting("127.0.0.1", 0, hosts=1, serve=False)).run(given()) == 3
    finally:
        gc.enable()
