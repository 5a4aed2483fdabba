"""Which operators draw random numbers.

torch's own tag for it (``nondeterministic_seeded``) is also on attention and recurrent layers,
which draw only with a dropout rate above zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_hybrid._torch.tensors import arguments, schema

_ALWAYS = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "multinomial"),
    *("normal", "normal_functional", "poisson", "random", "uniform", "_sample_dirichlet"),
    *("_standard_gamma", "_fused_dropout", "_cudnn_init_dropout_state"),
}
_IN_TRAINING = {
    **dict.fromkeys(("native_dropout", "dropout", "alpha_dropout"), ("p", "train")),
    **dict.fromkeys(("feature_dropout", "feature_alpha_dropout"), ("p", "train")),
    **dict.fromkeys(("rrelu", "rrelu_with_noise", "rrelu_with_noise_functional"), ("training",)),
    **dict.fromkeys(("_cudnn_rnn", "miopen_rnn", "_lstm_mps"), ("dropout", "train")),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), ("dropout", "train")),
}
"""Per operator, the arguments that must all be true or above zero for it to draw."""
_DROPOUT = ("dropout_p", "dropout")
"""The arguments of operators of attention that are a rate of dropout."""


def draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws from a random generator.

    Args:
        operator: the operator, as dispatch modes get it.
        args: of the call.
        kwargs: of the call.
    """
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    if operator.namespace != "aten":
        return True  # its author has tagged it so
    given = arguments(operator, args, kwargs)
    name = schema(operator).name.removeprefix("aten::")
    name = name.removesuffix("_") or name
    if name in _ALWAYS:
        return True
    if name in _IN_TRAINING:
        return all(
            given.get(each) is not False and given.get(each) != 0 for each in _IN_TRAINING[name]
        )
    # the other operators are of attention, and draw only with a rate of dropout above zero
    return any(given.get(each) for each in _DROPOUT)
