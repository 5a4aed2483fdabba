"""Trace a network into layers, for known sizes and any batch size."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_hybrid.compat import FakeTensorMode
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.network.build import Builder
from lightning_hybrid.network.effects import unchanged
from lightning_hybrid.network.graph import Leaf, NetworkGraph, autocast_dtype, batch_size, describe
from lightning_hybrid.network.merge import Merger, Mismatch, Setting
from lightning_hybrid.network.recorder import Recorder
from lightning_hybrid.network.recording import Recording
from lightning_hybrid.network.structure import flatten, rebuild


def trace(
    network: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> NetworkGraph:
    """Find the layers of a network and what flows between them.

    The network's code runs a few times on tensors that have a size but no memory, with several
    batch sizes, in training and in evaluation. So control flow on sizes, types and devices goes the
    way it goes for the given arguments; the batch size stays free; and what depends on
    ``module.training`` is still decided when the graph runs. A module whose code cannot be followed
    (values in control flow, attributes set in ``forward``, hooks, parametrizations, activation
    checkpointing, other layers in training than in evaluation) becomes one opaque layer.
    Hooks of the network itself are not part of the graph: they belong to its call.

    Nothing of the network changes, and no random number is drawn.

    Args:
        network: any module; its parameters may be on the meta device.
        args: example arguments; only structure, sizes and types of the tensors matter, so tensors
            on the meta device will do (see `describe`).
        kwargs: example keyword arguments.
        device: where the network will run, if its code asks; default: where the arguments are,
            else where the parameters are.

    Raises:
        NetworkError: the forward of the network itself cannot be followed.
    """
    return _Tracing(network, args, dict(kwargs or {}), device).graph()


class _Tracing:
    def __init__(
        self,
        network: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device | str | None,
    ) -> None:
        lazy = [name for name, value in network.named_parameters() if is_lazy(value)]
        if lazy:
            raise NetworkError(
                f"parameter {lazy[0]!r} has no size yet (lazy module); call the network once first"
            )
        self.network = network
        self.args, self.kwargs = args, kwargs
        self.tensors: list[Tensor] = []
        self.structure = flatten((args, kwargs), self.tensors)
        self.batch = batch_size(self.tensors)
        self.batched = [t.dim() > 0 and t.shape[0] == self.batch for t in self.tensors]
        self.device = _seeming_device(device, self.tensors, network)
        self.opaque: dict[str, str] = {}
        self.changed: dict[int, Any] = {}
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.inference_mode(False), self.fake_mode:
            self.fakes = _fake_state(network, self.device)
        self.now = network.training
        self.training: bool | None = None

    def graph(self) -> NetworkGraph:
        """Record until all recordings agree, then build the graph."""
        # Lightning validates in inference mode, whose tensors have no versions
        with torch.inference_mode(False), _training_restored(self.network):
            while True:
                opaque = len(self.opaque)
                recordings = self._recordings()
                if len(self.opaque) > opaque:
                    continue
                merger = Merger(list(recordings), self.device)
                recorded = list(recordings.values())
                try:
                    calls, output = merger.calls(recorded), merger.output(recorded)
                except Mismatch as mismatch:
                    self._give_way(mismatch)
                    continue
                inputs = [merger.value(shapes) for shapes in zip(*(r.inputs for r in recorded))]
                builder = Builder(self.network, self.device, inputs)
                return builder.build(
                    calls,
                    output,
                    structure=self.structure,
                    leaves=tuple(
                        Leaf(tensor.dtype, tuple(tensor.shape), batched)
                        for tensor, batched in zip(self.tensors, self.batched)
                    ),
                    autocast=autocast_dtype(self.device) if self.tensors else None,
                    training=self.training,
                    batch=self.batch,
                    opaque=self.opaque,
                    changed=self.changed,
                    example=describe(self.args, self.kwargs),
                )

    def _recordings(self) -> dict[Setting, Recording]:
        batch = self.batch or 1
        mode = self.training
        recordings = {}
        if mode is None:
            now, other = Setting(batch, self.now), Setting(batch, not self.now)
            recordings[now] = self._record(now, True)
            try:
                recordings[other] = self._record(other, True)
            except NetworkError:
                self.training = mode = self.now
                recordings = {}
                self.opaque.clear()  # it holds what failed in the other mode
        last = False if mode is None else mode
        if Setting(batch, last) not in recordings:
            recordings[Setting(batch, last)] = self._record(Setting(batch, last), True)
        try:
            recordings[Setting(2 * batch, last)] = self._record(Setting(2 * batch, last), True)
        except NetworkError:
            if not self._fewer_batched():
                raise
            self.opaque.clear()
            return self._recordings()
        # a batch of one takes its own way through some code; some networks cannot run on it
        with contextlib.suppress(NetworkError):
            small = Setting(1 if batch > 1 else 3, last)
            recordings[small] = self._record(small, False)
        return dict(sorted(recordings.items(), key=lambda item: item[0].training, reverse=True))

    def _fewer_batched(self) -> bool:
        """Vectors may only happen to be as long as the batch is large (class weights)."""
        first = self.batched.index(True) if True in self.batched else 0
        fewer = [
            batched and (number == first or tensor.dim() > 1)
            for number, (tensor, batched) in enumerate(zip(self.tensors, self.batched))
        ]
        changed, self.batched = fewer != self.batched, fewer
        return changed

    def _give_way(self, mismatch: Mismatch) -> None:
        if mismatch.scope:
            module = self.network.get_submodule(mismatch.scope[-1])
            why = "other in training than in evaluation" if mismatch.by_mode else "batch size"
            for name, other in self.network.named_modules():
                # the same code will differ in the same way elsewhere
                if type(other) is type(module) and other is not self.network:
                    self.opaque.setdefault(name, f"{mismatch.reason} ({why})")
        elif mismatch.by_mode and self.training is None:
            self.training = self.now
        else:
            raise NetworkError(
                f"{type(self.network).__name__}.forward {mismatch.reason} for another batch size; "
                "move that code into a sub-module, which then becomes one layer"
            )

    def _record(self, setting: Setting, fall_back: bool) -> Recording:
        for module in self.network.modules():
            _set_training(module, setting.training)
        fakes = self.fakes
        with unchanged(self.network), self.fake_mode, torch.enable_grad():
            inputs = [
                self._fake_input(tensor, setting.batch if batched else None)
                for tensor, batched in zip(self.tensors, self.batched)
            ]
            remaining = iter(inputs)
            args, kwargs = rebuild(
                (self.args, self.kwargs), lambda v: next(remaining) if isinstance(v, Tensor) else v
            )
            recorder = Recorder(
                self.network,
                fakes,
                self.device,
                self.opaque,
                self.changed,
                fall_back=fall_back,
                count_flops=setting == Setting(self.batch or 1, self.now),
            )
            try:
                return recorder.run(
                    lambda: torch.func.functional_call(self.network, dict(fakes), args, kwargs),
                    inputs,
                )
            except Exception as error:
                raise self._cannot(error) from error

    def _fake_input(self, tensor: Tensor, batch: int | None) -> Tensor:
        size = list(tensor.shape)
        if batch is not None:
            size[0] = batch
        fake = torch.empty(size, dtype=tensor.dtype, device=self.device)
        for memory_format in (torch.channels_last, torch.channels_last_3d):
            if tensor.dim() == (4 if memory_format is torch.channels_last else 5) and (
                not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format)
            ):
                fake = fake.contiguous(memory_format=memory_format)
        return fake

    def _cannot(self, error: Exception) -> NetworkError:
        frames = traceback.extract_tb(error.__traceback__)
        ours = re.compile(r"/(torch|lightning_hybrid)/|/contextlib\.py$")
        user = [f for f in frames if not ours.search(f.filename)]
        line = f"{user[-1].filename}:{user[-1].lineno}: {user[-1].line}" if user else "its forward"
        kept = [f"\n  (module {name!r} is one layer: {why})" for name, why in self.opaque.items()]
        return NetworkError(
            f"cannot follow {type(self.network).__name__}.forward at {line}\n"
            f"  {type(error).__name__}: {error}{''.join(kept[:3])}\n"
            "  move that code into a sub-module (it then becomes one layer), or name the part of "
            "the model that is to be cut with network='...'"
        )


def _seeming_device(
    given: torch.device | str | None, tensors: Sequence[Tensor], network: nn.Module
) -> torch.device:
    devices = [torch.device(given)] if given else []
    devices += [t.device for t in (*tensors, *network.parameters()) if t.device.type != "meta"]
    device = devices[0] if devices else torch.device("cpu")
    return device if device.type == "cpu" else torch.device(device.type, 0)


def _fake_state(network: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Stand-ins for parameters and buffers; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for kind in (network.named_parameters, network.named_buffers):
        for name, value in kind(remove_duplicate=False):
            if id(value) not in made:
                fake = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                )
                if isinstance(value, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=value.requires_grad)
                made[id(value)] = fake
            state[name] = made[id(value)]
    return state


def _set_training(module: nn.Module, flag: bool) -> None:
    # the flag alone, whatever the user's train() does; a script module keeps its flag elsewhere
    if "training" in vars(module):
        vars(module)["training"] = flag


@contextlib.contextmanager
def _training_restored(network: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in network.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            _set_training(module, flag)
