"""Random networks under stages, against plain PyTorch on one device.

Most are of numbered seeds. Hypothesis draws others, and makes a network that fails as small as it
can: for a longer look, run its tests with a larger ``max_examples`` and without ``derandomize``.
"""

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
from comparison import differences
from fuzz import MEETINGS, OTHER_LAYOUTS, STEPS, Fuzzed, Recipe, drawn, fuzzed, one_device, row_of
from hypothesis import given, note, settings
from hypothesis import strategies as st
from session import Session
from suite import Conformance, Record, Row, assert_no_error, assert_refused, was_refused

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.errors import NetworkError, PlanError

# The first test of a class waits for all rows of the class; their session ends what hangs.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(0)]


class _Fuzz(Conformance):
    refusals = (NetworkError, PlanError)
    seeds: ClassVar[range]

    @classmethod
    def make_strategy(cls, row: type[Row]) -> HybridGabraStrategy:
        return HybridGabraStrategy(
            data_parallel_size=cls.replicas,
            pipeline_parallel_size=cls.stages,
            num_microbatches=row.microbatches,
            plan=row.cuts[cls.stages],
        )

    @classmethod
    def catalogue(cls) -> list[type[Fuzzed]]:  # type: ignore[override]
        return [fuzzed(seed) for seed in cls.seeds]

    @classmethod
    def rows(cls) -> list[type[Fuzzed]]:  # type: ignore[override]
        return cls.catalogue()

    def test_row(
        self, row: type[Row], records: Callable[[type[Conformance], type[Row]], list[Record]]
    ) -> None:
        assert issubclass(row, Fuzzed)

        def of(suite: type[Conformance]) -> list[Record]:
            return records(suite, row)

        self.compare(row, of)

    def compare(
        self, row: type[Fuzzed], records: Callable[[type[Conformance]], list[Record]]
    ) -> None:
        """Hold what the drivers of a suite have recorded against plain PyTorch."""
        ranks = records(type(self))
        if self.stages > 1 and was_refused(ranks, row):
            assert_refused(ranks, row)
            return
        assert_no_error(ranks)
        assert len({record["pid"] for record in ranks}) == len(ranks)
        module = one_device(row, 1, [1] * STEPS)[0]
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        said = " ".join(ranks[0]["said"])
        whole = self.stages == 1 or "runs on the driver in some calls" in said
        for got in (set(record["gradients"]) for record in ranks):
            assert got <= trained if whole else got < trained, "no stage is apart"
        ways = row.parts() if self.stages > 1 else (1,)
        found = [_differences(ranks, row, [parts] * STEPS) for parts in ways]
        if all(found) and "is cut where it divides best" in said:  # a part of it
            assert self.reference is not None
            found = [_differences_from(records(self.reference), ranks, row)]
        elif all(found) and "whole" in said:  # calls that cannot be split are not
            found = [_differences(ranks, row, _as_it_went(ranks, row))]
        assert not all(found), "\n".join(found[0][:10])


def _differences_from(reference: list[Record], ranks: list[Record], row: type[Fuzzed]) -> list[str]:
    """From plain Lightning: Python that draws on the driver draws what it draws there."""
    found = []
    for record, expected in zip(ranks, reference, strict=True):
        found += differences(record["seen"], expected["seen"], row.tolerance, "seen")
    for record in ranks:
        found += differences(record["weights"], reference[0]["weights"], row.tolerance, "weights")
    return found


def _differences(ranks: list[Record], row: type[Fuzzed], parts: Sequence[int]) -> list[str]:
    """From one device that takes batches in so many parts."""
    copies = one_device(row, len(ranks), parts)
    weights = copies[0].state_dict()
    found = []
    for record, expected in zip(ranks, copies, strict=True):
        found += differences(record["seen"], expected.seen, row.tolerance, "seen")
        found += differences(record["weights"], dict(weights), row.tolerance, "weights")
    return found


def _as_it_went(ranks: list[Record], row: type[Fuzzed]) -> list[int]:
    """The number of parts in each step, as the losses tell."""
    parts = [1] * STEPS
    losses = [record["seen"][::2] for record in ranks]
    for step in range(STEPS):
        for parts[step] in row.parts():
            expected = [module.seen[2 * step] for module in one_device(row, len(losses), parts)]
            if expected == pytest.approx([of_one[step] for of_one in losses], rel=1e-9):
                break
    return parts


class TestFuzzControl(_Fuzz):
    """Plain Lightning on one device agrees with the loop, but for its random numbers."""

    seeds = range(1000, 1040)

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:  # type: ignore[override]
        return "auto"

    @classmethod
    def rows(cls) -> list[type[Fuzzed]]:  # type: ignore[override]
        return [r for r in cls.catalogue() if not any(k.draws for k in r.made.kinds)]


class FuzzOneDevice(_Fuzz):
    seeds = range(400)

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:  # type: ignore[override]
        return "auto"


class FuzzTwoDevices(FuzzOneDevice):
    replicas = 2
    seeds = range(400, 500)

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:  # type: ignore[override]
        return "ddp"


class TestFuzzTwoStages(_Fuzz):
    stages = 2
    reference = FuzzOneDevice
    seeds = range(250)


class TestFuzzThreeStages(_Fuzz):
    stages = 3
    reference = FuzzOneDevice
    seeds = range(250, 400)


class TestFuzzReplicas(_Fuzz):
    replicas = 2
    stages = 2
    reference = FuzzTwoDevices
    seeds = range(400, 500)


class FuzzLayoutsOneDevice(FuzzOneDevice):
    seeds = range(OTHER_LAYOUTS, OTHER_LAYOUTS + 40)


class TestFuzzLayouts(_Fuzz):
    """Tensors cross cuts whose numbers lie in memory in many orders."""

    stages = 2
    reference = FuzzLayoutsOneDevice
    seeds = range(OTHER_LAYOUTS, OTHER_LAYOUTS + 40)


class FuzzMeetingsOneDevice(FuzzOneDevice):
    seeds = range(MEETINGS, MEETINGS + 30)


class TestFuzzMeetings(_Fuzz):
    """Samples meet at the start or the end, and batches are folded, in attention of all layouts."""

    stages = 2
    reference = FuzzMeetingsOneDevice
    seeds = range(MEETINGS, MEETINGS + 30)


# ---------------------------------------------------------------- drawn by Hypothesis

RECIPE = "FUZZ_RECIPE"
"""The environment of the processes of such a row: its recipe."""


class _Drawn(_Fuzz):
    """One network at a time; its processes know it by their environment."""

    @classmethod
    def catalogue(cls) -> list[type[Fuzzed]]:  # type: ignore[override]
        text = os.environ.get(RECIPE)
        return [] if text is None else [row_of(pickle.loads(bytes.fromhex(text)), "Drawn")]

    @classmethod
    def rows(cls) -> list[type[Fuzzed]]:  # type: ignore[override]
        return []

    def check(self, made: Recipe) -> None:
        note(str(made))
        with _in_environment(made), TemporaryDirectory() as folder:
            [row] = self.catalogue()

            def records(suite: type[Conformance]) -> list[Record]:
                place = Path(folder, suite.__name__)
                return Session(suite, [row.__name__], place).records[row.__name__]

            self.compare(row, records)


@contextmanager
def _in_environment(made: Recipe) -> Iterator[None]:
    os.environ[RECIPE] = pickle.dumps(made).hex()
    try:
        yield
    finally:
        del os.environ[RECIPE]


class DrawnOneDevice(_Drawn):
    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:  # type: ignore[override]
        return "auto"


recipes = st.builds(drawn, st.randoms(use_true_random=False), layouts=st.booleans())


class DrawnTwoStages(_Drawn):
    stages = 2
    reference = DrawnOneDevice


class DrawnThreeStages(_Drawn):
    stages = 3
    reference = DrawnOneDevice


drawn_by_hypothesis = settings(max_examples=12, derandomize=True)


@pytest.mark.conformance
@drawn_by_hypothesis
@given(recipes)
def test_drawn_networks_train_as_on_one_device_under_two_stages(made: Recipe) -> None:
    DrawnTwoStages().check(made)


@pytest.mark.conformance
@drawn_by_hypothesis
@given(recipes)
def test_drawn_networks_train_as_on_one_device_under_three_stages(made: Recipe) -> None:
    DrawnThreeStages().check(made)
