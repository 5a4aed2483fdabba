"""What a driver has that the other replicas have too: its stages, and what no network owns."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from lightning_hybrid.comm import Group
from lightning_hybrid.pipeline import ReplicaGroup, Trace, state_buffers, tensors_of
from lightning_hybrid.tensors import is_deferred


class Replicated:
    """The data-parallel groups of all that one driver owns.

    Args:
        module: the LightningModule.
        group: the drivers of all replicas.
        device: the driver's.
        trace: where to record.

    Attributes:
        networks: of each network, in the order of their numbers, the group of this rank's stages.
        rest: the group of what no network owns: temperatures, loss weights, small networks.
        here: whether the rest is on the device; until a network is cut all may wait on the CPU.
    """

    def __init__(self, module: nn.Module, group: Group, device: torch.device, trace: Trace) -> None:
        self._module, self._group, self._device, self._trace = module, group, device, trace
        self.networks: list[ReplicaGroup] = []
        self._cut: set[str] = set()
        # DDP does not broadcast what is registered later
        self._buffers = frozenset(name for name, _ in module.named_buffers())
        self.here = False
        self.rest = self._make_rest()

    def add(self, replica_group: ReplicaGroup, names: Iterable[str]) -> None:
        """A network has been cut.

        Args:
            replica_group: of this rank's stages.
            names: in the LightningModule, of the tensors that stages own, on all ranks.
        """
        self.networks.append(replica_group)
        self._cut.update(names)
        self.here = True
        self.renew_rest()

    def settle(self) -> None:
        """No network will be cut: average all parameters as the driver's own."""
        if not self.here:
            self.here = True
            self.renew_rest()

    def renew_rest(self) -> None:
        """Take in what no network owns now."""
        self.rest.close()
        self.rest = self._make_rest()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for replica_group in (self.rest, *self.networks):
            replica_group.close()

    def _make_rest(self) -> ReplicaGroup:
        cut = self._identities()
        parameters = [p for p in self._module.parameters() if not (id(p) in cut or is_deferred(p))]
        if self.here:
            for tensor in (*parameters, *self._buffers_of_the_rest()):
                tensor.data = tensor.data.to(self._device)
        state = partial(state_buffers, self._module)
        return ReplicaGroup(parameters, self._buffers_of_the_rest, self._group, self._trace, state)

    def _buffers_of_the_rest(self) -> list[Tensor]:
        cut = self._identities()
        known = (b for name, b in self._module.named_buffers() if name in self._buffers)
        return [b for b in known if not (id(b) in cut or is_deferred(b))]

    def _identities(self) -> set[int]:
        """Of the tensors that networks own, looked up anew, since a buffer may be replaced."""
        if not self._cut:
            return set()
        named = tensors_of(self._module)
        return {id(named[name]) for name in self._cut if name in named}
