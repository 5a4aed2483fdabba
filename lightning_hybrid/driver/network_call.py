"""A call of a network that has been cut, as one node of autograd on the driver.

The forward of the node (:class:`_CallNode`) runs the pipeline and returns the outputs; its backward
sends the gradients back through the stages, which keep what they need for it: autograd saves no
tensor of the call.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.autograd import (
    backward_reaches,
    forward_derivatives,
    graph_is_kept,
    is_batched,
)
from lightning_hybrid._torch.tensors import storage_key
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.microbatches import Specialization
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import NetworkGraph, joined, place_now, slices
from lightning_hybrid.stage import Gradients


class NetworkCall:
    """Calls the stages of one captured graph of a network that has been cut.

    Args:
        network: the network.
        specialization: the captured graph.
    """

    def __init__(self, network: DrivenNetwork, specialization: Specialization) -> None:
        self.network, self.specialization = network, specialization

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Run the pipeline in the place of the graph.

        Args:
            values: the arguments of the graph.

        Returns:
            What the graph returns.
        """
        graph = self.specialization.graph
        leaves = graph.bind(values)
        if graph.written_leaves:
            _refuse_shared_memory(graph, leaves)
        if self.learns(leaves):
            outputs = _CallNode.apply(self, self.network.anchor(), *leaves)  # type: ignore[no-untyped-call]
        else:
            _, parts = self.network.forward(self.specialization, leaves, grad=False)
            outputs = _join(parts, graph)
        if graph.written_leaves:
            _write_back(graph, leaves, outputs)
        numbers: Sequence[Any] = ()
        if graph.returns_numbers:
            numbers = graph.values_of_numbers(graph.sizes(leaves))
        return graph.returned(outputs, numbers)

    def learns(self, leaves: Sequence[Tensor]) -> bool:
        """Whether a call on these tensors is differentiable."""
        if not torch.is_grad_enabled():
            return False
        return self.network.anchor() is not None or any(leaf.requires_grad for leaf in leaves)


class _CallNode(torch.autograd.Function):
    """The node in autograd's graph for one call of a network."""

    @staticmethod
    def forward(
        ctx: Any,
        called: NetworkCall,
        anchor: Tensor | None,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        network, specialization = called.network, called.specialization
        with forward_derivatives():
            call, parts = network.forward(specialization, leaves, grad=True)
        ctx.network, ctx.call = network, call
        ctx.trained = anchor is not None  # (else all parameters are frozen)
        graph = specialization.graph
        ctx.graph, ctx.sizes = graph, specialization.samples(leaves)
        ctx.wanted = [leaf.requires_grad for leaf in leaves]
        # if the outputs are dropped without a backward, stages drop what they keep for it
        ctx.finaliser = weakref.finalize(ctx, network.drop, call.number)
        ctx.finaliser.atexit = False
        # an output without a gradient sends none back, instead of zeros through all stages
        ctx.set_materialize_grads(False)
        # (a Function must return tensors without a graph, and outputs of stages have one)
        detached = [[v.detach() if isinstance(v, Tensor) else v for v in part] for part in parts]
        outputs = _join(detached, graph)
        # outputs that share memory become views, so that torch refuses to change them in place
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
        # (`retain_graph`, which autograd does not pass to nodes)
        keep = graph_is_kept()
        if ctx.call.number not in network.calls:
            raise RuntimeError(
                "Trying to backward through a call of the network a second time. Specify "
                "retain_graph=True in the first backward."
            )
        inputs = network.backward(
            ctx.call,
            _split_gradients(gradients, ctx.sizes, ctx.graph),
            parameters=ctx.trained and backward_reaches(ctx, 0),
            keep=keep,
            input_gradient=any(ctx.wanted),
        )
        if not keep:
            # (this pass has dropped what all ranks kept of the call)
            ctx.finaliser.detach()
        return None, None, *_join_gradients(inputs, ctx.wanted, ctx.graph)


def _refuse_shared_memory(graph: NetworkGraph, leaves: Sequence[Tensor]) -> None:
    """Refuse a call whose arguments share memory of which the network writes to one.

    They are sent to the stages as separate tensors, so that a write to one would not change the
    other, as it does on one device.

    Raises:
        NetworkError: a written argument shares its memory with another one.
    """
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
    """Copy arguments that the network has changed in place back into the caller's tensors."""
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
    """Split gradients of the outputs of a batch into those of its micro-batches.

    The gradient of an output that is the same in all micro-batches goes to the first one's.

    Args:
        gradients: the gradients of the outputs of the whole batch.
        sizes: how many samples each micro-batch has.
        graph: tells in which dimension an output has the samples.
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
    """Join gradients of the inputs over the micro-batches; those of unsplit inputs are added.

    Args:
        inputs: per micro-batch, the gradients of the inputs.
        wanted: for each input whether it needs a gradient.
        graph: tells in which dimension an input has the samples.
    """
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
