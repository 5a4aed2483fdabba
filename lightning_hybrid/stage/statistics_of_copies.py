"""Running statistics of batch normalisation in a stage that several ranks have copies of.

One device updates the statistics once per micro-batch, in order. But copies of a stage take
micro-batches in turn, and each copy sees only its own. So each forward starts from statistics of
zero, and what it leaves there is what its micro-batch adds. At the end of the pass the copies
exchange these additions, and each copy updates its statistics with all micro-batches in their
order: all copies end with the same bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import ANOTHER_REPLICA, Group, start, wait
from lightning_hybrid.graph import Stage

_COUNT, _AVERAGES = "num_batches_tracked", ("running_mean", "running_var")


class StatisticsOfCopies:
    """The running statistics of one copy of a stage.

    For each micro-batch of this rank the forward runs inside of :meth:`noting`; at the end of the
    pass all copies call :meth:`replay`.

    Args:
        network: the network of the stage.
        group: returns the group of the copies in this replica, in the order in which they take
            micro-batches. Its first call is made by all copies together.
    """

    def __init__(self, network: nn.Module, group: Callable[[], Group]) -> None:
        self._network = network
        self._group = group
        self._seen: dict[int, Tensor] = {}

    @contextmanager
    def noting(self, stage: Stage, microbatch: int) -> Iterator[None]:
        """Context of a micro-batch's forward: it writes to zeros instead of to running statistics.

        At the end what it has written is kept for :meth:`replay`; after an error nothing is kept.

        Args:
            stage: the stage.
            microbatch: number of the micro-batch.
        """
        noted = {
            name: torch.zeros(buffer.shape, dtype=buffer.dtype, device=stage.device)
            for name, buffer in stage.changed().items()
        }
        with stage.instead(noted):
            yield
        self._seen[microbatch] = torch.cat([n.flatten().to(torch.float64) for n in noted.values()])

    def replay(self, stage: Stage, microbatches: int) -> None:
        """Update the running statistics with all micro-batches of a pass; all copies call it.

        A micro-batch whose forward has failed changes nothing.

        Args:
            stage: the stage.
            microbatches: number of micro-batches of the pass, those of other copies included.
        """
        # (all copies have the same code: either all return here or none)
        seen, self._seen = self._seen, {}
        if not stage.written:
            return
        group = self._group()
        copies, me = group.size(), group.rank()
        sizes = [tensor.numel() for tensor in stage.changed().values()]
        shape = -(-microbatches // copies), 1 + sum(sizes)
        # float64 holds every float32 and every count exactly, so that one message carries both
        mine = torch.zeros(shape, dtype=torch.float64, device=stage.device)
        for microbatch, values in seen.items():
            line = mine[microbatch // copies]
            line[0], line[1:] = 1.0, values
        parts = [torch.empty_like(mine) for _ in range(copies)]
        assert all(microbatch % copies == me for microbatch in seen)
        wait(start(group.allgather, [parts], [mine], peer=ANOTHER_REPLICA), ANOTHER_REPLICA)
        # in the order of micro-batches, as on one device: in a moving average later ones weigh more
        written = self._written(stage)
        for microbatch in range(microbatches):
            here, *values = parts[microbatch % copies][microbatch // copies].split([1, *sizes])
            self._update(written, dict(zip(written, values)), here)

    def _written(self, stage: Stage) -> dict[str, Tensor]:
        """By name, the stage's running statistics as tensors whose writes autograd does not notice.

        Else autograd would refuse the backward, since it saves the buffers of a batch
        normalisation, though that backward does not need them. If the driver has a copy of the
        stage, its proxies of the statistics are written here without a message: their owner writes
        the same values.
        """
        with as_they_are():
            return {name: tensor.data for name, tensor in stage.changed().items()}

    def _update(self, written: dict[str, Tensor], added: dict[str, Tensor], here: Tensor) -> None:
        """Add one micro-batch, which any copy may have computed, to this copy's statistics.

        With a momentum of m, and a layer that the forward has called u times, a running mean or
        variance becomes (1 - m) ** u times what it was, plus ``added``. The device is not waited
        for.

        Args:
            written: by name, the statistics to update.
            added: by name, what the layer wrote in the micro-batch's forward, where its statistics
                began with zero.
            here: a tensor with 1; or with 0 if the forward has failed, and then ``added`` has
                zeros.
        """
        for owner in dict.fromkeys(name.rpartition(".")[0] for name in written):
            prefix = f"{owner}." if owner else ""
            layer: Any = self._network.get_submodule(owner)
            count, momentum = prefix + _COUNT, layer.momentum
            # (how often the layer ran on this micro-batch: if it is called twice, it counts twice)
            uses = added.get(count, here).reshape(())
            if count in written:
                written[count].add_(uses.to(written[count].dtype))
            if momentum is None:  # a cumulative average: the noted value is that of these uses
                share = uses / written[count].clamp(min=1)
                kept = 1.0 - share
            else:
                share, kept = here.reshape(()), (1.0 - momentum) ** uses
            for name in (prefix + key for key in _AVERAGES):
                if name in written:
                    average = written[name]
                    value = added[name].to(average.dtype).view_as(average)
                    average.mul_(kept).add_(value * share)
