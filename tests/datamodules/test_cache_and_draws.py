"""The cache under kills, full disks and company; random numbers under any number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from test_adni_datamodule import SHAPE, make, prepared

from datamodules import ADNIDataModule
from datamodules.errors import ScanReadError

ROOT = Path(__file__).parents[2]
READS = """
import sys
from pathlib import Path
import torch
from datamodules import ADNIDataModule
from datamodules.errors import ScanReadError
root, cache = map(Path, sys.argv[1:3])
made = ADNIDataModule(root, spatial_shape=(24, 28, 24), spacing_mm=8.0, val_fraction=0.2,
                      test_fraction=0.2, cache_dir=cache)
made.prepare_data()
made.setup()
{before}
print(sum(float(item["image"].sum()) for item in made.dataset("train")))
"""


def start(root: Path, cache: Path, before: str = "") -> subprocess.Popen[str]:
    """A process that reads all training scans through the cache and prints their sum."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", READS.format(before=before), root, cache],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def total(module: ADNIDataModule) -> float:
    return sum(float(item["image"].sum()) for item in module.dataset("train"))


def epochs(module: ADNIDataModule, count: int) -> list[dict[str, torch.Tensor]]:
    """The training images of each epoch, by scan."""
    torch.manual_seed(5)
    loader: Any = module.train_dataloader()
    found = [
        {name: image for batch in loader for name, image in zip(batch["image_id"], batch["image"])}
        for _ in range(count)
    ]
    if loader._iterator is not None:  # left to the garbage collector it waits for five seconds
        loader._iterator._shutdown_workers()
    return found


@pytest.mark.conformance
def test_augmentation_is_the_same_whatever_the_number_of_processes(tiny_cohort, tmp_path):
    runs = [
        epochs(prepared(tiny_cohort, tmp_path / "cache", num_workers=workers), 2)
        for workers in (0, 1, 2)
    ]
    everyone = set.union(*(set(epoch) for run in runs for epoch in run))
    # a last batch of one scan is left out: in each epoch, and of each order, another one
    names = set.intersection(*(set(epoch) for run in runs for epoch in run))
    assert len(names) >= len(everyone) - 6
    for epoch in (0, 1):
        for name in names:
            assert torch.equal(runs[0][epoch][name], runs[1][epoch][name])
            assert torch.equal(runs[0][epoch][name], runs[2][epoch][name])
    # each step is drawn with a probability: now and then none is, in both epochs
    assert sum(torch.equal(runs[0][0][name], runs[0][1][name]) for name in names) < len(names) / 4


def test_no_two_scans_and_no_two_epochs_draw_the_same_numbers(tiny_cohort, tmp_path):
    module = prepared(tiny_cohort, tmp_path / "cache")
    dataset = module.dataset("train", augment=True)
    noise = next(t for t in dataset.transform.transforms if "Noise" in type(t).__name__)
    drawn = set()
    for epoch in range(3):
        dataset.draws.epoch = epoch
        for record in module.scans("train"):
            dataset.draws.seed(dataset.transform, record.image_id)
            drawn.add(float(noise.R.uniform()))
    assert len(drawn) == 3 * len(module.scans("train"))


class Sums(lightning.LightningModule):
    """Writes down, per epoch, what it is given."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.file = file

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        with self.file.with_suffix(f".{self.global_rank}").open("a") as out:
            for name, image in zip(batch["image_id"], batch["image"]):
                out.write(f"{self.current_epoch} {name} {image.sum().item():.6f}\n")
        return self.scale * batch["image"].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.conformance
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")  # advice on loaders, and that a forked process has threads
@pytest.mark.parametrize("strategy", ["ddp_fork", "hybrid_gabra_fork"])
def test_images_are_the_same_on_one_device_and_on_several(tiny_cohort, tmp_path, strategy):
    if strategy.startswith("hybrid"):
        import lightning_hybrid

        chosen: Any = lightning_hybrid.HybridGabraStrategy(
            data_parallel_size=2, pipeline_parallel_size=1, start_method="fork"
        )
    else:
        chosen = DDPStrategy(start_method="fork")
    seen = []
    for devices, how in ((1, "auto"), (2, chosen)):
        lightning.seed_everything(3)
        file = tmp_path / f"{devices}.txt"
        data = make(tiny_cohort, tmp_path / "cache", batch_size=1)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=how,
            max_epochs=2,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Sums(file), datamodule=data)
        seen.append(set("".join(f.read_text() for f in tmp_path.glob(f"{devices}.*")).split("\n")))
    assert seen[0] == seen[1]


def test_the_cache_says_what_it_holds(tiny_cohort, tmp_path):
    module = prepared(tiny_cohort, tmp_path / "cache")
    dataset = module.dataset("train")
    assert dataset.kept().scans == 0
    _ = dataset[0], dataset[1]
    kept = dataset.kept()
    assert (kept.scans, kept.of) == (2, len(dataset))
    assert kept.bytes > 2 * 4 * SHAPE[0] * SHAPE[1] * SHAPE[2]
    assert f"2 of {len(dataset)} scans" in str(kept)


@pytest.mark.conformance
def test_a_kill_while_caching_loses_nothing_and_the_next_run_goes_on(tiny_cohort, tmp_path):
    expected = total(prepared(tiny_cohort, tmp_path / "other"))
    dies = """
save = torch.save
def half(data, file):
    save(data, file)
    with open(file, "r+b") as part:
        part.truncate(1000)
    import os
    os.kill(os.getpid(), 9)
_ = made.dataset("train")[0]
torch.save = half
"""
    process = start(tiny_cohort, tmp_path / "cache", dies)
    process.communicate(timeout=120)
    assert process.returncode == -9
    images = tmp_path / "cache" / "images"
    assert len(list(images.glob("*.pt"))) == 1
    assert len(list(images.glob(".*.part"))) == 1
    module = prepared(tiny_cohort, tmp_path / "cache")
    assert total(module) == pytest.approx(expected)
    part = next(images.glob(".*.part"))
    os.utime(part, (0, 0))  # as if it were of yesterday
    module.dataset("train")
    assert not part.exists()


@pytest.mark.conformance
def test_two_trainings_may_share_one_cache(tiny_cohort, tmp_path):
    runs = [start(tiny_cohort, tmp_path / "cache") for _ in range(2)]
    said = [run.communicate(timeout=240) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    results = [float(out.strip().splitlines()[-1]) for out, _ in said]
    assert results[0] == results[1] == pytest.approx(total(prepared(tiny_cohort, tmp_path / "a")))


@pytest.mark.conformance
def test_a_disk_that_fills_up_costs_speed_only(tiny_cohort, tmp_path):
    """A limit of the process on the size of files stands in for the disk."""
    full = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
"""
    process = start(tiny_cohort, tmp_path / "cache", full)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    images = tmp_path / "cache" / "images"
    assert list(images.iterdir()) == []
    module = prepared(tiny_cohort, tmp_path / "cache")
    assert total(module) == pytest.approx(float(out.strip().splitlines()[-1]))
    assert len(list(images.iterdir())) == len(module.scans("train"))


def test_a_file_that_was_replaced_at_the_same_size_and_time_is_refused(download, tmp_path):
    module = prepared(download, tmp_path / "cache")
    record = module.scans("train")[0]
    path = Path(record.path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the length that gzip keeps
    path.write_bytes(bytes(data))
    os.utime(path, ns=(record.mtime_ns, record.mtime_ns))
    assert path.stat().st_size == record.bytes
    with pytest.raises(ScanReadError, match="has changed since it was checked"):
        module.dataset("train")[0]
