"""A call of a network that has been cut, on its driver: from the user's values to the pipeline.

The user's call is one node of autograd (:class:`_CallNode`): its forward runs the pipeline and
returns the outputs, its backward sends the gradients back through the stages.

What a call of the network saves for its backward, as code around the call sees it.

A call keeps in the stages what its backward needs, so autograd saves nothing for it. Activation
checkpointing around it (`torch.utils.checkpoint` with ``use_reentrant=False``) hears of saved
tensors: when the first of them is needed, it runs its region again, and with it the network, whose
running statistics are then written for a second time, as on one device.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.autograd import (
    Hooks,
    backward_reaches,
    forward_derivatives,
    graph_is_kept,
    is_batched,
    pass_number,
)
from lightning_hybrid._torch.tensors import storage_key
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.split_batch import Specialization
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import NetworkGraph, joined, place_now, slices, views_of_inputs
from lightning_hybrid.stage import Gradients


class SavedForBackward:
    """One tensor that a call saves, in the way of the code around it.

    Args:
        hooks: those of the code around it.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._pack, self._unpack = hooks
        self._wanted = self._saved = False
        self._held: Any = None
        self._asked = -1

    def want(self) -> None:
        """The call has a backward."""
        self._wanted = True

    def save(self) -> None:
        """The call is over; what runs a region again may end it here, by an exception."""
        if self._wanted:
            self._held = self._pack(torch.zeros(()))
            self._saved = True

    def ask(self) -> None:
        """The backward of the call begins; of several in one pass the first one asks."""
        number = pass_number()
        if self._saved and self._asked != number:
            self._asked = number
            self._unpack(self._held)


class NetworkCall:
    """Calls a network that has been cut, by one of its graphs.

    Args:
        network: the network.
        specialization: the graph.
    """

    def __init__(self, network: DrivenNetwork, specialization: Specialization) -> None:
        self.network, self.specialization = network, specialization
        self._views = views_of_inputs(specialization.graph)

    def __call__(self, values: Sequence[Any], saved: SavedForBackward | None = None) -> list[Any]:
        """Call the network.

        Args:
            values: the arguments of the graph.
            saved: what the call saves for its backward, if code around it wants to know.

        Returns:
            What the graph returns.
        """
        graph = self.specialization.graph
        leaves = graph.bind(values)
        if graph.written_leaves:
            _refuse_shared_memory(graph, leaves)
        if self.learns(leaves):
            outputs = _CallNode.apply(self, saved, self.network.anchor(), *leaves)  # type: ignore[no-untyped-call]
        else:
            _, parts = self.network.forward(self.specialization, leaves, grad=False)
            outputs = _join(parts, graph)
        if graph.written_leaves:
            _write_back(graph, leaves, outputs)
        if self._views:
            outputs = list(outputs)
            for view in self._views:
                outputs[view.output] = view.of(graph, values)
        numbers = graph.values_of_numbers(graph.sizes(leaves)) if graph.numbers else ()
        return graph.returned(outputs, numbers)

    def learns(self, leaves: Sequence[Tensor]) -> bool:
        """Whether a call on these tensors is differentiable."""
        if not torch.is_grad_enabled():
            return False
        return self.network.anchor() is not None or any(leaf.requires_grad for leaf in leaves)


class _CallNode(torch.autograd.Function):
    """A call of the network as one node of the graph of the user's code."""

    @staticmethod
    def forward(
        ctx: Any,
        called: NetworkCall,
        saved: SavedForBackward | None,
        anchor: Tensor | None,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        network, specialization = called.network, called.specialization
        with forward_derivatives():
            call, parts = network.forward(specialization, leaves, grad=True)
        ctx.network, ctx.call, ctx.saved = network, call, saved
        if saved is not None:
            saved.want()
        ctx.trained = anchor is not None
        graph = specialization.graph
        ctx.graph, ctx.sizes = graph, specialization.samples(leaves)
        ctx.wanted = [leaf.requires_grad for leaf in leaves]
        # outputs may be dropped without a backward: then stages let go of what they keep for it
        ctx.finaliser = weakref.finalize(ctx, network.drop, call.number)
        ctx.finaliser.atexit = False
        # an output without a gradient sends none back, instead of zeros through all stages
        ctx.set_materialize_grads(False)
        # what a Function returns must bring no graph of its own, and the stages have one each
        detached = [[v.detach() if isinstance(v, Tensor) else v for v in part] for part in parts]
        outputs = _join(detached, graph)
        # the outputs have no common graph: as views torch refuses that they are changed in place
        for index, node in enumerate(graph.tensor_outputs):
            if node in graph.sharing_outputs:
                outputs[index] = outputs[index].view_as(outputs[index])
        ctx.mark_non_differentiable(
            *(
                output
                for output, value in zip(outputs, parts[0])
                if isinstance(value, Tensor) and not value.requires_grad
            )
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NetworkError(
                f"create_graph=True, in a backward or torch.autograd.grad ({place_now()}): "
                "gradients of gradients cannot pass through a network that is cut into stages. "
                "Compute the penalty with a network that is not cut "
                "(the strategy's network=...), or train with strategy='ddp'."
            )
        if any(map(is_batched, gradients)):
            raise NetworkError(
                f"is_grads_batched=True, or another vmap of a backward ({place_now()}): many "
                "gradients at once cannot pass through a network that is cut into stages. Compute "
                "them one after the other, with retain_graph=True (for jacobians: "
                "vectorize=False)."
            )
        network: DrivenNetwork = ctx.network
        # (autograd tells its nodes nothing of `retain_graph`)
        keep = graph_is_kept()
        if ctx.call.number not in network.calls:
            raise RuntimeError(
                "Trying to backward through a call of the network a second time. Specify "
                "retain_graph=True in the first backward."
            )
        if ctx.saved is not None:
            ctx.saved.ask()
        inputs = network.backward(
            ctx.call,
            _split_gradients(gradients, ctx.sizes, ctx.graph),
            parameters=ctx.trained and backward_reaches(ctx, 0),
            keep=keep,
            input_gradient=any(ctx.wanted),
        )
        if not keep:
            # this pass has closed the call on all ranks
            ctx.finaliser.detach()
        return None, None, None, *_join_gradients(inputs, ctx.wanted, ctx.graph)


def _refuse_shared_memory(graph: NetworkGraph, leaves: Sequence[Tensor]) -> None:
    """What is written to in one memory on one device travels in two messages to the stages."""
    pairs = [(x, t) for x, t in zip(graph.leaves, leaves) if t.layout is torch.strided]
    memory = {leaf: storage_key(tensor.untyped_storage()) for leaf, tensor in pairs}
    counts = Counter(memory.values())
    for leaf in graph.written_leaves:
        if counts[memory.get(leaf, 0)] > 1:
            raise NetworkError(
                f"The network changes its argument {leaf.name!r} in place ({place_now()}), "
                "and another argument shows the same memory. In stages it would not follow. Pass a "
                "copy (tensor.clone()) of one of them."
            )


def _write_back(graph: NetworkGraph, leaves: Sequence[Tensor], outputs: Sequence[Any]) -> None:
    """Write what the network has changed in place back into the caller's tensors."""
    found = dict(zip(graph.tensor_outputs, outputs))
    for leaf, tensor in zip(graph.leaves, leaves):
        if leaf in graph.written_leaves:
            with torch.no_grad():
                tensor.copy_(found[leaf.node].detach())


def _join(parts: Sequence[Sequence[Any]], graph: NetworkGraph) -> list[Any]:
    """The outputs of the whole batch from those of its micro-batches."""
    if len(parts) == 1:
        return list(parts[0])
    rows = [graph.rows[node] for node in graph.tensor_outputs]
    rows += [None] * (len(parts[0]) - len(rows))  # numbers are the same in all of them
    return [s[0] if r is None else joined(s, r) for s, r in zip(zip(*parts), rows)]


def _split_gradients(
    gradients: Sequence[Tensor | None], sizes: Sequence[int], graph: NetworkGraph
) -> list[Gradients]:
    """Per micro-batch, the gradients of the outputs.

    Args:
        gradients: of the outputs of the whole batch.
        sizes: how many samples each micro-batch has.
        graph: tells where they are in the outputs. The gradient of an output that is the same in
            all micro-batches is that of the first one's.
    """
    if len(sizes) == 1:
        return [list(gradients)]
    rows = [graph.rows[node] for node in graph.tensor_outputs]
    columns: list[Gradients] = []
    for index, gradient in enumerate(gradients):
        where = rows[index] if index < len(rows) else None
        if gradient is None:
            columns.append([None] * len(sizes))
        elif where is None:
            others = [torch.zeros_like(gradient) for _ in sizes[1:]]
            columns.append([gradient, *others])
        else:
            columns.append([*slices(gradient, where, sizes)])
    return list(map(list, zip(*columns)))


def _join_gradients(
    inputs: Sequence[Gradients], wanted: Sequence[bool], graph: NetworkGraph
) -> Gradients:
    """The gradients of the inputs of the whole batch; of one that was passed whole, their sum."""
    found: Gradients = []
    for index, (wants, leaf) in enumerate(zip(wanted, graph.leaves)):
        parts = [part[index] for part in inputs if part] if wants else []
        present = [piece for piece in parts if piece is not None]
        if not present:
            found.append(None)
        elif len(present) == 1:
            found.append(present[0])
        else:
            rows = leaf.rows
            found.append(torch.stack(present).sum(0) if rows is None else joined(present, rows))
    return found
