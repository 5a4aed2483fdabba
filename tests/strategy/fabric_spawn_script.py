"""Two replicas that are spawned: ``python fabric_spawn_script.py STAGES FILE``; 0: plain DDP."""

import sys
from typing import Any

import torch
from fabric_script import Convolutions, images, trained, weights
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import DDPStrategy

from lightning_hybrid import HybridGabraFabricStrategy


def loop(fabric: Fabric, net: Convolutions) -> dict[str, Any]:
    drawn = torch.rand(2).tolist()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    losses = trained(fabric, model, optimizer, fabric.setup_dataloaders(images()))
    # no tensors: another process may ask for their memory when this one has ended
    found = {name: value.tolist() for name, value in weights(model).items()}
    return {"drawn": drawn, "losses": losses, "weights": found}


if __name__ == "__main__":
    stages = int(sys.argv[1])
    strategy: Any = DDPStrategy(start_method="spawn")
    if stages:
        strategy = HybridGabraFabricStrategy(
            data_parallel_size=2, pipeline_parallel_size=stages, start_method="spawn"
        )
    fabric = Fabric(accelerator="cpu", devices=2 * max(1, stages), strategy=strategy)
    seed_everything(5)
    torch.rand(3)  # so that the generators are not as just after the seed
    torch.save(fabric.launch(loop, Convolutions().double()), sys.argv[2])
