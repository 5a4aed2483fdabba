"""A server loads neither Lightning nor TorchDynamo, and ends when its orders do."""

import pickle
import subprocess
import sys
from dataclasses import replace
from io import BytesIO

import torch
from torch import nn

from lightning_hybrid.process import ServeOrder, orders
from lightning_hybrid.stage import StageOptions

LOADED = """
import sys
from lightning_hybrid.worker.server import Server
names = ("lightning", "pytorch_lightning", "lightning_fabric", "torch._dynamo", "torch._inductor")
print(*[name for name in names if name in sys.modules])
"""


def test_a_server_loads_neither_lightning_nor_torchdynamo() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_a_server_whose_driver_is_gone_ends_without_a_word() -> None:
    command = [sys.executable, "-m", "lightning_hybrid.worker", "1"]
    done = subprocess.run(command, input=b"", capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_orders_arrive_as_they_were_given() -> None:
    order = ServeOrder.of(nn.Linear(2, 3), StageOptions(), timed=True)
    assert order.dtype == torch.get_default_dtype()
    sent = [order, replace(order, timed=False)]
    assert [*orders(BytesIO(b"".join(map(pickle.dumps, sent))))] == sent
