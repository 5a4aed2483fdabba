"""The backward passes of the user's code: hooks on weights, and gradients of chosen weights.

The user's hooks on gradients are held back while a backward pass runs
(:mod:`lightning_hybrid.driver.weight_hooks` says why, and does so for one network).

For `torch.autograd.grad(loss, weights)` and `backward(inputs=weights)`: a call of a network that is
cut is one node of autograd, which adds the gradients of all weights to ``parameter.grad``, on the
rank of each; the weights themselves are not in autograd's graph. So a backward for chosen weights
of such networks runs through all of their stages, after which the gradients that were there before
are put back: all of them after ``grad``, which returns the new ones; those of the other weights
after ``backward``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.autograd import is_in_backward
from lightning_hybrid._torch.tensors import as_the_user_sees_them
from lightning_hybrid.comm import copies_of, signals_deferred
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.weight_hooks import WorkersGradients
from lightning_hybrid.driver.when_to_average import ReplicaGradients
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import place_now
from lightning_hybrid.remote import is_deferred
from lightning_hybrid.schedules import STREAMED

Gradient = Tensor | None


class HeldHooks:
    """Takes the user's hooks off weights during a backward, and calls each of them once after it.

    Args:
        networks: the networks that are cut; the list may grow.
        bring_to_owners: brings all gradients to the owners of their parameters.
        there: takes and sets gradients at workers.
    """

    def __init__(
        self,
        networks: Sequence[DrivenNetwork],
        bring_to_owners: Callable[[], None],
        there: WorkersGradients,
    ) -> None:
        self._networks = networks
        self._bring_to_owners = bring_to_owners
        self._there = there

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, a backward pass runs without the user's hooks; at the end each is called once.

        They are called after all gradients have come to the owners of their parameters. After an
        error inside they are put back, and not called. If no weight has a hook, nothing is done.

        Raises:
            NetworkError: a hook is on a weight of a stage with copies; or a post-accumulate hook
                could change weights with which forwards of later batches have begun.
        """
        # (hooks are rare, and holding them asks the owners of weights for gradients)
        networks = [network for network in self._networks if network.weight_hooks]
        if not networks:
            yield
            return
        _refuse_copies(networks)
        _refuse_late(networks)
        self._hold(networks)
        try:
            yield
        except BaseException:
            # (put back and not called, since no gradient is complete)
            self._release(networks, call=False)
            raise
        self._bring_to_owners()
        self._release(networks, call=True)

    @signals_deferred
    def _hold(self, networks: Sequence[DrivenNetwork]) -> None:
        for network in networks:
            network.weight_hooks.hold(self._there)

    @signals_deferred
    def _release(self, networks: Sequence[DrivenNetwork], *, call: bool) -> None:
        for network in networks:
            network.weight_hooks.release(self._there, call=call)


def _refuse_copies(networks: Sequence[DrivenNetwork]) -> None:
    """Refuse hooks on weights of a stage with copies: each copy has only a part of the gradient.

    Raises:
        NetworkError: there is such a hook.
    """
    for network in networks:
        hooked, placement = network.weight_hooks.names(), network.placement
        for names, copies in zip(placement.owned, map(copies_of, placement.devices)):
            if len(copies) > 1 and (found := sorted(names.intersection(hooked))):
                raise NetworkError(
                    f"{found[0]!r} in network {network.name!r} has a hook on its gradient, and its "
                    f"stage has {len(copies)} copies, each with a part of that gradient. Give the "
                    "stage one copy (pipeline_parallel_size), or change gradients in "
                    "on_before_optimizer_step."
                )


def _refuse_late(networks: Sequence[DrivenNetwork]) -> None:
    """Refuse hooks by ``register_post_accumulate_grad_hook`` under streamed schedules.

    Such a hook possibly changes weights with which later batches have begun already.

    Raises:
        NetworkError: there is such a hook.
    """
    for network in networks:
        schedule = network.placement.schedule
        if schedule in STREAMED and (late := network.weight_hooks.late()):
            raise NetworkError(
                f"{late[0]!r} in network {network.name!r} has a hook by "
                "`register_post_accumulate_grad_hook`, which may change weights in the middle of a "
                f"backward pass. schedule={schedule!r} begins with later batches before that. Use "
                "schedule='gpipe'."
            )


class UserBackwards:
    """Runs the backward passes of the user's code on one driver.

    It is called in the place of the function that runs autograd's engine, and calls that function.
    Gradients are right also where weights of networks that are cut are chosen as inputs.

    Args:
        networks: the networks that are cut; the list may grow.
        gradients: averages the gradients of this replica over the replicas.
        hooks: holds the user's hooks on gradients back while a pass runs.
    """

    def __init__(
        self, networks: Sequence[DrivenNetwork], gradients: ReplicaGradients, hooks: HeldHooks
    ) -> None:
        self._networks = networks
        self._gradients = gradients
        self._hooks = hooks

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
        """Run a backward pass, in the place of the function that runs autograd's engine.

        Args:
            run: the function that runs autograd's engine.
            outputs: the tensors at which the pass begins.
            starts: the gradients of ``outputs`` with which it begins.
            keep: ``retain_graph``.
            create_graph: see `torch.autograd.grad`.
            inputs: the tensors whose gradients are wanted; empty: all leaves.
            unused: for ``grad`` alone, the value of ``allow_unused``: whether the outputs may be
                independent of an input.
            accumulate_grad: whether this is ``backward``; else it is ``grad``.
            options: further options of the engine.

        Returns:
            For ``grad``: the gradients of the inputs, in their order; ``None`` for an input that
            the outputs are independent of. What is returned for ``backward`` is not used.

        Raises:
            NetworkError: inputs are weights of a network whose stages have copies, which is whole
                on no rank, whose gradients come steps later, or which has hooks on weights.
            RuntimeError: the outputs are independent of an input, and ``allow_unused`` is False.
        """
        run = partial(
            run, outputs, starts, keep, create_graph, accumulate_grad=accumulate_grad, **options
        )
        chosen = {id(tensor) for tensor in inputs}
        nested = is_in_backward()  # (stages compute gradients of their layers inside of a backward)
        # (in nearly every step nothing is chosen, and no list of all weights is made)
        candidates = self._networks if chosen and not nested else ()
        networks = [n for n in candidates if not chosen.isdisjoint(map(id, n.weights()))]
        if not networks:
            # (hooks on weights are not concerned by gradients of other tensors alone)
            with nullcontext() if nested or chosen or not accumulate_grad else self._hooks():
                return run(inputs, *unused)
        weights = {id(weight): weight for network in networks for weight in network.weights()}
        for network in networks:
            _refuse_chosen(network)
        # `backward(inputs=...)` leaves the gradients of the chosen weights, and `grad` leaves none
        kept = chosen if accumulate_grad else set[int]()
        others = [weight for key, weight in weights.items() if key not in kept]
        # (autograd runs only nodes on the way to an input: each call of a network is on the way to
        # the network's leaf)
        reached = (*inputs, *(network.leaf for network in networks))
        # (where an input is a proxy, this runs inside of `as_they_are`: let proxies intercept)
        with as_the_user_sees_them(), self._gradients.kept_local():
            before = _take(others)
            try:
                found = run(reached, *[True for _ in unused])
                self._gradients.bring_to_owners()
                if not accumulate_grad:
                    # (without those of the networks' leaves)
                    own = found[: len(inputs)]
                    found = tuple([_whole_gradient(g, t, weights) for g, t in zip(own, inputs)])
            finally:
                for parameter, gradient in zip(others, before):
                    parameter.grad = gradient
                self._gradients.bring_to_owners()
        if unused == (False,) and any(gradient is None for gradient in found):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
        return found


def _refuse_chosen(network: DrivenNetwork) -> None:
    """Refuse to compute gradients of chosen weights if a pass would not leave them whole at once.

    Raises:
        NetworkError: a stage of the network has copies, its weights have hooks, its schedule is
            delayed, or a weight is a deferred tensor.
    """
    what = f"Gradients of single weights ({place_now()}) of network {network.name or 'self'!r}"
    if any(len(copies_of(device)) > 1 for device in network.placement.devices):
        raise NetworkError(
            f"{what} are in parts, as one of its stages has copies (pipeline_parallel_size). Read "
            "parameter.grad after a backward for all weights, or give each stage one copy."
        )
    if hooked := network.weight_hooks.names():
        raise NetworkError(
            f"{what} come in pieces, for each of which the hook on {hooked[0]!r} there would be "
            "called. Remove the hook, or read parameter.grad after a backward for all weights."
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
    """Take the gradients off parameters; return copies, in the order of the parameters.

    ``None`` is returned for a parameter without a gradient.
    """
    taken = []
    for parameter in parameters:
        gradient = parameter.grad
        # (a copy, since a proxy shows what its owner has at any later time)
        taken.append(None if gradient is None else gradient.detach().clone())
        if gradient is not None:
            parameter.grad = None
    return taken


def _whole_gradient(gradient: Gradient, tensor: Any, weights: Mapping[int, Tensor]) -> Gradient:
    """The whole gradient of an input of `torch.autograd.grad`, after the pass.

    That is what autograd has returned, plus, for a weight of a network that is cut, what calls of
    the network have added to ``weight.grad``. ``None``: there is neither.

    Args:
        gradient: the gradient that autograd has returned; ``None``: it has found none.
        tensor: the input.
        weights: by ``id``, the weights of the networks.
    """
    left = weights[id(tensor)].grad if id(tensor) in weights else None
    if left is None:
        return gradient
    with torch.no_grad():
        return left.detach().clone() if gradient is None else gradient + left
