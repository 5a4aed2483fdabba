"""What profiling costs: 3D-ResAttNet-34, 64x64x64, for micro-batches of 2, 3 and 6.

Claim: under 60 s on two cores (and under 10 s on a GPU), capture included; nothing the second time.

    python benchmarks/profile_cost.py [--depth 34] [--side 64]
"""

import argparse
import os
import tempfile
import time
from functools import partial

import torch
from _capturing import capture
from _results import record

from lightning_hybrid.graph import network_partitions
from lightning_hybrid.profiling.measure import measure
from lightning_hybrid.profiling.profile_cache import cached
from models import ResAttNet3D

SIZES = (2, 3, 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, choices=[18, 34], default=34)
    parser.add_argument("--side", type=int, default=64)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = ResAttNet3D(arguments.depth).to(device)
    x = torch.randn(max(SIZES), 1, *3 * [arguments.side], device=device)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_HYBRID_CACHE"] = folder
        for number in ("first", "second"):
            print(f"{number} time, {device.type}, {torch.get_num_threads()} threads")
            start = time.perf_counter()
            graph, _ = capture(network, x)
            partitions = network_partitions(graph)
            print(f"  captured: {len(partitions)} partitions, {time.perf_counter() - start:.1f} s")
            for size in SIZES:
                begin, leaves = time.perf_counter(), [x[:size]]
                profile = cached(
                    partial(measure, graph, partitions, leaves, device=device),
                    graph,
                    partitions,
                    leaves,
                    device,
                )
                parts = [sum(getattr(profile, f"{what}_s")) for what in ("forward", "backward")]
                print(
                    f"  micro-batch of {size}: {time.perf_counter() - begin:.2f} s for "
                    + "a forward of {:.3f} s, a backward of {:.3f} s".format(*parts)
                )
            record({f"{number} time": time.perf_counter() - start}, "s")
            print(f"  in all {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
