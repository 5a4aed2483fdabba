"""How much memory each rank needs at most, phase by phase, where a model is large.

Three steps with Adam, a checkpoint in the middle of the fit, the end of the fit; and another run,
which goes on from that checkpoint. Counted is the most that a process has in memory (`VmHWM`, which
is set back between phases; Linux), without what it had before the model was made. Beside it stands
its ratio to the aim, which is 1.15 x (one device's peak of the steps / stages) + 64 MiB, and what
the plan says. A worker's figure is that of the whole fit. `2x2` are two replicas of two stages, and
`zero` has the replicas divide the states of the optimizer, of which each rank's size is shown.

    python benchmarks/large_models.py --width 4096 --layers 24
    python benchmarks/large_models.py --model gpt --width 1024 --layers 24
    python benchmarks/large_models.py --model unet --width 16 --size 96
    python benchmarks/large_models.py --peers "one device;hybrid 2 __init__" --limit-mib 3000
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _results import record
from _timing import bare_trainer
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_hybrid import HybridGabraStrategy

PEERS = (
    "one device",
    "ddp 2",
    "fsdp2 2",
    "hybrid 2 __init__",
    "hybrid 2 configure_model",
    "hybrid 2 configure_model recompute",
    "hybrid 4 __init__",
    "hybrid 4 configure_model",
    "hybrid 4 configure_model recompute",
    "hybrid 2x2 __init__",
    "hybrid 2x2 __init__ zero",
)
MIB = 2**20
VOCABULARY = 8192


def memory(field: str) -> int:
    """A line of `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Phases:
    """The peaks of this process."""

    def __init__(self) -> None:
        self.base = memory("VmRSS")
        self.peaks: dict[str, float] = {}
        self.times: dict[str, float] = {}
        self._begun = time.perf_counter()
        self._reset()

    def over(self, phase: str) -> None:
        """A phase is over; the next one begins."""
        peak = (memory("VmHWM") - self.base) / MIB
        self.peaks[phase] = max(self.peaks.get(phase, 0.0), round(peak))
        now = time.perf_counter()
        self.times[phase] = round(now - self._begun, 2)
        self._begun = now
        self._reset()

    @staticmethod
    def _reset() -> None:
        Path("/proc/self/clear_refs").write_text("5")


# ---------------------------------------------------------------- networks


class Perceptron(nn.Sequential):
    """Layers of one width."""

    def __init__(self, width: int, layers: int, size: int) -> None:
        super().__init__(
            *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
        )


class Block(nn.Module):
    """A transformer's layer, each token looking back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attend(self.before(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).flatten(2))
        narrow: Tensor = self.narrow(F.gelu(self.wide(self.between(x))))
        return x + narrow


class Gpt(nn.Sequential):
    """A language model, without ties."""

    def __init__(self, width: int, layers: int, size: int) -> None:
        super().__init__(
            nn.Embedding(VOCABULARY, width),
            *(Block(width) for _ in range(layers)),
            nn.LayerNorm(width),
            nn.Linear(width, VOCABULARY),
        )


def unet(width: int, layers: int, size: int) -> nn.Module:
    """MONAI's, of so many levels."""
    from monai.networks.nets import UNet

    channels = [width * 2**level for level in range(layers)]
    return UNet(3, 1, 2, channels, strides=[2] * (layers - 1), num_res_units=2)


NETWORKS = {
    "perceptron": (Perceptron, 2048, 24, 0),
    "gpt": (Gpt, 512, 8, 128),
    "unet": (unet, 8, 4, 96),
}
"""What makes each of them, and its width, layers and size if nothing is said."""


class Adam(torch.optim.Adam):
    """Notes what this process has of its states."""

    states = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        Adam.states = sum(v.nbytes for state in self.state.values() for v in state.values())
        return loss


class Model(LightningModule):
    """One of the networks.

    Args:
        where: it is built.
        kind: which one.
        sizes: width, layers, and length of a text or edge of a volume.
    """

    def __init__(self, where: str, kind: str, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        self._kind, self._sizes, self._where = kind, sizes, where
        self.net: nn.Module | None = None
        self.losses: list[float] = []
        if where == "__init__":
            self.configure_model()

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        self.net = NETWORKS[self._kind][0](*self._sizes)
        if self._where == "fsdp2":
            mesh = self.device_mesh["data_parallel"]
            for part in self.net.children():
                fully_shard(part, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.net is not None
        if self._kind == "gpt":
            tokens = batch[:, :-1]
            loss = F.cross_entropy(self.net(tokens).flatten(0, 1), batch[:, 1:].flatten())
        else:
            loss = (self.net(batch) - 1).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Adam(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(1)
        width, _, size = self._sizes
        if self._kind == "gpt":
            data = torch.randint(VOCABULARY, (12, size + 1), generator=generator)
        elif self._kind == "unet":
            data = torch.randn(6, 1, size, size, size, generator=generator)
        else:
            data = torch.randn(12, width, generator=generator)
        return DataLoader(data, batch_size=len(data) // 3)  # type: ignore[arg-type]


class Saves(Callback):
    """Looks at the phases of the driver, and saves in the second step."""

    def __init__(self, phases: Phases, folder: Path) -> None:
        self._phases, self._folder = phases, folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self._phases.over("steps")
            trainer.save_checkpoint(self._folder / "saved.ckpt")
            self._phases.over("checkpoint")

    def on_train_end(self, *_: Any) -> None:
        self._phases.over("steps")


def numbers_after(module: Model, trainer: Any) -> dict[str, float]:
    """Norms of each weight, gradient and state, which a script reads one after the other."""
    [optimizer] = trainer.optimizers
    found = {}
    for name, parameter in module.named_parameters():
        found[name] = parameter.detach().double().norm().item()
        if trainer.is_global_zero:
            assert parameter.grad is not None
            found[f"{name}.grad"] = parameter.grad.double().norm().item()
            for key, value in (optimizer.state.get(parameter) or {}).items():
                found[f"{name}.{key}"] = value.double().norm().item()
    return found


def run(peer: str, arguments: argparse.Namespace, sizes: tuple[int, int, int]) -> None:
    """One rank."""
    phases, folder = Phases(), arguments.out
    if arguments.limit_mib:
        limit = memory("VmSize") + arguments.limit_mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    kind, count, where, again = [*peer.split(), "1", "__init__", ""][:4]
    strategy: Any = kind
    replicas, _, count = count.rpartition("x")
    replicas = replicas or "1"
    if peer == "one device":
        strategy, count, where = "auto", "1", "__init__"
    elif kind == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=int(count), tensor_parallel_size=1)
        where = "fsdp2"
    elif kind == "hybrid":
        strategy = HybridGabraStrategy(
            data_parallel_size=int(replicas),
            pipeline_parallel_size=int(count),
            num_microbatches=2,
            verify="auto" if again == "verify" else False,
            recompute=again == "recompute",
            schedule="looped" if again == "looped" else "auto",
            shard_optimizer_states=again == "zero",
        )
    module = Model(where, arguments.model, sizes)
    saves = Saves(phases, folder)
    trainer = bare_trainer(
        strategy=strategy, devices=int(replicas) * int(count), max_epochs=1, callbacks=[saves],
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=arguments.resume)
    phases.over("end" if module.losses else "all")  # workers have no hooks
    after = numbers_after(module, trainer) if arguments.read else {}
    plan = getattr(trainer.strategy, "plan", None)
    result = {
        "peaks": phases.peaks,
        "times": phases.times,
        "losses": module.losses,
        "states": Adam.states / MIB,
        "after": after,
        "planned": {row.device: row.peak_bytes / MIB for row in plan.rows} if plan else {},
    }
    (folder / f"rank{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(result))


def show(peer: str, path: Path, alone: float | None, how: str) -> float:
    """Print the line of one rank. Returns the peak of its steps."""
    seen = json.loads(path.read_text())
    highest = max(seen["peaks"].values())
    text = f"{peer}{how}, {path.stem}: {seen['peaks']} s: {seen['times']}"
    text += f", states {seen['states']:.0f}"
    if alone is not None and peer != "one device":
        aim = 1.15 * alone / int(peer.split()[1].rpartition("x")[2]) + 64
        text += f", {highest / aim:.2f} of the aim of {aim:.0f}"
    planned = seen["planned"].get(path.stem.removeprefix("rank"))
    text += "" if planned is None else f", planned {planned:.0f}"
    print(text, " ".join(f"{loss:.7f}" for loss in seen["losses"]), flush=True)
    record({f"{peer}{how}, {path.stem}: {at}": mib for at, mib in seen["peaks"].items()}, "MiB")
    steps: float = seen["peaks"].get("steps", highest)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=NETWORKS, default="perceptron")
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int, help="levels of the U-Net")
    parser.add_argument("--size", type=int, help="tokens of a text, or edge of a volume")
    parser.add_argument("--peers", default=";".join(PEERS))
    parser.add_argument("--limit-mib", type=int, default=0, help="of each rank (RLIMIT_AS)")
    parser.add_argument("--run", metavar="PEER", help="one of them, here")
    parser.add_argument("--out", type=Path, help="folder of its results and checkpoint")
    parser.add_argument("--resume", help="checkpoint that it goes on from")
    parser.add_argument("--read", action="store_true", help="all that it finds afterwards")
    arguments = parser.parse_args()
    _, width, layers, size = NETWORKS[arguments.model]
    sizes = arguments.width or width, arguments.layers or layers, arguments.size or size
    if arguments.run:
        run(arguments.run, arguments, sizes)
        return
    with torch.device("meta"):
        weights = sum(p.numel() for p in NETWORKS[arguments.model][0](*sizes).parameters())
    print(f"{weights / 1e6:.0f} M parameters, {weights * 4 / MIB:.0f} MiB; peaks in MiB, by rank")
    alone = None
    for peer in arguments.peers.split(";"):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            command = [sys.executable, __file__, "--run", peer, "--out", place]
            command += ["--model", arguments.model, "--limit-mib", f"{arguments.limit_mib}"]
            for name, value in zip(("--width", "--layers", "--size"), sizes):
                command += [name, f"{value}"]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            for how, more in ("", []), (", resumed", ["--resume", str(folder / "saved.ckpt")]):
                done = subprocess.run(
                    [*command, *more], env=environment, capture_output=True, text=True
                )
                found = sorted(folder.glob("rank*.json"))
                if done.returncode or not found:
                    last = done.stderr.strip().splitlines()[-1:]
                    print(f"{peer}{how}: failed: {last}", flush=True)
                    break
                for path in found:
                    steps = show(peer, path, alone, how)
                    alone = steps if peer == "one device" and not how else alone
                    path.unlink()


if __name__ == "__main__":
    main()
