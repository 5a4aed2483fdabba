from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from models.classifier import ResAttNetClassifier
from models.errors import UseError
from models.explain import explain
from models.findings import MethodName


class DrawExplanations(Callback):
    """Draw maps of a few validation scans while training goes on: ``explain/epoch_N`` of the run.

    Works under any strategy that can write a checkpoint: the weights are gathered as for one, and
    put into a network of their own on the CPU of rank 0, so that neither hooks nor gradients touch
    what is trained, on whichever device its layers lie.

    Args:
        every_n_epochs: How often to draw.
        layer: Layer of the network to explain.
        methods: How, see ``explain``.
        subjects: How many scans.
    """

    def __init__(
        self,
        every_n_epochs: int = 10,
        layer: str = "layer1",
        methods: list[MethodName] = ["gradcam", "hirescam"],  # noqa: B006 (read only, for YAML)
        subjects: int = 2,
    ) -> None:
        self.every_n_epochs = every_n_epochs
        self.layer = layer
        self.methods = methods
        self.subjects = subjects

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        if epoch % self.every_n_epochs and epoch != trainer.max_epochs:
            return
        if not isinstance(pl_module, ResAttNetClassifier):
            raise UseError(f"DrawExplanations explains ResAttNetClassifier, not {type(pl_module)}.")
        log_dir = trainer.log_dir  # asks all ranks
        # gathers on some strategies: every rank takes part
        state = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero and not trainer.sanity_checking:
            folder = Path(log_dir or trainer.default_root_dir) / "explain" / f"epoch_{epoch}"
            # making a network and opening a loader draw numbers; the run's own stay as they are
            with torch.random.fork_rng(devices=[]):
                self._draw(trainer, pl_module, state, folder)

    def _draw(
        self,
        trainer: Trainer,
        pl_module: ResAttNetClassifier,
        state: dict[str, Any],
        folder: Path,
    ) -> None:
        # plotting libraries are slow to import
        from models.explanation import Writer

        network = pl_module.make_network()
        prefix = "network."
        network.load_state_dict(
            {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        )
        loader = trainer.val_dataloaders
        batches: list[Any] = []
        seen = 0
        for batch in loader if loader is not None else ():
            batches.append(batch)
            seen += len(batch["label"])
            if seen >= 4 * self.subjects:  # enough to have both classes, as a rule
                break
        found = explain(
            {"trained": network}, lambda: batches, self.methods, self.layer, self.subjects
        )
        Writer(folder, pl_module.class_names, self.layer, {}).write(found)
