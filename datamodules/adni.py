"""The data module for ADNI scans."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from .cache import Item, ScanDataset
from .errors import DataError, ProblemsError, SplitError
from .flow import flow, write_flow
from .labels import TaskName, task_named
from .montage import write_montage
from .nifti import Leniency
from .profiles import Profile, choose_profile
from .progress import progress_bar
from .progression import LabelRule
from .records import ScanRecord, fingerprint, read_manifest, write_manifest
from .report import class_table, number_table, write_demographics, write_shareable
from .seeding import Draws, EpochLoader
from .sources import Layout, Names
from .sources.people import label_map as words_of
from .space import shared_middle
from .split_drawing import make_split
from .splits import (
    SPLITS,
    Split,
    SplitName,
    assign,
    check_classes,
    check_leak,
    check_same,
    check_same_images,
    chosen_fold,
    load_split,
    permuted,
    save_split,
)
from .survey import cut_brains, refuse_inside, refuse_nothing, survey, write_problems
from .transforms import SHAPE, SPACING_MM, fixed_transforms, random_transforms
from .unlike import Unlike, usual


class ADNIDataModule(lightning.LightningDataModule):
    """Structural MRI of ADNI: a portal (IDA) download, a BIDS or CAPS folder, or a plain table.

    Each item is a dictionary of plain tensors and strings: ``image`` (1, D, H, W) float32 in RAS
    order, ``label`` int64, ``subject``, ``image_id``, ``affine`` (4, 4) float32 from voxel index to
    RAS mm. ``prepare_data`` reads every file once to its end, reports all problems together and
    writes manifest and split beside the cache; ``setup`` only reads these two small files and
    checks that no subject is in two parts.

    Args:
        root: folder of the scans and their tables, or a table with the columns path, subject and
            label. Never written to.
        task: ``ad_nc``: label 0 is NC, label 1 is AD. ``pmci_smci``: label 0 is stable, label 1
            progressive MCI; needs diagnoses over time. ``three_way``: NC, MCI, AD. ``age``: the
            label is the age in years, of people who are normal at every visit. ``mmse``: the label
            is the mini-mental state at the visit, 0 to 30, of everybody.
        batch_size: scans per batch (of one replica).
        spatial_shape: voxels of an image (D, H, W), reached by cropping and padding.
        spacing_mm: voxel size.
        val_fraction: share of the subjects for validation.
        test_fraction: share of the subjects for testing; may be 0.
        leave_out: test on a whole cohort or site instead of ``test_fraction``: ``cohort=OASIS``,
            ``site=012``.
        folds: cut all that are not in the test set into so many folds instead of ``val_fraction``.
        fold: which of them validates, from 0; the others train. With ``test_fraction=0`` it is the
            one that tests, and the next one validates.
        seed: decides the split, and the permutation of ``shuffle_labels``.
        num_workers: loader processes.
        profile: what the scans are: ``raw`` heads, ``registered`` heads, or ``stripped`` brains;
            found out when not given. A mixture is refused. It decides what counts as air.
        augment: vary pose, gain, contrast and noise of training images.
        flip: also mirror training images; this erases left-right differences.
        eval_visits: validate and test on each subject's first scan, or on all.
        shuffle_labels: permute the labels over the subjects of each part. A sanity run: whatever a
            network then scores on held-out subjects is not knowledge about the disease.
        layout: how the scans lie on disk; found out when not given.
        horizon_months: conversion within this time makes progressive MCI.
        tolerance_months: how early and late visits may be.
        late_converters: leave out who converts after the horizon, or take them for stable.
        smc: leave out people with memory complaints (SMC), or take them for controls.
        ad: every scan at which somebody is demented is one of AD, or only scans of those who were
            demented at their first visit.
        reverters: leave out who was demented once and not at a later visit, or take the diagnosis
            at the visit.
        gaps: leave visits without a diagnosis between two equal ones, or fill them.
        other_dementia: leave out people whose dementia has another cause, or take it for AD.
        collection_csv: the collection table, when it is not the only CSV in ``root``.
        diagnosis_csv: ADNIMERGE, DXSUM, or a table or BIDS folder of Clinica; diagnoses are then
            those at the scan, with what came of them. None: such a table directly in ``root``, or
            else the groups that the source gives.
        subject_pattern: regular expression whose first group is the person in a subject's name, for
            names that end in a session; those of ADNI, OASIS and BIDS are known.
        label_column: column of ``participants.tsv``, or of a table of scans, with the labels.
        label_map: what words of the tables stand for, ``HC=NC,Patient=AD``.
        split_file: read the split from here, or write it here when the file does not exist.
        cache_dir: prepared images, results of the check, manifests and splits.
        cache_images: keep prepared images on disk.
        on_bad: stop when anything is wrong with the data, or go on without the bad scans.
        nan: refuse scans with voxels that are NaN or infinite, or take 0 for those.
        assume: refuse files without orientation, or take them for RAS.
        unlike: refuse scans that are no heads like the others, or use them.

    Raises:
        FolderError: no such folder, no scans, or an output inside ``root``.
        TableError: the collection table is missing, ambiguous or not understood.
        ProblemsError: problems with scans or rows, all at once (``on_bad="error"``).
        SplitError: a leak, a class too small, or a split file that does not fit.
        ScanReadError: a scan cannot be read any more while training.
    """

    def __init__(
        self,
        root: str | Path,
        task: TaskName = "ad_nc",
        batch_size: int = 6,
        *,
        spatial_shape: tuple[int, int, int] = SHAPE,
        spacing_mm: float = SPACING_MM,
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        leave_out: str = "",
        folds: int = 0,
        fold: int = 0,
        seed: int = 0,
        num_workers: int = 0,
        profile: Literal["auto", "raw", "registered", "stripped"] = "auto",
        augment: bool = True,
        flip: bool = False,
        eval_visits: Literal["baseline", "all"] = "baseline",
        shuffle_labels: bool = False,
        layout: Literal["auto", "ida", "bids", "caps", "csv", "oasis"] = "auto",
        horizon_months: float = 36.0,
        tolerance_months: float = 3.0,
        late_converters: Literal["exclude", "stable"] = "exclude",
        smc: Literal["exclude", "normal"] = "exclude",
        ad: Literal["ever", "baseline"] = "ever",
        reverters: Literal["exclude", "visit"] = "exclude",
        gaps: Literal["leave", "fill"] = "leave",
        other_dementia: Literal["exclude", "ad"] = "exclude",
        collection_csv: str | Path | None = None,
        diagnosis_csv: str | Path | None = None,
        subject_pattern: str = "",
        label_column: str = "",
        label_map: str = "",
        split_file: str | Path | None = None,
        cache_dir: str | Path = ".cache/adni",
        cache_images: bool = True,
        on_bad: Literal["error", "skip"] = "error",
        nan: Literal["error", "zero"] = "error",
        assume: Literal["", "RAS"] = "",
        unlike: Unlike = "error",
    ) -> None:
        super().__init__()
        self.root = Path(root)
        self.task = task_named(task)
        self.batch_size = batch_size
        self.spatial_shape = spatial_shape
        self.spacing_mm = spacing_mm
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.leave_out = leave_out
        self.folds, self.fold = folds, fold
        self.seed = seed
        self.num_workers = num_workers
        self.profile: Profile | Literal["auto"] = profile
        self.augment = augment
        self.flip = flip
        self.eval_visits = eval_visits
        self.shuffle_labels = shuffle_labels
        self.layout: Layout | None = None if layout == "auto" else layout
        self.rule = LabelRule(
            horizon_months=horizon_months,
            tolerance_months=tolerance_months,
            late_converters=late_converters,
            smc=smc,
            ad=ad,
            reverters=reverters,
            gaps=gaps,
            other_dementia=other_dementia,
        )
        self.collection_csv = Path(collection_csv) if collection_csv else None
        self.diagnosis_csv = Path(diagnosis_csv) if diagnosis_csv else None
        self.names = Names(subject_pattern, label_column, words_of(label_map))
        self.split_file = Path(split_file) if split_file else None
        self.cache_dir = Path(cache_dir)
        self.cache_images = cache_images
        self.on_bad = on_bad
        self.leniency = Leniency(nan=nan, assume=assume)
        self.unlike: Unlike = unlike
        self.split: Split | None = None
        self.records: list[ScanRecord] = []
        self._told = False
        refuse_inside(self.root, self.cache_dir, "--data.cache_dir")
        if self.split_file:
            refuse_inside(self.root, self.split_file, "--data.split_file")

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names; the index is the label. Of a number, its name alone."""
        return self.task.class_names

    @property
    def num_classes(self) -> int:
        """Number of classes; 1 for a number."""
        return len(self.task.class_names)

    @property
    def state_dir(self) -> Path:
        """Folder of the manifest, the split and the check's results for this data folder."""
        key = "|".join(
            str(part)
            for part in (
                self.root.resolve(),
                self.task.name,
                self.layout,
                self.rule,
                self.leniency,
                self.collection_csv,
                self.diagnosis_csv,
                *((self.names,) if self.names != Names() else ()),
            )
        )
        name = f"{self.root.resolve().name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        return self.cache_dir / name

    def prepare_data(self) -> None:
        """Survey the folder, report every problem at once, write manifest and split."""
        with progress_bar("checking files") as advance:
            found = survey(
                self.root,
                self.task,
                self._checks_file,
                layout=self.layout,
                rule=self.rule,
                leniency=self.leniency,
                collection_csv=self.collection_csv,
                diagnosis_csv=self.diagnosis_csv,
                names=self.names,
                unlike=self.unlike,
                progress=advance,
            )
        found.warnings.extend(cut_brains(found.records, self.spatial_shape, self.spacing_mm))
        report = self.state_dir / "problems.tsv"
        write_problems(report, found)
        if not self._told:
            picture = self.state_dir / "montage.png"
            write_montage(picture, found.records, self._checks_file, self.leniency)
        if found.problems and self.on_bad == "error":
            raise ProblemsError(found.problems, str(self.root), str(report))
        refuse_nothing(found)
        write_manifest(self.state_dir / "manifest.tsv", found.records)
        path = self._split_path()
        if not path.exists():
            fractions = (self.val_fraction, self.test_fraction)
            made = make_split(
                found.records,
                *fractions,
                self.seed,
                folds=self.folds,
                leave_out=self.leave_out,
            )
            save_split(path, replace(made, task=self.task.name, rule=asdict(self.rule)))
        if not self._told:
            self._load()
            write_demographics(self.state_dir / "demographics.tsv", self.records)
            counts = flow(
                self.records, {part: self.scans(part) for part in SPLITS}, self.class_names
            )
            write_flow(self.state_dir / "flow.json", counts)
            shared = self.state_dir / "shareable.json"
            write_shareable(shared, self.records, self.task.name, asdict(self.rule))
            listed = f"\nlisted in {report}" if found.problems or found.warnings else ""
            rank_zero_info(f"{found.summary()}{listed}\n{self.describe()}")
            self._told = True

    def setup(self, stage: str | None = None) -> None:
        """Read manifest and split, check for leaks and that all ranks have the same scans.

        Reads no image.

        Raises:
            DataError: there is no manifest yet, or another one than on rank 0.
            SplitError: a leak, or a split that does not fit.
        """
        self._load()
        if self.trainer is not None:
            self._compare(self.trainer.strategy.broadcast(fingerprint(self.records)))

    def _compare(self, first: str) -> None:
        """Refuse to train when rank 0, whose ``fingerprint`` this is, has other scans."""
        if first != fingerprint(self.records):
            raise DataError(
                "OTHER_MANIFEST",
                "this rank has other scans, contents or labels than rank 0",
                str(self.state_dir / "manifest.tsv"),
                "use one --data.cache_dir that all ranks see, or the same data on every node",
            )

    def _load(self) -> None:
        manifest = self.state_dir / "manifest.tsv"
        if not manifest.exists():
            raise DataError(
                "NOT_PREPARED", "no manifest yet", str(manifest), "call prepare_data() first"
            )
        records = read_manifest(manifest)
        path = self._split_path()
        self.split = chosen_fold(load_split(path), self.fold, self.task.name, self.rule, path)
        records = assign(records, self.split, str(path))
        check_leak(records)
        choose_profile(self.profile, records)
        self.records = permuted(records, self.seed) if self.shuffle_labels else records
        check_classes(self.records, self.class_names, self.root)

    @property
    def _checks_file(self) -> Path:
        """What was read once need not be read again for another task or rule."""
        key = f"{self.root.resolve()}|{self.leniency}"
        return self.cache_dir / f"checks-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"

    def _split_path(self) -> Path:
        """The file does not depend on who is in the data: one more subject must not reshuffle."""
        if self.split_file is not None:
            return self.split_file
        key = f"{self.val_fraction}|{self.test_fraction}|{self.folds}|{self.seed}"
        key += f"|{self.leave_out}" * bool(self.leave_out)
        return self.state_dir / f"split-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"

    @property
    def class_weights(self) -> list[float]:
        """Weights for the loss that make every class count alike, of mean 1 over the scans."""
        counts = Counter(record.label for record in self.scans("train"))
        scans = sum(counts.values())
        return [scans / (self.num_classes * counts[label]) for label in range(self.num_classes)]

    @property
    def target_scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the number to be told over the training scans.

        Raises:
            SplitError: it is the same for all of them.
        """
        values = [record.target for record in self.scans("train") if record.target is not None]
        mean, spread = fmean(values), pstdev(values)
        if not spread:
            raise SplitError(
                "ONE_NUMBER",
                f"{self.class_names[0]} is {mean:g} in all {len(values)} training scans",
                str(self.root),
                "give scans with different ones",
            )
        return mean, spread

    def scans(self, part: SplitName) -> list[ScanRecord]:
        """The records of ``train``, ``val`` or ``test`` in the order of the data set."""
        chosen = [record for record in self.records if record.split == part]
        if part == "train" or self.eval_visits == "all":
            return chosen
        first: dict[str, ScanRecord] = {}
        for record in sorted(chosen, key=lambda r: r.order):
            first.setdefault(record.subject, record)
        return [record for record in chosen if first[record.subject] is record]

    def dataset(self, part: SplitName, augment: bool = False) -> ScanDataset:
        """The scans of one part as a data set of items."""
        return ScanDataset(
            self.scans(part),
            fixed_transforms(
                self.spatial_shape,
                self.spacing_mm,
                choose_profile(self.profile, self.records),
                shared_middle(self.records),
            ),
            random_transforms(self.flip) if augment else (),
            self.cache_dir / "images" if self.cache_images else None,
            draws=Draws(torch.initial_seed()) if augment else None,
        )

    def train_dataloader(self) -> DataLoader[Item]:
        """Shuffled training scans."""
        return self._loader("train", shuffle=True, augment=self.augment)

    def val_dataloader(self) -> DataLoader[Item]:
        """Validation scans, in fixed order."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Item]:
        """Test scans, in fixed order."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Item]:
        """The test scans again: predictions about subjects that were trained on prove nothing."""
        return self._loader("test")

    def _loader(
        self, part: SplitName, shuffle: bool = False, augment: bool = False
    ) -> DataLoader[Item]:
        dataset = self.dataset(part, augment)
        rank_zero_info(f"{part}: {dataset.kept()}")
        alone = part == "train" and self._ends_alone(len(dataset))
        if alone:
            rank_zero_info(
                f"train: the last of {len(dataset)} shuffled scans is left out in each epoch: a "
                f"batch of one (batch_size {self.batch_size}) has no batch statistics"
            )
        return EpochLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=alone,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            draws=dataset.draws,
            current_epoch=self._current_epoch if self.trainer else None,
        )

    def _ends_alone(self, scans: int) -> bool:
        """Whether a replica's last batch would be a single scan, with others before it."""
        sampled = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {}
        own = math.ceil(scans / sampled.get("num_replicas", 1))
        return bool(own > self.batch_size > 1 and own % self.batch_size == 1)

    def _current_epoch(self) -> int:
        assert self.trainer is not None
        return self.trainer.current_epoch

    def describe(self) -> str:
        """Scans and subjects per class and part, as a small table."""
        parts: dict[str, list[ScanRecord]] = {part: self.scans(part) for part in SPLITS}
        if self.task.number:
            lines = number_table(parts, self.class_names[0])
        else:
            lines = class_table(parts, self.class_names)
        present = {record.subject for record in self.records if record.used}
        gone = set(self.split.part_of()) - present if self.split else set()
        if gone:
            lines.append(
                f"left out: {len(gone)} people of the split, of whom this task uses no scan"
            )
        if self.shuffle_labels:
            lines.append("labels are PERMUTED over subjects (--data.shuffle_labels true)")
        return "\n".join(lines)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How scans become images: plain values, which a checkpoint can hold.

        A network's results mean something only for images that were prepared as in training.
        """
        middle = shared_middle(self.records)
        return {
            "profile": choose_profile(self.profile, self.records),
            "spacing_mm": float(self.spacing_mm),
            "spatial_shape": [int(n) for n in self.spatial_shape],
            "middle_mm": None if middle is None else list(middle),
        }

    def usual_head(self) -> tuple[torch.Tensor, float] | None:
        """Mean of coarse images of the training scans, and the least correlation with it."""
        found = usual(self.scans("train"), self._checks_file, self.leniency)
        return None if found is None else (torch.tensor(found.mean).float(), found.bound)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to know: split, scans, and how they were prepared."""
        if self.split is None:
            return {}
        return {
            "split": self.split.fingerprint,
            "scans": fingerprint(self.records),
            "preprocessing": self.preprocessing,
            "trained_files": sorted({r.sha256[:16] for r in self.scans("train")}),
            "trained_pictures": sorted({r.picture for r in self.scans("train")}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint that was trained on another split or on images prepared otherwise.

        Lightning calls it before the first batch, in ``fit`` and in evaluation with a checkpoint.

        Raises:
            SplitError: today's held-out subjects may have been trained on.
            DataError: another preprocessing.
        """
        if self.split is not None:
            check_same(state_dict, self.state_dict(), self._split_path(), self.root)

    def refuse_other_images(self, state_dict: dict[str, Any]) -> None:
        """Raise a DataError for a checkpoint, of any split, of images prepared otherwise."""
        check_same_images(state_dict, self.preprocessing, self.root)
