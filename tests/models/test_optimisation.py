import math

import pytest
import torch

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
