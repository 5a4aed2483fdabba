"""A stage that is to be split looks out for hooks in its own forward."""

from typing import Any

import pytest
import torch

from lightning_hybrid.stage.early_forwards import EarlyForwards
from lightning_hybrid.stage.rank_stages import OwnedStage


def owned(*, splits: bool) -> OwnedStage:
    links: Any = None
    return OwnedStage(1, [], links, True, "", EarlyForwards(None), splits=splits)


def test_it_is_not_split_any_more_once_a_forward_has_hooked_what_it_computes() -> None:
    stage, x = owned(splits=True), torch.ones(2, requires_grad=True)
    with stage.looks_for_hooks():
        y = x.exp()
    assert stage.splits
    with pytest.warns(UserWarning, match="Stage 1 goes back in one"), stage.looks_for_hooks():
        y.register_hook(lambda gradient: gradient)
    assert not stage.splits
    with stage.looks_for_hooks():  # and says so once
        x.exp()
    assert not stage.splits


def test_one_that_is_not_split_does_not_look() -> None:
    stage = owned(splits=False)
    with stage.looks_for_hooks():
        assert not torch.overrides._get_current_function_mode_stack()
