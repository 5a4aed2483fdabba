"""Two, three and four devices under each schedule: simulated, beside the closed forms.

The parts of 3D-ResAttNet-18 (or of a wide perceptron) are measured here, one process of one thread,
at each size of a micro-batch; other devices are taken to be equal to this one and to have a core
and a memory of their own. ``simulated`` is the time of a batch with the cuts that the planner
chooses, with messages, all-reduce and optimizer steps; ``closed form`` is that of docs/schedules.md
with equal stages and nothing else. Both as shares of ``ddp``'s simulated time: the batch divided by
the number of devices, an all-reduce that nothing hides (as on CPUs), and the optimizer step.

    OMP_NUM_THREADS=1 python benchmarks/more_stages.py
"""

import argparse
import statistics
import sys
import timeit
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "helpers"))

from _results import record
from orders import streamed
from schedules import WINDOW, perceptron
from timed_orders import time_orders

from lightning_hybrid.asking.partition_costs import capture_call
from lightning_hybrid.graph import network_partitions
from lightning_hybrid.planning.cluster_description import ClusterDescription
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.search import PlanSettings, Replica, plan_stages
from lightning_hybrid.profiling.measure import measure
from lightning_hybrid.schedules import STREAMED
from models import ResAttNet3D

BATCH = 12
BATCHED = ("gpipe", "looped", "zero_bubble")
DELAYED = ("pipedream", "ddg", "fdg", "akintoye")
LINK = ClusterDescription.load("cpu-processes").levels[0]


class Measured:
    """A network whose parts are timed here."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...]) -> None:
        self._graph, self._leaves = capture_call(network, (torch.rand(BATCH, *shape),), {})
        self._partitions = network_partitions(self._graph)
        self._profiles: dict[int, PartitionTable] = {}
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        self.update_s = statistics.median(timeit.repeat(optimizer.step, number=1, repeat=9))
        """Seconds of an optimizer step of the whole network."""

    def profile(self, microbatches: int) -> PartitionTable:
        """What the parts take of a batch that is divided."""
        if microbatches not in self._profiles:
            leaves = self._graph.split(self._leaves, microbatches)[0]
            self._profiles[microbatches] = measure(
                self._graph, self._partitions, leaves, device=torch.device("cpu")
            )
        return self._profiles[microbatches]

    def ddp_s(self, devices: int) -> float:
        """Seconds of a batch that is divided, its gradients passed round a ring."""
        profile = self.profile(devices)
        size = sum(profile.gradient_bytes)
        rounds = 2 * (devices - 1)  # of a ring, in each of which a device sends its share
        ring_s = rounds * (size / devices / LINK.bandwidth_bytes_per_s + LINK.latency_s)
        return work_s(profile) + ring_s + self.update_s

    def plan(self, schedule: str, devices: int, microbatches: int) -> Plan:
        profile = self.profile(microbatches)
        sizes = profile.parameters
        table = replace(profile, step_s=[self.update_s * size / sum(sizes) for size in sizes])
        return plan_stages(
            table,
            PlanSettings(schedule=schedule, contiguous=schedule != "looped"),
            Replica(
                stages=devices,
                microbatches=microbatches,
                bandwidth_bytes_per_s=LINK.bandwidth_bytes_per_s,
                latency_s=LINK.latency_s,
            ),
        )

    def simulated_s(self, schedule: str, devices: int, microbatches: int) -> float:
        """Seconds of a batch; of 1F1B, a window's divided by its batches."""
        plan = self.plan(schedule, devices, microbatches)
        if schedule != "1f1b_stream":
            return plan.step_s
        rows = plan.rows
        window = time_orders(
            streamed(STREAMED["1f1b_stream"], devices, WINDOW),
            [row.forward_s or 0.0 for row in rows],
            [row.backward_s or 0.0 for row in rows],
            send_s=[(row.send_s or 0.0) + (row.latency_s or 0.0) for row in rows[:-1]],
        )
        return (window.makespan_s + max(row.step_s or 0.0 for row in rows)) / WINDOW

    def closed_s(self, schedule: str, devices: int, microbatches: int) -> float:
        """Seconds of a batch by docs/schedules.md: equal stages, nothing but their work."""
        profile = self.profile(microbatches)
        stage_s, more = work_s(profile) / devices, devices - 1
        if schedule == "gpipe":
            return (microbatches + more) * stage_s
        if schedule == "looped":
            rounds = self.plan(schedule, devices, microbatches).stages // devices
            return (microbatches + more / rounds) * stage_s
        if schedule == "zero_bubble":
            weights_s = sum(part or 0.0 for part in profile.weight_part_s) / devices
            return (microbatches + more) * stage_s - more * weights_s
        return (WINDOW + more) / WINDOW * stage_s if schedule == "1f1b_stream" else stage_s


def work_s(profile: PartitionTable) -> float:
    """Seconds of forward and backward of all parts."""
    return sum(profile.loads)


def main(network: str, side: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured = (
        Measured(perceptron(), (4096,))
        if network == "perceptron"
        else Measured(ResAttNet3D(18), (1, side, side, side))
    )
    alone_s = work_s(measured.profile(1)) + measured.update_s
    print(f"one device: {1e3 * alone_s:.1f} ms a batch of {BATCH}")
    for devices in (2, 3, 4):
        ddp_s = measured.ddp_s(devices)
        print(f"\n{devices} devices, ddp {1e3 * ddp_s:.1f} ms")
        print(f"{'':14}{'M':>4}{'simulated':>11}{'closed form':>13}  x ddp")
        for schedule in (*BATCHED, "1f1b_stream", *DELAYED):
            sizes = [m for m in (2, 3, 4, 6) if m >= devices] if schedule in BATCHED else [1]
            m = min(sizes, key=lambda count: measured.simulated_s(schedule, devices, count))
            simulated = measured.simulated_s(schedule, devices, m) / ddp_s
            closed = measured.closed_s(schedule, devices, m) / ddp_s
            record({f"{schedule}, {devices} devices: simulated by ddp": simulated}, "")
            print(f"{schedule:14}{m:4}{simulated:11.2f}{closed:13.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=["resattnet", "perceptron"], default="resattnet")
    parser.add_argument("--side", type=int, default=64)
    chosen = parser.parse_args()
    main(chosen.network, chosen.side)
