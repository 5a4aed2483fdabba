"""One group of processes that runs rows: ``python session.py FOLDER``, and who starts it.

FOLDER holds ``config.json``. Each driver leaves ``<row>/rank<N>.pt`` for every row that it has
finished. After an error that the row did not announce it stops: links may hold half-sent messages.
"""

import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import seed_everything
from prepared import Forked, start_ranks
from suite import SEED, Conformance, Record, Row, Run, Witness
from torch.utils.data import DataLoader

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SILENCE_S = 240.0
"""After that long without a finished row a group is taken to hang."""
LETTING_GO_S = 1.0
"""As long does a process that ends leave its connections and the store to the others."""
FOLLOW_S = 12.0
"""As long may the other ranks take to notice that one has failed."""


# ---------------------------------------------------------------- in each process


def main(folder: Path) -> None:
    """Run the rows of ``config.json``, one after the other."""
    config = json.loads((folder / "config.json").read_text())
    module, name = config["suite"]
    suite: type[Conformance] = getattr(importlib.import_module(module), name)
    rows = {row.__name__: row for row in suite.catalogue()}
    for name in config["rows"]:
        place = folder / name
        place.mkdir(exist_ok=True)
        record = run_row(suite, rows[name], place)
        rank = os.environ["TEST_RANK"]
        torch.save(record, place / f"writing{rank}")
        (place / f"writing{rank}").rename(place / f"rank{rank}.pt")
        if not _may_go_on(suite, rows[name], record):
            sys.stdout.flush()
            time.sleep(LETTING_GO_S)  # as at the end of a script: others may still hear of a row
            os._exit(0)


def is_away(value: torch.Tensor) -> bool:
    """Whether a weight is on another rank alone, where nobody has gathered it."""
    return hasattr(value, "_where")


def _may_go_on(suite: type[Conformance], row: type[Row], record: Record) -> bool:
    if not record["error"]:
        return True
    error, trained = record["error"], record.get("trained", True)
    here = bool(suite.also_refused) and suite.also_refused in error and not trained
    return suite.stages > 1 and (here or row.announced(error, trained))


def run_row(suite: type[Conformance], row: type[Row], folder: Path) -> Record:
    """One row, from the same start everywhere. Returns all that is to be compared."""
    seed_everything(SEED, verbose=False)
    module, witness = row(), Witness(row.trains)
    # statistics of the first batch are no training
    before = {name: value.clone() for name, value in module.named_parameters()}
    if row.per_microbatch and suite.stages == 1:
        in_microbatches(module)
    run = Run(suite, module, folder, witness.attach)
    result, error, refusal = None, "", ""
    processes = _loader_processes(suite.loader_processes)
    with _compilations(row) as captures, _Listening() as said, processes:
        try:
            result = module.exercise(run)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()}"
            refusal = str(failure) if isinstance(failure, suite.refusals) else ""
    state = module.state_dict() if error else module.weights(run)
    weights = {
        name: value.clone() for name, value in state.items() if not (error and is_away(value))
    }
    return {
        "result": result,
        "error": error,
        "refusal": refusal,
        "seen": module.seen,
        "weights": weights,
        "trained": any(not before[n].equal(weights[n]) for n in before.keys() & weights.keys()),
        "said": said.texts,
        "metrics": [
            [
                [dict(t.callback_metrics), dict(t.progress_bar_metrics)],
                *(dict(t.logged_metrics), t.global_step, t.current_epoch),
                *(t.num_training_batches, t.num_val_batches, t.num_test_batches),
            ]
            for t in run.trainers
        ],
        "forwards": witness.forwards,
        "gradients": witness.gradients,
        "captures": len(captures),
        "pid": os.getpid(),
    }


def _loader_processes(count: int) -> Any:
    """Inside, so many are the default of a ``DataLoader``."""
    function = vars(DataLoader)["__init__"]
    options = [p for p in signature(function).parameters.values() if p.default is not p.empty]
    values = (count if p.name == "num_workers" else p.default for p in options)
    positional = len(function.__defaults__)
    return patch.object(function, "__defaults__", (*values,)[:positional])


class _Listening(logging.Handler):
    """Notes what Lightning tells the user, once for all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> "_Listening":
        logging.getLogger("lightning.pytorch").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("lightning.pytorch").removeHandler(self)


@contextmanager
def _compilations(row: type[Row]) -> Iterator[list[Any]]:
    """What TorchDynamo compiles meanwhile; not counted for rows that set no limit."""
    found: list[Any] = []
    if row.captures is None:
        yield found
        return
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(found.append)
    try:
        yield found
    finally:
        callback_handler.remove_start_callback(found.append)


def in_microbatches(module: Row) -> None:
    """Call ``net`` once per micro-batch, each with the generators that the micro-batch has."""
    from lightning_hybrid.stage.random_numbers import microbatch_seed, seed_number_of

    net, calls = module.net, (seed_number_of(batch, 0) for batch in count())
    original = net.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        call, parts = next(calls), []
        replica = module.trainer.global_rank
        for index, part in enumerate(x.chunk(module.parts or module.microbatches)):
            with torch.random.fork_rng(devices=[part.device] if part.is_cuda else []):
                torch.manual_seed(microbatch_seed(SEED, replica, call, index))
                parts.append(original(part))
        return torch.cat(parts)

    net.forward = forward


# ---------------------------------------------------------------- in pytest


class Session:
    """All rows of a suite, in as few groups of processes as their failures allow.

    Args:
        suite: the suite.
        rows: names, in the order in which they run.
        folder: where the groups work.
    """

    def __init__(self, suite: type[Conformance], rows: Sequence[str], folder: Path) -> None:
        self._suite, self._folder = suite, folder
        self._drivers = suite.drivers()
        self.records: dict[str, list[Record]] = {}
        left = list(rows)
        for attempt in count():
            if not left:
                break
            left = self._run_group(left, folder / f"group{attempt}")

    def _run_group(self, rows: list[str], folder: Path) -> list[str]:
        """One group of processes. Returns the rows that are left for the next."""
        folder.mkdir(parents=True)
        suite = [self._suite.__module__, self._suite.__qualname__]
        (folder / "config.json").write_text(json.dumps({"suite": suite, "rows": rows}))
        self._start_and_wait(rows, folder)
        for number, row in enumerate(rows):
            records = self._read(folder / row)
            if not all(records):
                text = f"the processes ended or hung in this row:\n{_tail(folder / 'output.txt')}"
                lost: Record = {"error": text}
                errors = [r for r in records if r and r["error"]]
                self.records[row] = [*errors, *(lost for r in records if r is None)]
                return rows[number + 1 :]
            self.records[row] = [record for record in records if record]
            [found] = [r for r in self._suite.catalogue() if r.__name__ == row]
            if not all(_may_go_on(self._suite, found, record) for record in self.records[row]):
                return rows[number + 1 :]
        return []

    def _read(self, folder: Path) -> list[Record | None]:
        files = [folder / f"rank{rank}.pt" for rank in self._drivers]
        return [torch.load(f, "cpu", weights_only=False) if f.exists() else None for f in files]

    def _start_and_wait(self, rows: list[str], folder: Path) -> None:
        here = HERE
        if self._suite.package == "pytorch_lightning":
            here = translated(HERE, folder / "translated")
        path = os.pathsep.join(map(str, (here, ROOT, *_suite_folder(self._suite))))
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "PYTHONWARNINGS": "ignore",
        }
        environment.pop("PL_GLOBAL_SEED", None)
        ranks = start_ranks(
            [str(here / "session.py"), str(folder)],
            self._suite.processes(),
            env=environment,
            cwd=folder,
            output=folder / "output.txt",
            package=self._suite.package,
        )
        try:
            count = len(self._drivers)
            self._wait(ranks[0], folder, count * len(rows), count)
        finally:
            for process in ranks:
                process.kill()

    @staticmethod
    def _wait(main: Forked, folder: Path, expected: int, ranks: int) -> None:
        """Until the main process has ended and all records are there, or nothing more comes."""
        finished, since = 0, time.monotonic()
        while True:
            now = len(list(folder.glob("*/rank*.pt")))
            if now > finished:
                finished, since = now, time.monotonic()
            ended = FOLLOW_S if finished % ranks else FOLLOW_S / 4  # else all have said why
            patience = SILENCE_S if main.poll() is None else ended
            done = finished == expected and main.poll() is not None
            if done or time.monotonic() - since > patience:
                return
            time.sleep(0.05)


def _suite_folder(suite: type[Conformance]) -> list[Path]:
    file = sys.modules[suite.__module__].__file__
    return [Path(file).parent] if file else []


def translated(source: Path, target: Path) -> Path:
    """A copy of this folder for `pytorch_lightning`, which is made from `lightning` in this way."""
    target.mkdir()
    for file in source.glob("*.py"):
        text = file.read_text().replace("lightning.pytorch", "pytorch_lightning")
        (target / file.name).write_text(text.replace("lightning.fabric", "lightning_fabric"))
    return target


def _tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-60:])


def selected(items: Sequence[Any]) -> dict[type[Conformance], list[str]]:
    """Which rows of which suite the collected tests need, references included.

    Rows whose package is missing are left out: they would only end their group of processes.
    """
    found: dict[type[Conformance], list[str]] = {}
    for item in items:
        suite, row = getattr(item, "cls", None), getattr(item, "callspec", None)
        row = row.params.get("row") if row else None
        if row is not None and row.needs and find_spec(row.needs) is None:
            continue
        while suite is not None and row is not None and issubclass(suite, Conformance):
            names = found.setdefault(suite, [])
            if row.__name__ not in names:
                names.append(row.__name__)
            suite = suite.reference
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
