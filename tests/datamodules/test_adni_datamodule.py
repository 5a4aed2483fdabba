from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import lightning
import nibabel as nib
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from datamodules import ADNIDataModule, cache, checks
from datamodules.errors import DataError, FolderError, ProblemsError, ScanReadError, SplitError
from datamodules.labels import TASKS
from datamodules.records import ScanRecord, fingerprint
from datamodules.split_drawing import extend_split
from datamodules.splits import SPLITS, load_split, save_split
from datamodules.survey import survey
from datamodules.synth import CohortSpec, generate
from datamodules.transforms import fixed_transforms

SHAPE = (24, 28, 24)


@pytest.fixture
def module(tiny_cohort, tmp_path):
    return prepared(tiny_cohort, tmp_path / "cache")


def make(root: Path, cache_dir: Path, **options: object) -> ADNIDataModule:
    fixed = {"spatial_shape": SHAPE, "spacing_mm": 8.0, "batch_size": 3, "cache_dir": cache_dir}
    return ADNIDataModule(root, **{"val_fraction": 0.2, "test_fraction": 0.2} | fixed | options)


def prepared(root: Path, cache_dir: Path, **options: object) -> ADNIDataModule:
    made = make(root, cache_dir, **options)
    made.prepare_data()
    made.setup()
    return made


def state_of(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file()
    }


def test_batches_are_plain_tensors_and_strings(module):
    batch = next(iter(module.train_dataloader()))
    assert set(batch) == {"image", "label", "subject", "image_id", "affine"}
    assert type(batch["image"]) is type(batch["affine"]) is torch.Tensor
    assert batch["image"].shape == (3, 1, *SHAPE)
    assert batch["image"].dtype == batch["affine"].dtype == torch.float32
    assert batch["label"].dtype == torch.int64
    assert batch["affine"].shape == (3, 4, 4)
    assert all(isinstance(name, str) for name in batch["subject"] + batch["image_id"])


@pytest.mark.conformance
def test_no_training_batch_is_one_scan_alone_and_nothing_else_is_left_out(tiny_cohort, tmp_path):
    scans = len(prepared(tiny_cohort, tmp_path).scans("train"))
    for size in (1, scans - 1, scans):
        module = prepared(tiny_cohort, tmp_path, batch_size=size)
        sizes = [len(batch["label"]) for batch in module.train_dataloader()]
        assert sizes == ([1] * scans if size == 1 else [size])
        held_out = [len(batch["label"]) for batch in module.val_dataloader()]
        assert sum(held_out) == len(module.scans("val"))


def test_labels_follow_the_class_names(module, tiny_cohort):
    truth = (tiny_cohort / "truth" / "truth.tsv").read_text().splitlines()[1:]
    diagnosis = {row.split("\t")[1]: row.split("\t")[2] for row in truth}
    assert module.class_names == ("NC", "AD")
    assert module.num_classes == 2
    for part in SPLITS:
        for item in module.dataset(part):
            assert module.class_names[int(item["label"])] == diagnosis[item["image_id"]]


def test_data_folder_is_untouched_by_a_whole_run(download, tmp_path):
    before = state_of(download)
    made = prepared(download, tmp_path / "cache")
    for loader in (made.train_dataloader(), made.val_dataloader(), made.test_dataloader()):
        list(loader)
    assert state_of(download) == before


def test_outputs_inside_the_data_folder_are_refused(tiny_cohort, tmp_path):
    with pytest.raises(FolderError, match=r"INSIDE_DATA: --data\.cache_dir"):
        make(tiny_cohort, tiny_cohort / "cache")
    with pytest.raises(FolderError, match=r"INSIDE_DATA: --data\.split_file"):
        make(tiny_cohort, tmp_path, split_file=tiny_cohort / "split.json")


def test_cached_and_uncached_items_are_the_same_bit_for_bit(module, tiny_cohort, tmp_path):
    fresh = prepared(tiny_cohort, tmp_path / "cache", cache_images=False).dataset("train")
    missed, hit = list(module.dataset("train")), list(module.dataset("train"))
    assert len(list((tmp_path / "cache" / "images").glob("*.pt"))) == len(missed)
    for items in zip(fresh, missed, hit):
        for key in ("image", "affine", "label"):
            assert torch.equal(items[0][key], items[1][key])
            assert torch.equal(items[0][key], items[2][key])
            assert type(items[1][key]) is type(items[2][key]) is torch.Tensor


def test_replaced_file_is_not_served_from_the_cache(download, tmp_path):
    made = prepared(download, tmp_path / "cache", augment=False)
    old = made.dataset("train")[0]
    path = Path(made.scans("train")[0].path)
    loaded = nib.Nifti1Image.from_bytes(nib.load(path).to_bytes())
    nib.save(nib.Nifti1Image(loaded.get_fdata()[::-1].astype("int16"), loaded.affine), path)
    with pytest.raises(ScanReadError, match=f"changed since it was checked.*\n.*{path.name}"):
        ADNIDataModule.dataset(prepared_again_without_check(made), "train")[0]
    new = prepared(download, tmp_path / "cache", augment=False).dataset("train")[0]
    assert new["image_id"] == old["image_id"]
    assert not torch.equal(new["image"], old["image"])


def prepared_again_without_check(made: ADNIDataModule) -> ADNIDataModule:
    shutil.rmtree(made.cache_dir / "images")
    return made


def test_other_settings_do_not_share_prepared_images(module, tiny_cohort, tmp_path):
    list(module.dataset("train"))
    other = prepared(tiny_cohort, tmp_path / "cache", spacing_mm=9.0).dataset("train")[0]
    assert not torch.equal(other["image"], module.dataset("train")[0]["image"])


def test_damaged_cache_file_is_made_again(module):
    good = module.dataset("train")[0]["image"]
    damaged = (
        module.cache_dir / "images" / module.dataset("train").cache_name(module.scans("train")[0])
    )
    damaged.write_bytes(damaged.read_bytes()[:500])
    with pytest.warns(UserWarning, match="is damaged"):
        assert torch.equal(module.dataset("train")[0]["image"], good)
    assert torch.equal(module.dataset("train")[0]["image"], good)


def test_cache_file_that_was_changed_on_disk_is_made_again(module):
    dataset, record = module.dataset("train"), module.scans("train")[0]
    good = dataset[0]["image"].clone()
    path = module.cache_dir / "images" / dataset.cache_name(record)
    data = bytearray(path.read_bytes())
    place = data.find(good.numpy().tobytes()[2000:2400])
    data[place + 10] ^= 64  # one bit of a voxel: torch.load does not mind
    path.write_bytes(data)
    assert not torch.equal(torch.load(path)["image"], good)
    with pytest.warns(UserWarning, match="is damaged.*not what was written"):
        assert torch.equal(dataset[0]["image"], good)
    assert torch.equal(torch.load(path)["image"], good)


def test_a_scan_of_which_nothing_is_left_is_refused(download, tmp_path):
    made = prepared(download, tmp_path / "cache")
    path = Path(made.scans("train")[0].path)
    old, times = nib.load(path), path.stat()
    values = np.asarray(old.dataobj).astype(np.float32)
    values[12, 15, 12] = 1e30
    nib.save(nib.Nifti1Image(values, old.affine), path)  # between the check and the first epoch
    records = [replace(made.scans("train")[0], bytes=path.stat().st_size, sha256="")]
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ScanReadError, match=f"(?s)CONSTANT: .*nothing is left.*{path.name}"):
        cache.ScanDataset(records, fixed_transforms(SHAPE, 8.0))[0]


def test_full_disk_costs_the_cache_and_not_the_run(module, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.torch, "save", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert module.dataset("train")[0]["image"].shape == (1, *SHAPE)
    assert not list((module.cache_dir / "images").iterdir())


@pytest.mark.conformance  # the other process needs seconds to import MONAI
def test_cache_names_are_the_same_in_another_process():
    script = (
        "from datamodules.cache import ScanDataset\n"
        "from datamodules.records import ScanRecord\n"
        "from datamodules.transforms import fixed_transforms\n"
        "record = ScanRecord(subject='', image_id='', path='', sha256='abc')\n"
        "name = ScanDataset([record], fixed_transforms((24, 28, 24), 8.0)).cache_name(record)\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script + "print(name)"]
    out = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    here: dict[str, str] = {}
    exec(script, here)
    assert out.strip() == here["name"]


def test_setup_reads_no_image(download, tmp_path):
    prepared(download, tmp_path / "cache")
    shutil.rmtree(download / "ADNI")
    again = make(download, tmp_path / "cache")
    again.setup("fit")
    assert again.train_dataloader().dataset


def test_setup_without_preparation_says_so(tiny_cohort, tmp_path):
    with pytest.raises(DataError, match=r"(?s)NOT_PREPARED.*prepare_data"):
        make(tiny_cohort, tmp_path / "cache").setup()


def test_all_problems_are_reported_at_once_or_skipped(download, tmp_path):
    paths = [Path(r.path) for r in prepared(download, tmp_path / "cache").scans("train")][:2]
    paths[0].write_bytes(paths[0].read_bytes()[:-30])
    paths[1].write_bytes(b"")
    with pytest.raises(ProblemsError, match="1 x CORRUPT_GZIP, 1 x EMPTY") as caught:
        make(download, tmp_path / "cache").prepare_data()
    assert {problem.path for problem in caught.value.problems} == {str(path) for path in paths}
    assert "CORRUPT_GZIP" in Path(caught.value.report).read_text()
    skipping = prepared(download, tmp_path / "cache", on_bad="skip")
    assert not {str(path) for path in paths} & {r.path for r in skipping.scans("train")}
    assert sum(bool(record.problem) for record in skipping.records) == 2


def test_training_uses_all_visits_and_evaluation_the_first(module, tiny_cohort, tmp_path):
    assert len(module.scans("train")) > len({r.subject for r in module.scans("train")})
    for part in ("val", "test"):
        assert {r.session for r in module.scans(part)} == {"M000"}
    everything = prepared(tiny_cohort, tmp_path / "cache", eval_visits="all")
    assert len(everything.scans("test")) > len(module.scans("test"))


def test_permuted_labels_keep_counts_and_subjects_whole(module, tiny_cohort, tmp_path):
    shuffled = prepared(tiny_cohort, tmp_path / "cache", shuffle_labels=True)
    assert "PERMUTED" in shuffled.describe()
    moved = 0
    for part in SPLITS:
        true = {r.subject: r.label for r in module.scans(part)}
        fake = {
            r.subject: {s.label for s in shuffled.scans(part) if s.subject == r.subject}
            for r in shuffled.scans(part)
        }
        assert all(len(labels) == 1 for labels in fake.values())
        assert sorted(true.values()) == sorted(next(iter(labels)) for labels in fake.values())
        moved += sum({true[subject]} != labels for subject, labels in fake.items())
    assert moved


def test_split_file_is_made_once_and_then_obeyed(tiny_cohort, tmp_path):
    path = tmp_path / "split.json"
    first = prepared(tiny_cohort, tmp_path / "cache", split_file=path)
    second = prepared(tiny_cohort, tmp_path / "cache", split_file=path, seed=7)
    assert first.split == second.split
    assert prepared(tiny_cohort, tmp_path / "cache", seed=7).split != first.split


def test_one_more_subject_does_not_change_the_split_silently(download, tmp_path):
    subject = sorted((download / "ADNI").iterdir())[0]
    shutil.move(subject, tmp_path / subject.name)
    table = next(download.glob("SYNTHETIC*"))
    text = table.read_text()
    rows = [row for row in text.splitlines() if subject.name not in row]
    table.write_text("\n".join(rows) + "\n")
    first = prepared(download, tmp_path / "cache")
    shutil.move(tmp_path / subject.name, subject)
    table.write_text(text)
    with pytest.raises(SplitError, match=rf"(?s)NOT_IN_SPLIT.*{subject.name}.*--extend"):
        prepared(download, tmp_path / "cache")
    path = first._split_path()
    longer = extend_split(load_split(path), make_records(download))
    save_split(tmp_path / "longer.json", longer)
    again = prepared(download, tmp_path / "cache", split_file=tmp_path / "longer.json")
    assert (again.split.val, again.split.test) == (first.split.val, first.split.test)


def make_records(root: Path) -> list[ScanRecord]:
    return survey(root, TASKS["ad_nc"], None).records


def test_another_rule_reads_no_file_again(module, tiny_cohort, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "check_file", None)
    prepared(tiny_cohort, tmp_path / "cache", horizon_months=24.0)


def test_ranks_with_other_scans_are_refused(module):
    module._compare(fingerprint(module.records))
    with pytest.raises(DataError, match=r"(?s)OTHER_MANIFEST.*manifest\.tsv.*cache_dir"):
        module._compare(fingerprint(module.records[1:]))


def test_subjects_that_are_gone_are_counted(download, tmp_path):
    first = prepared(download, tmp_path / "cache")
    subject = first.split.train[0]
    shutil.rmtree(download / "ADNI" / subject)
    again = prepared(download, tmp_path / "cache", on_bad="skip")
    assert "left out: 1 people of the split, of whom this task uses no scan" in again.describe()
    assert "people of the split" not in first.describe()


def test_folds_and_rule_stand_in_the_split_file(tiny_cohort, tmp_path):
    options = {"folds": 3, "split_file": tmp_path / "folds.json"}
    parts = [
        prepared(tiny_cohort, tmp_path / "cache", fold=n, **options).split.val for n in range(3)
    ]
    assert len({subject for part in parts for subject in part}) == sum(map(len, parts)) > 0
    with pytest.raises(SplitError, match=r"(?s)NO_FOLD: fold 3 .*folds\.json"):
        prepared(tiny_cohort, tmp_path / "cache", fold=3, **options)
    with pytest.raises(SplitError, match=r"OTHER_RULE: .*horizon_months 36\.0 there, 24\.0 here"):
        prepared(tiny_cohort, tmp_path / "cache", horizon_months=24.0, **options)


def test_checkpoint_of_another_split_is_refused(module, tiny_cohort, tmp_path):
    state = module.state_dict()
    module.load_state_dict(state)
    with pytest.raises(SplitError, match="OTHER_SPLIT"):
        prepared(tiny_cohort, tmp_path / "cache", seed=7).load_state_dict(state)


def test_split_file_of_before_an_option_holds_its_default(tiny_cohort, tmp_path):
    path = tmp_path / "split.json"
    prepared(tiny_cohort, tmp_path / "cache", split_file=path)
    content = json.loads(path.read_text())
    del content["rule"]["smc"]
    path.write_text(json.dumps(content))
    prepared(tiny_cohort, tmp_path / "cache", split_file=path)
    with pytest.raises(SplitError, match=r"OTHER_RULE: .*smc 'exclude' there, 'normal' here"):
        prepared(tiny_cohort, tmp_path / "cache", split_file=path, smc="normal")


def test_unreadable_scan_is_named_by_a_loader_process(download, tmp_path):
    made = prepared(download, tmp_path / "cache", num_workers=1)
    path = Path(made.scans("val")[0].path)
    path.unlink()
    batches = iter(made.val_dataloader())
    with pytest.raises(ScanReadError, match=f"UNREADABLE.*(.|\n)*{path.name}"):
        next(batches)
    batches._shutdown_workers()  # left to the garbage collector it waits for five seconds


@pytest.fixture(scope="module")
def ill_scan(tmp_path_factory):
    """A scan whose left hippocampus is dark."""
    folder = tmp_path_factory.mktemp("ill") / "cohort"
    generate(folder, CohortSpec(subjects=(("AD", 1),), resolution_mm=8.0, difficulty="L0"))
    return nib.load(next((folder / "ADNI").rglob("*.nii.gz")))


@pytest.mark.parametrize("orientation", ["RAS", "LAS", "LPI", "PIR", "ASL", "LPS"])
def test_left_stays_left_whatever_the_orientation_of_the_file(ill_scan, tmp_path, orientation):
    target = nib.orientations.axcodes2ornt(tuple(orientation))
    start = nib.io_orientation(ill_scan.affine)
    turned = ill_scan.as_reoriented(nib.orientations.ornt_transform(start, target))
    nib.save(turned, tmp_path / "scan.nii")
    data = {"image": str(tmp_path / "scan.nii")}
    for transform in fixed_transforms(SHAPE, 8.0):
        data = transform(data)
    x = data["affine"][0, 0] * torch.arange(SHAPE[0]) + data["affine"][0, 3]
    image = data["image"][0]
    left, right = image[(x > -38) & (x < -12)], image[(x > 12) & (x < 38)]
    assert left.sum() < 0.97 * right.sum()


def test_command_line_can_build_it(tiny_cohort, tmp_path):
    parser = ArgumentParser()
    parser.add_class_arguments(ADNIDataModule, "data")
    arguments = [f"--data.root={tiny_cohort}", "--data.spatial_shape=[24,28,24]"]
    config = parser.parse_args([*arguments, f"--data.cache_dir={tmp_path}", "--data.flip=true"])
    made = parser.instantiate(config).data
    assert (made.root, made.spatial_shape, made.flip) == (tiny_cohort, (24, 28, 24), True)


class Linear(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(24 * 28 * 24, 2)
        self.validation_step = self.test_step = self.predict_step = self.training_step

    def training_step(self, batch: cache.Item, index: int) -> torch.Tensor:
        scores = self.layer(batch["image"].flatten(1))
        return torch.nn.functional.cross_entropy(scores, batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def trainer_in(folder: Path, **options: object) -> lightning.Trainer:
    return lightning.Trainer(
        **options,
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
    )


@pytest.fixture(scope="module")
def trained(tiny_cohort, tmp_path_factory):
    """The cache and the checkpoint of a run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two cores, on purpose
        trainer_in(folder).fit(Linear(), datamodule=make(tiny_cohort, folder / "cache"))
    return folder / "cache", next(folder.rglob("*.ckpt"))


def test_trainer_keeps_split_and_preprocessing_in_the_checkpoint(trained, tiny_cohort):
    cache_dir, checkpoint = trained
    saved = torch.load(checkpoint, weights_only=True)["ADNIDataModule"]
    made = prepared(tiny_cohort, cache_dir)
    assert made.split is not None
    assert saved["split"] == made.split.fingerprint
    assert saved["preprocessing"] == {
        "profile": "stripped",
        "spacing_mm": 8.0,
        "spatial_shape": [24, 28, 24],
        "middle_mm": None,
    }
    made.refuse_other_images(saved | {"split": "another"})  # of images alone
    with pytest.raises(DataError, match=r"OTHER_PREPROCESSING: .*spacing_mm 2\.0 there, 8\.0 here"):
        made.refuse_other_images({"preprocessing": {"spacing_mm": 2.0}})


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    ("options", "found"),
    [
        (
            {"spatial_shape": (28, 28, 24)},
            r"spatial_shape \[24, 28, 24\] there, \[28,",
        ),
        ({"spacing_mm": 9.0}, r"spacing_mm 8\.0 there, 9\.0 here"),
    ],
)
def test_no_command_takes_a_checkpoint_of_another_preprocessing(
    trained, tiny_cohort, options, found
):
    cache_dir, checkpoint = trained
    for command in ("fit", "validate", "test", "predict"):
        run = getattr(trainer_in(cache_dir, enable_checkpointing=False), command)
        with pytest.raises(DataError, match=rf"(?s)OTHER_PREPROCESSING: .*{found}.*config\.yaml"):
            run(Linear(), datamodule=make(tiny_cohort, cache_dir, **options), ckpt_path=checkpoint)
    trainer_in(cache_dir.parent).test(
        Linear(), make(tiny_cohort, cache_dir), ckpt_path=checkpoint, verbose=False
    )
