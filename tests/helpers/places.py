"""Where the ranks of a test run: on CPUs, or where ``TESTS_ON`` in the environment says.

``gpu``: on GPUs. If they are fewer than the ranks they are shared: each rank runs as if on a host
of its own, since NCCL refuses two ranks of one host on one GPU. ``emulated``: see `tests/as_gpu`.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

ON_GPU = "TESTS_ON" in os.environ
if os.environ.get("TESTS_ON") == "emulated":
    sys.path.append(str(Path(__file__).parents[1] / "as_gpu"))
    for name in ("emulated_cuda", "emulated_nccl"):
        importlib.import_module(name).emulate()


def shared(ranks: int) -> bool:
    """Whether so many ranks share a GPU."""
    return ON_GPU and torch.cuda.device_count() < ranks


def devices(ranks: int) -> dict[str, Any]:
    """Arguments of the Trainer."""
    if not ON_GPU:
        return {"accelerator": "cpu", "devices": ranks}
    if not shared(ranks):
        return {"accelerator": "gpu", "devices": ranks}
    return {"accelerator": "gpu", "devices": 1, "num_nodes": ranks}


def variables(rank: int, ranks: int) -> dict[str, str]:
    """What the environment of a rank says of its place."""
    if not shared(ranks):
        return {"LOCAL_RANK": f"{rank}", "NODE_RANK": "0"}
    over = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return {"LOCAL_RANK": "0", "NODE_RANK": f"{rank}", "NCCL_HOSTID": f"host{rank}", **over}
