"""A call of a network inside of which the backwards of micro-batches run too.

The loss is a sum over samples (:mod:`lightning_hybrid.graph.loss_terms`). So the gradients of a
micro-batch can be computed when its forward ends, but for one factor: the gradient of the loss,
which comes with the user's backward. The backwards run with an expected value of this factor, and
leave their gradients aside. The user's backward multiplies them with the quotient of the real and
the expected factor, and adds them to ``parameter.grad``. If no backward comes, they are dropped.

All other outputs (logits) are late: their numbers are made by another forward when they are read,
and kept in later calls. If a gradient comes to such an output, the call is made again, and its
backward follows it.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.autograd import (
    backward_reaches,
    forward_derivatives,
    graph_is_kept,
)
from lightning_hybrid._torch.late import Late
from lightning_hybrid._torch.tensors import as_they_are, version
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.microbatches import Specialization
from lightning_hybrid.driver.outputs import join_outputs, refuse_backward, split_gradients
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import LossOfCall, NetworkGraph, Rows, joined, place_now
from lightning_hybrid.schedules import INSIDE
from lightning_hybrid.stage import Call, Gradients, Values


def why_not_inside(network: DrivenNetwork, graph: NetworkGraph) -> str:
    """Why backwards of a graph cannot run inside of its calls, as a clause; empty: they can."""
    placement, engine = network.placement, network.engine
    if graph.no_shares:
        return graph.no_shares
    # (a backward has parts of other replicas then, whose losses may get other gradients)
    if engine.synchronises:
        return "batch statistics are those of all replicas, whose losses may have other factors"
    return "" if placement.schedule == INSIDE else "its plan has another schedule"


class InsideCalls:
    """Makes the calls of one captured graph whose backwards run inside of them.

    Args:
        network: the network.
        specialization: the graph.
        say: tells the user why the backwards of a call do not run inside of it.

    Attributes:
        network: see above.
        specialization: see above.
        read: positions of the outputs that were read after an earlier call, so that calls keep
            their numbers.
        factor: the gradient of the loss that has come last, divided by the factor of loss scaling;
            ``None``: none has come yet.
    """

    def __init__(
        self,
        network: DrivenNetwork,
        specialization: Specialization,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.network, self.specialization, self._say = network, specialization, say
        self.read: set[int] = set()
        self.factor: Tensor | None = None
        self._suits = not why_not_inside(network, specialization.graph)

    def suits(self, leaves: Sequence[Tensor], loss: LossOfCall | None) -> bool:
        """Whether backwards can run inside of a call on these tensors; says once why they cannot.

        Args:
            leaves: the inputs of the graph.
            loss: the loss of the call; ``None``: micro-batches have no shares of a loss.
        """
        if loss is None or not self._suits or self.network.anchor() is None:
            return False
        if loss.learns or any(leaf.requires_grad for leaf in leaves):
            self._say("an input of it, or a weight of its loss, wants a gradient")
            self._say = lambda _: None  # (once)
            return False
        return len(self.specialization.samples(leaves)) > 1

    def __call__(self, leaves: Sequence[Tensor], loss: LossOfCall, *, keep: bool) -> list[Tensor]:
        """Make a call, and give the loss its value.

        Args:
            leaves: the inputs of the graph.
            loss: the loss of this call; its ``value`` is set.
            keep: whether all outputs will be read, so that their numbers are kept.

        Returns:
            The outputs of the graph.
        """
        run = _InsideCall(self, leaves, loss, keep=keep)
        loss.value, *outputs = _InsideNode.apply(self.network.anchor(), run)  # type: ignore[no-untyped-call]
        return list(outputs)

    # (Numbers stay where they are, on the driver's device: a host that read one would wait for all
    # micro-batches, and could prepare nothing meanwhile.)

    def expected(self) -> Tensor:
        """The gradient of the loss that is expected to come in the next backward.

        That is the last one that came (1 if none has), at the present factor of loss scaling.
        """
        last = self._one() if self.factor is None else self.factor
        return self.network.scaled(last)

    def expect(self, came: Tensor) -> None:
        """Expect the gradient ``came`` of the loss from now on, unless it is zero or not finite.

        It is kept without the factor of loss scaling.
        """
        last = self._one() if self.factor is None else self.factor
        is_one = came.isfinite() & (came != 0)
        self.factor = torch.where(is_one, came / self.network.scaled(self._one()), last)

    def _one(self) -> Tensor:
        return torch.ones((), dtype=torch.float64, device=self.network.engine.device)


class _InsideCall:
    """One call of a network whose backwards run inside of its forward.

    Args:
        calls: makes the calls of the graph.
        leaves: the inputs of the graph.
        loss: the loss of the call.
        keep: whether the numbers of all outputs are kept.

    Attributes:
        calls: see above.
        loss: see above.
        samples: the number of samples of each micro-batch.
        expected: the gradient of the loss with which backwards run, a scalar.
        call: the call of the stages; set by :meth:`forward`.
        learns: for each output of the graph, whether a gradient may come to it; set by
            :meth:`forward`.
    """

    call: Call
    learns: list[bool]

    def __init__(
        self, calls: InsideCalls, leaves: Sequence[Tensor], loss: LossOfCall, *, keep: bool
    ) -> None:
        self.calls = calls
        self.loss = loss
        self._leaves = leaves
        self.samples = calls.specialization.samples(leaves)
        self.expected = calls.expected()
        count = len(calls.specialization.graph.tensor_outputs)
        self._keeps = set(range(count)) if keep else set(calls.read)
        self._kept: dict[int, Values] = {}
        self._shares: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def forward(self) -> tuple[Tensor, ...]:
        """Run the forwards and backwards of all micro-batches.

        Returns:
            The loss, and the outputs of the graph. Of those that are not kept, numbers are made
            when they are read.
        """
        calls = self.calls
        graph = calls.specialization.graph
        self.call, _ = calls.network.forward(
            calls.specialization, self._leaves, grad=True, ends=self._end
        )
        # (not before the call, which brings stages the tied weights of others)
        self._state = self._state_now()
        parts = [self._kept[number] for number in range(len(self.samples))]
        value = torch.stack([self._shares[number] for number in range(len(parts))]).sum(0)
        outputs = []
        for index, (node, pieces) in enumerate(zip(graph.tensor_outputs, zip(*parts))):
            rows = graph.rows[node]
            if index not in self._keeps:
                outputs.append(self._late(index, pieces, rows))
            else:
                outputs.append(pieces[0] if rows is None else joined(pieces, rows))
        self._kept.clear()
        return value, *outputs

    def _end(self, microbatch: int, outputs: Values) -> tuple[Values, Gradients]:
        """Compute the share of the loss that a micro-batch has, when its forward has ended.

        Args:
            microbatch: number of the micro-batch.
            outputs: the outputs of the last stage for it.

        Returns:
            No outputs (what is kept of them is kept here), and for each output its gradient, by
            the expected gradient of the loss.
        """
        leaves = [output.detach().requires_grad_(output.requires_grad) for output in outputs]
        self.learns = [leaf.requires_grad for leaf in leaves]
        share = self.loss.share(leaves, self.samples, microbatch)
        found: dict[int, Tensor | None] = {}
        if share.requires_grad:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            kind = self.calls.network.engine.device.type
            with torch.autocast(kind, enabled=False):
                start = self.expected.to(share.dtype).expand(share.shape)
                gradients = torch.autograd.grad(share, wanted, start, allow_unused=True)
            found = dict(zip(map(id, wanted), gradients))
        self._shares[microbatch] = share.detach()
        # (of the others sizes alone, in memory of one number)
        self._kept[microbatch] = [
            output.detach() if index in self._keeps else _sized(output)
            for index, output in enumerate(outputs)
        ]
        return [], [found.get(id(leaf)) for leaf in leaves]

    def _late(self, index: int, pieces: Sequence[Tensor], rows: Rows | None) -> Tensor:
        """Make an output whose numbers are made when code reads it.

        Args:
            index: position of the output.
            pieces: per micro-batch, a tensor of the size and type of its part of the output.
            rows: where the output has the samples; ``None``: it is the same in all micro-batches.
        """
        size = list(pieces[0].shape)
        if rows is not None:
            size[rows.dim] = sum(piece.shape[rows.dim] for piece in pieces)
        return Late.like(pieces[0], lambda: self._read(index), tuple(size))

    def _read(self, index: int) -> Tensor:
        """Make the numbers of a late output, which is read now, by running the call again.

        They are kept for the next read, and later calls keep theirs.

        Args:
            index: position of the output.

        Returns:
            The output, with its numbers.

        Raises:
            NetworkError: see :meth:`again`.
        """
        self.calls.read.add(index)
        if index not in self._made:
            with torch.no_grad():
                _, parts = self.again(grad=False)
            outputs = join_outputs(parts, self.calls.specialization.graph)
            self._made |= {number: outputs[number] for number in self.calls.read}
        return self._made[index]

    def again(self, *, grad: bool) -> tuple[Call, list[Values]]:
        """Run the forward of the call again, with the same random numbers.

        Args:
            grad: whether a backward may follow.

        Returns:
            The call of the stages, and per micro-batch the outputs, detached.

        Raises:
            NetworkError: weights, the module's mode or inputs have changed since the call.
        """
        network = self.calls.network
        if self._state != self._state_now():
            raise NetworkError(
                f"What network {network.name or 'self'!r} has returned beside its loss is read, or "
                f"gets a gradient ({place_now()}), and its weights, its mode or the batch have "
                f"changed since the call. Under schedule={INSIDE!r} it is computed when it is "
                "first read. Read it before the optimizer's step, or use schedule='gpipe'."
            )
        # (not with the modes of the code that reads)
        with self.call.key.precision.applied():
            call, parts = network.forward(
                self.calls.specialization, self._leaves, grad=grad, again=self.call
            )
        detached = [[value.detach() for value in part] for part in parts]
        return call, detached

    def _state_now(self) -> tuple[Any, ...]:
        """Versions and modes on which outputs depend: equal as long as none has changed."""
        network = self.calls.network
        with as_they_are():
            here = [own.specializations[0].parameters() for own in network.engine.owned]
            weights = [version(p) for parameters in here for p in parameters]
        batch = [version(leaf) for leaf in self._leaves]
        return network.age, network.module.training, network.trainable(), weights, batch


def _sized(output: Tensor) -> Tensor:
    """A tensor of the same size and type, without values, in memory for one number."""
    return output.detach().new_empty(()).expand(output.shape)


class _InsideNode(torch.autograd.Function):
    """Autograd's node of one :class:`_InsideCall`.

    Its backward adds the gradients that the call has made to those of the parameters.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: _InsideCall) -> tuple[Tensor, ...]:
        with forward_derivatives():
            value, *outputs = run.forward()
        ctx.run = run
        ctx.finaliser = weakref.finalize(ctx, run.calls.network.drop, run.call.number)
        ctx.finaliser.atexit = False
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, learns in zip(outputs, run.learns) if not learns))
        return value, *outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        run: _InsideCall = ctx.run
        network, keep = run.calls.network, graph_is_kept()
        refuse_backward(network, run.call, gradients)
        of_loss, *of_outputs = gradients
        parameters = backward_reaches(ctx, 0)
        if any(gradient is not None for gradient in of_outputs):
            _go_back_again(run, of_loss, of_outputs, parameters=parameters)
            if not keep:
                network.drop(run.call.number)
        elif of_loss is not None:
            came = of_loss.reshape(()).to(run.expected.dtype)
            network.backward(
                run.call,
                [[]],
                parameters=parameters,
                keep=keep,
                input_gradient=False,
                factor=came / run.expected,
            )
            if parameters:
                run.calls.expect(came)
        if not keep:
            ctx.finaliser.detach()
        return None, None


def _go_back_again(
    run: _InsideCall,
    of_loss: Tensor | None,
    of_outputs: Sequence[Tensor | None],
    *,
    parameters: bool,
) -> None:
    """Run the backward of a call if gradients have come to other outputs than its loss.

    The gradients that the call has left aside are those of the loss alone. So its forward is run
    again, and its backward follows with all gradients.

    Args:
        run: the call.
        of_loss: the gradient of the loss; ``None``: it has none.
        of_outputs: the gradients of the outputs; ``None``: an output has none.
        parameters: whether parameters get gradients.

    Raises:
        NetworkError: see :meth:`_InsideCall.again`.
    """
    graph, network = run.calls.specialization.graph, run.calls.network
    call, parts = run.again(grad=True)
    call.averages = run.call.averages  # (replicas agree once about what the first one has left)
    leaves = [
        leaf.requires_grad_(learns) for leaf, learns in zip(join_outputs(parts, graph), run.learns)
    ]
    found: dict[int, Tensor | None] = {}
    if of_loss is not None:
        share = run.loss.share(leaves, [sum(run.samples)])
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(share, wanted, of_loss, allow_unused=True)
        found = dict(zip(map(id, wanted), gradients))
    together = []
    for leaf, of_output in zip(leaves, of_outputs):
        both = [g for g in (found.get(id(leaf)), of_output) if g is not None]
        together.append(sum(both[1:], both[0]) if both else None)
    network.backward(
        call,
        split_gradients(together, run.samples, graph),
        parameters=parameters,
        keep=False,
        input_gradient=False,
    )
