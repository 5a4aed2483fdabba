import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset

from models import ResAttNetClassifier

pytestmark = [
    # volumes of this size are made faster than a worker process starts
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
]


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


def test_overfits_eight_volumes(tmp_path) -> None:
    torch.manual_seed(0)
    model = ResAttNetClassifier(learning_rate=0.01)
    run = trainer(tmp_path, max_epochs=8)
    run.fit(model, loader(), loader())
    assert run.callback_metrics["train/loss_epoch"] < 0.1


def test_reports_every_metric_of_a_known_classifier(tmp_path) -> None:
    model = ResAttNetClassifier()
    scores = torch.tensor([[0.0, 1], [0, 2], [2, 0], [1, 0]])
    labels = torch.tensor([1, 1, 0, 1])
    model.network = torch.nn.Flatten()
    batch = {"image": scores, "label": labels}
    [found] = trainer(tmp_path).test(model, DataLoader([batch], batch_size=None), verbose=False)
    expected = {"accuracy": 3 / 4, "sensitivity": 2 / 3, "specificity": 1, "auroc": 1}
    expected["balanced_accuracy"] = (2 / 3 + 1) / 2
    assert {k.removeprefix("test/"): v for k, v in found.items() if k != "test/loss"} == (
        pytest.approx(expected)
    )


def test_metrics_start_afresh_in_every_epoch(tmp_path) -> None:
    model, run = ResAttNetClassifier(), trainer(tmp_path)
    first = run.validate(model, loader(), verbose=False)
    assert run.validate(model, loader(), verbose=False) == first


def test_class_weights_weigh_the_loss() -> None:
    scores, labels = torch.tensor([[1.0, 0], [1, 0]]), torch.tensor([0, 1])
    plain, weighted = ResAttNetClassifier(), ResAttNetClassifier(class_weights=[1.0, 3.0])
    assert weighted._loss(scores, labels) > plain._loss(scores, labels)
    with pytest.raises(ValueError, match="two numbers"):
        ResAttNetClassifier(class_weights=[1.0])


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [1, 1, 1]), ("cosine", [1, 0.75, 0.25]), ("step", [1, 0.1, 0.01])],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_learning_rate_follows_its_schedule(tmp_path, optimizer, schedule, rates) -> None:
    model = ResAttNetClassifier(optimizer=optimizer, learning_rate=1, lr_schedule=schedule)
    model.trainer = trainer(tmp_path, max_epochs=3)
    made = model.configure_optimizers()
    if schedule == "constant":
        assert made.param_groups[0]["lr"] == 1
        return
    seen = []
    for _ in range(3):
        seen.append(made["optimizer"].param_groups[0]["lr"])
        made["optimizer"].step()
        made["lr_scheduler"].step()
    assert seen == pytest.approx(rates)


def test_predictions_carry_the_ids_and_no_images(tmp_path) -> None:
    first = trainer(tmp_path).predict(ResAttNetClassifier(), loader())[0]
    assert first.keys() == {"label", "subject", "probabilities"}
    assert first["subject"] == [f"999_S_{i:04d}" for i in range(4)]
    torch.testing.assert_close(first["probabilities"].sum(1), torch.ones(4))


def test_a_checkpoint_restores_architecture_and_weights(tmp_path) -> None:
    model = ResAttNetClassifier(stem_kernel=7, attention_after=[4], class_weights=[1.0, 2.0])
    run = trainer(tmp_path)
    run.strategy.connect(model)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = ResAttNetClassifier.load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu")
    assert again.hparams == model.hparams
    weights = again.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
