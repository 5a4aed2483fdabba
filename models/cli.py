"""``python -m models fit|validate|test|predict|explain --config FILE``."""

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.cli import LightningCLI

from datamodules import ADNIDataModule, DataError
from models.classifier import ResAttNetClassifier
from models.tables import prediction_rows, write_table

DESCRIPTION = "Train, test and explain 3D-ResAttNet on ADNI. Each command has its own --help."


class ExplainingTrainer(Trainer):
    """A Trainer with one more command, ``explain``."""

    def explain(
        self,
        model: ResAttNetClassifier,
        datamodule: ADNIDataModule,
        ckpt_path: str,
        out: Path | None = None,
        layer: str = "layer3",
        subjects: int = 4,
        truth: Path | None = None,
    ) -> None:
        """Draw Grad-CAM overlays of a few held-out subjects.

        Args:
            model: The classifier; its weights are those of the checkpoint afterwards.
            datamodule: Gives the held-out scans.
            ckpt_path: Checkpoint of the run to explain.
            out: Folder for the pictures and ``explain.tsv``; default: ``explain`` in the run's.
            layer: Layer of the network to explain, layer1 to layer4; later ones have larger cells.
            subjects: How many test subjects to explain, of both classes in turn.
            truth: Folder with one mask per scan, IMAGE_ID.nii.gz, to draw and to score against.
        """
        # plotting libraries are slow to import, and only this command needs them
        from models.explain import explain_scans, of_both_classes
        from models.overlay import save_overlay

        checkpoint = torch.load(ckpt_path, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["state_dict"])
        model.to("cuda" if isinstance(self.accelerator, CUDAAccelerator) else "cpu")
        datamodule.prepare_data()
        datamodule.setup("test")
        # as Lightning does: refuses when these subjects may have been trained on
        datamodule.load_state_dict(checkpoint.get(type(datamodule).__qualname__, {}))
        samples = of_both_classes(datamodule.test_dataloader(), subjects)
        scans = explain_scans(model, samples, layer, truth)
        folder = out or run_folder(ckpt_path) / "explain"
        folder.mkdir(parents=True, exist_ok=True)
        for scan in scans:
            picture = folder / f"{scan.row.subject}_{scan.row.image_id}_{layer}.png"
            save_overlay(scan, picture, datamodule.class_names)
        write_table([asdict(scan.row) for scan in scans], folder / "explain.tsv")
        print(f"{len(scans)} overlays and explain.tsv written to {folder}")


class ClassifierCLI(LightningCLI):
    """The LightningCLI of the use case: one folder per run, results beside the checkpoint."""

    trainer: ExplainingTrainer

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return LightningCLI.subcommands() | {"explain": {"model", "datamodule"}}

    def before_instantiate_classes(self) -> None:
        if self.subcommand == "fit":
            return
        # only training makes a run; a logger here would start another one's folder
        self.config[self.subcommand].trainer.logger = False
        self.save_config_callback = None
        # ModelCheckpoint remembers its run's folder, and this is no run
        warnings.filterwarnings("ignore", "The dirpath has changed", UserWarning)
        if not self.config[self.subcommand].get("ckpt_path"):
            self.parser.error(f"{self.subcommand} needs the checkpoint of a run: --ckpt_path FILE")

    def after_instantiate_classes(self) -> None:
        if self.datamodule.num_classes != 2:
            raise DataError(
                "BAD_TASK",
                f"task {self.datamodule.task.name} has {self.datamodule.num_classes} classes",
                action="use ad_nc or pmci_smci: the classifier here knows two classes",
            )
        loggers = self.trainer.loggers
        # ask all for their number before the first one makes the folder and the next one counts on
        _ = [logger.version for logger in loggers]
        _ = [logger.experiment for logger in loggers]  # type: ignore[attr-defined]

    def after_fit(self) -> None:
        log_dir = self.trainer.log_dir  # asks all ranks
        # a strategy that cuts the network into stages has a plan, others have none
        plan = getattr(self.trainer.strategy, "plan", None)
        if self.trainer.is_global_zero and plan is not None and log_dir is not None:
            plan.save(Path(log_dir) / "plan.json")
        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        if self.trainer.is_global_zero and best:
            print(f"best checkpoint: {best}")

    def after_test(self) -> None:
        self._write_metrics("test")

    def after_validate(self) -> None:
        self._write_metrics("validate")

    def predict(self, **arguments: Any) -> None:
        """Write the predictions of every rank that has some as a table."""
        batches = self.trainer.predict(**arguments)
        rank = self.trainer.global_rank
        if rank < self.trainer.world_size and batches:
            suffix = f"_{rank}" if self.trainer.world_size > 1 else ""
            path = self._run_folder() / f"predictions{suffix}.tsv"
            write_table(prediction_rows(batches), path)
            print(f"predictions written to {path}")

    def _write_metrics(self, name: str) -> None:
        if self.trainer.is_global_zero:
            metrics = {key: float(value) for key, value in self.trainer.callback_metrics.items()}
            path = self._run_folder() / f"{name}_metrics.json"
            path.write_text(json.dumps(metrics, indent=2) + "\n")
            print(f"metrics written to {path}")

    def _run_folder(self) -> Path:
        return run_folder(self.config[self.subcommand].ckpt_path)


def run_folder(ckpt_path: str) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    folder = Path(ckpt_path).parent
    return folder.parent if folder.name == "checkpoints" else folder


def main() -> None:
    """Run one command of ``python -m models``."""
    # Lightning 2.6 walks trees in a way that torch 2.13 calls old; a user can do nothing about it
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    try:
        ClassifierCLI(
            ResAttNetClassifier,
            ADNIDataModule,
            trainer_class=ExplainingTrainer,
            # a run's folder is new; the same file again means a resumed run
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,  # the model has its own
            load_from_checkpoint_support=False,  # the checkpoint then needs no CLI to be loaded
            parser_kwargs={"prog": "python -m models", "description": DESCRIPTION},
        )
    except DataError as error:  # says itself what is wrong, where, and what to do
        sys.exit(str(error))
