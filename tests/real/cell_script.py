"""One rank of a cell of the matrix, or the plain loop that it is compared with.

``python cell_script.py FOLDER MODEL SOURCE PLACE VARIANT``. The driver of several processes leaves
``rank0.pt`` in FOLDER, a single process ``alone.pt``, and the network that others load.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from networks_of_transformers import batches, network, optimizer_of, save
from torch import nn

Record = dict[str, Any]


def alone(folder: Path, model: str, source: Path | None, variant: str) -> Record:
    """A loop of one process, as a tutorial of PyTorch has it."""
    if source is not None:
        save(model, source)
    net = network(model, source, variant)
    optimizer, losses = optimizer_of(net), []
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for batch in batches(model):
        loss = net(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "before": before, "weights": net.state_dict()}


def held(module: nn.Module) -> int:
    """Bytes of the weights and buffers of a module that have memory here."""
    from torch._C import DisableTorchFunctionSubclass

    with DisableTorchFunctionSubclass():
        tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
        here = (t for t in tensors.values() if not t.is_meta and t.untyped_storage().nbytes())
        return sum(t.nbytes for t in here)


def in_stages(folder: Path, model: str, source: Path | None, place: str, variant: str) -> Record:
    """The same by the Trainer, in two stages."""
    import lightning.pytorch as pl

    from lightning_hybrid import HybridGabraStrategy
    from lightning_hybrid.errors import HybridError

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = None, []
            if place == "__init__":
                self.net = network(model, source, variant)

        def configure_model(self) -> None:
            if self.net is None:
                self.net = network(model, source, variant)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            out = self.net(**batch)
            self.losses.append(out.loss.item())
            self.held = held(self)
            self.kind = type(out.logits).__name__
            return out.loss

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.net)

    strategy = HybridGabraStrategy(
        data_parallel_size=1,
        pipeline_parallel_size=2,
        num_microbatches=2,
        schedule="1f1b" if variant == "1f1b" else "auto",
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loader = torch.utils.data.DataLoader(list(batches(model)), batch_size=None)
    try:
        trainer.fit(module, loader)
    except HybridError as error:
        return {"refused": str(error)}
    weights = trainer.strategy.full_state_dict()
    plan = trainer.strategy.plan
    return {
        "losses": module.losses,
        "weights": {name.removeprefix("net."): value for name, value in weights.items()},
        "held": module.held,
        "stages": plan.stages,
        "microbatches": plan.microbatches,
        "logits": getattr(module, "kind", ""),
    }


def main(folder: Path, model: str, source: str, *rest: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    place, variant = rest
    saved = folder / "saved" if source == "folder" else None
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        torch.save(alone(folder, model, saved, variant), folder / "alone.pt")
    else:
        torch.save(in_stages(folder, model, saved, place, variant), folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
