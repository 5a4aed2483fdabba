"""How fast scans are checked and read, beside MONAI's data sets: 1,193 scans at 2 mm.

The cohort has the class counts of the paper (389 AD, 172 pMCI, 232 sMCI, 400 NC, first visits). It
is generated once (about 15 minutes on 2 cores) and kept; so are the prepared images. Every figure
is of a whole epoch with two loader processes at 91 x 109 x 91; the rows alternate, and medians are
shown.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from _results import record
from monai.data import CacheDataset, Dataset, PersistentDataset
from monai.data.utils import pickle_hashing
from monai.transforms import Compose
from torch.utils.data import DataLoader

from datamodules import ADNIDataModule
from datamodules.progress import progress_bar
from datamodules.synth import CohortSpec, generate
from datamodules.transforms import fixed_transforms

PAPER = (("AD", 389), ("pMCI", 172), ("sMCI", 232), ("NC", 400))
SHAPE, SPACING_MM = (91, 109, 91), 2.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(".cache/benchmarks/data_loading"))
    parser.add_argument("--divide", type=int, default=1, help="a smaller cohort: counts / this")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cohort", type=Path, help="a download to read instead of a generated one")
    chosen = parser.parse_args()
    cohort = chosen.cohort or chosen.folder / f"cohort-{chosen.divide}"
    if chosen.cohort is None:
        make_cohort(cohort, chosen.divide)
    check(cohort, chosen.folder / f"state-{chosen.divide}")
    read(cohort, chosen.folder, chosen.divide, chosen.epochs, chosen.workers)


def make_cohort(folder: Path, divide: int) -> None:
    spec = CohortSpec(tuple((name, max(count // divide, 4)) for name, count in PAPER))  # type: ignore[misc]
    with progress_bar("generating") as advance:
        print(generate(folder, spec, workers=2, progress=advance))


def module(cohort: Path, state: Path, workers: int, **options: Any) -> ADNIDataModule:
    """All scans that have a label, in one data module."""
    made = ADNIDataModule(
        cohort,
        task="three_way",
        num_workers=workers,
        cache_dir=state,
        val_fraction=0.1,
        test_fraction=0.0,
        **options,
    )
    made.prepare_data()
    made.setup()
    return made


def check(cohort: Path, state: Path) -> None:
    """The whole check, with nothing known from before."""
    for known in state.glob("checks-*.json"):
        known.unlink()
    start = time.perf_counter()
    module(cohort, state, 0)
    print(f"check of all files, manifest and split: {time.perf_counter() - start:.1f} s")


def read(cohort: Path, folder: Path, divide: int, epochs: int, workers: int) -> None:
    state = folder / f"state-{divide}"
    plain = module(cohort, state, workers, augment=False)
    paths = [{"image": record.path} for record in plain.scans("train")]
    fixed = Compose(fixed_transforms(SHAPE, SPACING_MM))
    persistent = folder / f"persistent-{divide}"
    batch = plain.batch_size

    def loader(dataset: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=images_only,
        )

    for kept in (state / "images", persistent):
        shutil.rmtree(kept, ignore_errors=True)
    scans = len(paths)
    print(f"{scans} training scans, batches of {batch}, {workers} loader processes\n")
    cold = {
        "ADNIDataModule": plain.train_dataloader(),
        "PersistentDataset": loader(
            PersistentDataset(paths, fixed, persistent, hash_transform=pickle_hashing)
        ),
    }
    print(f"{'':34}{'scans/s':>10}")
    for name, one in cold.items():
        say(f"{name}, cold", scans, [epoch(one)])
    say("Dataset, nothing kept", scans, [epoch(loader(Dataset(paths, fixed)))])
    warm: dict[str, Iterable[Any]] = {**cold}
    if 4 * scans * 91 * 109 * 91 < 8e9:
        start = time.perf_counter()
        warm["CacheDataset"] = loader(CacheDataset(paths, fixed, progress=False, num_workers=2))
        say("CacheDataset, filling", scans, [time.perf_counter() - start])
    augmented = module(cohort, state, workers).train_dataloader()
    say("ADNIDataModule, augmented, warm", scans, [epoch(augmented)])
    for one in warm.values():
        epoch(one)
    times: dict[str, list[float]] = {name: [] for name in warm}
    resident = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    for _ in range(epochs):
        for name, one in warm.items():
            times[name].append(epoch(one))
        resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    for name, measured in times.items():
        say(f"{name}, warm", scans, measured)
    ratio = [b / a for a, b in zip(times["ADNIDataModule"], times["PersistentDataset"])]
    print(
        f"\nspeed over a warm PersistentDataset: {statistics.median(ratio):.2f} x (median of pairs)"
    )
    grown = (resident[-1] - resident[1]) / 1024
    print(f"growth of the main process over {epochs - 1} epochs of every row: {grown:.0f} MiB")


def images_only(items: list[dict[str, Any]]) -> torch.Tensor:
    return torch.utils.data.default_collate([item["image"] for item in items])


def epoch(loader: Iterable[Any]) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def say(name: str, scans: int, seconds: list[float]) -> None:
    record({name: scans / statistics.median(seconds)}, "scans/s")
    print(f"{name:34}{scans / statistics.median(seconds):10.1f}", flush=True)


if __name__ == "__main__":
    main()
