"""A driver and its workers in one process: the workers are threads, the network is really cut."""

from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any

import torch
from in_memory import MemoryGroup
from nccl_rules import StrictGroupOfRank, StrictReplica
from pipelines import ALONE, CPU
from torch import Tensor, nn
from torch.optim import SGD

from lightning_hybrid.capture import Capture
from lightning_hybrid.capture.watched_calls import own_forward
from lightning_hybrid.comm.activation_links import copies_of
from lightning_hybrid.comm.protocol import Placement
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.driver.driver import Driver
from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.driver.streamed_calls import Batches
from lightning_hybrid.errors import HybridError
from lightning_hybrid.graph import NetworkGraph, cut, make_stages, network_partitions
from lightning_hybrid.remote.hollow_network import Hollow
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.stage.module_outline import ModuleOutline
from lightning_hybrid.stage.rank_stages import StageOptions
from lightning_hybrid.stage.stage_check import run
from lightning_hybrid.worker.worker import Worker

PLAIN = StageOptions()


class Model(nn.Module):
    """Stands for a LightningModule: a network, and a parameter outside of it.

    Args:
        network: the network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network
        self.scale = nn.Parameter(torch.ones(()))


def model() -> Model:
    """Four layers, in float64."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(3, 3), nn.Tanh())]
    return Model(nn.Sequential(*layers)).double()


def batches(count: int = 4) -> list[Tensor]:
    """Inputs of :func:`model`."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(count)]


def loss_of(module: Model, output: Tensor) -> Tensor:
    """Of what the network has returned, with the parameter outside of it."""
    return (module.scale * output).square().mean()


_GRAPHS: dict[Hashable, NetworkGraph] = {}
"""By all that a capture of such a network depends on: a test is not about it, and it takes long."""


def _kind(network: nn.Module, value: Tensor) -> Hashable:
    """What a capture depends on; ``None``: perhaps on more, as on the Python of a class of its own.

    A class whose Python looks at nothing but its layers says so: ``captured_once = True``.
    """
    modules = list(network.modules())
    plain = all(
        type(m).__module__.startswith("torch.nn.modules") or getattr(m, "captured_once", False)
        for m in modules
    )
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if not plain or any("forward" in vars(m) or any(vars(m)[h] for h in hooks) for m in modules):
        return None
    named = (*network.named_parameters(), *network.named_buffers(), ("", value))
    return (
        repr(network),
        tuple((type(m), m.training) for m in modules),
        tuple((name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in named),
        torch.is_grad_enabled(),
    )


class Calls:
    """Calls of a network as its strategy sees them: a graph, and the arguments of the graph.

    Networks that are alike have one graph, with which each of them is called from then on.
    """

    def __init__(self, network: nn.Module, device: torch.device = CPU) -> None:
        self.compute: Callable[[NetworkGraph, Sequence[Any]], list[Any]] = self.at_once
        self._network, self._device = network, device
        self._hollow = Hollow(network, device)
        self._capture = Capture(network, own_forward(network), self._lifted)
        self._known: NetworkGraph | None = None

    def __call__(self, value: Tensor) -> Any:
        if self._known is not None:
            [output] = self.compute(self._known, _arguments(self._known, value))
            return output
        with self._hollow:
            return self._capture((value,), {})

    def graph(self, value: Tensor) -> NetworkGraph:
        """That of a call, which is computed here."""
        kind = _kind(self._network, value)
        if kind in _GRAPHS:
            self._known = replace(_GRAPHS[kind], network=self._network)
        self(value)
        if kind is not None:
            self._known = _GRAPHS[kind] = self._graph
        return self._graph

    def _lifted(self, graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        with self._hollow.lifted():
            return self.compute(graph, values)

    def at_once(self, graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        """Without stages."""
        self._graph = graph
        codes = cut(graph, network_partitions(graph), [])
        return run(graph, make_stages(codes, self._network, self._device), graph.bind(values))


def arguments(call: NetworkCall, value: Tensor) -> list[Any]:
    """Those of a graph, as far as a call looks at them: the weights are where they are."""
    return _arguments(call.specialization.graph, value)


def _arguments(graph: NetworkGraph, value: Tensor) -> list[Any]:
    [leaf] = graph.inputs
    found: list[Any] = [None] * len(graph.place)
    found[graph.place[leaf]] = value
    return found


class Ranks:
    """A driver, and its workers as threads of this process. Nothing is cut yet.

    Args:
        model: the module; workers have shells of it.
        workers: how many.
        timeout_s: how long a rank waits for another one.
        options: how stages compute.
        batches: that it is trained on, as far as later ones are known.
        on: the device of each ``pp_rank``; the module goes to that of the driver.
        trains: see :class:`lightning_hybrid.driver.driver.Driver`.
        blocking: whether a send or a receive that begins is over.

    Attributes:
        model: the module.
        ranks: of the replica.
        driver: the driver.
        modules: the workers', by ``pp_rank``.
        workers: likewise.
        errors: of each worker what it raised.
    """

    def __init__(
        self,
        model: Model,
        workers: int,
        timeout_s: float = 60.0,
        *,
        options: StageOptions = PLAIN,
        batches: Batches | None = None,
        on: Callable[[int], torch.device] = lambda _: CPU,
        trains: bool = False,
        blocking: bool = True,
    ) -> None:
        self.model, self._on = model.to(on(0)), on
        self.ranks = StrictReplica(workers + 1, timeout_s, on(0), blocking=blocking)
        outline = ModuleOutline.of(model)
        self.modules: dict[int, Any] = {rank: outline.shell() for rank in range(1, workers + 1)}
        self.errors: dict[int, Exception] = {}
        self._lock = Lock()
        self._groups: dict[tuple[str | int, ...], MemoryGroup] = {}
        self._members: dict[tuple[str | int, ...], Any] = {}
        self.workers = {
            rank: Worker(module, self.mesh(rank), options) for rank, module in self.modules.items()
        }
        self._start()
        nothing: Any = None
        self._options = DriverOptions(
            seed=0, stages=options, planner=nothing, progress=nothing, trains=trains
        )
        self.driver = Driver(model, self.mesh(0), self._options, batches=batches)

    def _start(self) -> None:
        self._threads = [Thread(target=self._serve, args=(rank,)) for rank in self.modules]
        for thread in self._threads:
            thread.start()

    def begin_other_stages(self) -> None:
        """End all stages; in the same run a network may be cut again."""
        self.driver.bring_all()
        self.driver.close()
        self.driver.end_stages()
        for thread in self._threads:
            thread.join(60)
        self.errors.clear()
        self.workers = {
            rank: Worker(
                self.modules[rank],
                self.mesh(rank),
                self._options.stages,
                before=old,
            )
            for rank, old in self.workers.items()
        }
        self._start()
        before = self.driver
        self.driver = Driver(self.model, self.mesh(0), self._options, before=before)
        self.driver.optimizers.connect(before.optimizers.optimizers)

    def end(self) -> None:
        """End the run as after a fit."""
        self.driver.weights.bring_into_module()
        self.driver.end()
        self.close()

    def close(self) -> None:
        """Wait for the workers."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a worker hangs"
        self.driver.close()

    def mesh(self, rank: int) -> Any:
        """That of a rank."""
        lines = self.ranks.lines[rank]
        return SimpleNamespace(
            coordinates=lines.coordinates,
            device=self._on(rank),
            channel=lines.channel,
            wires=lines.wires,
            say_goodbye=lines.say_goodbye,
            timeout=timedelta(minutes=10),
            backend="gloo",
            data_parallel=ALONE,
            survivors=None,
            drivers=ALONE,
            owners=lambda copies: self._group(copies, rank, "owners"),
            siblings=lambda copies: self._group(copies, rank, "siblings"),
        )

    def _group(self, copies: tuple[int, ...], rank: int, kind: str) -> Any:
        if len(copies) == 1:
            return ALONE
        with self._lock:
            group = self._groups.setdefault((kind, *copies), MemoryGroup(len(copies)))
            member = StrictGroupOfRank(group, copies.index(rank), self._on(rank))
            return self._members.setdefault((kind, rank, *copies), member)

    def _serve(self, rank: int) -> None:
        if self._on(rank).type == "cuda":
            torch.cuda.set_device(self._on(rank))
        try:
            self.workers[rank].serve()
        except Exception as error:
            self.errors[rank] = error
            # as `world.py` does: it tells the others, and then its groups end
            self.mesh(rank).say_goodbye(Failure.of(error, f"rank {rank}"))
            self.ranks.kill(rank)


class Replica(Ranks):
    """A replica whose network is cut.

    Args:
        model: the module; workers have shells of it.
        value: an input of its network.
        devices: ``pp_rank`` of each stage, or of all its copies.
        parts: micro-batches.
        timeout_s: how long a rank waits for another one.
        continues_generators: the network draws from the stream of the code around it.
        schedule: name of the schedule.
        split: numbers of the stages whose backward it splits.
        ends: of each stage the number after its last partition; empty: shares that are equal.
        options: how stages compute.
        batches: see :class:`Ranks`.
        on: likewise.
        trains: likewise.

    Attributes:
        network: as the driver sees it.
        call: of the network, by the graph that it was cut with.
    """

    def __init__(
        self,
        model: Model,
        value: Tensor,
        devices: tuple[int | tuple[int, ...], ...],
        parts: int = 2,
        timeout_s: float = 60.0,
        *,
        continues_generators: bool = False,
        schedule: str = "gpipe",
        split: Sequence[int] = (),
        ends: Sequence[int] = (),
        options: StageOptions = PLAIN,
        batches: Batches | None = None,
        on: Callable[[int], torch.device] = lambda _: CPU,
        trains: bool = False,
    ) -> None:
        super().__init__(
            model,
            max(map(max, map(copies_of, devices))),
            timeout_s,
            options=options,
            batches=batches,
            on=on,
            trains=trains,
            # (what runs before its turn is sent before anybody waits for it)
            blocking=schedule not in STREAMED,
        )
        self._calls = Calls(model.net, on(0))
        self._value, self._devices, self._parts = value, devices, parts
        self.cut(ends, schedule=schedule, split=split, continues_generators=continues_generators)

    def cut(
        self,
        ends: Sequence[int] = (),
        *,
        schedule: str = "gpipe",
        split: Sequence[int] = (),
        continues_generators: bool = False,
    ) -> None:
        """Give all ranks their stages; see the arguments of the class."""
        self._calls.compute = self._calls.at_once
        devices, graph = self._devices, self._calls.graph(self._value)
        partitions = network_partitions(graph)
        # a copy of the driver's has no layers behind it
        collects = any(0 in copies_of(device) for device in devices[:-1])
        stages = len(devices) - collects
        equal = [round(len(partitions) / stages * k) for k in range(1, stages)]
        codes = cut(graph, partitions, list(ends[:-1]) or equal, collects=collects)
        placement = Placement.of(codes, devices, schedule, split)
        try:
            self.network = self.driver.add_network(
                "net", self.model.net, codes, placement, continues_generators=continues_generators
            )
        except HybridError:  # refused: the workers wait
            let_go(self)
            raise
        self.call = NetworkCall(self.network, self.network.specialize(graph, self._parts))
        self._calls.compute = lambda _, values: self.call(values)

    def __call__(self, value: Tensor) -> Any:
        """Call the network."""
        with self.driver.remote.suspended():  # the capture looks at ordinary tensors
            return self._calls(value)


def let_go(ranks: Ranks) -> None:
    """Tell the workers to go, if nobody has ended them."""
    if any(thread.is_alive() for thread in ranks._threads):
        ranks.driver.abort(Failure("the test is over"))
        ranks.close()


def train_one_device(module: Model, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train with all batches. Returns the losses."""
    losses = []
    for value in batches():
        optimizer.zero_grad()
        loss = loss_of(module, torch.cat([module.net(part) for part in value.chunk(2)]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(replica: Replica, optimizer: torch.optim.Optimizer) -> list[float]:
    """The same, on all ranks of a replica."""
    replica.driver.optimizers.connect([optimizer])
    losses = []
    for step, value in enumerate(batches()):
        replica.driver.begin_step(step)
        optimizer.zero_grad()
        loss = loss_of(replica.model, replica(value))
        replica.driver.gradients.before_backward()
        loss.backward()
        replica.driver.gradients.after_backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class TrainedBeside:
    """A replica and one device, with the same gradients.

    Args:
        replicas: makes replicas.
        devices: ``pp_rank`` of each stage.
        kind: of the optimizer.
    """

    def __init__(self, replicas: Any, devices: tuple[int, ...], kind: Any = SGD) -> None:
        self.module = model()
        self.reference = deepcopy(self.module)
        self.replica: Replica = replicas(self.module, devices)
        self.mine = kind(self.module.parameters(), lr=0.1)
        self.theirs = kind(self.reference.parameters(), lr=0.1)
        self.optimizers = self.replica.driver.optimizers
        self.clipping = self.replica.driver.clipping
        self.optimizers.connect([self.mine])
        self.backward()

    def backward(self) -> None:
        [value] = batches(1)
        loss_of(self.module, self.replica(value)).backward()
        self.replica.driver.gradients.after_backward()
        loss_of(self.reference, self.reference.net(value)).backward()

    def assert_same_gradients(self) -> None:
        torch.testing.assert_close(
            gradients(self.module), gradients(self.reference), rtol=1e-12, atol=1e-12
        )


def gradients(module: nn.Module) -> list[Tensor]:
    """Copies of the gradients of a module's parameters, of those that have one."""
    found = [p.grad for p in module.parameters()]
    return [gradient.clone() for gradient in found if gradient is not None]
