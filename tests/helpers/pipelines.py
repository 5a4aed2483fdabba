"""A replica in one process: a thread per rank, links in memory, the real engines."""

import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from nccl_rules import StrictReplica
from torch import Tensor, nn

from lightning_hybrid.comm.call_precision import CallPrecision
from lightning_hybrid.comm.protocol import Backward, Placement
from lightning_hybrid.comm.tensor_specs import CallKey, TensorSpec
from lightning_hybrid.stage.calls import Call, Traffic
from lightning_hybrid.stage.engine import Engine
from lightning_hybrid.stage.rank_stages import StageOptions
from lightning_hybrid.stage.trace import Trace

CPU = torch.device("cpu")
ALONE: Any = SimpleNamespace(size=lambda: 1)  # the group of one replica


class Layers(nn.Module):
    """A stage as the engine needs it: values and numbers in, values out."""

    checkpointed = False

    def __init__(self, *layers: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        modules = [layer for layer in layers if isinstance(layer, nn.Module)]
        self.modules_, self.layers = nn.ModuleList(modules), layers

    def forward(self, values: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        first, *others = values
        for layer in self.layers:
            first = layer(first)
        return [first, *others]


class Pipeline:
    """The stages of a network on the ranks of one replica.

    Args:
        stages: of the network.
        devices: of each the ``pp_rank`` of its rank; the last one is the driver's, 0.
        timeout_s: how long a rank waits for another one.
        schedule: its name.
        split: numbers of the stages whose backward is split.
        device: of the stages; ``meta`` stands for one that is not the CPU, and whose numbers no
            host can read.

    Attributes:
        replica: its ranks.
        engines: of each rank.
        errors: what each rank has raised in the last pass.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        devices: Sequence[int],
        timeout_s: float = 30.0,
        *,
        schedule: str = "gpipe",
        split: Sequence[int] = (),
        device: torch.device = CPU,
    ) -> None:
        self.replica = StrictReplica(max(devices) + 1, timeout_s, device)
        self.engines: dict[int, Engine] = {}
        self.errors: dict[int, Exception] = {}
        self._traffic: dict[CallKey, dict[int, list[Traffic]]] = {}
        self._numbers = 0
        for rank in sorted(set(devices)):
            own: Any = {n: stages[n] for n, owner in enumerate(devices) if owner == rank}
            mesh: Any = SimpleNamespace(
                survivors=None,
                coordinates=self.replica.lines[rank].coordinates,
                channel=self.replica.lines[rank].channel,
                wires=self.replica.lines[rank].wires,
                owners=lambda _: ALONE,
                device=device,
            )
            self.engines[rank] = Engine(
                nn.Module(),
                own,
                Placement(tuple(devices), (), schedule, tuple(split)),
                StageOptions(),
                mesh=mesh,
                seed=0,
                trace=Trace(rank, ""),
            )

    def open(self, parts: Sequence[Sequence[Tensor]], *, uses_rng: bool = False) -> dict[int, Call]:
        """A call with these inputs per micro-batch, on each rank."""
        specs = tuple(tuple(TensorSpec.of(value) for value in part) for part in parts)
        numbers = tuple(() for _ in parts)
        key = CallKey(0, specs, numbers, True, True, (), CallPrecision.current(CPU))
        exchange = key not in self._traffic
        known = self._traffic.setdefault(
            key, {d: [Traffic() for _ in e.owned] for d, e in self.engines.items()}
        )
        self._numbers += 1
        return {
            device: Call(
                self._numbers, 0, key, exchange, uses_rng, known[device], [{} for _ in engine.owned]
            )
            for device, engine in self.engines.items()
        }

    def forward(self, calls: Mapping[int, Call], parts: Sequence[list[Tensor]]) -> Any:
        """Run the forward pass on all ranks. Returns the driver's outputs, or raises its error."""
        return self.together(
            lambda device: self.engines[device].forward(calls[device], () if device else parts)
        )

    def backward(
        self, calls: Mapping[int, Call], gradients: Sequence[Any], *, input_gradient: bool = False
    ) -> Any:
        """Likewise the backward pass; returns the gradients of the inputs."""
        number = calls[0].number
        exchange = calls[0].exchange
        mode = Backward(0, number, 0, exchange, True, False, input_gradient, False)
        return self.together(
            lambda device: self.engines[device].backward(
                calls[device], mode, () if device else gradients
            )
        )

    def together(self, rank: Callable[[int], Any]) -> Any:
        """Run all ranks at once. Returns what the driver returns, or raises what it raises."""
        results: dict[int, Any] = {}
        self.errors = {}

        def run(device: int) -> None:
            try:
                results[device] = rank(device)
            except Exception as error:
                self.errors[device] = error

        threads = [threading.Thread(target=run, args=(device,)) for device in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        if 0 in self.errors:
            raise self.errors[0]
        return results[0]


PLACEMENTS = [(1, 0), (1, 2, 0), (1, 2, 3, 0), (1, 2, 1, 0), (0, 1, 0)]


def chain(count: int) -> list[nn.Module]:
    """Stages of a layer each, in float64."""
    torch.manual_seed(0)
    return [Layers(nn.Linear(4, 4).double(), nn.Tanh()) for _ in range(count)]


def slices(parts: int = 3, *, requires_grad: bool = False) -> list[list[Tensor]]:
    """Micro-batches for :func:`chain`."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(2, 4, generator=generator, dtype=torch.float64) for _ in range(parts)]
    return [[value.requires_grad_(requires_grad)] for value in values]


def one_device(network: Sequence[nn.Module], parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The outputs of stages one after the other."""
    outputs = []
    for values in parts:
        current = list(values)
        for stage in network:
            current = stage(current, ())
        outputs.append(current[0])
    return outputs


def gradients_of(network: Sequence[nn.Module]) -> list[Tensor]:
    """Those of all parameters."""
    return [parameter.grad for stage in network for parameter in stage.parameters()]  # type: ignore[misc]


def train_step(
    pipeline: Pipeline, parts: list[list[Tensor]], **how: bool
) -> tuple[list[Tensor], Any]:
    """Forward, then backward of the sum of squares of the outputs."""
    calls = pipeline.open(parts)
    outputs = [values[0] for values in pipeline.forward(calls, parts)]
    return outputs, pipeline.backward(calls, [[2 * o.detach()] for o in outputs], **how)
