"""What each rank needs, reads and takes until a pretrained network has computed its first loss.

A Llama is made and saved as a folder of safetensors; then it is fine-tuned from there with LoRA for
one step, by one device, by FSDP2 (Lightning's `ModelParallelStrategy`; each rank calls
`from_pretrained` and shards what it got) and by stages, which make it in `configure_model`. Before
each the files are dropped from the page cache, where the system does so. Until the end of the first
forward, of each rank:

* peak: what it has in memory beyond what it had before the fit, with the pages of the folder's
  files that it has mapped (sampled). For stages beside the aim, 1.15 x (the folder / stages) +
  256 MiB; a worker is a server, which is watched from its first weights on;
* read: bytes that came from the disk for it, as the page cache was empty; ranks of a host share
  what one of them has read. For all ranks of a run together beside the size of the folder; the aim
  is 1.2 x;
* seconds: of `configure_model`; until the network is there, until the first batch, until the first
  loss. With stages the first of these comes after the start of the other ranks, and the last one
  has the work before the first step, whose pieces are shown: in "handing" (out) ranks read the
  files. One device has mapped them by then, and each page is read when it is used; so that this can
  be compared, it uses one number of each page before the first batch ("reading").

    python benchmarks/pretrained.py                                # about 1 B parameters in bf16
    python benchmarks/pretrained.py --width 512 --layers 4 --shard 20MB
    python benchmarks/pretrained.py --folder FOLDER --peers "one device;hybrid 2"
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from _results import record
from _timing import bare_trainer, before_the_first_step, servers
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_hybrid import HybridGabraStrategy

PEERS = ("one device", "fsdp2 2", "fsdp2 4", "hybrid 2", "hybrid 4")
MIB = 2**20
VOCABULARY, TOKENS = 32_000, 32


def make(folder: Path, width: int, layers: int, shard: str) -> None:
    """Save a network with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard)
    torch.set_default_dtype(torch.float32)


def size_of(folder: Path) -> int:
    """Bytes of the weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Have the system drop the files from its page cache."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Watch:
    """Samples the memory of a process in a thread.

    Args:
        folder: of the network.
        process: its number, or `self`.

    Attributes:
        peak: the most that the process has had beyond the beginning, in bytes.
        read: bytes that the system has read from a disk for this process.
    """

    def __init__(self, folder: Path, process: int | str = "self") -> None:
        self._folder, self._over = str(folder.resolve()), Event()
        self._place = Path("/proc") / str(process)
        self.peak = self.read = 0
        self._base, self._before = self._own(), self._from_disk()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop, if it has not been stopped before."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self.read = self._from_disk() - self._before

    def _run(self) -> None:
        took = 0.0
        # (a look holds Python's lock: it takes 2 % of the time that is measured at most)
        while not self._over.wait(max(0.05, 50 * took)):
            begun = time.thread_time()
            self.peak = max(self.peak, self._own() - self._base + sum(self._mapped()))
            took = time.thread_time() - begun

    def _own(self) -> int:
        lines = (self._place / "status").read_text().splitlines()
        own = ("RssAnon:", "RssShmem:")
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(own))

    def _from_disk(self) -> int:
        lines = (self._place / "io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

    def _mapped(self) -> Iterator[int]:
        """Bytes in memory of each mapping of a file of the network."""
        found = False
        for line in (self._place / "smaps").read_text().splitlines():
            if self._folder in line:
                found = True
            elif line.startswith("Rss:") and found:
                yield int(line.split()[1]) * 1024
                found = False


class FineTune(LightningModule):
    """A causal language model with adapters.

    Args:
        folder: where it is.
        kind: `one`, `fsdp2` or `hybrid`.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__()
        self.folder, self._kind, self.net = folder, kind, None
        self.begun, self.seconds = time.perf_counter(), dict[str, float]()
        self.watch, self.of_servers = Watch(folder), list[Watch]()

    def reached(self, what: str) -> None:
        self.seconds[what] = round(time.perf_counter() - self.begun, 1)

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        begun = time.perf_counter()
        net = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16)
        adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        self.net = get_peft_model(net, adapters, autocast_adapter_dtype=False)
        if self._kind == "fsdp2":
            self._shard(self.net)
        self.seconds["configure_model"] = round(time.perf_counter() - begun, 1)
        self.reached("network")

    def _shard(self, net: nn.Module) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in net.get_submodule("base_model.model.model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.net is not None
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        self.loss = loss.item()
        for watch in (self.watch, *self.of_servers):
            watch.end()
        self.reached("loss")
        spent = before_the_first_step(self.trainer)
        self.seconds |= {what: round(s, 1) for what, s in spent.items()}
        return loss

    def on_train_start(self) -> None:
        if self._kind == "one":
            begun = time.perf_counter()
            for parameter in self.parameters():
                parameter.data.view(-1)[:: mmap.PAGESIZE // parameter.element_size()].sum()
            self.seconds["reading"] = round(time.perf_counter() - begun, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 1e-3)


class AtFirstBatch(Callback):
    def on_train_batch_start(self, trainer: Any, module: FineTune, *_: Any) -> None:
        module.reached("batch")
        # (before any weight is sent)
        module.of_servers = [Watch(module.folder, process) for process in servers()]


def run(peer: str, folder: Path, out: Path) -> None:
    """One rank."""
    kind, _, count = peer.partition(" ")
    strategy: Any = "auto"
    if kind == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=int(count), tensor_parallel_size=1)
    elif kind == "hybrid":
        strategy = HybridGabraStrategy(
            data_parallel_size=1, pipeline_parallel_size=int(count), num_microbatches=2
        )
    words = torch.randint(VOCABULARY, (8, TOKENS), generator=torch.Generator().manual_seed(1))
    # as many samples for each replica of FSDP2 as one device takes
    words = words.repeat(int(count) if kind == "fsdp2" else 1, 1)
    trainer = bare_trainer(
        strategy=strategy, devices=1 if kind == "one" else int(count), max_epochs=1,
        callbacks=[AtFirstBatch()], default_root_dir=out,
    )  # fmt: skip
    module = FineTune(folder, kind)
    trainer.fit(module, DataLoader(words, batch_size=8))  # type: ignore[arg-type]
    own = int(os.environ.get("LOCAL_RANK", "0"))  # FSDP2 runs the script on each rank
    for rank, watch in enumerate((module.watch, *module.of_servers), own):
        result = {
            "peak": watch.peak / MIB,
            "read": watch.read / MIB,
            "seconds": module.seconds,
            "loss": getattr(module, "loss", None),
        }
        (out / f"rank{rank}.json").write_text(json.dumps(result))


def show(peer: str, ranks: list[dict[str, Any]], size: float) -> None:
    """Print the lines of a peer."""
    kind, _, count = peer.partition(" ")
    values = dict[str, float]()
    for number, rank in enumerate(ranks):
        text = f"{peer}, rank {number}: peak {rank['peak']:.0f} MiB"
        if kind == "hybrid":
            aim = 1.15 * size / int(count) + 256
            text += f" ({rank['peak'] / aim:.2f} of the aim of {aim:.0f})"
        text += f", read {rank['read']:.0f} MiB"
        print(f"{text}, s: {rank['seconds']}, loss {rank['loss']}")
        values |= {f"{peer}, rank {number}: {what}": rank[what] for what in ("peak", "read")}
    read = sum(rank["read"] for rank in ranks) / size
    print(f"{peer}: all read {read:.2f} x the folder", flush=True)
    record(values, "MiB")
    record({f"{peer}: read by all, of the folder": read}, "")
    record({f"{peer}: until {what}": s for what, s in ranks[0]["seconds"].items()}, "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--shard", default="200MB", help="size of a file")
    parser.add_argument("--folder", type=Path, help="a folder that is there already")
    parser.add_argument("--peers", default=";".join(PEERS))
    parser.add_argument("--run", metavar="PEER", help="one of them, here")
    parser.add_argument("--out", type=Path, help="folder of its results")
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run, arguments.folder, arguments.out)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = arguments.folder or Path(place) / "network"
        if arguments.folder is None:
            make(folder, arguments.width, arguments.layers, arguments.shard)
        size = size_of(folder) / MIB
        files = len([*folder.glob("*.safetensors")])
        print(f"{size:.0f} MiB in {files} files", flush=True)
        for peer in arguments.peers.split(";"):
            out = Path(place) / peer.replace(" ", "_")
            out.mkdir()
            forget(folder)
            done = subprocess.run(
                [sys.executable, __file__, "--run", peer, "--folder", folder, "--out", out],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            found = [json.loads(file.read_text()) for file in sorted(out.glob("rank*.json"))]
            if done.returncode or not found:
                print(f"{peer}: failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
                continue
            show(peer, found, size)


if __name__ == "__main__":
    main()
