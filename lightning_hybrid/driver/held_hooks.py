"""Holds the user's hooks on gradients back on all ranks while a backward pass runs.

:mod:`lightning_hybrid.stage.weight_hooks` says why, and does so on one rank.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from lightning_hybrid.comm import copies_of, signals_deferred
from lightning_hybrid.comm.protocol import HoldHooks, ReleaseHooks
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.schedules import STREAMED


class HeldHooks:
    """Takes the user's hooks off weights during a backward, and calls each of them once after it.

    Args:
        networks: the networks that are cut; the list may grow.
        commands: sends commands to the workers.
        settle: brings all gradients to the owners of their parameters.
    """

    def __init__(
        self, networks: Sequence[DrivenNetwork], commands: Commands, settle: Callable[[], None]
    ) -> None:
        self._networks, self._commands, self._settle = networks, commands, settle

    @contextmanager
    def __call__(
        self, chosen: Collection[int] | None = None, *, late: bool = True
    ) -> Iterator[None]:
        """Inside, a backward pass runs without the user's hooks; at the end each is called once.

        Args:
            chosen: the ``id`` of each weight that the pass is for; ``None``: all weights.
            late: whether to call hooks by ``register_post_accumulate_grad_hook`` too, which run
                when the sum is in ``weight.grad``.

        Raises:
            NetworkError: a hook is on a weight of a stage with copies; or a post-accumulate hook
                could change weights with which forwards of later batches have begun.
        """
        # (hooks are rare, and holding them sends commands to all ranks)
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
            self._release(networks, (), late=False)
            raise
        self._settle()
        self._release(networks, chosen, late=late)

    @signals_deferred
    def _hold(self, networks: Sequence[DrivenNetwork]) -> None:
        for network in networks:
            self._commands.tell(HoldHooks(network.number))
            network.weight_hooks.hold()

    @signals_deferred
    def _release(
        self, networks: Sequence[DrivenNetwork], chosen: Collection[int] | None, *, late: bool
    ) -> None:
        for network in networks:
            names = None if chosen is None else _names(network, chosen)
            self._commands.tell(ReleaseHooks(network.number, late, names))
            network.weight_hooks.release(names, late=late)


def _refuse_copies(networks: Sequence[DrivenNetwork]) -> None:
    """Refuse hooks on weights of a stage with copies, of which each has a part of the gradient.

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
    """Refuse post-accumulate hooks under a schedule that begins with later batches early.

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


def _names(network: DrivenNetwork, chosen: Collection[int]) -> tuple[str, ...]:
    """Names in the network of the parameters whose ``id`` is among these."""
    named: Iterator[tuple[str, Tensor]] = network.module.named_parameters()
    return tuple([name for name, weight in named if id(weight) in chosen])
