"""What of torch is replaced while a network is captured: what CONTRIBUTING lists, for no longer."""

import sys
from typing import Any

import torch
from torch import nn

from lightning_hybrid.capture import capture

REPLACED = {
    "torch._C._select_conv_backend",
    "torch._VF.gru",
    "torch._VF.lstm",
    "torch._VF.rnn_relu",
    "torch._VF.rnn_tanh",
    "torch.jit.isinstance",
    "torch.nn.modules.batchnorm._BatchNorm.forward",
    "torch.nn.modules.transformer.TransformerEncoder.forward",
}


def functions_of_torch() -> dict[str, Any]:
    """All functions and classes of torch, with those in its classes, by module and name."""
    found: dict[str, Any] = {}
    for module, content in [*sys.modules.items()]:
        if module.partition(".")[0] != "torch" or not hasattr(content, "__dict__"):
            continue
        for name, value in [*vars(content).items()]:
            if callable(value):
                found[f"{module}.{name}"] = value
            if issubclass(type(value), type) and value.__module__ == module:
                found |= {f"{module}.{name}.{k}": v for k, v in vars(value).items() if callable(v)}
    return found


def test_what_is_listed_is_replaced_while_a_network_is_captured_and_nothing_else() -> None:
    network, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(2, 3)
    inside: list[dict[str, Any]] = []

    def run(_: Any, values: Any) -> list[torch.Tensor]:
        inside.append(functions_of_torch())
        return [x]

    captured = capture.Capture(network, network.forward, run)
    captured((x,), {})  # which imports parts of torch
    before = functions_of_torch()
    captured((x,), {})
    after = functions_of_torch()
    assert len(before) > 10_000
    assert any(name.startswith("torch._dynamo.variables") for name in before)

    def changed(now: dict[str, Any]) -> set[str]:
        names = before.keys() | now.keys()
        return {name for name in names if before.get(name) is not now.get(name)}

    assert changed(inside[1]) == REPLACED
    assert changed(after) == set()
