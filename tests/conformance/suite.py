"""A conformance suite for strategies of Lightning: what users do must work unchanged.

**A row** is a LightningModule with one habit of users (:class:`Row`; they stand in ``rows_*.py``).
It is trained by the strategy under test and by a reference, both in real processes, and everything
that it has noted must agree: values of each step, weights on every rank, metrics, results. To add
one, subclass :class:`Row` in a ``rows_*.py`` file, change the one thing that it is about, and
``self.seen.append(...)`` what a user would look at. For more than ``trainer.fit`` (tests,
predictions, a second Trainer) override :meth:`Row.exercise`.

**A strategy** is put under test by a subclass of :class:`Conformance`::

    class TestMine(Conformance):
        replicas, stages = 1, 2

        @classmethod
        def make_strategy(cls, row):
            return MyStrategy(stages=2, cut_before=row.cuts[2])

All rows of one class run one after the other in one group of processes (:mod:`session`). A row
that fails ends its group; the next rows run in a new one.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import places
import pytest
import torch
from comparison import differences
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ran_here import LISTENERS, hear_of_gradients, noting

STEPS = 6
SEED = 7
ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO = (1, 2), (1, 3), (2, 2)
"""Shapes: replicas, stages of each."""
OF_REAL = ("transformers", "peft")
"""Packages of the extra `real`: rows that need one run in `make real`."""
Record = dict[str, Any]


class Layers(nn.Module):
    """Three linear layers with a skip connection around the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(x)) + x)


class Row(LightningModule):
    """A classifier; the rows change one thing each.

    Attributes:
        shapes: (replicas, stages) under which it runs.
        fast: whether it belongs to ``make test``, under two stages; this is not inherited.
        sampled: whether suites that take some rows of each kind take it, as they do fast ones; nor
            is this.
        options: arguments of the Trainer. For objects override :meth:`trainer_options`.
        arguments: arguments of the strategy, for rows about these.
        microbatches: into which the strategy splits a batch.
        cuts: names of the first modules of the later stages, by number of stages; a row runs under
            no other number.
        samples: in the data set.
        refused: words in the error of every rank, under more than one stage, before any weight has
            changed; empty: the row must work.
        equal_or_refused: words that such an error must have, if there is one, in the message of a
            refusal itself; the row may as well work, with the numbers of the reference.
        works: the shapes in which such a row does, and is to go on so, with given cuts.
        per_microbatch: the reference calls ``net`` once per micro-batch, each with generators of
            its own (batch statistics, random layers).
        parts: into which the reference splits a batch then; ``None``: the micro-batches asked for.
            (1 where samples meet in ``net``, so that a strategy must not split the batch.)
        captures: at most as many compilations by TorchDynamo in one process; ``None``: any number.
        control: whether plain `ddp` on one device is expected to give the numbers of one device.
            (It starts its generators anew, so user code that draws gets other numbers.)
        trains: else stages are known by their forward passes alone.
        shares: whether the gradient of a parameter arises on several ranks of a replica.
        idle: whether a stage may own nothing that is trained.
        alone: whether there is nothing that stages could share out.
        gathered: whether rank 0 alone has all weights afterwards, and has to ask for them.
        tolerance: absolute and relative.
        needs: a package that may be missing; then the row is skipped.
        seen: what is noted while the user's steps run, on the ranks that run them.
    """

    shapes: ClassVar[tuple[tuple[int, int], ...]] = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
    fast: ClassVar[bool] = False
    sampled: ClassVar[bool] = False
    options: ClassVar[dict[str, Any]] = {}
    arguments: ClassVar[dict[str, Any]] = {}
    microbatches: ClassVar[int] = 2
    cuts: ClassVar[dict[int, list[str]]] = {2: ["net.second"], 3: ["net.second", "net.third"]}
    samples: ClassVar[int] = 16
    refused: ClassVar[tuple[str, ...]] = ()
    equal_or_refused: ClassVar[tuple[str, ...]] = ()
    works: ClassVar[tuple[tuple[int, int], ...]] = ()
    per_microbatch: ClassVar[bool] = False
    parts: ClassVar[int | None] = None
    captures: ClassVar[int | None] = None
    control: ClassVar[bool] = True
    trains: ClassVar[bool] = True
    idle: ClassVar[bool] = False
    shares: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    gathered: ClassVar[bool] = False
    tolerance: ClassVar[float] = 1e-10
    needs: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.fast = vars(cls).get("fast", False)
        cls.sampled = cls.fast or vars(cls).get("sampled", False)

    def __init__(self) -> None:
        super().__init__()
        self.build()
        self.double()
        self.seen: list[Any] = []

    def build(self) -> None:
        self.net = Layers()

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        """Arguments of the Trainer; ``folder`` is the row's own, the same for all ranks."""
        return dict(self.options)

    def exercise(self, run: "Run") -> Any:
        """What the script does. What it returns must be the reference's too, on all ranks."""
        run.trainer().fit(self)

    def weights(self, run: "Run") -> dict[str, Tensor]:
        """Weights and buffers when all is over; all ranks call it."""
        if not self.gathered:
            return self.state_dict()
        return getattr(run.trainers[-1].strategy, "full_state_dict", self.state_dict)()

    @classmethod
    def announced(cls, error: str, trained: bool) -> bool:
        """Whether this is the refusal that the row speaks of, after which processes can go on."""
        words = cls.refused or cls.equal_or_refused
        return bool(words) and not trained and all(word in error for word in words)

    @classmethod
    def check(cls, ranks: list[Record], reference: list[Record]) -> None:
        """More to assert about the records, beside their equality."""

    def dataset(self, samples: int | None = None, seed: int = 1) -> TensorDataset:
        """Learnable: the class is in the sum of the features."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples or self.samples, 6, generator=generator, dtype=torch.float64)
        y = torch.bucketize(x.sum(1), torch.tensor([-1.0, 1.0], dtype=x.dtype))
        return TensorDataset(x, y)

    def train_dataloader(self) -> Any:
        """Batches of 4; with several replicas each takes every R-th batch."""
        dataset = self.dataset()
        indices = torch.arange(len(dataset)).split(4)
        mine = indices[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(dataset, batch_sampler=[part.tolist() for part in mine])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(*batch)
        self.seen.append(loss.item())
        return loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Run:
    """One row in one process, as its script sees it.

    Args:
        suite: says which strategy.
        module: the row.
        folder: of this row, the same for all ranks.
        witness: attaches what observes the ranks, in `strategy.setup`.
    """

    def __init__(
        self,
        suite: "type[Conformance]",
        module: Row,
        folder: Path,
        witness: Callable[[LightningModule], None],
    ) -> None:
        self.suite, self.module, self.folder = suite, module, folder
        self._witness = witness
        self.trainers: list[Trainer] = []

    def trainer(self, **options: Any) -> Trainer:
        """A new Trainer with the strategy under test; ``options`` come before the row's own."""
        defaults: dict[str, Any] = {
            **places.devices(self.suite.replicas * self.suite.stages),
            "strategy": self.suite.make_strategy(type(self.module)),
            "max_steps": STEPS,
            "max_epochs": -1,
            "default_root_dir": self.folder,
            "use_distributed_sampler": False,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        defaults |= self.suite.options
        trainer = Trainer(**{**defaults, **self.module.trainer_options(self.folder), **options})
        setup = trainer.strategy.setup

        def observed(trainer: Trainer) -> None:
            self._witness(trainer.lightning_module)
            setup(trainer)

        trainer.strategy.setup = observed
        self.trainers.append(trainer)
        return trainer


def load_checkpoint(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """What a checkpoint holds: a file as anybody loads it, a folder as the strategy does."""
    if path.is_dir():
        state = importlib.import_module("lightning_hybrid.state")
        return state.load_checkpoint(path, weights_only=weights_only)  # type: ignore[no-any-return]
    return torch.load(path, weights_only=weights_only)


class Witness:
    """Sees which parameters get gradients in *this* process, or which modules run.

    Args:
        trains: whether there will be gradients. Only without are modules observed: a hook on every
            module is Python of the network's own, which the rows are to have the say of.
    """

    def __init__(self, trains: bool = True) -> None:
        self.forwards: set[str] = set()
        self.gradients: Counter[str] = Counter()
        self._trains = trains
        self._known: set[int] = set()
        LISTENERS.append(self._ran)

    def attach(self, module: LightningModule) -> None:
        """Observe what is not observed yet. (All modules exist when a strategy is set up.)"""
        for name, part in module.named_modules():
            owns = next(part.parameters(recurse=False), None) is not None
            if not self._trains and owns and part is not module and id(part) not in self._known:
                part.register_forward_hook(partial(noting, name))
                self._known.add(id(part))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                hear_of_gradients(parameter, partial(self._got, name))
                self._known.add(id(parameter))

    def _ran(self, name: str, *_: Any) -> None:
        self.forwards.add(name)

    def _got(self, name: str) -> None:
        self.gradients.update([name])


def all_rows() -> list[type[Row]]:
    """Every row of every ``rows_*.py``; names with an underscore are bases."""
    found: dict[str, type[Row]] = {}
    for file in sorted(Path(__file__).parent.glob("rows_*.py")):
        for name, value in vars(importlib.import_module(file.stem)).items():
            is_row = isinstance(value, type) and issubclass(value, Row)
            if is_row and value.__module__ == file.stem and not name.startswith("_"):
                assert name not in found, f"two rows are called {name}"
                found[name] = value
    return list(found.values())


class Conformance:
    """The suite for one strategy in one shape. Subclass it (``class Test...``) and say which.

    Attributes:
        replicas: to Lightning, the number of devices.
        stages: processes per replica.
        reference: the suite whose records are the expected ones; it must have as many replicas.
        refusals: kinds of errors by which the strategy says that it cannot do what is asked.
        package: of Lightning, `lightning` or `pytorch_lightning`.
        looks: at the network before a run, each of which may compile it once.
        cuts_freely: whether the strategy cuts where it likes, through ties too, and not at all what
            is not one graph.
        options: arguments of the Trainer in all rows that say nothing else.
        also_refused: words that may stand in the refusal of any row, before its first step.
        knows_refusals: whether `Row.works` says which rows are refused.
        loader_processes: that loaders have where a row says nothing of them.
    """

    replicas: ClassVar[int] = 1
    stages: ClassVar[int] = 1
    reference: ClassVar["type[Conformance] | None"] = None
    refusals: ClassVar[tuple[type[Exception], ...]] = ()
    package: ClassVar[str] = "lightning"
    looks: ClassVar[int] = 0
    cuts_freely: ClassVar[bool] = False
    options: ClassVar[dict[str, Any]] = {}
    also_refused: ClassVar[str] = ""
    knows_refusals: ClassVar[bool] = False
    loader_processes: ClassVar[int] = 0

    @classmethod
    def make_strategy(cls, row: type[Row]) -> Strategy | str:
        """A new strategy for one Trainer."""
        raise NotImplementedError

    @classmethod
    def catalogue(cls) -> list[type[Row]]:
        """All rows that there are; override it to add some."""
        return all_rows()

    @classmethod
    def rows(cls) -> list[type[Row]]:
        """The rows that are asked for in this shape."""
        shape = cls.replicas, cls.stages
        return [r for r in cls.catalogue() if shape in r.shapes and cls.stages in r.cuts]

    @classmethod
    def is_fast(cls, row: type[Row]) -> bool:
        """Whether a row belongs to the fast tier here: in one shape only, which says so."""
        return False

    @classmethod
    def processes(cls) -> int:
        """How many processes a launcher starts; those of workers serve, and come to no row."""
        return cls.replicas * cls.stages

    @classmethod
    def drivers(cls) -> list[int]:
        """Local ranks that run the script, one per replica."""
        return list(range(0, cls.processes(), cls.stages))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "row" in metafunc.fixturenames:
            slow, real = pytest.mark.conformance, pytest.mark.real
            rows = []
            for row in self.rows():
                marks = [real] if row.needs in OF_REAL else []
                if not self.is_fast(row):
                    marks.append(slow)
                rows.append(pytest.param(row, marks=marks, id=row.__name__))
            metafunc.parametrize("row", rows)

    def test_row(
        self, row: type[Row], records: "Callable[[type[Conformance], type[Row]], list[Record]]"
    ) -> None:
        if row.needs:
            pytest.importorskip(row.needs)
        ranks = records(type(self), row)
        refused = self.stages > 1 and was_refused(ranks, row)
        if self.knows_refusals and row.equal_or_refused and not row.needs:  # which has versions
            works = (self.replicas, self.stages) in row.works
            assert refused is not works, ranks[0]["error"] or "it was not refused any more"
        if refused:
            assert_refused(ranks, row)
            return
        assert_no_error(ranks)
        if self.reference is None:
            return
        reference = records(self.reference, row)
        assert_no_error(reference)
        # (on GPUs weights go there later, which leaves the nodes that are listened to)
        if self.stages > 1 and not places.ON_GPU:
            assert_computed_elsewhere(ranks, reference, row, freely=self.cuts_freely)
        assert_trained_the_same(ranks, reference, row)
        captures = max(record["captures"] for record in ranks) - self.looks
        assert row.captures is None or captures <= row.captures
        row.check(ranks, reference)


def assert_no_error(ranks: list[Record]) -> None:
    errors = [record["error"] for record in ranks if record["error"]]
    assert not errors, "\n".join(dict.fromkeys(errors))


def was_refused(ranks: list[Record], row: type[Row]) -> bool:
    """Whether it had to be, or may be and was."""
    return bool(row.refused or (row.equal_or_refused and any(r["error"] for r in ranks)))


def assert_refused(ranks: list[Record], row: type[Row]) -> None:
    for record in ranks:
        for word in row.refused or row.equal_or_refused:
            assert word in record["error"]
        # a rank that has hung has no such entry
        assert record.get("trained") is False, f"not before the first step: {record['error']}"
    if row.equal_or_refused:  # else any failure that passes the user's line would do
        said = [record["refusal"] for record in ranks]
        assert any(all(w in text for w in row.equal_or_refused) for text in said), ranks[0]["error"]


def assert_computed_elsewhere(
    ranks: list[Record], reference: list[Record], row: type[Row], *, freely: bool
) -> None:
    """Some parameters get their gradients on workers, of which no record speaks."""
    for record, expected in zip(ranks, reference, strict=True):
        apart = set(record["gradients"]) < set(expected["gradients"])
        # (of weights of configure_model it is a hook that listens, which the driver calls)
        listens = row.configure_model is not LightningModule.configure_model
        anyhow = not row.trains or row.alone or row.idle or row.shares or listens or freely
        assert apart or anyhow, "no stage is apart"


def assert_trained_the_same(ranks: list[Record], reference: list[Record], row: type[Row]) -> None:
    for record, expected in zip(ranks, reference, strict=True):
        names = ("seen", "result", "metrics")
        _assert_same({n: record[n] for n in names}, {n: expected[n] for n in names}, row)
        # running statistics are those of replica 0
        if not row.gathered or record is ranks[0]:
            _assert_same(record["weights"], reference[0]["weights"], row)


def _assert_same(found: Any, expected: Any, row: type[Row]) -> None:
    different = list(differences(found, expected, row.tolerance))
    assert not different, "\n".join(different[:10])
