import numpy as np
import pytest
from matplotlib.figure import Figure

from models.figures import FIGURES, log_figure

PROBABILITIES = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
LABELS = np.array([0, 1, 1])


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


def test_other_loggers_are_left_alone() -> None:
    assert not log_figure(Logger(Experiment("add_scalar")), "val/roc", Figure(), 3)
