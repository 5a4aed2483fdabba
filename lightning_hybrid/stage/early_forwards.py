"""Forwards that run before their turn, under streamed schedules.

While such a forward waits for its backward, earlier batches have their backwards, and optimizers
possibly step. Two things need care:

*Weights.* Autograd saves references to the parameters that a forward has used, and an optimizer
changes these in place. So under a delayed schedule hooks on saved tensors decide what the backward
computes with: a copy of the weights of the forward (``stash``); the current weights with the
activations of the forward (``current``); or nothing is saved, and the forward runs again in the
backward (``recompute``). The parameters themselves stay the leaves of the graph: their gradients
and their hooks work as ever. (With these hooks autograd does not check for changes in place; the
first batch of a run never runs ahead, and is checked.)

*Buffers.* What a forward writes (running statistics) must not be visible before its turn: else a
validation or a checkpoint would see batches that nobody has trained on. Each forward writes into
copies. They begin with the values that the forward before it has left, and are written to the
buffers when ``training_step`` makes the call, as on one device, whether or not a backward follows.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.autograd import own_saved_tensors
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import Stage
from lightning_hybrid.schedules import DelayedWeights
from lightning_hybrid.stage.recomputation import Recipe, saving_nothing
from lightning_hybrid.stage.split_backward import operations_behind


class EarlyForwards:
    """Runs forward passes of one stage before their batch has its turn, and keeps what they write.

    For each call: :meth:`forward` for each micro-batch, :meth:`end_forward`, and later
    :meth:`commit` or :meth:`drop`.

    Args:
        weights: the weights that the backward of an early forward computes with (see the module);
            ``None``: current ones, since no optimizer steps between a forward and its backward.
    """

    def __init__(self, weights: DelayedWeights | None) -> None:
        self._weights = weights
        self._written: dict[int, dict[str, Tensor]] = {}  # by call, the oldest first
        self._copies: dict[int, dict[int, torch.UntypedStorage]] = {}  # of weights, by call
        self._looked_at: set[Stage] = set()

    def forward(
        self,
        call: int,
        stage: Stage,
        values: list[Tensor],
        numbers: Sequence[Any],
        states: list[Tensor],
    ) -> tuple[list[Any], Recipe | None]:
        """Run a micro-batch's forward ahead of its turn; buffers change only at :meth:`commit`.

        Args:
            call: number of the call.
            stage: the stage.
            values: the stage's inputs for this micro-batch.
            numbers: for this micro-batch, the values of ``NetworkGraph.numbers`` (Python numbers
                that follow from the sizes of the inputs).
            states: states of the random generators before the forward (from `random_state`); empty
                if the stage draws no random numbers.

        Returns:
            A pair: the outputs; and with ``weights="recompute"`` what the backward needs to run the
            forward again, else ``None``.
        """
        before = self._before(stage)
        # (cloned once more, since the recipe keeps the values from before the forward)
        written = {name: value.clone() for name, value in before.items()}
        with torch.enable_grad(), self._saving(call, stage.parameters()):
            outputs = stage.run_with([*(stage.taken() | written).values()], values, numbers)
        self._written.setdefault(call, {}).update(written)
        if self._weights != "recompute":
            return outputs, None
        return outputs, Recipe(values, states, before)

    def end_forward(self, call: int) -> None:
        """After the last micro-batch of a call, drop the references to its copies of weights.

        Autograd's graphs keep the copies until the backward.
        """
        self._copies.pop(call, None)

    def commit(self, call: int, stage: Stage) -> None:
        """Write to the buffers what forwards up to this call have written to copies of them.

        Called when the call has its turn: where one device would run its forward.
        """
        written: dict[str, Tensor] = {}
        for number in [number for number in self._written if number <= call]:
            written |= self._written.pop(number)
        # in place: the driver's proxies and the user's modules know these tensors
        places = stage.taken()
        with torch.no_grad():
            for name, value in written.items():
                places[name].copy_(value)

    def drop(self, call: int) -> None:
        """Discard what a call has written to copies of buffers: it will not have its turn."""
        self._written.pop(call, None)

    def refuse_functions(self, stage: Stage, outputs: Sequence[Any]) -> None:
        """With ``weights="stash"``, refuse a stage that has an ``autograd.Function`` of the user's.

        Such a function possibly keeps a weight (detached, for instance) elsewhere than by
        ``ctx.save_for_backward``. Hooks on saved tensors do not see it there, and cannot replace it
        by the copy. Called after a forward in its turn, as the first one of a run is. A stage is
        looked at once: all its calls have the same operations.

        Args:
            stage: the stage that was computed.
            outputs: its outputs: tensors and Python numbers.

        Raises:
            NetworkError: the graph of the outputs has such a function.
        """
        if self._weights != "stash" or stage in self._looked_at:
            return
        self._looked_at.add(stage)  # (once: each call of a stage has the same operations)
        for node in operations_behind(outputs):
            raise NetworkError(
                f"{type(node).__name__.removesuffix('Backward')}, an autograd.Function, may keep a "
                "parameter where weights='stash' cannot give its backward the weights of "
                "its forward. Use weights='recompute' or schedule='gpipe'."
            )

    def _before(self, stage: Stage) -> dict[str, Tensor]:
        """By name, the values that the next early forward finds in the buffers that it writes.

        They are what the latest early forward has left in its copies, if it is not committed; else
        a copy of the buffer. The caller must not write to them.
        """
        later: dict[str, Tensor] = {}
        for written in self._written.values():
            later |= written
        return {
            name: later[name] if name in later else value.detach().clone()
            for name, value in stage.changed().items()
        }

    def _saving(self, call: int, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """Context of a forward, in which autograd saves what the class's ``weights`` demands.

        Args:
            call: number of the call, by which micro-batches share copies of weights.
            parameters: the parameters of the stage.
        """
        if self._weights is None:
            return own_saved_tensors()
        if self._weights == "recompute":
            return saving_nothing()
        copies = self._copies.setdefault(call, {}) if self._weights == "stash" else None
        return _weights_apart(parameters, copies)


_Apart = tuple[torch.UntypedStorage, torch.dtype, Any, Any, Any]
"""A tensor as its memory, and how it lies there: element type, offset, sizes, strides."""


def _weights_apart(
    parameters: Iterable[nn.Parameter], copies: dict[int, torch.UntypedStorage] | None
) -> AbstractContextManager[Any]:
    """Context in which autograd saves parameters as memory that it does not check for changes.

    Args:
        parameters: the parameters of the stage; frozen ones are saved as ever.
        copies: by address of a parameter's memory, a copy of it, which is saved in its place;
            copies are made and added as needed. ``None``: the parameter's own memory is saved.
    """
    trained = {p.untyped_storage().data_ptr() for p in parameters if p.requires_grad}

    def pack(tensor: Tensor) -> Tensor | _Apart:
        if tensor.layout is not torch.strided:
            return tensor
        # by memory and not by tensor: autograd saves views of a weight (its transpose) as well
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in trained:
            return tensor
        if copies is not None:
            # one copy for all micro-batches of a call, between which no optimizer steps
            if place not in copies:
                copies[place] = storage.clone()
            storage = copies[place]
        return storage, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(kept: Tensor | _Apart) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    storage, dtype, *place = kept
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)
