"""What the other device of a script costs: a server, or a second run of the script.

The script makes a data set of 1 GB, imports transformers (where that is installed) and trains a
small network in two stages for three steps. Shown are the seconds from the start of the script to
the end of its first step, and what the worker has in memory after the third (``VmRSS``) and had at
most (``VmHWM``). *open*: sizes are left open, and the network is made in ``configure_model``.
*script*: both ranks begin the script, as where a cluster starts them; the worker leaves it in
``fit``. The kinds take turns.

    python benchmarks/served_worker.py
    python benchmarks/served_worker.py --rounds 1
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

BEGUN = time.time()
MIB = 2**20
KINDS = ("server", "open", "script")


def train(kind: str, out: Path) -> None:
    """The script; `kind` is one of `KINDS`."""
    import torch
    from _timing import bare_trainer, servers
    from lightning.pytorch import LightningModule
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_hybrid import HybridGabraStrategy

    if find_spec("transformers"):
        import transformers

        assert transformers.AutoModel

    def made() -> nn.Module:
        return nn.Sequential(*[nn.Linear(64, 64), nn.ReLU()] * 4)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module | None = None if kind == "open" else made()
            self.first_s = 0.0

        def configure_model(self) -> None:
            self.net = self.net or made()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert self.net is not None
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.first_s = self.first_s or time.time() - BEGUN
            if batch_idx == 2 and self.trainer.is_global_zero:
                [worker] = servers() or [int((out / "worker").read_text())]
                status = Path(f"/proc/{worker}/status").read_text()
                lines = (line.split() for line in status.splitlines() if line.startswith("Vm"))
                found = {name: int(size) * 1024 / MIB for name, size, _ in lines}
                seen = {"now": found["VmRSS:"], "most": found["VmHWM:"], "first": self.first_s}
                (out / "seen.json").write_text(json.dumps(seen))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = TensorDataset(torch.ones(2**22, 64))  # 1 GB
    sizes: dict[str, Any] = {"data_parallel_size": 1, "pipeline_parallel_size": 2}
    strategy = HybridGabraStrategy(**({} if kind == "open" else sizes))
    if os.environ.get("LOCAL_RANK") == "1":
        (out / "worker").write_text(f"{os.getpid()}")
    trainer = bare_trainer(strategy, devices=2, max_steps=3)
    trainer.fit(Module(), DataLoader(data, batch_size=32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", choices=KINDS, help="one of them, here")
    parser.add_argument("--out", type=Path, help="folder of its results")
    arguments = parser.parse_args()
    if arguments.run:
        train(arguments.run, arguments.out)
        return
    from _results import record
    from slow_device import free_port

    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(arguments.rounds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as place:
                command = [sys.executable, __file__, "--run", kind, "--out", place]
                port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
                ranks = [{}] if kind != "script" else [port | {"LOCAL_RANK": r} for r in "01"]
                started = [subprocess.Popen(command, env=os.environ | rank) for rank in ranks]
                if max(process.wait() for process in started):
                    raise SystemExit(f"it has failed: {' '.join(command)}")
                found[kind].append(json.loads((Path(place) / "seen.json").read_text()))
    for kind, runs in found.items():
        now, most, first = (median(run[what] for run in runs) for what in ("now", "most", "first"))
        print(f"{kind}: first step after {first:.1f} s; worker {now:.0f} MiB, at most {most:.0f}")
        record({f"{kind}: worker": now, f"{kind}: worker at most": most}, "MiB")
        record({f"{kind}: end of the first step": first}, "s")


if __name__ == "__main__":
    main()
