"""Recurrent layers as operations that are free in the length of their sequences.

To find the shapes of their results TorchDynamo runs torch's own operations step by step, and so
captures them for one length only. These take the place of torch's while a network is captured; they
compute with them, and tell the shapes without running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch import Exchanged, is_fake, recurrent_functions

_functions = recurrent_functions()


_Original = Callable[..., Any]
_in_graph: Callable[[_Original], _Original] = torch.compiler.allow_in_graph
_ORIGINAL: dict[str, _Original] = {
    name: getattr(_functions, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}


@_in_graph
def lstm(*args: Any) -> Any:
    """`torch.nn.LSTM`, with the arguments of torch's own operation."""
    return _computed("lstm", args)


@_in_graph
def gru(*args: Any) -> Any:
    """`torch.nn.GRU`, likewise."""
    return _computed("gru", args)


@_in_graph
def rnn_tanh(*args: Any) -> Any:
    """`torch.nn.RNN`, likewise."""
    return _computed("rnn_tanh", args)


@_in_graph
def rnn_relu(*args: Any) -> Any:
    """`torch.nn.RNN(nonlinearity="relu")`, likewise."""
    return _computed("rnn_relu", args)


_INSTEAD: dict[str, _Original] = {
    "lstm": lstm,
    "gru": gru,
    "rnn_tanh": rnn_tanh,
    "rnn_relu": rnn_relu,
}

captured_recurrence = Exchanged(
    lambda: vars(_functions).update(_INSTEAD),
    lambda: [vars(_functions).pop(name) for name in _INSTEAD],
)
"""Inside, what captures a recurrent layer keeps the length of its sequences free."""


def _computed(name: str, args: tuple[Any, ...]) -> Any:
    value, states, weights = args[:3]
    # a packed sequence has the sizes of its steps in the second place
    packed = isinstance(weights, Tensor) or (name == "lstm" and isinstance(states, Tensor))
    if packed or not is_fake(value) or _must_run(args):
        return _ORIGINAL[name](*args)
    return _shapes(value, states if name == "lstm" else [states], weights, args[7])


def _must_run(args: tuple[Any, ...]) -> bool:
    """Whether more than shapes is to be known: random numbers are drawn, types may change."""
    value, _, _, _, layers, dropout, training, *_ = args
    draws = training and dropout and layers > 1
    return bool(draws or torch.is_autocast_enabled(value.device.type))


def _shapes(
    value: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], bidirectional: bool
) -> tuple[Tensor, ...]:
    """Outputs of all steps, and the last states, without numbers."""
    size = states[0].shape[-1] * (2 if bidirectional else 1)
    tie = 0 * (value.sum() + weights[0].sum() + states[0].sum())  # they have gradients if one has
    results = [value.new_empty((*value.shape[:2], size)), *map(torch.empty_like, states)]
    return tuple(result + tie for result in results)
