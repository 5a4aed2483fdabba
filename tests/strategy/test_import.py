"""Importing this package changes nothing but the registry of strategies."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, pickle, sys
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import nn

def state():
    connector = vars(_AcceleratorConnector)
    return dict(os.environ), sys.excepthook, dict(connector), nn.Module.__call__

before = state()
import lightning_hybrid
assert state() == before
data = pickle.dumps(lightning_hybrid.HybridGabraStrategy(1, 2))
trainer = Trainer(accelerator="cpu", devices=2, strategy=pickle.loads(data), logger=False)
assert not trainer._accelerator_connector.is_distributed  # one replica
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
assert trainer._accelerator_connector.is_distributed
"""


@pytest.mark.conformance
def test_lightning_is_as_it_was_until_a_strategy_is_made() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], check=True)
