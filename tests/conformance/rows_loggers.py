"""Loggers get each value once, from replica 0, and hyper-parameters once."""

import csv
import json
import os
import struct
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from rows_callbacks import _Epochs
from suite import ONE_OF_TWO, TWO_OF_TWO, Row, Run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_hybrid import HybridGabraStrategy

Values = dict[str, list[tuple[int, float]]]


class _Logs(_Epochs):
    """Logs steps, epochs, validation, hyper-parameters; reads back what has been stored."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 8})

    def make_logger(self, folder: Path) -> Logger:
        raise NotImplementedError

    def close(self, logger: Any) -> None:
        """Write what is left."""

    def stored(self, logger: Any, folder: Path) -> Any:
        """Hyper-parameters and values, as another program would read them."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"by_hand": float(batch_idx)}, step=self.trainer.global_step)
        return loss

    def exercise(self, run: Run) -> Any:
        if self.needs and not find_spec(self.needs):
            return super().exercise(run)
        logger = self.make_logger(run.folder)
        trainer = run.trainer(logger=logger)
        trainer.fit(self)
        trainer.test(self, verbose=False)
        self.close(logger)
        trainer.strategy.barrier()  # files are closed on replica 0 and read on all ranks
        return self.stored(logger, run.folder)


class LogsToCSV(_Logs):
    """`CSVLogger`: steps, epochs, validation and hyper-parameters, each once."""

    fast = True

    def make_logger(self, folder: Path) -> Logger:
        return CSVLogger(folder, version=0)

    def stored(self, logger: Any, folder: Path) -> Any:
        place = folder / "lightning_logs" / "version_0"
        with (place / "metrics.csv").open() as file:
            rows = [{k: _number(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        return [rows, (place / "hparams.yaml").read_text(), Path(logger.log_dir).name]


class LogsToTensorBoard(_Logs):
    """`TensorBoardLogger(log_graph=True)`: the graph, steps, epochs, validation and
    hyper-parameters, each once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = self.dataset(2)[:2][0]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def make_logger(self, folder: Path) -> Logger:
        return TensorBoardLogger(folder, version=0, log_graph=True)

    def stored(self, logger: Any, folder: Path) -> Any:
        place = folder / "lightning_logs" / "version_0"
        return [_nodes(place), scalars(place), (place / "hparams.yaml").read_text()]


class LogsToMLflow(_Logs):
    """`MLFlowLogger` on SQLite, where MLflow is installed."""

    needs = "mlflow"

    def make_logger(self, folder: Path) -> Logger:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        ready = folder / "ready"
        # the tables are made with the logger; a script's other ranks start only after that
        while os.environ.get("LOCAL_RANK", "0") != "0" and not ready.exists():
            time.sleep(0.1)
        logger = MLFlowLogger("runs", tracking_uri=f"sqlite:///{folder / 'runs.db'}")
        ready.touch()
        return logger

    def stored(self, logger: Any, folder: Path) -> Any:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{folder / 'runs.db'}")
        [experiment] = client.search_experiments(filter_string="name = 'runs'")
        [run] = client.search_runs([experiment.experiment_id])
        values = {
            name: [(v.step, v.value) for v in client.get_metric_history(run.info.run_id, name)]
            for name in sorted(run.data.metrics)
        }
        return [run.data.params, values, run.info.status]


class LogsToWandb(_Logs):
    """`WandbLogger` offline, where it is installed."""

    needs = "wandb"

    def make_logger(self, folder: Path) -> Logger:
        return WandbLogger("run", save_dir=folder, offline=True)

    def close(self, logger: Any) -> None:
        logger.experiment.finish()

    def stored(self, logger: Any, folder: Path) -> Any:
        from wandb.proto.wandb_internal_pb2 import Record as Stored

        [file] = folder.glob("wandb/offline-run-*/*.wandb")
        config: dict[str, str] = {}
        rows = []
        for record in _whole_log(file, Stored):
            if record.WhichOneof("record_type") == "config":
                config |= {u.key: u.value_json for u in record.config.update if u.key != "_wandb"}
            if record.WhichOneof("record_type") == "history":
                items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
                rows.append({k: json.loads(v) for k, v in sorted(items.items()) if k[0] != "_"})
        return [config, rows]  # keys of a record have no order of their own


class LogsPerformance(Row):
    """`log_performance=True`.

    The strategy's own values stand where they belong and within their bounds.
    """

    shapes = (ONE_OF_TWO, TWO_OF_TWO)
    control = False
    arguments: ClassVar = {"log_performance": True}
    options: ClassVar = {
        "max_steps": -1,
        "max_epochs": 3,
        "log_every_n_steps": 2,
        "num_sanity_val_steps": 0,
    }

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(*batch)

    def exercise(self, run: Run) -> Any:
        loggers: list[Logger] = [
            CSVLogger(run.folder, name="csv", version=0),
            TensorBoardLogger(run.folder, name="tb", version=0),
        ]
        trainer = run.trainer(logger=loggers)
        trainer.fit(self)
        if isinstance(trainer.strategy, HybridGabraStrategy) and trainer.is_global_zero:
            check_performance(run.folder, trainer.global_step, trainer.world_size)
        return None


def check_performance(folder: Path, steps: int, replicas: int) -> None:
    """Every second step but the first, which is not measured, and the rest at the end."""
    text = (folder / "csv" / "version_0" / "hparams.yaml").read_text()
    for words in ("hybrid/stages: 2", f"hybrid/replicas: {replicas}", "hybrid/schedule: gpipe"):
        assert words in text
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("hybrid/step_s")]
    expected = [*range(3, steps + 1, 2)]
    expected += [steps] if expected[-1:] != [steps] else []
    assert [int(row["step"]) + 1 for row in rows] == expected
    for row in rows:
        step_s, busy = float(row["hybrid/step_s"]), 1 - float(row["hybrid/bubble"])
        assert step_s > 0
        assert 0 < busy < 1
        assert abs(float(row["hybrid/speedup"]) - 2 * replicas * busy) < 1e-9
        samples = float(row["hybrid/samples_per_s"]) * step_s
        assert abs(samples - 4 * replicas) < 1e-6
    with (folder / "hybrid_runs.csv").open() as file:
        [line] = csv.DictReader(file)
    assert (line["replicas"], line["stages"]) == (str(replicas), "2")
    assert (line["devices"], float(line["batch_samples"])) == (str(2 * replicas), 4.0)
    assert float(line["step_s"]) > 0 < int(line["parameters"])
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        [start] = [row for row in csv.DictReader(file) if row.get("hybrid/start/capturing_s")]
    assert float(start["hybrid/start/calling_s"]) > 0 == int(start["step"])
    assert float(start["hybrid/start/looking_whether_samples_meet_in_s"]) > 0
    in_tensorboard = scalars(folder / "tb" / "version_0")
    assert [step + 1 for step, _ in in_tensorboard["hybrid/step_s"]] == expected


def scalars(folder: Path) -> Values:
    """The values that TensorBoard would show."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in sorted(events.Tags()["scalars"])
    }


def _nodes(folder: Path) -> list[str]:
    """The operations of the graph that TensorBoard would show."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return sorted(node.op for node in events.Graph().node)


def _whole_log(file: Path, kind: Any) -> list[Any]:
    """The records of a run, once the process that writes them has come to its end."""
    deadline = time.monotonic() + 60
    records: list[Any] = []
    while not records or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, f"{file} has no end: {len(records)} records"
        time.sleep(0.1)
        records = [kind.FromString(data) for data in log_records(file.read_bytes())]
    return records


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, as W&B writes it: 7 bytes, then blocks of 32 KiB.

    A record is a checksum (4 bytes), a length (2), a kind (1: whole, 2: first, 3: middle, 4: last
    part) and the content; a block's rest too short for that is empty.
    """
    block, place, parts = 32768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def _number(text: str) -> float:
    return float(text)
