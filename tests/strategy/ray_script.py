"""Ray starts two workers on this machine, each of which trains as `training_script.py` does."""

import json
import sys
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from training_script import train


def work(config: dict[str, Any]) -> None:
    """What each worker of Ray runs."""
    folder = Path(config["folder"])
    _, seen = train(config, folder)
    rank = ray.train.get_context().get_world_rank()
    torch.save(seen, folder / f"rank{rank}.pt")
    ray.train.report({"step": seen["step"]})  # as all workers do, after fit


if __name__ == "__main__":
    config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
    ray.init(num_cpus=2, include_dashboard=False)
    ray.train.torch.TorchTrainer(
        work,
        train_loop_config=config | {"folder": sys.argv[1]},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=sys.argv[1]),
    ).fit()
