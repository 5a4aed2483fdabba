"""How long a run takes to the end of its first training step, beside one device.

Claim: at most 3 x one device's first step + 10 s where nothing is known of the network, and + 2 s
where its profile is on the disk. Each run is a Trainer in a process of its own, with one thread
each: on one device; on one device under ``torch.compile(backend="eager")``, whose first step is
TorchDynamo's trace and little else, so the least that a captured network can take; under
``hybrid_gabra`` with two stages and an empty cache of profiles; and once more with the profile that
the run before has left. "start" is the time from the start of the script to the setup hooks:
imports, and under ``hybrid_gabra`` the other process and the connection to it. "first step" goes on
from there to the end of the first training step; the pieces of work in it stand beside. What is
kept of a run is the profile: TorchDynamo's trace cannot be, since its guards name objects of the
process (torch's own cache, ``torch._dynamo.config.caching_precompile``, drops such guards).

    python benchmarks/first_step.py [--rounds 3] [NAME ...]   # those that are installed
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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _results import record

if TYPE_CHECKING:
    from torch import Tensor, nn

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


def vit() -> "nn.Module":
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=10))


def resnet() -> "nn.Module":
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=10))


def whisper() -> "nn.Module":
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 64, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "vocab_size": 1000}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(
        WhisperConfig(**sizes, **heads, **tokens, max_source_positions=100)
    )


Case = tuple[str, Callable[[], Any], tuple[int, ...], int]

NETWORKS: dict[str, Case] = {
    "3D-ResAttNet-18": ("monai", resattnet, (1, 64, 64, 64), 6),
    "MaxViT (our own, 11 blocks)": ("torch", maxvit, (3, 128, 128), 6),
    "EfficientNet-B0 (MONAI, 2D)": ("monai", efficientnet, (3, 128, 128), 6),
    "200 linear layers": ("torch", layers, (256,), 32),
    "ViT (transformers, 12 layers)": ("transformers", vit, (3, 64, 64), 8),
    "ResNet-50 (transformers)": ("transformers", resnet, (3, 64, 64), 8),
    "Whisper (transformers, 6 + 4 layers)": ("transformers", whisper, (80, 200), 8),
}
"""The package that it needs, what makes it, the shape of an input, and the batch size."""


def loss_of(network: "nn.Module", batch: Any) -> "Tensor":
    """The loss of a batch of inputs and of classes, which are tokens for a network of sequences."""
    from torch.nn.functional import cross_entropy

    x, y = batch
    if getattr(network, "main_input_name", "") == "input_features":
        loss: Tensor = network(input_features=x, labels=2 + y[:, None].repeat(1, 16)).loss
        return loss
    found = network(x)
    return cross_entropy(getattr(found, "logits", found), y)


def run(name: str, kind: str, out: Path) -> None:
    """The script of one process: train for one step, and note down when what was over."""
    import torch
    from _timing import Module, Repeated, bare_trainer, before_the_first_step
    from lightning.pytorch import Callback

    from lightning_hybrid import HybridGabraStrategy

    class Clock(Callback):
        def setup(self, *_: Any, **__: Any) -> None:
            self.start_s = time.time() - float(os.environ[STARTED])
            self.since = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.first_step_s = time.perf_counter() - self.since
            self.parts = before_the_first_step(trainer)

    class Trained(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return loss_of(self.net, batch)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    _, make, shape, batch = NETWORKS[name]
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
    trainer.fit(Trained(network), Repeated(shape, batch, steps=1).loader())
    if trainer.is_global_zero:
        seconds = {"start": clock.start_s, "first step": clock.first_step_s}
        out.write_text(json.dumps(seconds | clock.parts))


def seconds(name: str, kind: str, cache: str) -> dict[str, float]:
    """Seconds of the start, of the first step and of its pieces, in processes of their own."""
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
        found: dict[str, float] = json.loads(out.read_text())
        return found


def medians(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """Per kind the medians of what `seconds` returns; kinds alternate."""
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for kind, found in rows.items():
                found.append(seconds(name, kind, cache))
    return {
        kind: {what: statistics.median(row[what] for row in found) for what in found[0]}
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
    installed = [name for name, (package, *_) in NETWORKS.items() if find_spec(package)]
    for name in arguments.names or installed:
        found = medians(name, arguments.rounds)
        record({f"{name}: {kind}": row["first step"] for kind, row in found.items()}, "s")
        one = found[KINDS[0]]["first step"]
        print(f"{name}, median of {arguments.rounds}", flush=True)
        for kind, more_s in zip(KINDS, (None, None, 10.0, 2.0)):
            start_s, first_s, *parts = found[kind].values()
            text = f"  {kind:12} start {start_s:5.1f} s, first step {first_s:6.2f} s"
            pieces = [f"{what} {s:.2f}" for what, s in zip([*found[kind]][2:], parts)]
            text += f" ({', '.join(pieces)})" if pieces else ""
            if more_s is not None:
                limit = 3 * one + more_s
                text += f" (at most {limit:.2f} s: {'yes' if first_s <= limit else 'NO'})"
            print(text, flush=True)


if __name__ == "__main__":
    main()
