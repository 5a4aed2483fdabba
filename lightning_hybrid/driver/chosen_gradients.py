"""Gradients of chosen weights: `torch.autograd.grad(loss, weights)`, `backward(inputs=weights)`.

A call of a network that is cut is one node of autograd, which adds the gradients of all weights to
``parameter.grad``, on the rank of each; autograd itself knows of no way from the loss to a weight.
So a backward for chosen weights of such networks goes to their calls as every other does, and the
gradients that were there before are put back: all of them after ``grad``, which returns those that
have arisen; those of the other weights after ``backward``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.autograd import is_in_backward
from lightning_hybrid._torch.tensors import as_the_user_sees_them
from lightning_hybrid.comm import copies_of
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.held_hooks import HeldHooks
from lightning_hybrid.driver.when_to_average import ReplicaGradients
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import place_now
from lightning_hybrid.remote import is_deferred
from lightning_hybrid.schedules import STREAMED

Gradient = Tensor | None


class ChosenGradients:
    """Runs the backward passes of one driver.

    Args:
        networks: that are cut; more may come.
        gradients: of this replica.
        hooks: the user's, on gradients.
    """

    def __init__(
        self, networks: Sequence[DrivenNetwork], gradients: ReplicaGradients, hooks: HeldHooks
    ) -> None:
        self._networks, self._gradients, self._hooks = networks, gradients, hooks

    def __call__(
        self,
        run: Callable[..., tuple[Gradient, ...]],
        outputs: Any,
        starts: Any,
        keep: bool,
        create_graph: bool,
        inputs: tuple[Any, ...],
        *unused: bool,
        accumulate_grad: bool,
        **options: bool,
    ) -> tuple[Gradient, ...]:
        """A backward pass.

        Args:
            run: runs autograd.
            outputs: where it begins.
            starts: gradients of these.
            keep: ``retain_graph``.
            create_graph: see `torch.autograd.grad`.
            inputs: what gradients are wanted of; empty: of all leaves.
            unused: of ``grad`` alone, whether there may be none (``allow_unused``).
            accumulate_grad: ``backward``, and not ``grad``.
            options: further ones.

        Raises:
            NetworkError: of a weight of a network that is whole on no rank, or whose gradients come
            later.
            RuntimeError: the outputs do not depend on one of the inputs, and must.
        """
        run = partial(
            run, outputs, starts, keep, create_graph, accumulate_grad=accumulate_grad, **options
        )
        chosen = {id(tensor) for tensor in inputs}
        nested = is_in_backward()  # stages take gradients of their weights there, layer by layer
        # in nearly every step nothing is chosen, and all weights need not be looked at
        candidates = self._networks if chosen and not nested else ()
        networks = [n for n in candidates if not chosen.isdisjoint(map(id, n.weights()))]
        if not networks:
            # gradients of other tensors alone are nothing that weights hear of
            with nullcontext() if nested or chosen or not accumulate_grad else self._hooks():
                return run(inputs, *unused)
        weights = {id(weight): weight for network in networks for weight in network.weights()}
        for network in networks:
            _check(network)
        # `backward(inputs=...)` leaves the gradients of the chosen weights, and `grad` leaves none
        kept = chosen if accumulate_grad else set[int]()
        others = [weight for key, weight in weights.items() if key not in kept]
        # autograd runs only what leads to an input: the leaf of a network leads to its calls
        reached = (*inputs, *(network.leaf for network in networks))
        # a weight of another rank among the inputs has torch take tensors as they are
        with as_the_user_sees_them(), self._gradients.kept_local():
            before = _take(others)
            try:
                with self._hooks(chosen, late=accumulate_grad):
                    found = run(reached, *[True for _ in unused])
                self._gradients.settle()
                if not accumulate_grad:
                    # (what was found for the leaves of the networks means nothing to the caller)
                    own = found[: len(inputs)]
                    found = tuple([_arisen(g, t, weights) for g, t in zip(own, inputs)])
            finally:
                for parameter, gradient in zip(others, before):
                    parameter.grad = gradient
                self._gradients.settle()
        if unused == (False,) and any(gradient is None for gradient in found):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
        return found


def _check(network: DrivenNetwork) -> None:
    what = f"Gradients of single weights ({place_now()}) of network {network.name or 'self'!r}"
    if any(len(copies_of(device)) > 1 for device in network.placement.devices):
        raise NetworkError(
            f"{what} are in parts, as one of its stages has copies (pipeline_parallel_size). Read "
            "parameter.grad after a backward for all weights, or give each stage one copy."
        )
    schedule = STREAMED.get(network.placement.schedule)
    if schedule is not None and schedule.delayed:
        raise NetworkError(
            f"{what} arise some steps later under schedule={schedule.name!r}. Use schedule='gpipe'."
        )
    if any(map(is_deferred, network.weights())):
        raise NetworkError(
            f"{what}, which was made in configure_model: no rank has them all. Make the network in "
            "__init__, or read parameter.grad after a backward."
        )


def _take(parameters: Iterable[Tensor]) -> list[Gradient]:
    """What gradients are there; afterwards there are none."""
    taken = []
    for parameter in parameters:
        gradient = parameter.grad
        # the proxy of another rank's shows what that has later
        taken.append(None if gradient is None else gradient.detach().clone())
        if gradient is not None:
            parameter.grad = None
    return taken


def _arisen(gradient: Gradient, tensor: Any, weights: Mapping[int, Tensor]) -> Gradient:
    """What autograd has found here, and what the calls of networks have left."""
    left = weights[id(tensor)].grad if id(tensor) in weights else None
    if left is None:
        return gradient
    with torch.no_grad():
        return left.detach().clone() if gradient is None else gradient + left
