"""The user's hooks on gradients, held on all ranks while a backward pass runs.

See :mod:`lightning_hybrid.stage.weight_hooks`.
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
        networks: that are cut; more may come.
        commands: to the workers.
        settle: has the gradients where they belong.
    """

    def __init__(
        self, networks: Sequence[DrivenNetwork], commands: Commands, settle: Callable[[], None]
    ) -> None:
        self._networks, self._commands, self._settle = networks, commands, settle

    @contextmanager
    def __call__(
        self, chosen: Collection[int] | None = None, *, late: bool = True
    ) -> Iterator[None]:
        """Inside, a backward pass runs; at the end each hook hears of it once.

        Args:
            chosen: identities of the weights that it is for; ``None``: all.
            late: call the hooks that wait for the sum to be in ``weight.grad`` too.

        Raises:
            NetworkError: such a hook may change weights with which forwards have begun.
        """
        # (hooks are rare, and to hold them asks all ranks)
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
            # the hooks are put back and not called: no gradient has come to its end
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
    """A hook hears of a gradient once, and each copy of a stage has a part of it."""
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
    named: Iterator[tuple[str, Tensor]] = network.module.named_parameters()
    return tuple([name for name, weight in named if id(weight) in chosen])
