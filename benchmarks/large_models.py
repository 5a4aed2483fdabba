"""How much memory each rank needs at most, phase by phase, where a model is large.

With the strategy's default settings: three steps with Adam, a checkpoint in the middle of the fit,
its end; with the same Trainer `test` and `predict`; and five more calls, `fit` and `test` by turns.
Then another process goes on from that checkpoint. Counted is the most that a process has in memory
(`VmHWM`, which is set back between phases; Linux), without what it had before the model was made.
After each of the calls, what it has then (`VmRSS`) is shown too. A phase of a rank is marked if it
needs more than the aim, which is 1.15 x (one device's peak of this phase / stages) + 64 MiB. `2x2`
are two replicas of two stages, and `zero` has the replicas divide the states of the optimizer, of
which each rank's size is shown.

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
from _counted_adam import Adam
from _results import record
from _timing import bare_trainer, servers
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_hybrid import Equal, HybridGabraStrategy

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


def memory(field: str, process: int | str = "self") -> int:
    """A line of `/proc/<process>/status`, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Phases:
    """The peaks of a process.

    Args:
        process: its number.
        base: bytes that it has before there is anything to measure; ``None``: those of now.
    """

    def __init__(self, process: int | str = "self", base: int | None = None) -> None:
        self._process = process
        self.base = memory("VmRSS", process) if base is None else base
        self.peaks: dict[str, float] = {}
        self.left: dict[str, float] = {}
        self.times: dict[str, float] = {}
        self._begun = time.perf_counter()
        self._reset()

    def over(self, phase: str) -> None:
        """A phase is over; the next one begins."""
        peak = (memory("VmHWM", self._process) - self.base) / MIB
        self.peaks[phase] = max(self.peaks.get(phase, 0.0), round(peak))
        self.left[phase] = round((memory("VmRSS", self._process) - self.base) / MIB)
        now = time.perf_counter()
        self.times[phase] = round(now - self._begun, 2)
        self._begun = now
        self._reset()

    def _reset(self) -> None:
        Path(f"/proc/{self._process}/clear_refs").write_text("5")


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

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        assert self.net is not None
        self.log("mean", self.net(self._inputs(batch)).mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.net is not None
        mean: Tensor = self.net(self._inputs(batch)).mean()
        return mean

    def _inputs(self, batch: Tensor) -> Tensor:
        return batch[:, :-1] if self._kind == "gpt" else batch

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

    test_dataloader = predict_dataloader = train_dataloader


class Saves(Callback):
    """Looks at the phases of all ranks, and saves in the second step.

    Args:
        phases: of this process; those of its servers are added when the fit begins.
        folder: of the checkpoint.
    """

    def __init__(self, phases: list[Phases], folder: Path) -> None:
        self._phases, self._folder, self._first = phases, folder, True

    def over(self, phase: str) -> None:
        """A phase is over on all ranks."""
        for each in self._phases:
            each.over(phase)

    def on_fit_start(self, *_: Any) -> None:
        if len(self._phases) == 1:  # (no weight has come to the servers yet)
            self._phases += [Phases(process) for process in servers()]

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._first &= trainer.global_step <= 3
        if trainer.global_step == 2:
            self.over("steps")
            trainer.save_checkpoint(self._folder / "saved.ckpt")
            self.over("checkpoint")

    def on_train_end(self, *_: Any) -> None:
        if self._first:
            self.over("steps")


def numbers_after(module: Model, trainer: Any) -> dict[str, float]:
    """Norms of each weight, gradient and state, which a script reads one after the other."""
    [optimizer] = trainer.optimizers
    found = {}
    for name, parameter in module.named_parameters():
        found[name] = parameter.detach().double().norm().item()
        assert parameter.grad is not None
        found[f"{name}.grad"] = parameter.grad.double().norm().item()
        for key, value in (optimizer.state.get(parameter) or {}).items():
            found[f"{name}.{key}"] = value.double().norm().item()
    return found


def run(peer: str, arguments: argparse.Namespace, sizes: tuple[int, int, int]) -> None:
    """One driver, and its servers."""
    phases, folder = [Phases()], arguments.out
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
            recompute=again == "recompute",
            schedule="looped" if again == "looped" else "auto",
            replicas=Equal(shard_states=again == "zero"),
        )
    module = Model(where, arguments.model, sizes)
    saves = Saves(phases, folder)
    trainer = bare_trainer(
        strategy=strategy, devices=int(replicas) * int(count), max_epochs=1, callbacks=[saves],
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=arguments.resume)
    saves.over("end")
    after = numbers_after(module, trainer) if arguments.read else {}
    if not (arguments.resume or arguments.fit_alone):
        trainer.test(module, verbose=False)
        saves.over("test")
        trainer.predict(module)
        saves.over("predict")
        for number in range(5):
            if number % 2:
                trainer.test(module, verbose=False)
            else:
                trainer.fit_loop.max_epochs += 1
                trainer.fit(module)
            saves.over(f"call {number + 1}")
    plan = getattr(trainer.strategy, "plan", None)
    first = int(os.environ.get("LOCAL_RANK", "0"))
    for number, each in enumerate(phases):
        result = {
            "peaks": each.peaks,
            "left": each.left,
            "times": each.times,
            "losses": [] if number else module.losses,
            "states": 0.0 if number else Adam.states / MIB,
            "after": {} if number else after,
            "planned": {row.device: row.peak_bytes / MIB for row in plan.rows} if plan else {},
        }
        (folder / f"rank{first + number}.json").write_text(json.dumps(result))


def show(peer: str, path: Path, alone: dict[str, float], how: str) -> dict[str, float]:
    """Print the line of one rank. Returns its peaks.

    Args:
        peer: how it runs.
        path: of its results.
        alone: the peaks of one device, if it has run.
        how: whether it has gone on from a checkpoint.
    """
    seen = json.loads(path.read_text())
    peaks: dict[str, float] = seen["peaks"]
    stages = 1 if peer == "one device" else int(peer.split()[1].rpartition("x")[2])
    shown = []
    for phase, mib in peaks.items():
        text = f"{phase} {mib:.0f}"
        beside = alone.get(phase)
        if beside is not None and stages > 1:
            aim = 1.15 * beside / stages + 64
            text += f" ({aim:.0f}{' MISSED' if mib > aim else ''})"
        shown.append(text)
    text = f"{peer}{how}, {path.stem}: {', '.join(shown)}; left {[*seen['left'].values()]}"
    text += f"; s {[*seen['times'].values()]}; states {seen['states']:.0f}"
    planned = seen["planned"].get(path.stem.removeprefix("rank"))
    text += "" if planned is None else f", planned {planned:.0f}"
    print(text, " ".join(f"{loss:.7f}" for loss in seen["losses"]), flush=True)
    record({f"{peer}{how}, {path.stem}: {at}": mib for at, mib in seen["peaks"].items()}, "MiB")
    return peaks


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
    parser.add_argument("--fit-alone", action="store_true", help="no calls after it")
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
    alone: dict[str, float] = {}
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
                    peaks = show(peer, path, alone, how)
                    alone = peaks if peer == "one device" and not how else alone
                    path.unlink()


if __name__ == "__main__":
    main()
