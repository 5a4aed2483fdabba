"""A call of a network that has been cut, as one node of autograd on the driver.

The forward of the node (:class:`_CallNode`) runs the pipeline and returns the outputs; its backward
sends the gradients back through the stages, which keep what they need for it: autograd saves no
tensor of the call.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.autograd import (
    backward_reaches,
    forward_derivatives,
    graph_is_kept,
)
from lightning_hybrid._torch.tensors import storage_key
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.inside_call import InsideCalls
from lightning_hybrid.driver.microbatches import Specialization
from lightning_hybrid.driver.outputs import join_outputs, refuse_backward, split_gradients
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import LossOfCall, NetworkGraph, joined, place_now
from lightning_hybrid.stage import Gradients


class NetworkCall:
    """Calls the stages of one captured graph of a network that has been cut.

    Args:
        network: the network.
        specialization: the captured graph.
        say: tells the user why backwards do not run inside of a call.
    """

    def __init__(
        self,
        network: DrivenNetwork,
        specialization: Specialization,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.network, self.specialization = network, specialization
        self._inside = InsideCalls(network, specialization, say)

    def __call__(
        self, values: Sequence[Any], loss: LossOfCall | None = None, *, keep: bool = False
    ) -> list[Any]:
        """Run the pipeline in the place of the graph.

        Arguments that the network changes in place are changed.

        Args:
            values: the arguments of the graph.
            loss: the loss of this call, if each micro-batch has a share of it; it gets its value
                where backwards run inside of the call.
            keep: whether all outputs will be read. (If backwards run inside of the call, the
                numbers of other outputs are made when they are read.)

        Returns:
            What the graph returns.

        Raises:
            NetworkError: see :func:`_refuse_shared_memory`.
            Exception: a stage has failed.
        """
        graph = self.specialization.graph
        leaves = graph.bind(values)
        if graph.written_leaves:
            _refuse_shared_memory(graph, leaves)
        if loss is not None and self._inside.suits(leaves, loss):
            outputs: list[Any] = self._inside(leaves, loss, keep=keep)
        elif self.learns(leaves):
            outputs = _CallNode.apply(self, self.network.anchor(), *leaves)  # type: ignore[no-untyped-call]
        else:
            _, parts = self.network.forward(self.specialization, leaves, grad=False)
            outputs = join_outputs(parts, graph)
        if graph.written_leaves:
            _write_back(graph, leaves, outputs)
        numbers: Sequence[Any] = ()
        if graph.returns_numbers:
            numbers = graph.values_of_numbers(graph.sizes(leaves))
        return graph.returned(outputs, numbers)

    def learns(self, leaves: Sequence[Tensor]) -> bool:
        """Whether a call on these inputs is differentiable.

        That is: gradients are enabled, and an input or a parameter of the network requires one.
        """
        if not torch.is_grad_enabled():
            return False
        return self.network.anchor() is not None or any(leaf.requires_grad for leaf in leaves)


class _CallNode(torch.autograd.Function):
    """Autograd's node of one call of a network: its forward and backward run the pipeline."""

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
        ctx.network = network
        ctx.call = call
        ctx.trained = anchor is not None  # (else all parameters are frozen)
        graph = specialization.graph
        ctx.graph = graph
        ctx.sizes = specialization.samples(leaves)
        ctx.wanted = [leaf.requires_grad for leaf in leaves]
        # if the outputs are dropped without a backward, stages drop what they keep for it
        ctx.finaliser = weakref.finalize(ctx, network.drop, call.number)
        ctx.finaliser.atexit = False
        # an output without a gradient sends none back, instead of zeros through all stages
        ctx.set_materialize_grads(False)
        # (a Function must return tensors without a graph, and outputs of stages have one)
        detached = [[v.detach() if isinstance(v, Tensor) else v for v in part] for part in parts]
        outputs = join_outputs(detached, graph)
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
        network: DrivenNetwork = ctx.network
        refuse_backward(network, ctx.call, gradients)
        # (`retain_graph`, which autograd does not pass to nodes)
        keep = graph_is_kept()
        inputs = network.backward(
            ctx.call,
            split_gradients(gradients, ctx.sizes, ctx.graph),
            parameters=ctx.trained and backward_reaches(ctx, 0),
            keep=keep,
            input_gradient=any(ctx.wanted),
        )
        if not keep:
            # (this pass has dropped what all ranks kept of the call)
            ctx.finaliser.detach()
        return None, None, *_join_gradients(inputs, ctx.wanted, ctx.graph)


def _refuse_shared_memory(graph: NetworkGraph, leaves: Sequence[Tensor]) -> None:
    """Refuse a call in which the network writes to an argument that shares memory with another.

    Arguments are sent to the stages as separate tensors, so that a write to one would not change
    the other, as it does on one device.

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
    """Copy arguments that the network has changed in place back into the caller's tensors.

    Args:
        graph: the captured graph.
        leaves: the caller's tensors, the inputs of the graph.
        outputs: what the stages have returned, changed arguments included.
    """
    found = dict(zip(graph.tensor_outputs, outputs))
    for leaf, tensor in zip(graph.leaves, leaves):
        if leaf in graph.written_leaves:
            with torch.no_grad():
                tensor.copy_(found[leaf.node].detach())


def _join_gradients(
    inputs: Sequence[Gradients], wanted: Sequence[bool], graph: NetworkGraph
) -> Gradients:
    """Join gradients of the inputs over the micro-batches.

    Those of an input that was not split, and that each micro-batch has got whole, are added.

    Args:
        inputs: per micro-batch, the gradients of the inputs.
        wanted: for each input whether it needs a gradient.
        graph: tells in which dimension an input has the samples.

    Returns:
        For each input its gradient; ``None``: it needs or has none.
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
