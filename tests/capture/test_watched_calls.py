"""While calls of a module are watched, it looks as it did to those who look at its ``forward``."""

import inspect
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_hybrid.capture.watched_calls import unwatch, watch


class Encoder(nn.Module):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        return x


def with_one_of_its_own() -> nn.Module:
    module = Encoder()
    module.forward = lambda x, mask: x  # type: ignore[method-assign,assignment]
    return module


@pytest.mark.parametrize("make", [Encoder, with_one_of_its_own])
def test_the_signature_of_forward_is_its_own(make: Any) -> None:
    module = make()
    own = inspect.signature(module.forward)
    assert len(own.parameters) > 1
    watch(module, "net", lambda *_: None)
    assert inspect.signature(module.forward) == own
    assert inspect.getfullargspec(module.forward).args[-2:] == [*own.parameters][:2]
    unwatch(module)
    assert inspect.signature(module.forward) == own
