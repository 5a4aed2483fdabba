"""Tries whether an optimizer can step in parts: each rank its own parameters.

Adam, SGD and most others treat every parameter by itself: stepped on several ranks, each of which
has the gradients of its own parameters, they do what they do on one device. An optimizer that
clips by a common norm in its step, estimates a common step size, draws noise or calls its closure
twice does not. To find out, copies of the optimizer step small *stand-ins* for the parameters, as a
whole and in parts, through the same functions that send optimizers to workers:

* The copies have the groups of the user's optimizer, at most two of each kind (that differ in
  numbers only). Stand-ins have the number of dimensions and the dtype of the parameters, at most
  two of each kind in a group, and at most three elements per dimension.
* A trial has twelve steps, with gradients of very different size (so that clipping is active in
  some of them), and one more with a gradient that is NaN. It runs with a closure, as Lightning
  steps, or without one where the optimizer takes none.
* If a step before that last one gives numbers that are not finite, the trial shows nothing, and the
  optimizer steps as a whole.
* Weights, gradients, states, groups and attributes must be equal bit for bit. Optimizers that
  compute several parameters at a time (``foreach``, ``fused``) compute each element as they do for
  one parameter, so a tolerance would only hide small interactions.
* The user's optimizer and the random generators stay as they were. What its code prints, logs and
  counts outside of itself (class attributes, globals) tells of the trial's steps too. An optimizer
  whose step draws random numbers steps as a whole, and so does one that counts or sets its rate
  before it calls its closure: workers step later, and would do so again.

When the hyper-parameters change in kind (a learning rate that is no longer zero), it is tried
again. A trial does not show what an optimizer does only after more than thirteen steps, or only for
gradients with a larger norm than any in the trial (about a million; about 1,000 in float16).
"""

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid._torch.optimizers import runs_step_hooks
from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote import is_offloaded
from lightning_hybrid.state import (
    NamedGroups,
    groups_of,
    kind_of_group,
    record_of,
    take_groups,
    unship,
    write_records,
)

T = TypeVar("T")

_SCALES = (1.0, 30.0, 1e-3, 1.0, 1e3, 0.1, 1.0, 10.0, 1e-2, 1.0, 3.0, 1e6)
"""Scale of the gradients in each step; the largest comes last, so that no later one overflows."""
_PATCHED = {"step", "zero_grad"}
"""Methods that learning-rate schedulers and this package put on the instance."""


def why_whole(optimizer: Optimizer, names: Mapping[int, str], device: torch.device) -> str:
    """Why an optimizer cannot step in parts; empty: it can.

    Args:
        optimizer: the user's optimizer; it is not changed.
        names: by ``id``, the names of the module's parameters.
        device: the device of the stand-ins.
    """
    attributes = vars(optimizer)
    for key, value in attributes.items():
        held = next(_objects_in(value), None)
        if held is not None:
            return f"it holds another object that computes (`{key}`: {type(held).__name__})"
        if callable(value) and "hook" not in key and key not in _PATCHED:
            return f"it holds a function of its own (`{key}`)"
    if not isinstance(optimizer, Optimizer) or not runs_step_hooks(optimizer):
        return "it does not call `Optimizer.__init__`"
    with as_they_are(), torch.inference_mode(False), torch.enable_grad(), _undisturbed(device):
        try:
            stand_ins = _StandIns(optimizer, names, device)
            return _try(stand_ins)
        except Exception as error:  # (the code of an optimizer may raise anything)
            return f"small copies of it cannot be stepped ({type(error).__name__}: {error})"


def announce(optimizer: Optimizer, reason: str) -> str:
    """The line for the user about an optimizer that steps as a whole on the driver."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    megabytes = sum(p.numel() * p.element_size() for p in parameters) / 1e6
    return (
        f"hybrid_gabra: {type(optimizer).__name__} steps on the driver, as on one device: "
        f"{reason}. So the driver has all of its states, and in each step the gradients of the "
        f"other stages go there and their weights come back (at most {megabytes:.3g} MB each)."
    )


def announce_undivided(optimizer: Optimizer, reason: str) -> str:
    """The line for the user about an optimizer whose states replicas cannot divide."""
    return (
        f"hybrid_gabra: {type(optimizer).__name__} keeps all of its states on each replica, with "
        f"shard_optimizer_states=True too: it cannot be stepped in parts, since {reason}."
    )


def refuse_deferred(optimizer: Optimizer, reason: str) -> None:
    """Refuse an optimizer that must step as a whole, but whose parameters are not all on one rank.

    Raises:
        HybridError: a parameter was made in ``configure_model``, on another rank.
    """
    with as_they_are():
        away = any(is_offloaded(p) for group in optimizer.param_groups for p in group["params"])
    if away:
        raise HybridError(
            f"{type(optimizer).__name__} cannot be stepped in parts, one for each stage: {reason}. "
            "Stepped as a whole it needs all parameters on one rank, but the network is made in "
            "configure_model, where each rank makes its own stage only. Make the network in "
            "__init__, use an optimizer that treats each parameter by itself (AdamW, SGD), or "
            "pipeline_parallel_size=1."
        )


def _objects_in(value: Any) -> Iterator[object]:
    """Optimizers and modules in an attribute, which may have parameters that are in no group."""
    if isinstance(value, Optimizer | nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _objects_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _objects_in(item)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Inside, warnings are dropped; random generators are put back at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class _StandIns:
    """Small parameters in the place of those of an optimizer, for copies of it to step."""

    def __init__(
        self, optimizer: Optimizer, names: Mapping[int, str], device: torch.device
    ) -> None:
        self.device = device
        self._values: dict[str, Tensor] = {}
        groups: list[dict[str, Any]] = []
        known: dict[int, str] = {}
        for group in _two_of_each(optimizer.param_groups, _kind_with_parameters):
            chosen = _two_of_each(group["params"], _form)
            groups.append({**group, "params": chosen})
            for parameter in chosen:
                name = names.get(id(parameter), f"unnamed{len(known)}")
                known[id(parameter)] = name
                shape = [min(size, 3) for size in parameter.shape]
                value = torch.randn(shape, dtype=torch.float64)
                self._values[name] = value.to(device, parameter.dtype)
        # without states, since those of the optimizer have the sizes of the real parameters
        record = record_of(optimizer) | {"param_groups": groups, "state": {}}
        self._data = write_records([(type(optimizer), record)], known)
        # alternately to driver and worker: two of a kind follow each other, so each rank gets one
        self.here = set(list(self._values)[::2])
        self.there = self._values.keys() - self.here

    def copy(self, owned: set[str] | None = None) -> "_Copy":
        """A new copy of the optimizer, for gradients of the stand-ins in ``owned`` (None: all)."""
        parameters = {name: Parameter(value.clone()) for name, value in self._values.items()}
        [optimizer] = unship(self._data, (), parameters)
        return _Copy(optimizer, parameters, set(parameters) if owned is None else owned)

    def gradients(self, step: int) -> dict[str, Tensor]:
        """By name, the targets from which :meth:`_Copy.backward` makes the gradients of a step.

        In the last step of the trial one of them is NaN.
        """
        # (other random numbers than those of the stand-ins, so that no gradient is zero)
        generator = torch.Generator().manual_seed(1_000_003 * (step + 1))
        found = {}
        for name, value in self._values.items():
            target = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            if step == len(_SCALES) and name == min(self._values):
                target.fill_(torch.nan)
            found[name] = target.to(value)
        return found


def _two_of_each(values: Sequence[T], kind_of: Callable[[T], object]) -> list[T]:
    """At most two values of each kind."""
    kinds: dict[object, list[T]] = {}
    for value in values:
        kinds.setdefault(kind_of(value), []).append(value)
    return [value for kind in kinds.values() for value in kind[:2]]


def _form(parameter: Tensor) -> object:
    return parameter.dim(), parameter.dtype


def _kind_with_parameters(group: dict[str, Any]) -> object:
    return frozenset(map(_form, group["params"])), kind_of_group(group)


class _Copy:
    """A copy of the optimizer with stand-ins for parameters, of which ``owned`` get gradients."""

    def __init__(
        self, optimizer: Optimizer, parameters: dict[str, Parameter], owned: set[str]
    ) -> None:
        self.optimizer, self.parameters, self.owned = optimizer, parameters, owned
        self.start = {name: p.detach().clone() for name, p in parameters.items()}
        self._named = NamedGroups({id(p): name for name, p in parameters.items()})

    def settings(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The groups of the optimizer, and copies of its attributes, as they are now."""
        attributes = record_of(self.optimizer)
        del attributes["param_groups"]
        return self.groups(), deepcopy(attributes)

    def groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer as they are now, with the stand-ins by name."""
        return groups_of(self.optimizer, self._named)

    def backward(self, targets: Mapping[str, Tensor], scale: float, *, sparse: bool) -> Tensor:
        """Set the gradients of the owned stand-ins: ``scale`` times their distance from targets.

        Args:
            targets: by name of the stand-in.
            scale: of the gradients.
            sparse: whether the gradients are sparse tensors.

        Returns:
            A loss with these gradients.
        """
        loss = torch.zeros((), dtype=torch.float64)
        for name in self.parameters:
            if name not in self.owned:
                continue
            parameter = self.parameters[name]
            difference = parameter.detach() - targets[name]
            scale = min(scale, torch.finfo(parameter.dtype).max / 64)  # float16 ends at 65,504
            gradient = difference * scale
            loss += 0.5 * scale * difference.abs().square().sum().cpu().double()
            parameter.grad = gradient.to_sparse(1) if sparse and gradient.dim() else gradient
        return loss

    def is_finite(self) -> bool:
        """Whether all weights are finite."""
        return all(bool(p.isfinite().all()) for p in self.parameters.values())


def _try(stand_ins: _StandIns) -> str:
    """Try an optimizer in the first way in which it can step.

    That is with a closure or else without one, for dense gradients or else for sparse ones.

    Returns:
        Why it cannot step in parts; empty: it can.

    Raises:
        Exception: it can step in no way.
    """
    failures: list[Exception] = []
    for sparse, closure in product((False, True), (True, False)):
        way = {"sparse": sparse, "closure": closure}
        try:
            _step([stand_ins.copy()], stand_ins.gradients(0), 1.0, **way)
        except Exception as error:  # (some optimizers take sparse gradients only)
            failures.append(error)
            continue
        return _compare(stand_ins, way)
    raise failures[0]


def _compare(stand_ins: _StandIns, way: Mapping[str, bool]) -> str:
    """Step copies as a whole and in parts. Returns how they differ; empty: they do not."""
    whole = stand_ins.copy()
    driver, worker = stand_ins.copy(stand_ins.here), stand_ins.copy(stand_ins.there)
    for step, scale in enumerate((*_SCALES, 1.0)):
        targets = stand_ins.gradients(step)
        before = _random_state(stand_ins.device)
        try:
            early = _step([whole], targets, scale, **way)
        except Exception:
            if step == len(_SCALES):
                return ""  # (it takes no NaN, as a whole or in parts)
            raise
        if early:
            return "it counts, or sets its options, before it calls its closure"
        # (each rank would draw numbers of its own)
        if not same(before, _random_state(stand_ins.device)):
            return "its steps draw random numbers"
        if step < len(_SCALES) and not whole.is_finite():
            return "its steps on small copies are not finite, which shows nothing"
        try:
            _step([driver, worker], targets, scale, **way)
        except Exception as error:
            return f"a part of it cannot be stepped alone ({type(error).__name__}: {error})"
        difference = _difference(whole, driver, worker)
        if difference:
            return difference
    return ""


def _step(
    copies: Sequence[_Copy],
    targets: Mapping[str, Tensor],
    scale: float,
    *,
    sparse: bool,
    closure: bool,
) -> bool:
    """Step copies as the ranks of a replica do: the first is the driver's, the others workers'.

    Returns:
        Whether the first has changed groups or attributes before it has called its closure.
    """
    driver, *workers = copies
    settings = [driver.settings()]  # at the start, and whenever the closure is called

    def backward() -> Tensor:
        settings.append(driver.settings())
        losses = [copy.backward(targets, scale, sparse=sparse) for copy in copies]
        return torch.stack(losses).sum()

    if closure:
        driver.optimizer.step(backward)  # type: ignore[arg-type]
    else:
        backward()
        driver.optimizer.step()
    for worker in workers:
        take_groups(worker.optimizer, settings[-1][0], worker.parameters)
        worker.optimizer.step()
    return not same(settings[0], settings[1])


def _difference(whole: _Copy, driver: _Copy, worker: _Copy) -> str:
    """In what the steps of the parts differ from those of the whole; empty: in nothing."""
    for part in (driver, worker):
        for name, parameter in part.parameters.items():
            alone = whole.parameters[name]
            if name not in part.owned:
                if not same(parameter, part.start[name]) or part.optimizer.state.get(parameter):
                    return "it steps parameters that have no gradient"
                continue
            if not (same(alone, parameter) and same(alone.grad, parameter.grad)):
                return "what it does to a parameter depends on the others"
            if not same(whole.optimizer.state.get(alone), part.optimizer.state.get(parameter)):
                return "what it notes of a parameter depends on the others"
        if not same(whole.groups(), part.groups()):
            return "what it notes in its groups depends on all parameters"
        left = {"param_groups": None, "defaults": None}
        if not same(record_of(whole.optimizer) | left, record_of(part.optimizer) | left):
            return "what it notes as its attributes depends on all parameters"
    # (a state that belongs to no parameter would be sent to no rank)
    if any(not isinstance(key, Tensor) for key in whole.optimizer.state):
        return "it has a state that belongs to no parameter"
    return ""


def _random_state(device: torch.device) -> list[Any]:
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    # (hashed: its 625 numbers would be compared one by one)
    python = hash(random.getstate())
    return [torch.get_rng_state(), *on_device, python, *np.random.get_state()]


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal bit for bit, in containers and objects too; NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        left, right = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (left, right))
        alike = (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)
        return alike and torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))
    try:
        if left == right or (left != left and right != right):
            return True
        return hasattr(left, "__dict__") and bool(vars(left)) and same(vars(left), vars(right))
    except Exception:  # (a value may raise any error when it is compared, or contain itself)
        return False


def plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that are numbers, flags or texts."""
    kinds = (int, float, str, type(None))
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, kinds)}
