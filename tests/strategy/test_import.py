"""Importing this package registers the strategies and changes nothing else."""

import subprocess
import sys

import pytest

import lightning_hybrid

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
sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 2}
data = pickle.dumps(lightning_hybrid.HybridGabraStrategy(**sizes))
trainer = Trainer(accelerator="cpu", devices=2, strategy=pickle.loads(data), logger=False)
assert not trainer._accelerator_connector.is_distributed  # one replica
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
assert trainer._accelerator_connector.is_distributed
"""


@pytest.mark.conformance
def test_lightning_is_as_it_was_until_a_strategy_is_made() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], check=True)


FIRST = "import lightning.pytorch", "import lightning_hybrid", "import lightning_hybrid.allocation"
REGISTERED = """
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
assert "hybrid_gabra" in StrategyRegistry and "hybrid_gabra" in STRATEGY_REGISTRY
"""


@pytest.mark.conformance
@pytest.mark.parametrize("first", FIRST)
def test_the_strategies_are_registered_in_every_order_of_imports(first: str) -> None:
    script = f"{first}\nimport lightning_hybrid\nimport lightning.pytorch\n{REGISTERED}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


ALONE = """
import sys, types
package = sys.modules["lightning_hybrid"] = types.ModuleType("lightning_hybrid")
package.__path__ = [sys.argv[1]]
from lightning_hybrid.allocation import Problem, allocate
assert allocate(Problem([3.0, 1.0, 2.0], [1.0, 1.0])).assignment == (0, 1, 1)
assert not {"torch", "lightning", "pytorch_lightning"} & set(sys.modules)
"""


def test_the_allocation_itself_uses_neither_torch_nor_lightning() -> None:
    place = next(iter(lightning_hybrid.__path__))
    subprocess.run([sys.executable, "-c", ALONE, place], check=True)
