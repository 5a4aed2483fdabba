"""How long a run takes to the end of its first training step, beside one device.

Claim: at most 3 x one device's first step + 10 s where nothing is known of the network, and + 2 s
where its profile is on the disk. Each run is a Trainer in a process of its own, with one thread
each: on one device; on one device under ``torch.compile(backend="eager")``, whose first step is
TorchDynamo's trace and little else, so the least that a captured network can take; under
``hybrid_gabra`` with two stages and an empty cache of profiles; and once more with the profile that
the run before has left. "start" is the time from the start of the script to the setup hooks:
imports, and under ``hybrid_gabra`` the other process and the connection to it. "first step" goes on
from there to the end of the first training step.

    python benchmarks/first_step.py [--rounds 3] [NAME ...]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _results import record

if TYPE_CHECKING:
    from torch import nn

KINDS = ("one device", "traced", "empty cache", "cached")
STARTED = "FIRST_STEP_STARTED"  # the environment of the script: seconds since the epoch


def resattnet() -> "nn.Module":
    from models import ResAttNet3D

    return ResAttNet3D(18)


def maxvit() -> "nn.Module":
    from _maxvit import MaxViT

    return MaxViT()


def efficientnet() -> "nn.Module":
    from monai.networks.nets import EfficientNetBN

    return EfficientNetBN("efficientnet-b0", pretrained=False, spatial_dims=2, num_classes=10)


def layers() -> "nn.Module":
    from torch import nn

    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(200)))


NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "3D-ResAttNet-18": (resattnet, (1, 64, 64, 64), 6),
    "MaxViT (our own, 11 blocks)": (maxvit, (3, 128, 128), 6),
    "EfficientNet-B0 (MONAI, 2D)": (efficientnet, (3, 128, 128), 6),
    "200 linear layers": (layers, (256,), 32),
}
"""What makes it, the shape of an input, and the batch size."""


def run(name: str, kind: str, out: Path) -> None:
    """The script of one process: train for one step, and note down when what was over."""
    import torch
    from _timing import Module, Repeated, bare_trainer
    from lightning.pytorch import Callback

    from lightning_hybrid import HybridGabraStrategy

    class Clock(Callback):
        def setup(self, *_: Any, **__: Any) -> None:
            self.start_s = time.time() - float(os.environ[STARTED])
            self.since = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.first_step_s = time.perf_counter() - self.since

    torch.manual_seed(0)
    torch.set_num_threads(1)
    make, shape, batch = NETWORKS[name]
    clock, hybrid = Clock(), kind in KINDS[2:]
    trainer = bare_trainer(
        strategy=HybridGabraStrategy(pipeline_parallel_size=2) if hybrid else "auto",
        devices=2 if hybrid else 1,
        max_steps=1,
        callbacks=[clock],
    )
    network = make()
    if kind == "traced":
        compiled: Any = torch.compile
        network = compiled(network, backend="eager")
    trainer.fit(Module(network), Repeated(shape, batch, steps=1).loader())
    if trainer.is_global_zero:
        out.write_text(json.dumps([clock.start_s, clock.first_step_s]))


def seconds(name: str, kind: str, cache: str) -> tuple[float, float]:
    """Seconds of the start and of the first step, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        command = [sys.executable, __file__, name, "--run", kind, "--out", str(out)]
        more = {"OMP_NUM_THREADS": "1", "LIGHTNING_HYBRID_CACHE": cache}
        done = subprocess.run(
            command,
            env=os.environ | more | {STARTED: str(time.time())},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{name}, {kind}, ended with code {done.returncode}:\n{done.stderr}")
        start_s, first_s = json.loads(out.read_text())
        return start_s, first_s


def medians(name: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Per kind the median seconds of the start and of the first step; kinds alternate."""
    rows: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for kind, found in rows.items():
                found.append(seconds(name, kind, cache))
    return {
        kind: (statistics.median(s for s, _ in found), statistics.median(f for _, f in found))
        for kind, found in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {list(NETWORKS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", choices=KINDS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    unknown = set(arguments.names) - NETWORKS.keys()
    if unknown:
        parser.error(f"no network is called {sorted(unknown)}; there are {list(NETWORKS)}")
    if arguments.run:
        run(arguments.names[0], arguments.run, arguments.out)
        return
    for name in arguments.names or NETWORKS:
        found = medians(name, arguments.rounds)
        record({f"{name}: {kind}": first_s for kind, (_, first_s) in found.items()}, "s")
        one = found[KINDS[0]][1]
        print(f"{name}, median of {arguments.rounds}", flush=True)
        for kind, more_s in zip(KINDS, (None, None, 10.0, 2.0)):
            start_s, first_s = found[kind]
            text = f"  {kind:12} start {start_s:5.1f} s, first step {first_s:6.2f} s"
            if more_s is not None:
                limit = 3 * one + more_s
                text += f" (at most {limit:.2f} s: {'yes' if first_s <= limit else 'NO'})"
            print(text, flush=True)


if __name__ == "__main__":
    main()
