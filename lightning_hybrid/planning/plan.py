"""The plan: numbers of replicas, stages and micro-batches, schedule, and devices of the stages."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import SPLITTING, STREAMED, check_copies

VERSION = 2
"""Version of the JSON format. Version 1, which has no copies of stages, can be read too."""
_OF_GABRA = "(found by its descents: crossover is not shown to help, docs/allocation.md)"


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Contents and predicted costs of one stage, for reports.

    Attributes:
        layers: number of layers (nodes of the captured graph).
        partitions: names of the network partitions, in order.
        parameters: number of parameter elements.
        load: share of the whole network's computation, between 0 and 1.
        device: index of the stage's device within the replica; of several copies, the least index.
        memory_bytes: memory of the stage in training: parameters, gradients, optimizer state and
            the activations of the micro-batches held at once; None when nothing was profiled.
        peak_bytes: peak of memory of the stage's rank over a run, with the rank's other stages;
            None when nothing was profiled.
        limit_bytes: memory that this rank may use; None: not known.
        forward_s: seconds of the forward of a micro-batch; None, like the other times, if not
            predicted.
        backward_s: seconds of the backward of a micro-batch; if the backward is split, of its input
            part.
        weight_s: seconds of the weight part of a split backward of a micro-batch; 0: not split.
        send_s: seconds for which the transfer of a micro-batch occupies the link to the next stage,
            in either direction.
        latency_s: further seconds until this transfer arrives.
        reduce_s: seconds of the all-reduce of the stage's gradients over the replicas.
        step_s: seconds of the stage's optimizer step.
        cut_bytes: bytes that cross the cut after the stage, per micro-batch and direction; 0 after
            the last stage.
        gradient_bytes: size of the stage's gradients, which replicas average in a step.
    """

    layers: int
    partitions: tuple[str, ...]
    parameters: int
    load: float
    device: int
    memory_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    weight_s: float | None = None
    send_s: float | None = None
    latency_s: float | None = None
    reduce_s: float | None = None
    step_s: float | None = None
    cut_bytes: int | None = None
    gradient_bytes: int | None = None

    def without_times(self) -> Self:
        """Make a copy of this row in which all times are None, which means not predicted."""
        unknown: dict[str, Any] = dict.fromkeys(f.name for f in fields(self) if f.name[-2:] == "_s")
        return replace(self, **unknown)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a network is spread over the devices.

    A plan is plain data: it is made by the planner, checked when made, written as JSON, and read by
    the runtime and the report. It refers to no process and no tensor.

    Attributes:
        replicas: number of chains of stages that each hold the whole network.
        stages: number of stages of a replica.
        microbatches: number of micro-batches of a replica's batch.
        schedule: name of the schedule.
        cuts: for each stage but the first, the name in the network of its first module.
        devices: device of each stage, by index within the replica. The last stage is the driver's,
            which is device 0. Under a free placement a device may have several stages; a stage that
            has copies has a tuple of devices. Empty: stage k on device k + 1, the last on device 0.
        capacities: relative speed of each device of a replica: that of the slowest of its ranks
            over all replicas. Empty: all equal, or not known.
        shares: number of samples that each replica takes of a global batch. Empty: equal numbers.
            Unequal ones are for devices of different speed, with `BySpeed`.
        ranks: rank of each device, replica by replica; the first is 0, which drives the first
            replica. Empty: 0, 1, 2, ...
        split: numbers of the stages whose backward is split, under a schedule of `SPLITTING`. None:
            under `zero_bubble` all but the first, under `1f1b` none.
        recompute: whether activations are recomputed in the backward instead of being kept.
        split_by: how it is known that the network computes each sample by itself, so that batches
            may be split into micro-batches, and which part of it is computed for all samples
            together. Empty: batches are not split.
        rows: contents and costs of each stage; empty when the network was not profiled.
        predicted_step_s: predicted seconds of one optimizer step; None when nothing was profiled.
        objective: what the allocation has optimised: `step`, `makespan` or `profit`.
        allocation: search that chose the cuts: `gabra`, `exact`, `dynamic` (the dynamic programme
            for the shortest step of a chain), `merging`, `descent` (for looped schedules, and
            stages with copies), `balanced` (cuts whose slowest stage is the fastest), or `given`.
        seed: seed of the allocation.
        version: version of the JSON format.

    Raises:
        PlanError: two fields contradict each other; the text has both.
    """

    replicas: int
    stages: int
    microbatches: int
    schedule: str
    cuts: tuple[str, ...]
    devices: tuple[int | tuple[int, ...], ...] = ()
    capacities: tuple[float, ...] = ()
    shares: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    split: tuple[int, ...] | None = None
    recompute: bool = False
    split_by: str = ""
    rows: tuple[StagePlan, ...] = ()
    predicted_step_s: float | None = None
    objective: str = "makespan"
    allocation: str = "gabra"
    seed: int = 0
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise PlanError(
                f"the plan has format version {self.version}, this package reads {VERSION}: "
                "make it anew"
            )
        for name in ("replicas", "stages", "microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"{name}({value!r}) must be an integer of at least 1")
        # lists from JSON become tuples, and defaults that depend on `stages` are filled in
        derived = {
            "cuts": tuple(self.cuts),
            "devices": tuple([_devices_of(stage) for stage in self.devices])
            or (*range(1, self.stages), 0),
            "capacities": tuple(self.capacities),
            "shares": tuple(self.shares),
            "ranks": tuple(self.ranks),
            "rows": tuple(self.rows),
            "split": self._splits(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._check_lengths()
        self._check_copies()
        self._check_placement()
        # streamed schedules have another option for it, `Delayed(weights='recompute')`
        if self.recompute and self.schedule in STREAMED:
            raise PlanError(
                f"recompute({self.recompute}) is for schedules that finish a batch before the next "
                f"one, not for {self.schedule!r}"
            )

    def _splits(self) -> tuple[int, ...]:
        if self.split is None:
            return tuple(range(1, self.stages)) if self.schedule == "zero_bubble" else ()
        found, splits = tuple(self.split), self.schedule in SPLITTING
        if found and (not splits or not set(found) <= set(range(1, self.stages))):
            raise PlanError(
                f"split{found} must name stages of 1..{self.stages - 1} under schedule "
                f"{' or '.join(map(repr, SPLITTING))}, and be empty under others; the plan's is "
                f"{self.schedule!r}"
            )
        return found

    def _check_lengths(self) -> None:
        if len(self.cuts) != self.stages - 1 or len(set(self.cuts)) != len(self.cuts):
            raise PlanError(
                f"stages({self.stages}) need {self.stages - 1} different cuts, "
                f"the plan has {len(self.cuts)}: {list(self.cuts)}"
            )
        for name in ("devices", "rows"):
            value = getattr(self, name)
            if len(value) != self.stages and not (name == "rows" and not value):
                raise PlanError(f"stages({self.stages}) != {len(value)} {name}")

    @property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """By stage, the devices that compute it, by index in the replica; several: its copies."""
        return tuple([(d,) if isinstance(d, int) else d for d in self.devices])

    @property
    def copies(self) -> tuple[int, ...]:
        """By stage, how many devices of a replica compute it."""
        return tuple([len(devices) for devices in self.owners])

    @property
    def first_devices(self) -> tuple[int, ...]:
        """By stage, the index in the replica of its device; of several copies, the least index."""
        return tuple(map(min, self.owners))

    @property
    def data_parallel_sizes(self) -> tuple[int, ...]:
        """By stage, how many ranks compute it, in all replicas together."""
        return tuple([self.replicas * copies for copies in self.copies])

    def _check_copies(self) -> None:
        check_copies(self.copies, self.stages, self.schedule)
        # schedules with copies cannot merge the instructions of several stages on a device
        if max(self.copies) > 1 and sum(self.copies) > self.devices_per_replica:
            raise PlanError(
                f"devices{self.devices}: where a stage has copies, each device has one stage"
            )

    def _check_placement(self) -> None:
        named = {device for devices in self.owners for device in devices}
        count = len(named)
        if named != set(range(count)) or self.owners[-1][-1] != 0:
            raise PlanError(
                f"devices{self.devices} must name each of 0..{count - 1} (as many as there are "
                "different ones) and end with 0, the driver's, which owns the last stage, or the "
                "last copy of it"
            )
        # cuts between stages of the only device have no use
        if count == 1 and self.stages > 1:
            raise PlanError(
                f"stages({self.stages}) are all on one device{self.devices}: it needs no cuts"
            )
        if (self.schedule == "zero_bubble" or self.split) and count < self.stages:
            raise PlanError(
                f"split backwards give each stage a device of its own, and devices{self.devices} "
                f"are {count} for stages({self.stages}): use schedule 'gpipe', or no split"
            )
        # one for each device of a replica, and not for each rank
        if self.capacities and len(self.capacities) != count:
            raise PlanError(f"devices({count}) != {len(self.capacities)} capacities")
        if self.shares and (len(self.shares) != self.replicas or min(self.shares) < 1):
            raise PlanError(
                f"shares{self.shares} must be one number of samples, at least 1, for each of "
                f"replicas({self.replicas})"
            )
        if self.ranks and (self.ranks[0] or sorted(self.ranks) != [*range(self.world_size)]):
            raise PlanError(
                f"ranks{self.ranks} must name each of 0..{self.world_size - 1} once, replica by "
                "replica, and begin with 0, which drives the first"
            )
        rows = tuple(row.device for row in self.rows)
        if rows and rows != self.first_devices:
            raise PlanError(f"devices{self.devices} contradict the rows of the stages, {rows}")

    @property
    def devices_per_replica(self) -> int:
        """Number of devices of a replica.

        It is the number of stages, in which each copy counts; or less, if devices have several
        stages.
        """
        return len({device for devices in self.owners for device in devices})

    @property
    def delays(self) -> tuple[int, ...]:
        """By stage, how many optimizer steps its weights are behind when it computes a forward.

        0 for all stages, unless the schedule is a delayed one.
        """
        streamed = STREAMED.get(self.schedule)
        if streamed is None or not streamed.delayed:
            return (0,) * self.stages
        return streamed.look_aheads(self.stages)

    @property
    def world_size(self) -> int:
        """Number of devices, and so of processes, of the plan."""
        return self.replicas * self.devices_per_replica

    def check_network(self, partitions: Sequence[str], shown: str) -> None:
        """Check that this plan was made for a network: that both have the same partitions.

        A plan without rows, which does not name its partitions, passes.

        Args:
            partitions: names of the network's partitions, in order.
            shown: name of the network in the text of the error.

        Raises:
            PlanError: the partitions differ; the text says which.
        """
        planned = [name for row in self.rows for name in row.partitions]
        if not planned or planned == list(partitions):
            return
        missing = [name for name in planned if name not in partitions]
        more = [name for name in partitions if name not in planned]
        raise PlanError(
            f"the plan is for another network than {shown}: of the partitions, only the plan has "
            f"{_listed(missing)}, and only the network has {_listed(more)} ({len(planned)} and "
            f"{len(partitions)} in all). Let a new one be made (plan=None), and save that "
            "(strategy.plan.save)."
        )

    def to_json(self) -> str:
        """Write the plan as JSON text.

        The delays of a delayed schedule are added for human readers; `from_json` ignores them.
        """
        delays = {"delays": self.delays} if any(self.delays) else {}
        return json.dumps(asdict(self) | delays, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan from the JSON text of `to_json`, of this format version or version 1.

        Raises:
            PlanError: the text is no JSON object, a key is unknown or missing (the text names it),
                or the plan contradicts itself.
        """
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"the plan is not JSON: {error}") from error
        if isinstance(record, dict):
            # these follow from others, and `tried` was of earlier versions
            for name in ("delays", "data_parallel_sizes", "tried"):
                record.pop(name, None)
            if record.get("version") == 1:
                record["version"] = VERSION
        _check_keys(cls, record, "the plan")
        rows = []
        try:
            for stage, row in enumerate(record.get("rows", ())):
                _check_keys(StagePlan, row, f"stage {stage} of the plan")
                # a tuple in place of JSON's list, so that the plan equals the one written
                rows.append(StagePlan(**{**row, "partitions": tuple(row["partitions"])}))
            return cls(**{**record, "rows": tuple(rows)})
        except TypeError as error:  # for instance a number in place of a list
            raise PlanError(f"the plan has a value of the wrong type: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON, for `load` and `HybridGabraStrategy(plan=path)`."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan from a file that `save` has written.

        Args:
            path: path of the file.

        Raises:
            PlanError: the file cannot be read, or is refused by `from_json`.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"no plan can be read from {str(path)!r}: {error}") from error
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def to_html(self, path: str | Path) -> None:
        """Write the plan to a file, as an HTML page with its table and the picture of a step."""
        # here, since that module imports this one
        from lightning_hybrid.planning.plan_page import plan_page

        Path(path).write_text(plan_page(self), encoding="utf-8")

    def table(self) -> list[dict[str, str | int | float]]:
        """Make a table of the plan for readers.

        Returns:
            For each stage a dictionary from the name of a column to its value. A plan without
            `rows` has the columns ``stage``, ``device`` and ``replicas`` (how many ranks compute
            the stage), and what the schedule and the speeds of the devices add.
        """
        devices = [d if isinstance(d, int) else ", ".join(map(str, d)) for d in self.devices]
        shape = zip(devices, self.data_parallel_sizes)
        table: list[dict[str, str | int | float]] = [
            {"stage": stage, "device": device, "replicas": replicas}
            for stage, (device, replicas) in enumerate(shape)
        ]
        if any(self.delays):
            for line, delay in zip(table, self.delays):
                line["delay"] = delay
        if self.schedule == "zero_bubble" or self.split:
            for stage, line in enumerate(table):
                line["backward"] = "split" if stage in (self.split or ()) else "joint"
        if len(set(self.capacities)) > 1:
            for line, device in zip(table, self.first_devices):
                line["speed"] = round(self.capacities[device], 3)
        for line, row in zip(table, self.rows):
            first, last = row.partitions[0], row.partitions[-1]
            line["partitions"] = first if first == last else f"{first} .. {last}"
            line |= {"layers": row.layers, "parameters": row.parameters, "load": row.load}
            if row.memory_bytes is not None:
                most = row.memory_bytes if row.peak_bytes is None else row.peak_bytes
                of = "" if row.limit_bytes is None else f" of {row.limit_bytes / 1e9:.3g}"
                line["memory"] = f"{most / 1e9:.2f}{of} GB"
        for line, sent in zip(table, self.traffic_bytes or ()):
            line["sends"] = f"{sent / 1e6:,.1f} MB"
        return table

    @property
    def step_s(self) -> float:
        """Predicted seconds of one optimizer step; infinite if they were not predicted."""
        return float("inf") if self.predicted_step_s is None else self.predicted_step_s

    @property
    def traffic_bytes(self) -> tuple[float, ...] | None:
        """By stage, the bytes that a rank sends in a step for this stage; None: not known.

        A rank sends activations to the next stage, gradients to the previous one, and its part of a
        ring all-reduce over all ranks of the stage. Not counted are messages with the network's
        inputs, and messages between two stages of one device. Of several copies the one with the
        most micro-batches is meant.
        """
        rows, sent = self.rows, []
        cuts = [row.cut_bytes for row in rows]
        if not rows or None in cuts:
            return None
        crossing = [
            0 if k + 1 < self.stages and rows[k + 1].device == row.device else row.cut_bytes or 0
            for k, row in enumerate(rows)
        ]
        groups = zip(self.copies, self.data_parallel_sizes)
        for before, after, row, (copies, owners) in zip([0, *crossing], crossing, rows, groups):
            # in a ring of n ranks each sends (n - 1) / n of the bytes twice
            ring = 2 * (owners - 1) / owners * (row.gradient_bytes or 0)
            # that of the first copy, which has the most micro-batches
            sent.append(-(-self.microbatches // copies) * (before + after) + ring)
        return tuple(sent)

    def without_times(self) -> Self:
        """Make a copy without predicted times, for costs that are counted FLOPs and no seconds."""
        rows = tuple(row.without_times() for row in self.rows)
        return replace(self, rows=rows, predicted_step_s=None)

    def describe(self) -> str:
        """Describe the plan for a terminal: some lines of text, and a table of the stages."""
        predicted = self.predicted_step_s
        bred = (self.allocation, self.objective) == ("gabra", "step")
        replicas, shape = _counted(self.replicas, "replica"), _counted(self.stages, "stage")
        if max(self.copies) > 1:
            shape = f"{shape} ({'-'.join(map(str, self.copies))} copies)"
        if self.devices_per_replica < self.stages:
            shape = f"{_counted(self.devices_per_replica, 'device')} with {shape}"
        head = (
            f"{replicas} x {shape} = {_counted(self.world_size, 'device')}, "
            f"{_counted(self.microbatches, 'micro-batch', 'es')}, {self.schedule}\n"
            f"allocation: {self.allocation} ({self.objective})"
            + (", activations are computed again" if self.recompute else "")
            + (f", shares of a batch: {', '.join(map(str, self.shares))}" if self.shares else "")
            + (f", ranks in the order {', '.join(map(str, self.ranks))}" if self.ranks else "")
            + ("" if predicted is None else f", predicted step: {predicted:.4g} s")
            + (f"\n{_OF_GABRA}" if bred else "")
            + (f"\nsamples do not meet: {self.split_by}" if self.split_by else "")
        )
        table = Table()
        rows = cells(self)
        for column in rows[0]:
            table.add_column(column, justify="left" if column == "partitions" else "right")
        for row in rows:
            table.add_row(*row.values())
        text = StringIO()
        # no colours: it may end up in a log file, a notebook or an error message
        Console(file=text, width=120, color_system=None, force_jupyter=False).print(table)
        return f"{head}\n{text.getvalue()}"

    def __str__(self) -> str:
        return self.describe()


def cells(plan: Plan) -> list[dict[str, str]]:
    """Format `Plan.table`: for each stage a dictionary from the name of a column to its text."""

    def cell(name: str, value: str | int | float) -> str:
        if isinstance(value, str):
            return value
        return f"{value:.1%}" if name == "load" else f"{value:,}"

    return [{name: cell(name, value) for name, value in row.items()} for row in plan.table()]


def _devices_of(stage: int | Sequence[int]) -> int | tuple[int, ...]:
    """Normalise an entry of `Plan.devices`: a number for a single copy, a tuple for several."""
    if isinstance(stage, int):
        return stage
    # one form for one copy, so that plans can be compared
    return stage[0] if len(stage) == 1 else tuple(stage)


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _listed(names: Sequence[str]) -> str:
    """Join the first three names, and say how many more there are; ``none`` without names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more or "none"


def check_fields(
    record: Any, where: str, needed: Sequence[str], optional: Sequence[str]
) -> dict[str, Any]:
    """Check that a record from a file has the needed fields and no unknown ones, and return it.

    Args:
        record: what the file has here, as YAML or JSON gives it: a dictionary if the file is right,
            else any value.
        where: what the record describes, for the text of an error.
        needed: names of the fields that must be there and not be None.
        optional: names of the fields that may be left out.

    Raises:
        PlanError: `record` is no mapping, has an unknown field, or lacks a needed one.
    """
    known = (*needed, *optional)
    if not isinstance(record, dict):
        raise PlanError(f"{where} is {record!r}: fields are needed ({', '.join(known)})")
    for field in record:
        if field not in known:
            close = get_close_matches(str(field), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise PlanError(
                f"{where} has the unknown field {field!r}{hint} (known: {', '.join(known)})"
            )
    missing = [field for field in needed if record.get(field) is None]
    if missing:
        raise PlanError(f"{where} lacks {', '.join(map(repr, missing))}")
    return record


def _check_keys(cls: type[Any], record: Any, where: str) -> None:
    """Check a record from JSON: it has fields of a dataclass alone, and all without a default.

    Args:
        cls: the dataclass, `Plan` or `StagePlan`.
        record: what the JSON has here: a dictionary if it is right, else any value.
        where: what the record describes, for the text of an error.

    Raises:
        PlanError: `record` is no mapping, has an unknown field, or lacks a needed one.
    """
    needed = [field.name for field in fields(cls) if field.default is MISSING]
    check_fields(record, where, needed, [f.name for f in fields(cls) if f.name not in needed])
