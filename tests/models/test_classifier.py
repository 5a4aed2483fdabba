from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader, Dataset

from datamodules import DataError
from models import ResAttNetClassifier
from models.errors import UseError

pytestmark = [
    # volumes of this size are made faster than a worker process starts
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
]


NARROW = [8, 8, 8, 8]


class Bright(Dataset):
    """Noise; label 1 has a bright corner."""

    def __init__(self, scans: int = 8) -> None:
        noise = torch.Generator().manual_seed(0)
        self.images = torch.randn(scans, 1, 32, 32, 32, generator=noise)
        self.images[1::2, :, :12, :12, :12] += 2

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict:
        return {"image": self.images[i], "label": i % 2, "subject": f"999_S_{i:04d}"}


def trainer(path, **options) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"enable_checkpointing": False, "default_root_dir": path, "accelerator": "cpu"}
    return Trainer(**(quiet | options))


def loader() -> DataLoader:
    return DataLoader(Bright(), batch_size=4)


@pytest.mark.conformance
def test_overfits_eight_volumes(tmp_path) -> None:
    torch.manual_seed(0)
    model = ResAttNetClassifier(learning_rate=0.1, widths=NARROW)
    run = trainer(tmp_path, max_epochs=40)
    run.fit(model, loader(), loader())
    assert run.callback_metrics["train/loss_epoch"] < 1e-3


def scored(scores: list[list[float]], labels: list[int], task: str = "ad_nc") -> tuple:
    """A classifier that puts out the given scores, and the batch to give it."""
    model = ResAttNetClassifier(task=task, widths=NARROW)
    model.network = torch.nn.Flatten()
    return model, {
        "image": torch.tensor(scores, dtype=torch.float32),
        "label": torch.tensor(labels),
    }


def test_reports_every_metric_of_a_known_classifier_with_its_interval(tmp_path) -> None:
    model, batch = scored([[0, 1], [0, 2], [2, 0], [1, 0]] * 16, [1, 1, 0, 1] * 16)
    [found] = trainer(tmp_path).test(model, DataLoader([batch], batch_size=None), verbose=False)
    expected = {"accuracy": 3 / 4, "sensitivity": 2 / 3, "specificity": 1, "auroc": 1}
    expected |= {"balanced_accuracy": (2 / 3 + 1) / 2, "f1": 0.8}
    for name, value in expected.items():
        assert found[f"test/{name}"] == pytest.approx(value)
        if name not in ("f1", "auroc"):  # two people without the disease say nothing of an area
            assert found[f"test/{name}_low"] <= value <= found[f"test/{name}_high"]
    assert not {"test/f1_low", "test/auroc_low"} & found.keys()
    assert found.keys() >= {"test/loss", "test/mcc", "test/calibration_error"}


def test_three_classes_are_scored_against_each_other(tmp_path) -> None:
    model, batch = scored([[2, 0, 0], [0, 2, 0], [0, 2, 0]], [0, 1, 2], "three_way")
    [found] = trainer(tmp_path).test(model, DataLoader([batch], batch_size=None), verbose=False)
    assert found["test/balanced_accuracy"] == pytest.approx(2 / 3)
    assert found["test/auroc"] == pytest.approx((1 + 0.75 + 0.5) / 3)


def test_metrics_start_afresh_in_every_epoch(tmp_path) -> None:
    model, run = ResAttNetClassifier(widths=NARROW), trainer(tmp_path)
    first = run.validate(model, loader(), verbose=False)
    assert run.validate(model, loader(), verbose=False) == first


def test_class_weights_weigh_the_loss() -> None:
    scores, labels = torch.tensor([[1.0, 0], [1, 0]]), torch.tensor([0, 1])
    plain = ResAttNetClassifier(widths=NARROW)
    weighted = ResAttNetClassifier(widths=NARROW, class_weights=[1.0, 3.0])
    assert weighted._loss(scores, labels) > plain._loss(scores, labels)
    with pytest.raises(ValueError, match="2 numbers, for NC, AD"):
        ResAttNetClassifier(class_weights=[1.0])


def test_label_smoothing_acts_on_the_training_loss_alone() -> None:
    scores, labels = torch.tensor([[4.0, 0]]), torch.tensor([0])
    model = ResAttNetClassifier(label_smoothing=0.2, widths=NARROW)
    # 0.9 of the label, 0.1 of the other class
    expected = -(0.9 * scores.log_softmax(1)[0, 0] + 0.1 * scores.log_softmax(1)[0, 1])
    torch.testing.assert_close(model._loss(scores, labels, 0.2), expected)
    assert model._loss(scores, labels) < expected


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer, *args) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_rate_warms_up_and_falls_step_by_step(tmp_path, optimizer) -> None:
    options = {"lr_schedule": "cosine", "warmup_epochs": 1.0, "learning_rate": 0.5}
    model = ResAttNetClassifier(optimizer=optimizer, widths=NARROW, **options)
    rates = Rates()
    trainer(tmp_path, max_epochs=3, callbacks=[rates]).fit(model, loader(), loader())
    # two steps an epoch: half-way up, full, then a cosine over four steps
    expected = [0.0005, 0.25, 0.5, 0.5 * (1 + 0.5**0.5) / 2, 0.25, 0.5 * (1 - 0.5**0.5) / 2]
    assert rates.seen == pytest.approx(expected)


def test_a_schedule_needs_a_run_with_an_end(tmp_path) -> None:
    model = ResAttNetClassifier(lr_schedule="cosine", warmup_epochs=3, widths=NARROW)
    with pytest.raises(UseError, match=r"warmup_epochs=3 needs .*max_epochs is 2"):
        trainer(tmp_path, max_epochs=2).fit(model, loader(), loader())


class People(LightningDataModule):
    """The same noise for whoever trains, validates and tests."""

    class_weights = (0.5, 1.5)

    def __init__(self, **parts: list[str]) -> None:
        super().__init__()
        self.parts = parts

    def scans(self, part: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(subject=name) for name in self.parts.get(part, ())]

    def train_dataloader(self) -> DataLoader:
        return loader()

    def val_dataloader(self) -> DataLoader:
        return loader()


def trained(path, people: People, **options) -> ResAttNetClassifier:
    model = ResAttNetClassifier(widths=NARROW, **options)
    run = trainer(path, max_epochs=1)
    run.fit(model, datamodule=people)
    run.save_checkpoint(path / "first.ckpt")
    return model


@pytest.mark.parametrize("side", [32, 33])
def test_one_scan_of_one_voxel_is_refused_before_training(tmp_path, side) -> None:
    people = People()
    people.batch_size, people.spatial_shape = 1, (side, 20, 20)
    if side == 33:  # two voxels: batch normalisation has something to work with
        trained(tmp_path, people)
        return
    with pytest.raises(UseError, match=r"spatial_shape \[32, 20, 20\] is one voxel in layer4"):
        trained(tmp_path, people)


def test_transfer_starts_from_the_other_runs_weights(tmp_path) -> None:
    first = trained(tmp_path, People(train=["999_S_0001"]))
    options = {"transfer_from": str(tmp_path / "first.ckpt"), "learning_rate": 0.0}
    second = trained(tmp_path, People(train=["999_S_0002"], test=["999_S_0003"]), **options)
    for (name, a), b in zip(first.network.named_parameters(), second.network.parameters()):
        assert torch.equal(a, b), name
    # whom the first one saw is remembered, through both runs, and nobody's name
    text = str(torch.load(tmp_path / "first.ckpt", weights_only=True)["trained_on"])
    assert text.count(",") == 1
    assert "999_S" not in text


def test_transfer_to_another_number_of_classes_keeps_a_fresh_last_layer(tmp_path) -> None:
    first = trained(tmp_path, People(train=["999_S_0001"]))
    options = {"transfer_from": str(tmp_path / "first.ckpt"), "task": "three_way"}
    second = trained(tmp_path, People(), learning_rate=0.0, **options)
    assert second.network.classifier.weight.shape == (3, 8)
    assert torch.equal(first.network.stem.conv.weight, second.network.stem.conv.weight)


def test_transfer_from_weights_of_unknown_people_is_told(tmp_path) -> None:
    trained(tmp_path, People())
    with pytest.warns(UserWarning, match=r"first\.ckpt does not say whom its weights"):
        trained(tmp_path, People(), transfer_from=str(tmp_path / "first.ckpt"))


def test_transfer_from_a_run_that_trained_on_todays_held_out_is_refused(tmp_path) -> None:
    trained(tmp_path, People(train=["999_S_0001"]))
    options = {"transfer_from": str(tmp_path / "first.ckpt")}
    with pytest.raises(UseError, match=r"1 subject\(s\) that this run holds out"):
        trained(tmp_path, People(val=["999_S_0001"]), **options)


class Prepared(People):
    """People whose images are prepared in one of several ways."""

    spacing_mm = 2.0

    def state_dict(self) -> dict:
        return {"preprocessing": self.spacing_mm}

    def refuse_other_images(self, state: dict) -> None:
        if state["preprocessing"] != self.spacing_mm:
            raise DataError("OTHER_PREPROCESSING", f"{state['preprocessing']} there")


def test_transfer_from_other_images_is_refused(tmp_path) -> None:
    people = Prepared(train=["999_S_0001"])
    trained(tmp_path, people)
    people.spacing_mm = 4.0
    with pytest.raises(DataError, match=r"2\.0 there"):
        trained(tmp_path, people, transfer_from=str(tmp_path / "first.ckpt"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("none.ckpt", {}, r"no checkpoint .*none\.ckpt; in that folder: .*first\.ckpt"),
        ("first.ckpt", {"depth": 34}, "another one: layer1.2"),
        ("broken.ckpt", {}, "is no Lightning checkpoint"),
    ],
)
def test_transfer_from_what_does_not_fit_is_refused(tmp_path, name, options, message) -> None:
    trained(tmp_path, People(train=["999_S_0001"]))
    (tmp_path / "broken.ckpt").write_bytes(b"no checkpoint")
    with pytest.raises(UseError, match=message):
        trained(tmp_path, People(), transfer_from=str(tmp_path / name), **options)


def test_balanced_weights_come_from_the_data_module(tmp_path) -> None:
    model = trained(tmp_path, People(), class_weights="balanced")
    assert model.class_weights is not None
    assert model.class_weights.tolist() == [0.5, 1.5]


def test_balanced_weights_and_averaged_ones_go_together(tmp_path) -> None:
    model = ResAttNetClassifier(widths=NARROW, class_weights="balanced")
    averaging = trainer(tmp_path, max_epochs=1, callbacks=[EMAWeightAveraging(decay=0.5)])
    averaging.fit(model, datamodule=People())
    assert model.class_weights is not None
    assert model.class_weights.tolist() == [0.5, 1.5]


def test_predictions_carry_the_ids_and_no_images(tmp_path) -> None:
    first = trainer(tmp_path).predict(ResAttNetClassifier(widths=NARROW), loader())[0]
    assert first.keys() == {"label", "subject", "outputs"}
    assert first["subject"] == [f"999_S_{i:04d}" for i in range(4)]
    torch.testing.assert_close(first["outputs"].sum(1), torch.ones(4))


def test_a_checkpoint_restores_architecture_and_weights(tmp_path) -> None:
    model = ResAttNetClassifier(
        stem_kernel=7, widths=NARROW, attention_after=[4], class_weights=[1.0, 2.0]
    )
    run = trainer(tmp_path)
    run.strategy.connect(model)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = ResAttNetClassifier.load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu")
    assert again.hparams == model.hparams
    weights = again.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
