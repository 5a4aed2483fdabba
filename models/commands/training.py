"""``python -m models`` fit, validate, test, predict and explain: a LightningCLI."""

import logging
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from datamodules import ADNIDataModule
from models.classifier import ResAttNetClassifier
from models.environment import save_environment
from models.errors import UseError
from models.findings import MethodName
from models.maps.common import named_layer
from models.parser import Parser
from models.predictions import Prediction, arrays, table_rows
from models.results import beside, free_path, run_folder, save_result, scans_hash, writable
from models.scores import measured, not_learnt
from models.tables import write_table
from models.transfer import read_checkpoint, scale_of, state_of
from models.write_predictions import WritePredictions

DESCRIPTION = """Train, test and explain 3D-ResAttNet on ADNI. Each command has its own --help.
With `test --cohort ROOT` all people of another cohort are tested on, with `predict --scans WHAT`
scans are classified that nobody has labelled. More commands work on runs: `report RUN` writes one
HTML page about a run, `folds --config FILE --folds K` trains and tests K of them and sums them up,
`compare RUN RUN` tests whether two differ, `groups RUN` where the maps of two classes do,
`export --ckpt_path BEST` makes a MONAI bundle."""


class ExplainingTrainer(Trainer):
    """A Trainer with one more command, ``explain``."""

    def explain(
        self,
        model: ResAttNetClassifier,
        datamodule: ADNIDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        out: Path | None = None,
        layer: str = "layer1",
        methods: list[MethodName] = ["gradcam", "hirescam", "gradient"],  # noqa: B006 (read only)
        subjects: int = 4,
        truth: Path | None = None,
        shuffled_ckpt: str | None = None,
        keep_maps: bool = False,
    ) -> None:
        """Explain held-out scans: Grad-CAM and other maps, overlays, localisation scores.

        Args:
            model: The classifier; its weights are those of the checkpoint afterwards.
            datamodule: Gives the held-out scans.
            ckpt_path: Checkpoint of the run to explain.
            weights_only: Not used: checkpoints are always read without running code of theirs. The
                configuration that fit wrote has it.
            out: Folder for pictures, maps and tables; default: ``explain`` in the run's.
            layer: Layer of the network to explain, layer1 to layer4; later ones have larger cells.
            methods: Of gradcam, gradcam++, hirescam, gradient (of the input), smoothgrad,
                integrated (gradients), occlusion (slow), attention.
            subjects: How many scans to draw: one of another class, the rest of the explained class
                about the median of its scores. All are scored.
            truth: Folder with one mask per scan, IMAGE_ID.nii.gz, to draw and to score against; for
                a synthetic cohort truth/planted.
            shuffled_ckpt: Checkpoint of a run with --data.shuffle_labels true: scored beside this
                one, as a check of the method.
            keep_maps: Whether to keep the map of every scan, in ``maps``, for `groups`.
        """
        # plotting libraries are slow to import, and only this command needs them
        from models.explain import explain, make_explainer
        from models.explanation import Writer

        if ckpt_path is None:
            raise UseError("explain needs the checkpoint of a run: --ckpt_path FILE")
        networks = _networks(model, ckpt_path, shuffled_ckpt)
        try:
            named_layer(model.network, layer)
            for method in methods:
                make_explainer(method, model.network, layer)
        except ValueError as error:
            raise UseError(str(error)) from error
        folder = writable(out or run_folder(ckpt_path) / "explain")
        checkpoint = read_checkpoint(ckpt_path)
        device = "cuda" if isinstance(self.accelerator, CUDAAccelerator) else "cpu"
        for network in networks.values():
            network.to(device)
        datamodule.prepare_data()
        datamodule.setup("test")
        # as Lightning does: refuses when these subjects may have been trained on
        datamodule.load_state_dict(state_of(datamodule, checkpoint))
        if shuffled_ckpt is not None:
            datamodule.refuse_other_images(state_of(datamodule, read_checkpoint(shuffled_ckpt)))
        _refuse_no_truth(truth, [record.image_id for record in datamodule.scans("test")])
        loader = datamodule.test_dataloader()
        keep = folder / "maps" if keep_maps else None
        scale = scale_of(checkpoint)
        findings = explain(networks, lambda: loader, methods, layer, subjects, truth, keep, scale)
        files = {record.image_id: record.path for record in datamodule.records}
        Writer(folder, model.class_names, layer, files).write(findings)
        save_environment(folder)
        print(f"{len(findings.cases)} cases drawn, {_scored(findings.rows)}; written to {folder}")


def _networks(
    model: ResAttNetClassifier, ckpt_path: str, shuffled_ckpt: str | None
) -> dict[str, torch.nn.Module]:
    """The network of the checkpoint, and those that know nothing."""
    networks: dict[str, torch.nn.Module] = {"trained": model.network}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        networks["untrained"] = model.make_network()
        if shuffled_ckpt is not None:
            networks["shuffled"] = model.make_network()
    for name, path in (("trained", ckpt_path), ("shuffled", shuffled_ckpt)):
        if path is not None:
            state = read_checkpoint(path)["state_dict"]
            weights = {k.removeprefix("network."): v for k, v in state.items()}
            try:
                networks[name].load_state_dict(weights)
            except RuntimeError as error:
                raise UseError(
                    f"The network in {path} is not that of these options ({error}). Use the run's "
                    "own settings: --config RUN/config.yaml."
                ) from error
    return networks


def _refuse_no_truth(truth: Path | None, image_ids: Sequence[str]) -> None:
    """Refuse a folder that has a mask of none of the scans, which would score nothing."""
    if truth is None or any((truth / f"{image_id}.nii.gz").is_file() for image_id in image_ids):
        return
    what = "has no mask of any held-out scan" if truth.is_dir() else "is no folder"
    raise UseError(
        f"--truth {truth} {what} (IMAGE_ID.nii.gz, such as {image_ids[0]}.nii.gz). Give the folder "
        "of the planted masks, COHORT/truth/planted for a synthetic cohort, or leave --truth out."
    )


def _scored(rows: list[dict[str, Any]]) -> str:
    scored = {row["image_id"] for row in rows if row["energy"] != ""}
    return f"{len(scored)} scored against their truth" if scored else "none has a truth to score"


class ClassifierCLI(LightningCLI):
    """The LightningCLI of the use case: one folder per run, results beside the checkpoint.

    Attributes:
        trainer: what runs the subcommands, ``explain`` among them.
    """

    trainer: ExplainingTrainer

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return LightningCLI.subcommands() | {"explain": {"model", "datamodule"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.task", "model.task")
        parser.add_argument(
            "--init",
            type=str | None,
            default=None,
            help="weights that `fit` starts from: folder of a MONAI bundle, or a file of weights",
        )
        parser.link_arguments("init", "model.init_from")

    def before_instantiate_classes(self) -> None:
        if self.subcommand == "fit":
            return
        # only training makes a run; a logger here would start another one's folder
        self.config[self.subcommand].trainer.logger = False
        self.save_config_callback = None
        # ModelCheckpoint remembers its run's folder, and this is no run
        warnings.filterwarnings("ignore", "The dirpath has changed", UserWarning)
        # the averaged weights are those of the checkpoint; only training would go on averaging
        warnings.filterwarnings("ignore", "You're using the WeightAveraging", UserWarning)
        path = self.config[self.subcommand].get("ckpt_path")
        if not path:
            self.parser.error(f"{self.subcommand} needs the checkpoint of a run: --ckpt_path FILE")
        read_checkpoint(path)
        writable(run_folder(path))

    def after_instantiate_classes(self) -> None:
        loggers = self.trainer.loggers
        try:
            # ask all for their number before the first one makes the folder and the next counts on
            _ = [logger.version for logger in loggers]
            _ = [logger.experiment for logger in loggers]  # type: ignore[attr-defined]
        except OSError as error:
            raise UseError(
                f"The folder of the run cannot be written: {error}. Give the loggers of the "
                "configuration another save_dir."
            ) from error

    def after_fit(self) -> None:
        log_dir = self.trainer.log_dir  # asks all ranks
        if not self.trainer.is_global_zero:
            return
        if log_dir is not None:
            # a strategy that cuts the network into stages has a plan, others have none
            plan = getattr(self.trainer.strategy, "plan", None)
            if plan is not None:
                plan.save(Path(log_dir) / "plan.json")
                plan.to_html(Path(log_dir) / "plan.html")
            save_environment(Path(log_dir))
            self._keep_cohort(Path(log_dir))
        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        if best:
            self._remember(Path(best))
            print(f"best checkpoint: {best}")

    def _remember(self, best: Path) -> None:
        """Write into the best checkpoint what its scans were like, for scans that come later."""
        from models.reference import measure, to_checkpoint

        if not best.is_file():
            return
        model = ResAttNetClassifier(**{**self.model.hparams, "transfer_from": None})
        checkpoint = read_checkpoint(best)
        state = checkpoint["state_dict"].items()
        model.load_state_dict({k: v for k, v in state if k.startswith("network.")})
        if isinstance(self.trainer.accelerator, CUDAAccelerator):
            model.to("cuda")
        to_checkpoint(best, measure(model.network, self.datamodule, scale_of(checkpoint)))

    def test(self, **arguments: Any) -> None:
        """Test; write metrics with intervals, all predictions, pictures, and a baseline's."""
        unfinished = self._writing_predictions()
        self.trainer.test(**arguments)
        metrics = self._write_metrics("test")
        if metrics is not None:
            unfinished.path.replace(beside(metrics, "predictions", ".tsv"))
            self._draw(metrics)
            self._set_beside(metrics)

    def validate(self, **arguments: Any) -> None:
        """Validate, and write the metrics."""
        self.trainer.validate(**arguments)
        self._write_metrics("validate")

    def predict(self, **arguments: Any) -> None:
        """Write the predictions of all ranks as one table, and beside it what it depends on."""
        unfinished = self._writing_predictions()
        self.trainer.predict(**arguments)
        if self.trainer.is_global_zero:
            settings = self._settings(unfinished.written)
            path = free_path(self._run_folder(), "predictions", settings)
            unfinished.path.replace(path.with_suffix(".tsv"))
            save_result(path, {}, settings)
            print(f"predictions written to {path.with_suffix('.tsv')}")

    def _writing_predictions(self) -> WritePredictions:
        """Have the predictions written to a table that gets its name when it is whole."""
        writer = WritePredictions(self._run_folder() / "unfinished_predictions.tsv")
        self.trainer.callbacks.append(writer)  # type: ignore[attr-defined]
        return writer

    def _settings(self, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """What a result depends on, beside the run itself."""
        data = self.datamodule
        return {
            "checkpoint": Path(self.config[self.subcommand].ckpt_path).name,
            "scans": scans_hash(predictions),
            "spacing_mm": data.spacing_mm,
            "spatial_shape": list(data.spatial_shape),
            "shuffled": data.shuffle_labels,
        }

    def _draw(self, metrics: Path) -> None:
        """Save the pictures of a test: evaluation has no logger that could take them."""
        # plotting libraries are slow to import
        from models.drawing import save_figures

        evaluated, names = self.model.evaluated, self.model.class_names
        said = np.array([one.outputs for one in evaluated])
        if learnt := not_learnt(said, np.array([one.label for one in evaluated]), names):
            print(learnt)
        drawn = save_figures(evaluated, names, metrics)
        print(f"pictures written to {', '.join(map(str, drawn))}")

    def _set_beside(self, metrics: Path) -> None:
        """Write what a simple baseline says of the same scans, and whether the network beats it."""
        from models.commands.baseline import fit_baseline, verdict  # scikit-learn is slow to import

        said, names = self.model.evaluated, self.model.class_names
        baseline = fit_baseline(self.datamodule, said)
        rows = table_rows(baseline.predictions, names, {})
        write_table(rows, beside(metrics, "baseline", ".tsv"))
        values = measured(*arrays(baseline.predictions))
        settings = {"features": baseline.features, "verdict": verdict(said, baseline)}
        save_result(beside(metrics, "baseline", ".json"), values, settings)
        print(settings["verdict"])

    def _write_metrics(self, name: str) -> Path | None:
        """Write the metrics; rank 0 gets the path, which has the number of these settings."""
        if not self.trainer.is_global_zero:
            return None
        settings = self._settings(self.model.evaluated)
        metrics = {key: float(value) for key, value in self.trainer.callback_metrics.items()}
        path = free_path(self._run_folder(), f"{name}_metrics", settings)
        save_result(path, metrics, settings)
        print(f"metrics written to {path}")
        return path

    def _keep_cohort(self, folder: Path) -> None:
        """Copy who was in the data, and in which part: the cache may be gone when one asks."""
        for name, kept in (("demographics.tsv", "cohort.tsv"), ("flow.json", "flow.json")):
            path = self.datamodule.state_dir / name
            if path.is_file():
                shutil.copyfile(path, folder / kept)
        (folder / "parts.txt").write_text(self.datamodule.describe() + "\n")

    def _run_folder(self) -> Path:
        return run_folder(self.config[self.subcommand].ckpt_path)


def main() -> None:
    """Run fit, validate, test, predict or explain."""
    # Lightning 2.6 walks trees in a way that torch 2.13 calls old; a user can do nothing about it
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    # Lightning advertises a logger at every start
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "litlogger" not in record.getMessage()
    )
    ClassifierCLI(
        ResAttNetClassifier,
        ADNIDataModule,
        trainer_class=ExplainingTrainer,
        # a run's folder is new; the same file again means a resumed run
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,  # the model has its own
        load_from_checkpoint_support=False,  # the checkpoint then needs no CLI to be loaded
        parser_class=Parser,
        parser_kwargs={
            "prog": "python -m models",
            "description": DESCRIPTION,
            "allow_abbrev": False,  # what is cut short is more often a slip
        },
    )
