"""Runs the network's own Python on a copy of the module, and undoes most of its side effects.

The copy shares the parameters with the module (a forward reads them), so that it needs no memory
for those that are on the device already. Buffers, attributes and arguments are copied; code, data
sets, loaders and optimizers are shared. What the forward prints and warns of is dropped; the caller
says what random numbers it draws.

The forward may also change objects that the copy shares with the module: a forward hook keeps a
feature in an attribute of the LightningModule, in a variable of its closure or in a global
dictionary; a class counts its calls. These are put back: attributes of modules and of objects whose
methods are hooks, the containers in them, closures and globals of hooks and forwards, and
attributes of the modules' classes. What these functions change by calling other functions, and
files, is not put back.
"""

import copy
import io
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid._torch.modules import is_compiled, tables
from lightning_hybrid._torch.tensors import as_they_are, same_numbers
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.capture import plain
from lightning_hybrid.remote import writes_to

_CONTAINERS = (dict, list, set, deque)
_MANY = 10_000
"""Containers with more entries than this are taken for data, and not put back."""
_VALUES = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None), Tensor)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "forward")


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """The forward hooks and replaced ``forward`` functions of a module and its submodules."""
    for part in module.modules():
        for name in _HOOKS:
            held = vars(part).get(name)
            yield from held.values() if isinstance(held, dict) else () if held is None else (held,)


def owner_of(hook: Any) -> Any:
    """The object whose method a hook is; ``None``: it is a function."""
    while isinstance(hook, partial):
        hook = hook.func
    return hook.__self__ if isinstance(hook, MethodType) else None


@contextmanager
def undone(root: nn.Module, module: nn.Module) -> Iterator[None]:
    """Inside, the Python of a copy of a network runs; at the end, what it has changed is put back.

    That is what it has changed in objects that the copy shares with the run: attributes,
    containers, buffers, closures and globals. The docstring of this file says which.

    Args:
        root: the LightningModule.
        module: the network that was copied.
    """
    noted = _Noted()
    for part in {id(p): p for p in (*root.modules(), *module.modules())}.values():
        noted.container(vars(part))
        noted.numbers(tables(part)[1].values())
    for kind in {type(part) for part in module.modules()}:
        if not kind.__module__.startswith("torch."):
            noted.attributes_of_class(kind)
            noted.function(kind.forward)
    for hook in hooks_of(module):
        noted.function(hook)
    for name in ("log", "log_dict"):  # (they keep what is logged when the call is over)
        noted.function(vars(root).get(name))
    try:
        yield
    finally:
        noted.put_back()


class _Noted:
    """Records values that the Python of a network may change, so that they can be put back."""

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._places: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        self._numbers: list[tuple[Tensor, Tensor]] = []
        self._seen = set[int]()

    def container(self, value: Any) -> None:
        """Record what a container holds, and what the containers in it hold.

        Other values, and containers with more than `_MANY` entries, are not recorded.
        """
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if not isinstance(one, _CONTAINERS) or id(one) in self._containers or len(one) > _MANY:
                continue
            self._containers[id(one)] = one, one.copy()
            waiting += one.values() if isinstance(one, dict) else one

    def numbers(self, buffers: Iterable[Any]) -> None:
        """Record the numbers of tensors that may be written to in place."""
        with as_they_are():
            self._numbers += [(b, b.detach().clone()) for b in buffers if b is not None]

    def function(self, function: Any) -> None:
        """Record what a function can change: its closure, its globals, the object of a method."""
        waiting = [function]
        while waiting:
            one = waiting.pop()
            if id(one) in self._seen:
                continue
            self._seen.add(id(one))
            if isinstance(one, partial):
                waiting += [one.func, *one.args, *one.keywords.values()]
            elif isinstance(one, MethodType):
                waiting += [one.__func__, one.__self__]
            elif isinstance(one, FunctionType):
                waiting += self._held_by(one)
            elif isinstance(one, _CONTAINERS):
                self.container(one)
            elif not isinstance(one, type | nn.Module) and hasattr(one, "__dict__"):
                self.container(vars(one))

    def attributes_of_class(self, kind: Any) -> None:
        """Record the attributes of a class that are plain values or containers.

        Functions and attributes with names like ``__name__`` are not recorded.
        """
        for name, value in [*vars(kind).items()]:
            if isinstance(value, (*_VALUES, *_CONTAINERS)) and not name.startswith("__"):
                self.container(value)
                self._place(partial(getattr, kind, name), partial(setattr, kind, name))

    def _held_by(self, function: FunctionType) -> Iterator[Any]:
        """Record the variables of a function's closure and the globals that it looks up.

        Yields:
            The values of the closure's variables.
        """
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
            if isinstance(value, _VALUES):
                self._place(
                    partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents")
                )
            yield value
        names = function.__globals__
        for name in _names(function.__code__):
            value = names.get(name)
            if name in names and isinstance(value, (*_VALUES, *_CONTAINERS)):
                self.container(value)
                self._place(partial(names.get, name), partial(names.__setitem__, name))

    def _place(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._places.append((read, write, read()))

    def put_back(self) -> None:
        """Undo all changes since the recording of what was recorded."""
        # names first: a container that was replaced is back before what it holds is put back
        for read, write, value in self._places:
            if read() is not value:
                write(value)
        for container, before in self._containers.values():
            if not _is_same(container, before):
                container.clear()
                getattr(container, "extend" if isinstance(before, list | deque) else "update")(
                    before
                )
        with torch.no_grad(), as_they_are():
            for tensor, before in self._numbers:
                # (written only if it has changed: each write raises the version, and autograd
                # refuses a backward through tensors that were written to)
                same = tensor.layout is not torch.strided or same_numbers(tensor, before)
                if not same and not torch.allclose(tensor, before, 0, 0, equal_nan=True):
                    tensor.copy_(before)


def _names(code: CodeType) -> Iterator[str]:
    """The global and attribute names that code, and the functions defined in it, look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two containers hold the very same objects, in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return {*map(id, one)} == {*map(id, other)}
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items())
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    return all(a is b for a, b in zip(one, other))


ChooseSamples = Callable[[Tensor], Tensor]
"""Chooses samples of a tensor whose first dimension is the batch."""


class RandomStates:
    """The states of Python's and NumPy's random generators at the time when it is made."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the generators start from the recorded states; afterwards they are as before."""
        now = RandomStates()
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class WritesWeights(RuntimeError):
    """The forward of a copy has changed parameters that it shares with the module."""


class ModuleCopy:
    """A copy of a module and of the arguments of a call, as they are when it is made.

    Args:
        root: the LightningModule.
        module: the network; all of its weights have memory on this rank.
        arguments: positional arguments of the call.
        keywords: keyword arguments of the call.
        batched: the tensors among the arguments and in the module whose first dimension is the
            batch.
        writes: whether the forward changes parameters, so that the copy needs its own.

    Attributes:
        is_complete: whether all of ``batched`` were found in the arguments and the module.

    Raises:
        Exception: an object of the module or the arguments cannot be copied.
    """

    def __init__(
        self,
        root: nn.Module,
        module: nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        batched: Iterable[Tensor] = (),
        *,
        writes: bool = False,
    ) -> None:
        self._root = root
        self._origin = module
        self._writes = writes
        weights = {id(p): p for p in (*root.parameters(), *module.parameters())}
        # `deepcopy` takes objects in its memo as they are: so weights are shared, and not copied
        memo: dict[int, Any] = {key: _copy_of(p) if writes else p for key, p in weights.items()}
        self._weights: list[Any] = [*memo.values()]
        self._trainers = [_trainer_of(part) for part in module.modules()]
        held = [vars(part) for part in module.modules()]
        inside = {id(part) for part in module.modules()}
        data = [v for values in held for v in values.values() if isinstance(v, _DATA)]
        # objects whose methods are hooks are shared too: they may hold anything, and be as large
        # as a data set (a LightningModule holds one by its Trainer)
        owners = [o for o in map(owner_of, hooks_of(module)) if id(o) not in inside]
        fabrics = [values.get(name) for values in held for name in _OF_FABRIC]
        shared = [*data, *owners, *self._trainers, *fabrics, *([] if root is module else [root])]
        self._shared: dict[int, Any] = {id(v): v for v in shared if v is not None}
        memo |= self._shared
        buffers = {id(buffer) for buffer in module.buffers()}
        rows = {_memory(tensor) for tensor in batched}
        self._buffers = set[int]()
        self._batched = set[int]()
        self._tensors: list[Tensor] = []
        seen = set[Any]()
        for _, tensor in tensors_in((arguments, keywords, *held)):
            if id(tensor) in memo:
                continue
            copied = memo[id(tensor)] = _copy_of(tensor)
            self._tensors.append(copied)
            if id(tensor) in buffers:
                self._buffers.add(id(copied))
            if _memory(tensor) in rows:
                self._batched.add(id(copied))
                seen.add(_memory(tensor))
        self.is_complete = seen == rows
        self._made = copy.deepcopy((module, arguments, keywords), memo)

    @property
    def module(self) -> nn.Module:
        """The copied module, which is never called itself: a call runs on a copy of it."""
        made: nn.Module = self._made[0]
        return made

    def call(
        self, device: torch.device, rows: ChooseSamples | None = None
    ) -> tuple[nn.Module, Any, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Run the module's Python on a fresh copy of the copy, so that it can be called again.

        What it prints or warns of is dropped. Grad mode stays as it is, but autograd saves no
        tensors, so the result is only for a comparison, not for a backward.

        Args:
            device: where it runs.
            rows: chooses samples of the batch; ``None``: all of them.

        Returns:
            The module that was called; what it has returned; and a pair of its positional arguments
            and its keyword arguments, which the call has possibly changed.

        Raises:
            WritesWeights: the call has changed the module's parameters.
            Exception: the user's code has raised an error.
        """
        with as_they_are():
            stay = [p.device == device and not self._writes for p in self._weights]
        pairs = zip(self._weights, stay)
        memo = {id(p): p if stays else _copy_of(p, device) for p, stays in pairs}
        weights = [] if self._writes else [*memo.values()]
        memo |= self._shared
        for tensor in self._tensors:
            chosen = rows if id(tensor) in self._batched else None
            where = device if id(tensor) in self._buffers else tensor.device
            memo[id(tensor)] = _copy_of(tensor, where, chosen)
        module, arguments, keywords = copy.deepcopy(self._made, memo)
        for part, trainer in zip(module.modules(), self._trainers):
            if trainer is not None:  # (a copied LightningModule does not refer to its Trainer)
                part.trainer = trainer
        # the copy shares these with the run, so its forward must not write to them
        before = [*map(writes_to, weights)]
        with ExitStack() as stack:
            stack.enter_context(undone(self._root, self._origin))
            stack.enter_context(_unheard())
            # (a module that the user has compiled would be compiled anew in each call of a copy)
            if is_compiled(module):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            result = module.forward(*arguments, **keywords)
        if before != [*map(writes_to, weights)]:
            raise WritesWeights("it writes into its parameters")
        return module, result, (arguments, keywords)


_DATA = (Dataset, DataLoader, Optimizer)
"""Types of objects that a copy shares with the module, besides the parameters."""


_OF_FABRIC = ("_fabric", "_fabric_optimizers")
"""Attributes of a LightningModule in which Fabric stores itself and the optimizers."""


def _trainer_of(part: nn.Module) -> Any:
    """The Trainer of a module, if it is a LightningModule that is attached to one."""
    if not isinstance(getattr(type(part), "trainer", None), property):
        return None
    try:
        return part.trainer
    except RuntimeError:  # it is not attached
        return None


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors with the same memory, shape and strides, of any class."""
    with as_they_are():
        strided = tensor.layout is torch.strided
        place = tensor.data_ptr() if strided and tensor.numel() else id(tensor)
        return place, tuple(tensor.shape), tensor.stride() if strided else None


def _copy_of(
    tensor: Tensor, device: torch.device | None = None, rows: ChooseSamples | None = None
) -> Any:
    """A copy of a tensor, of torch's own class, in memory of its own.

    Args:
        tensor: the tensor.
        device: where the copy is; ``None``: where the tensor is.
        rows: chooses samples; ``None``: all of them.
    """
    with as_they_are():
        value = plain(tensor).detach()
        wants, leaf = tensor.requires_grad, tensor.is_leaf
        value = (value if rows is None else rows(value)).to(device or value.device, copy=True)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(value, wants)
        value = value.requires_grad_(wants)
        return value if leaf or not wants else value.clone()


@contextmanager
def _unheard() -> Iterator[None]:
    """Inside, prints and warnings are dropped, and autograd saves no tensors for a backward."""

    def keep(_: Tensor) -> None:
        return None

    def give(_: None) -> Tensor:
        raise RuntimeError("it runs a backward")

    # autocast would cache casts of weights made here, which are without a graph, for the call
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            torch.autograd.graph.saved_tensors_hooks(keep, give),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
