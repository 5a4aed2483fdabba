"""Which optimizers step in parts, each rank its own parameters: those whose class is declared.

Adam, SGD and most others treat every parameter by itself. Stepped on several ranks, each of which
has the gradients of its own parameters, they do what they do on one device. An optimizer that clips
by a common norm in its step, estimates a common step size, draws noise or calls its closure twice
does not, and no look at its class can tell. So the optimizers of torch are declared here, users
declare theirs by :func:`register_optimizer`, and every other optimizer steps *whole*: the driver
gets all of its gradients and states, and the workers get the new weights.
"""

import inspect
from importlib import import_module
from typing import TypeVar

import torch
from torch.optim import Optimizer

from lightning_hybrid._torch.optimizers import runs_step_hooks
from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote import is_offloaded

K = TypeVar("K", bound=type[Optimizer])

_OF_TORCH = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)
_DECLARED = {getattr(torch.optim, name) for name in _OF_TORCH if hasattr(torch.optim, name)}
_FREE = {"__init__", "__repr__"}
"""Methods that a subclass of a declared class may have of its own."""


def register_optimizer(kind: K) -> K:
    """Declare that an optimizer treats every parameter by itself, so that each rank steps its own.

    Call it on the class before the run, or use it as a decorator of the class. What its ``step``
    does to a parameter, and what it notes of it, must depend on that parameter, its gradient, its
    state and the options of its group alone: on no norm, step size or count over several
    parameters, and on no random numbers. It must call a closure once, before it changes anything.

    Args:
        kind: the class, which other processes can import. The optimizers of torch but ``LBFGS``
            are declared, and their subclasses that override ``__init__`` alone.

    Returns:
        The class.

    Raises:
        HybridError: ``kind`` is no class of optimizers.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise HybridError(
            f"register_optimizer takes a subclass of torch.optim.Optimizer, not {kind!r}"
        )
    _DECLARED.add(kind)
    return kind


def why_steps_whole(optimizer: Optimizer) -> str:
    """Why an optimizer steps as a whole, on the driver, as a clause.

    Empty: it steps in parts, each rank its own parameters.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") and kind not in _DECLARED:
        return "it looks at all parameters together"
    if not _is_declared(kind):
        return (
            "no one has said whether it treats every parameter by itself. If it does (no norm, "
            "step size or random numbers over several parameters), declare it before the run: "
            f"lightning_hybrid.register_optimizer({kind.__name__})"
        )
    if not runs_step_hooks(optimizer):
        return "it does not call `Optimizer.__init__`"
    if kind.__module__ == "__main__":
        return (
            "its class is defined in the script itself, which workers do not run. Move it to a "
            "module, which the script imports"
        )
    if not _is_found_by_name(kind):
        return "its class is defined inside of a function, where no other rank can import it"
    return ""


def _is_declared(kind: type[Optimizer]) -> bool:
    """Whether an optimizer class may step in parts.

    It is in `_DECLARED` (torch's, or by `register_optimizer`), or is a subclass of one of these
    that overrides no method but those in `_FREE`.
    """
    base = next((each for each in kind.__mro__ if each in _DECLARED), None)
    if base is None:
        return False
    # (torch wraps `step` for each class by itself)
    methods = (name for name, _ in inspect.getmembers(base, inspect.isfunction))
    return all(
        inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(base, name))
        for name in methods
        if name not in _FREE
    )


def _is_found_by_name(kind: type) -> bool:
    found: object = import_module(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def line_about_whole(optimizer: Optimizer, reason: str) -> str:
    """Make the line for the user about an optimizer that steps as a whole; it is not printed here.

    Args:
        optimizer: the optimizer.
        reason: why it does so, from :func:`why_steps_whole`.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    megabytes = sum(p.numel() * p.element_size() for p in parameters) / 1e6
    return (
        f"hybrid_gabra: {type(optimizer).__name__} steps on the driver, as on one device. The "
        "driver has all of its states, and in each step the gradients of the other stages go there "
        f"and their weights come back (at most {megabytes:.3g} MB each). The reason: {reason}."
    )


def line_about_undivided(optimizer: Optimizer, reason: str) -> str:
    """Make the line for the user about an optimizer whose states replicas cannot divide.

    Args:
        optimizer: the optimizer.
        reason: why it steps as a whole, from :func:`why_steps_whole`.
    """
    return (
        f"hybrid_gabra: {type(optimizer).__name__} keeps all of its states on each replica, with "
        f"shard_states=True too, since it is not stepped in parts: {reason}."
    )


def refuse_deferred(optimizer: Optimizer, reason: str) -> None:
    """Refuse to step an optimizer as a whole if its parameters are not all on one rank.

    Args:
        optimizer: the optimizer.
        reason: why it steps as a whole, from :func:`why_steps_whole`.

    Raises:
        HybridError: a parameter was made in ``configure_model``, on another rank.
    """
    with as_they_are():
        away = any(is_offloaded(p) for group in optimizer.param_groups for p in group["params"])
    if away:
        raise HybridError(
            f"{type(optimizer).__name__} is not stepped in parts, one for each stage: {reason}. "
            "Stepped as a whole it needs all parameters on one rank, but the network is made in "
            "configure_model, where each rank makes its own stage only. Otherwise make the network "
            "in __init__, use an optimizer of torch (AdamW, SGD), or pipeline_parallel_size=1."
        )
