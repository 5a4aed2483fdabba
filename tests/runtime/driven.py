"""A driver and its workers in one process: the workers are threads, the network is really cut."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from datetime import timedelta
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
from pipelines import ALONE, CPU
from torch import Tensor, nn

from lightning_hybrid.comm.memory import MemoryReplica
from lightning_hybrid.network import Capture, NetworkGraph, cut, make_stages, network_partitions
from lightning_hybrid.network.check import run
from lightning_hybrid.network.deferred import Hollow
from lightning_hybrid.network.find import own_forward
from lightning_hybrid.runtime.driver import Driver
from lightning_hybrid.runtime.engine import StageOptions
from lightning_hybrid.runtime.worker import Worker


class Model(nn.Module):
    """Stands for a LightningModule: a network, and a parameter outside of it.

    Args:
        network: the network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network
        self.scale = nn.Parameter(torch.ones(()))


class Calls:
    """Calls of a network as its strategy sees them: a graph, and the arguments of the graph."""

    def __init__(self, network: nn.Module) -> None:
        self.compute: Callable[[NetworkGraph, Sequence[Any]], list[Any]] = self._at_once
        self._network, self._hollow = network, Hollow(network, CPU)
        self._capture = Capture(network, own_forward(network), self._lifted)

    def __call__(self, value: Tensor) -> Any:
        with self._hollow:
            return self._capture((value,), {})

    def graph(self, value: Tensor) -> NetworkGraph:
        """That of a call, which is computed here."""
        self(value)
        return self._graph

    def _lifted(self, graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        with self._hollow.lifted():
            return self.compute(graph, values)

    def _at_once(self, graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        self._graph = graph
        codes = cut(graph, network_partitions(graph), [])
        return run(graph, make_stages(codes, self._network, CPU), graph.bind(values))


class Replica:
    """One replica in this process.

    Args:
        model: the module; workers have copies of it.
        value: an input of its network.
        devices: ``pp_rank`` of each stage.
        parts: micro-batches.
        timeout_s: how long a rank waits for another one.
        continues: the network draws from the stream of the code around it.

    Attributes:
        ranks: of the replica.
        driver: the driver.
        workers: the workers, by rank.
        results: of each worker what it returned at the end of the run, or raised.
    """

    def __init__(
        self,
        model: Model,
        value: Tensor,
        devices: tuple[int, ...],
        parts: int = 2,
        timeout_s: float = 60.0,
        *,
        continues: bool = False,
    ) -> None:
        self.model = model
        self.ranks = MemoryReplica(max(devices) + 1, timeout_s)
        self.modules = {rank: deepcopy(model) for rank in range(1, max(devices) + 1)}
        self.results: dict[int, Any] = {}
        self.workers = {
            rank: Worker(module, self._mesh(rank), CPU, StageOptions())
            for rank, module in self.modules.items()
        }
        self._threads = [Thread(target=self._serve, args=(rank,)) for rank in self.modules]
        for thread in self._threads:
            thread.start()
        self._calls = Calls(model.net)
        graph = self._calls.graph(value)
        self.driver = Driver(model, self._mesh(0), CPU, 0, StageOptions())
        partitions = network_partitions(graph)
        share = len(partitions) / len(devices)
        codes = cut(graph, partitions, [round(share * k) for k in range(1, len(devices))])
        self.network = self.driver.add_network(
            "net",
            model.net,
            graph,
            codes,
            devices=devices,
            parts=parts,
            schedule="gpipe",
            continues=continues,
        )
        self._calls.compute = self.network

    def __call__(self, value: Tensor) -> Any:
        """Call the network."""
        with self.driver.remote.suspended():  # the capture looks at ordinary tensors
            return self._calls(value)

    def end(self, results: Any = None) -> None:
        """End the run as after a fit."""
        self.driver.gather_weights()
        self.driver.end(results, weights=True)
        self.close()

    def close(self) -> None:
        """Wait for the workers."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a worker hangs"
        self.driver.close()

    def _mesh(self, rank: int) -> Any:
        lines = self.ranks.lines[rank]
        return SimpleNamespace(
            coordinates=lines.coordinates,
            channel=lines.channel,
            wires=lines.wires,
            say_goodbye=lines.say_goodbye,
            timeout=timedelta(minutes=10),
            data_parallel=ALONE,
        )

    def _serve(self, rank: int) -> None:
        try:
            self.results[rank] = self.workers[rank].serve()
        except Exception as error:
            self.results[rank] = error
