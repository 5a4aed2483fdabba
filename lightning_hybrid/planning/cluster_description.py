"""Descriptions of clusters, their devices and links, to plan for a cluster without having it.

A description is a YAML file, see `lightning_hybrid/planning/clusters/`::

    name: two workstations
    devices:                      # in the order of the ranks
      - name: RTX 4090
        count: 2                  # as many of them in a row; 1 if left out
        compute: 82.6 TFLOP/s     # only their ratios count where the network is measured
        memory: 24 GB             # may be left out: not known, no limit
      - name: RTX 3090
        count: 2
        compute: 35.6 TFLOP/s
        memory: 24 GB
    levels:                       # from the innermost to the outermost
      - name: PCIe
        devices: 2                # that it joins: ranks 0 and 1, ranks 2 and 3
        bandwidth: 12 GB/s        # between two devices, in one direction
        latency: 10 us
      - name: Ethernet
        devices: 4
        bandwidth: 10 Gbit/s
        latency: 50 us

The devices of an actual run, as measured, are in `planning.run_cluster`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Self

import yaml

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.plan import check_fields
from lightning_hybrid.planning.run_cluster import Rates
from lightning_hybrid.planning.units import parse, spell

SHIPPED = Path(__file__).parent / "clusters"
"""Folder of the descriptions that come with the package."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A device of a described cluster.

    Attributes:
        name: model, as the vendor calls it.
        flops_per_s: floating-point operations per second.
        memory_bytes: size of its memory; None: not known.
    """

    name: str
    flops_per_s: float
    memory_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Level:
    """The links within groups of devices with neighbouring numbers, such as those of a host.

    Attributes:
        name: name of the level, such as `within a host`.
        devices: number of devices in a group: those with the same `number // devices`.
        bandwidth_bytes_per_s: bandwidth between two devices, in one direction, while the other
            direction is in use too.
        latency_s: seconds from the start of sending until the first byte arrives.
    """

    name: str
    devices: int
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class ClusterDescription:
    """The devices of a cluster, and the levels of links that join them.

    Attributes:
        name: name of the cluster.
        devices: the devices; a device's number is its index here.
        levels: levels of links, from the innermost to the outermost; empty: there is one device.
        about: where these data come from, as text.
        places: if this is a part of a larger cluster, for each device its number there, by which
            levels group it; empty: its own number.
        unit: the FLOP/s that count as speed 1; None: those of the first device.
        rates: measured costs of all-reduces and optimizer steps. None: not measured; all-reduces
            are taken to be rings over the levels, and optimizer steps to take the times in the
            costs of the network.

    Raises:
        PlanError: there is no device; a level is not made of whole groups of the level inside; or
            no level joins all devices.
    """

    name: str
    devices: tuple[DeviceSpec, ...]
    levels: tuple[Level, ...] = ()
    about: str = ""
    places: tuple[int, ...] = ()
    unit: float | None = None
    rates: Rates | None = None

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlanError(f"cluster {self.name!r} has no devices")
        for inner, outer in pairwise(self.levels):
            if outer.devices <= inner.devices or outer.devices % inner.devices:
                raise PlanError(
                    f"level {outer.name!r} of cluster {self.name!r} joins {outer.devices} devices, "
                    f"which is no multiple of the {inner.devices} of {inner.name!r}: levels go "
                    "from the innermost to the outermost, each made of whole groups of the former"
                )
        joined = self.levels[-1].devices if self.levels else 1
        if joined < len(self.devices):
            raise PlanError(
                f"no level of cluster {self.name!r} joins all of its {len(self.devices)} devices "
                f"(the outermost joins {joined}): add one"
            )

    @cached_property
    def relative_speeds(self) -> tuple[float, ...]:
        """Speed of each device, relative to `unit`, by default to the first device."""
        return tuple(device.flops_per_s / self._unit for device in self.devices)

    @property
    def _unit(self) -> float:
        return self.unit or self.devices[0].flops_per_s

    @cached_property
    def memory_limits(self) -> tuple[float, ...] | None:
        """Memory of each device in bytes; None: that of some device is not known."""
        sizes = [device.memory_bytes for device in self.devices]
        return None if None in sizes else tuple(size or 0.0 for size in sizes)

    def level(self, devices: Iterable[int]) -> Level | None:
        """Find the innermost level of links that joins some devices.

        Args:
            devices: numbers of the devices.

        Returns:
            The level; None: `devices` has fewer than two different numbers.
        """
        numbers = set(devices)
        if len(numbers) < 2:
            return None
        places = [self.places[number] for number in numbers] if self.places else numbers
        return next(
            level for level in self.levels if len({n // level.devices for n in places}) == 1
        )

    def pick(self, numbers: Sequence[int]) -> Self:
        """Make the description of a part of the cluster; speeds keep their unit.

        Args:
            numbers: numbers of its devices, in the order that they get in the part.
        """
        places = tuple(self.places[number] for number in numbers) if self.places else tuple(numbers)
        outermost = self.level(numbers)
        return replace(
            self,
            devices=tuple(self.devices[number] for number in numbers),
            levels=self.levels[: self.levels.index(outermost) + 1] if outermost else (),
            places=() if places == tuple(range(len(places))) else places,
            unit=self._unit,
        )

    def sparing(self, share: float) -> Self:
        """Make a copy of the description in which each device whose memory is known has less.

        Args:
            share: fraction of each device's memory that is taken away.
        """
        left = (
            replace(d, memory_bytes=d.memory_bytes and (1 - share) * d.memory_bytes)
            for d in self.devices
        )
        return replace(self, devices=tuple(left))

    def take(self, count: int) -> Self:
        """Make the description of the cluster's first `count` devices alone; see `pick`.

        Raises:
            PlanError: `count` is less than 1, or the cluster has fewer devices.
        """
        if not 1 <= count <= len(self.devices):
            raise PlanError(
                f"cluster {self.name!r} has {len(self.devices)} devices, {count} are asked for: "
                "ask for fewer, or describe a larger cluster"
            )
        return self.pick(range(count))

    def to_yaml(self) -> str:
        """Write the description as YAML, which `from_yaml` reads."""
        record = {
            "name": self.name,
            **({"about": self.about} if self.about else {}),
            "devices": [
                _device_record(device, len(list(same))) for device, same in groupby(self.devices)
            ],
            "levels": [
                {
                    "name": level.name,
                    "devices": level.devices,
                    "bandwidth": spell("bandwidth", level.bandwidth_bytes_per_s),
                    "latency": spell("latency", level.latency_s),
                }
                for level in self.levels
            ],
        }
        return str(yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=96))

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read a description from YAML text; see the module for its fields.

        Raises:
            PlanError: the text is no YAML mapping; a field is unknown, missing or of the wrong
                kind; a quantity has no unit; or `ClusterDescription` refuses the values.
        """
        try:
            record = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError(f"the cluster is not YAML: {error}") from error
        fields = check_fields(record, "the cluster", ("name", "devices"), ("about", "levels"))
        devices: list[DeviceSpec] = []
        for number, entry in enumerate(_list(fields, "devices")):
            devices += _devices(entry, f"devices[{number}]")
        levels = [
            _level(entry, f"levels[{number}]")
            for number, entry in enumerate(_list(fields, "levels"))
        ]
        return cls(
            name=str(fields["name"]),
            devices=tuple(devices),
            levels=tuple(levels),
            about=str(fields.get("about") or ""),
        )

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Read a description from a file, or one that comes with the package by its name.

        Args:
            name: path of a YAML file, or the name of a file in `SHIPPED` without its ending.

        Raises:
            PlanError: there is no such file, or `from_yaml` refuses its text.
        """
        shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}
        path = shipped.get(str(name), Path(name))
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(
                f"no cluster can be read from {str(name)!r}: give a YAML file, or one of the "
                f"shipped descriptions: {', '.join(shipped)}"
            ) from error
        try:
            return cls.from_yaml(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


def _device_record(device: DeviceSpec, count: int) -> dict[str, Any]:
    record: dict[str, Any] = {"name": device.name, "count": count}
    record["compute"] = spell("compute", device.flops_per_s)
    if device.memory_bytes is not None:
        record["memory"] = spell("memory", device.memory_bytes)
    return record


def _devices(entry: Any, where: str) -> list[DeviceSpec]:
    fields = check_fields(entry, where, ("name", "compute"), ("count", "memory"))
    device = DeviceSpec(
        name=str(fields["name"]),
        flops_per_s=parse("compute", fields["compute"], f"{where}.compute"),
        memory_bytes=parse("memory", fields["memory"], f"{where}.memory")
        if "memory" in fields
        else None,
    )
    return [device] * _count(fields.get("count", 1), f"{where}.count")


def _level(entry: Any, where: str) -> Level:
    fields = check_fields(entry, where, ("name", "devices", "bandwidth", "latency"), ())
    return Level(
        name=str(fields["name"]),
        devices=_count(fields["devices"], f"{where}.devices"),
        bandwidth_bytes_per_s=parse("bandwidth", fields["bandwidth"], f"{where}.bandwidth"),
        latency_s=parse("latency", fields["latency"], f"{where}.latency"),
    )


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name) or []
    if not isinstance(value, list):
        raise PlanError(f"{name} is {value!r}: a list is needed, each entry beginning with '-'")
    return value


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{where} is {value!r}: an integer of at least 1 is needed")
    return value
