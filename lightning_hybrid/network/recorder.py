"""Run a network once on tensors without memory and write down every layer that it calls.

The run is ordinary Python: sizes, types and devices are known, so control flow on them works. What
is written down is plain data; `graph.trace` compares several runs (other batch sizes, training and
evaluation) and so learns which numbers depend on the batch size and which code on the mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_hybrid.compat import unset_fake_temporarily
from lightning_hybrid.network.effects import (
    Blackboards,
    Untraceable,
    side_effects_refused,
    unchanged,
)
from lightning_hybrid.network.recording import Call, Mark, Recording, Ref, Shape
from lightning_hybrid.network.structure import rebuild, tensors_in

_DESCENDED = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
"""Modules of torch.nn whose parts are layers; all others of torch.nn are layers themselves."""


def apply_function(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Call a user's autograd function; one layer, so that its own backward is kept."""
    apply: Any = function.apply
    return apply(*args, **kwargs)


def is_leaf(module: nn.Module) -> bool:
    """Whether the module is one layer: of torch.nn, or a call does more than its ``forward``."""
    if (
        isinstance(module, torch.jit.ScriptModule)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or parametrize.is_parametrized(module)
        or getattr(module, "_orig_mod", None) is not None  # torch.compile's wrapper
    ):
        return True
    forward = type(module).forward
    if any(forward is descended.forward for descended in _DESCENDED):
        return False
    return forward.__module__.startswith(("torch.nn.", "torch.ao."))


class Recorder(TorchFunctionMode):
    """Writes down the calls made while it is active (inside a fake mode).

    Args:
        network: the module whose call is recorded.
        fakes: stand-ins for its parameters and buffers by dotted name.
        device: the device that the network seems to be on.
        opaque: dotted names of modules to record as one layer; grows when ``fall_back``.
        changed: objects that opaque modules change when they are called, by identity; grows.
        fall_back: record a module that cannot be followed as one layer; else raise.
        count_flops: count floating-point operations (a third of the time goes there).
    """

    def __init__(
        self,
        network: nn.Module,
        fakes: Mapping[str, Tensor],
        device: torch.device,
        opaque: dict[str, str],
        changed: dict[int, Any],
        fall_back: bool,
        count_flops: bool,
    ) -> None:
        super().__init__()
        self.network = network
        self.device = device
        self.opaque = opaque
        self.changed = changed
        self.fall_back = fall_back
        self.count_flops = count_flops
        self.events: list[Mark | Call] = []
        layers = [name for name, module in network.named_modules() if name and is_leaf(module)]
        self._boards = Blackboards(network, {*layers, *opaque})
        self._names = {id(module): name for name, module in network.named_modules()}
        self._originals = dict(_named_tensors(network))
        self._refs: dict[int, Ref] = {}
        self._alive: list[Tensor] = []  # an id is only a name while its owner lives
        self._storages: dict[int, int] = {}
        self._scope: tuple[str, ...] = ()
        self._quiet = 0
        self._calls = 0
        self._flops = FlopCounterMode(display=False)
        self._state_names: dict[int, str] = {}
        for name, fake in fakes.items():
            self._know(fake, Ref("attribute", name))
            self._state_names[self._storage(fake)] = name
        for name, constant in _constants(network):
            self._know(constant, Ref("attribute", name))

    # ------------------------------------------------------------------ running the network

    def run(self, call: Callable[[], Any], inputs: list[Tensor]) -> Recording:
        """Record ``call()``, in which the network is called on ``inputs``."""
        shapes = []
        for number, value in enumerate(inputs):
            self._know(value, Ref("input", number))
            shapes.append(self._shape(value))
        self._ambient = self._context()
        counting = self._flops if self.count_flops else contextlib.nullcontext()
        with self._intercepted(), counting, self:
            output = call()
        return Recording(self.events, shapes, rebuild(output, self._written))

    @contextlib.contextmanager
    def _intercepted(self) -> Iterator[None]:
        """Let calls of modules and of autograd functions come to this recorder."""

        def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call_module(module, args, kwargs)

        def call_autograd(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if self._quiet:
                return apply(cls, *args, **kwargs)
            self._quiet += 1
            try:
                return self._record(
                    "call_function",
                    apply_function,
                    (cls, *args),
                    kwargs,
                    lambda: apply(cls, *args, **kwargs),
                )
            finally:
                self._quiet -= 1

        def enter_hooks(hooks: Any) -> None:
            # activation checkpointing and its like: the graph would lose them without a word
            if not self._quiet:
                raise Untraceable("uses saved-tensor hooks or activation checkpointing")
            enter(hooks)

        hooks_class = torch.autograd.graph.saved_tensors_hooks
        apply = torch.autograd.Function.__dict__["apply"].__func__
        enter = hooks_class.__enter__
        with (
            _replaced(nn.Module, "__call__", call_module),
            _replaced(torch.autograd.Function, "apply", classmethod(call_autograd)),
            _replaced(hooks_class, "__enter__", enter_hooks),
        ):
            yield

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        if func is Tensor.__iter__:
            with self:  # so that the parts are recorded
                return iter(args[0].unbind(0))
        target, args_written = func, args
        if isinstance(func, MethodWrapperType):  # a property, such as x.T
            target, args_written = getattr, (args[0], func.__self__.__name__)  # type: ignore[attr-defined]
        return self._record(
            "call_function", target, args_written, kwargs, lambda: func(*args, **kwargs)
        )

    # ------------------------------------------------------------------ modules

    def _call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        # the forward itself, never the hooks: they are the user's, and would see fake tensors
        name = self._names.get(id(module))
        if self._quiet or name is None:  # strangers are plain code
            return _forward(module)(*args, **kwargs)
        if module is self.network:
            with side_effects_refused(module, self._boards):
                return module.forward(*args, **kwargs)
        if name in self.opaque or is_leaf(module):
            return self._layer(name, module, args, kwargs)
        events, refs, calls = len(self.events), dict(self._refs), self._calls
        try:
            with self._boards.wiped_on_error():
                return self._descend(name, module, args, kwargs)
        except Exception as error:
            if not self.fall_back:
                raise
            del self.events[events:]
            self._refs, self._calls = refs, calls
            self.opaque[name] = f"{type(error).__name__}: {error}"
            try:
                return self._layer(name, module, args, kwargs)
            except Exception as second:
                raise second from error

    def _descend(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        outer, self._scope = self._scope, (*self._scope, name)
        self.events.append(Mark(self._scope, entered=True))
        try:
            with side_effects_refused(module, self._boards):
                output = module.forward(*args, **kwargs)
        finally:
            scope, self._scope = self._scope, outer
        self.events.append(Mark(scope, entered=False))
        return output

    def _layer(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        def run() -> Any:
            try:
                if type(module).__module__.startswith("torch.nn.modules."):
                    return module.forward(*args, **kwargs)  # changes no attribute: skip the care
                with unchanged(module) as changed:
                    output = _forward(module)(*args, **kwargs)
                self.changed |= changed
                return output
            except Exception as error:
                return self._really_run(name, module, args, kwargs, error)

        self._quiet += 1
        try:
            return self._record("call_module", name, args, kwargs, run)
        finally:
            self._quiet -= 1

    def _really_run(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, reason: Exception
    ) -> Any:
        """Learn shapes from zeros, on copies of the module's tensors: it refuses fake tensors."""
        if not is_about_values(reason):
            raise reason
        originals = {
            inner: self._originals[f"{name}.{inner}"] for inner, _ in _named_tensors(module)
        }
        device = next((value.device for value in originals.values()), torch.device("cpu"))

        def real(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.zeros(value.shape, dtype=value.dtype, device=device)

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty(value.shape, dtype=value.dtype, device=self.device)

        with unset_fake_temporarily(), unchanged(module), torch.no_grad():
            state = {inner: value.detach().clone() for inner, value in originals.items()}
            real_args, real_kwargs = rebuild((args, kwargs), real)
            output = torch.func.functional_call(module, state, real_args, real_kwargs)
        return rebuild(output, fake)

    # ------------------------------------------------------------------ writing down

    def _record(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Any, run: Callable[[], Any]
    ) -> Any:
        given = [value for _, value in tensors_in((args, kwargs))]
        state = self._state_of(target) if op == "call_module" else []
        before = [value._version for value in (*given, *state)]
        written = rebuild(args, self._written_lazily), rebuild(kwargs, self._written_lazily)
        flops = self._flops.get_total_flops()
        result = run()
        mutated = {
            self._storage(value)
            for value, version in zip((*given, *state), before)
            if value._version != version
        }
        parts = list(tensors_in(result))
        if not parts and not mutated:
            return result
        self._check_context()
        args_written, kwargs_written = (rebuild(w, self._resolved) for w in written)
        # a call may return what it was given (in place, or dropout in evaluation); under an object
        # of its own, what was given and what came back can be told apart afterwards
        olds = {id(value) for value in given}
        result = rebuild(result, lambda v: v.view(v.shape) if id(v) in olds else v)
        parts = list(tensors_in(result))
        returned = {path: self._shape(value) for path, value in parts}
        for path, value in parts:
            self._know(value, Ref("call", self._calls, path))
        self._calls += 1
        names = frozenset(self._state_names[s] for s in mutated if s in self._state_names)
        self.events.append(
            Call(
                self._scope, op, target, args_written, kwargs_written, returned,
                frozenset(mutated), names, self._flops.get_total_flops() - flops,
            )
        )  # fmt: skip
        return result

    def _state_of(self, name: str) -> list[Tensor]:
        module = self.network.get_submodule(name)
        return [value for _, value in _named_tensors(module)]

    def _know(self, value: Tensor, ref: Ref) -> None:
        self._refs[id(value)] = ref
        self._alive.append(value)

    def _written_lazily(self, value: Any) -> Any:
        # a call that returns no tensor (x.shape) may well be made on a tensor that is not known
        return self._refs.get(id(value), value) if isinstance(value, Tensor) else value

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise Untraceable(
                f"uses a tensor of size {tuple(value.shape)} that is neither an input, nor a "
                "parameter, buffer or attribute of a module, nor made by a call that torch shows"
            )
        if isinstance(value, nn.Module) or (callable(value) and hasattr(value, "__closure__")):
            raise Untraceable(f"passes {value!r:.80} to a function, which may hide parameters")
        return value

    def _written(self, value: Any) -> Any:
        return self._resolved(self._written_lazily(value))

    def _shape(self, value: Tensor) -> Shape:
        return Shape(tuple(value.shape), value.dtype, self._storage(value))

    def _storage(self, value: Tensor) -> int:
        try:
            key = value.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            key = id(value)
        return self._storages.setdefault(key, len(self._storages))

    def _context(self) -> tuple[Any, ...]:
        kind = self.device.type
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
        )

    def _check_context(self) -> None:
        if self._context() != self._ambient:
            raise Untraceable("switches gradients, inference mode or autocast inside its forward")


def _forward(module: nn.Module) -> Callable[..., Any]:
    # wrapped by torch.compile: the code that it wraps tells the shapes
    inner = getattr(module, "_orig_mod", None)
    return inner.forward if isinstance(inner, nn.Module) else module.forward


def is_about_values(error: Exception) -> bool:
    """Whether a module failed because fake tensors hold no values (and not by a mistake in it)."""
    module = type(error).__module__
    return module.startswith("torch._subclasses") or "fake" in str(error).lower() or (
        "meta tensor" in str(error).lower() or "data pointer" in str(error).lower()
        or "data-dependent" in str(error).lower()
    )  # fmt: skip


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _constants(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are plain attributes of modules, with their dotted names."""
    for name, module in network.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                yield (f"{name}.{key}" if name else key), value


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if old is None:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
