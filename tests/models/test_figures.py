from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from models.drawing import FIGURES, save_figures
from models.figures import LogFigures, log_figure
from models.predictions import Prediction

PROBABILITIES = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
LABELS = np.array([0, 1, 1])
SAID = [
    Prediction(f"999_S_{i:04d}", f"I{i}", int(label), tuple(row))
    for i, (label, row) in enumerate(zip(LABELS, PROBABILITIES.tolist()))
]


class Experiment:
    def __init__(self, *methods: str) -> None:
        self.calls = []
        for method in methods:
            setattr(self, method, lambda *args, **kwargs: self.calls.append((args, kwargs)))


class Logger:
    def __init__(self, experiment: Experiment, **more: object) -> None:
        self.experiment = experiment
        self.__dict__ |= more


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("classes", [("NC", "AD"), ("NC", "MCI", "AD")])
def test_every_figure_can_be_drawn(name, classes, tmp_path) -> None:
    probabilities = np.pad(PROBABILITIES, ((0, 0), (0, len(classes) - 2)))
    FIGURES[name](probabilities, LABELS, classes).savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_confusion_matrix_shows_its_counts() -> None:
    figure = FIGURES["confusion"](PROBABILITIES, LABELS, ("NC", "AD"))
    assert [text.get_text() for text in figure.axes[0].texts] == ["1", "0", "1", "1"]


@pytest.mark.parametrize(
    ("method", "more"),
    [("add_figure", {}), ("log_figure", {}), ("log_figure", {"run_id": "7"})],
)
def test_figures_go_to_loggers_that_take_them(method, more) -> None:
    experiment = Experiment(method)
    assert log_figure(Logger(experiment, **more), "val/roc", Figure(), 3)
    assert len(experiment.calls) == 1


class Steps:
    """A series of Neptune's."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def append(self, figure: Figure, step: int) -> None:
        self.steps.append(step)


class Neptune(dict):
    def get_structure(self) -> None: ...

    def __missing__(self, name: str) -> Steps:
        self[name] = Steps()
        return self[name]


class WandB(Logger):
    def __init__(self) -> None:
        super().__init__(Experiment())
        self.keys: list[str] = []

    def log_image(self, key: str, images: list[Figure], step: int) -> None:
        assert len(images) == 1
        assert step == 7
        self.keys.append(key)


def test_every_logger_that_takes_figures_gets_all_of_them_at_the_last_epoch_and_after_a_test() -> (
    None
):
    board, other = Experiment("add_figure"), Experiment("add_scalar")
    neptune, wandb = Neptune(), WandB()
    trainer = SimpleNamespace(
        loggers=[Logger(board), Logger(neptune), wandb, Logger(other)],
        current_epoch=0,
        max_epochs=3,
        global_step=7,
        sanity_checking=False,
        is_global_zero=True,
    )
    model = SimpleNamespace(evaluated=SAID, class_names=("NC", "AD"))
    drawing = LogFigures(every_n_epochs=10)
    drawing.on_validation_end(trainer, model)  # neither the tenth nor the last
    assert board.calls == []
    trainer.current_epoch = 2
    drawing.on_validation_end(trainer, model)
    drawing.on_test_end(trainer, model)
    wanted = [f"{part}/{name}" for part in ("val", "test") for name in FIGURES]
    assert [args[0] for args, _ in board.calls] == wandb.keys == list(neptune) == wanted
    assert all(series.steps == [7] for series in neptune.values())
    assert other.calls == []


def test_figures_are_saved_beside_the_metrics_with_their_number(tmp_path) -> None:
    paths = save_figures(SAID, ("NC", "AD"), tmp_path / "test_metrics_2.json")
    assert [path.name for path in paths] == [f"test_{name}_2.png" for name in FIGURES]
    assert all(path.stat().st_size > 1000 for path in paths)
    assert save_figures([], ("NC", "AD"), tmp_path / "test_metrics.json") == []


def test_other_loggers_are_left_alone() -> None:
    assert not log_figure(Logger(Experiment("add_scalar")), "val/roc", Figure(), 3)
