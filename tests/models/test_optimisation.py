import math
from pathlib import Path

import pytest
import torch
import yaml

from models.optimisation import make_optimizer, rate_factor


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("cosine", [(1 + math.cos(math.pi * t)) / 2 for t in (0, 0.25, 0.5, 0.75, 1)]),
        ("step", [1, 1, 0.1, 0.01, 0.01]),
    ],
)
def test_the_rate_follows_its_schedule(schedule, factors) -> None:
    found = [rate_factor(schedule, done, 0.0) for done in (0, 0.25, 0.5, 0.75, 1)]
    assert found == pytest.approx(factors)


def test_the_printed_recipe_is_what_the_paper_says() -> None:
    path = Path(__file__).parents[2] / "configs" / "paper.yaml"
    recipe = yaml.safe_load(path.read_text())
    model, data = recipe["model"], recipe["data"]
    assert (recipe["trainer"]["max_epochs"], data["batch_size"]) == (50, 6)
    assert (data["spacing_mm"], data["spatial_shape"]) == (2.0, [91, 109, 91])
    names = ("learning_rate", "weight_decay", "momentum", "nesterov")
    options = [model[name] for name in names]
    assert options == [1e-4, 0, 0, False]
    optimizer = make_optimizer(model["optimizer"], [torch.nn.Parameter(torch.ones(1))], *options)
    assert type(optimizer) is torch.optim.SGD
    # a tenth after each third, and nothing else: no smoothing, weights, dropout, augmentation
    rates = [1e-4 * rate_factor(model["lr_schedule"], epoch / 50, 0.0) for epoch in (0, 17, 34, 49)]
    assert rates == pytest.approx([1e-4, 1e-5, 1e-6, 1e-6])
    assert model.keys() == {"depth", "optimizer", "lr_schedule", *names}
    assert data["augment"] is False


def test_warm_up_grows_to_the_full_rate_and_the_schedule_takes_the_rest() -> None:
    found = [rate_factor("cosine", done, 0.2) for done in (0.05, 0.1, 0.2, 0.6, 1.0)]
    assert found == pytest.approx([0.25, 0.5, 1.0, 0.5, 0.0])
    assert rate_factor("cosine", 0, 0.2) > 0


def test_plain_sgd_is_possible() -> None:
    [group] = make_optimizer(
        "sgd", [torch.nn.Parameter(torch.ones(1))], 1.0, 0, 0, False
    ).param_groups
    assert (group["momentum"], group["nesterov"]) == (0, False)


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match="nesterov=true needs a momentum"):
        make_optimizer("sgd", [torch.nn.Parameter(torch.ones(1))], 1.0, 0, 0, True)
