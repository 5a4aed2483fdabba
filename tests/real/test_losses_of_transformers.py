"""The losses that language models of transformers compute are sums: micro-batches have shares."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from capturing import InShares
from libraries import needs


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@needs("transformers")
@pytest.mark.parametrize("number", [None, 11, torch.tensor(11)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_shares_of_a_language_model_are_its_loss_and_gradient(name: str, number: Any) -> None:
    from networks_of_transformers import MAKERS

    torch.manual_seed(0)
    net = MAKERS[name]().double()
    other = deepcopy(net)
    words = torch.randint(64, (6, 12))
    labels = words.masked_fill(torch.rand(6, 12) < 0.3, -100)
    labels[:2] = -100  # a micro-batch without any target
    given = {"input_ids": words, "labels": labels, "num_items_in_batch": number}
    shares = InShares(net, 3)
    one, whole = shares(**given), other(**given)
    assert (shares.reason, shares.shared) == ("", 3)
    # (transformers computes the loss in float32)
    torch.testing.assert_close(one.loss, whole.loss, rtol=1e-6, atol=1e-6)
    one.loss.backward()
    whole.loss.backward()
    for parameter, expected in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-5, atol=1e-6)
