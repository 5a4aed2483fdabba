"""Recurrent layers as operations whose captures hold for sequences of any length.

To find the shapes of their results TorchDynamo runs torch's own operations step by step, and so
captures them for one length only. The functions here replace torch's while a network is captured:
they compute with torch's, but to find shapes run a single step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_hybrid._torch.modules import recurrent_functions
from lightning_hybrid._torch.tensors import is_fake

_functions = recurrent_functions()
_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_ORIGINAL: dict[str, Any] = {name: getattr(_functions, name, None) for name in _NAMES}


def _instead_of(name: str) -> Callable[..., Any]:
    """Make the function that replaces torch's recurrent operation ``name`` during captures.

    It has the arguments and results of torch's function, positional arguments only.
    """

    def layer(*args: Any) -> Any:
        return _computed(name, args)

    # a stage's code travels with the names of its functions, and finds them here by these
    layer.__name__ = layer.__qualname__ = name
    return layer


_INSTEAD = {name: _instead_of(name) for name in _NAMES}
lstm, gru, rnn_tanh, rnn_relu = RECURRENT = tuple(_INSTEAD.values())
"""All replacements (lstm, gru, rnn_tanh, rnn_relu), as the nodes of captured graphs call them."""

FREE_SEQUENCES = [(_functions, name, instead) for name, instead in _INSTEAD.items()]
"""(owner, name of its attribute, replacement) of each function to be replaced during captures."""


def _computed(name: str, args: tuple[Any, ...]) -> Any:
    value, states, weights = args[:3]
    # a packed sequence has the sizes of its steps in the second place
    packed = isinstance(weights, Tensor) or (name == "lstm" and isinstance(states, Tensor))
    if packed or not is_fake(value):
        return _ORIGINAL[name](*args)
    return _shapes(name, value, args)


def _shapes(name: str, value: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The results of a recurrent layer as fake tensors: outputs of all steps, then last states.

    One step is run to find their types (autocast), and whether random numbers are drawn.

    Args:
        name: of the operation ("lstm").
        value: the input, a fake tensor; its dimension 0 is time, or 1 if ``args[8]``
            (``batch_first``).
        args: all arguments of the operation, in torch's order, ``value`` first.
    """
    time = 1 if args[8] else 0
    outputs, *states = _ORIGINAL[name](value.narrow(time, 0, 1), *args[1:])
    shape = list(outputs.shape)
    shape[time] = value.shape[time]
    # a sum of nothing: the outputs have gradients if those of one step have
    return outputs.new_empty(shape) + 0 * outputs.sum(), *states
