"""Writes `docs/features.md` from the rows of the suite and from tests of its neighbours.

A row is what its docstring says; a test is what its name says, or its docstring where it has one.

Run: python tests/conformance/features.py
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "helpers"), str(ROOT)]

from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Row, all_rows  # noqa: E402

PAGE = ROOT / "docs" / "features.md"

TITLES = {
    "rows_steps": "Fit, validate, test, predict, log",
    "rows_user_code": "Your LightningModule",
    "rows_networks": "Networks, and how they are built and called",
    "rows_escapes": "Hooks, and what leaves a network beside its output",
    "rows_python_state": "Python that the network reads and that changes",
    "rows_lightning_state": "A LightningModule that is its own network",
    "rows_driver_state": "What hooks set on the ranks that run them",
    "rows_operators": "Operators and transformations",
    "rows_samples": "Samples that meet at the ends of a network",
    "rows_inside": "Networks that return their loss, one forward, one backward",
    "rows_first_calls": "Sizes of batches, and samples that meet",
    "rows_zoo": "Networks that people train",
    "rows_by_hand": "Weights, gradients and settings by hand",
    "rows_optimizers": "Optimizers",
    "rows_trainer": "Arguments of the Trainer, schedulers, loaders",
    "rows_callbacks": "Callbacks",
    "rows_loggers": "Loggers",
    "rows_ranks": "Ranks",
    "rows_after": "After the run",
    "rows_refused": "Refusals",
}
"""Headings of the files of rows, in the order of the page."""

REFUSED = {
    "tests/strategy/test_refusals.py": "*",
    "tests/parts/test_reasons_to_refuse.py": "*",
    "tests/driver/test_adoption.py": "*are_refused",
    "tests/run/test_replica_world.py": "test_a_loader_that_was_made_for_all_processes_is_refused",
    "tests/planning/test_plan.py": "test_a_plan_for_another_network_says_which_partitions_differ",
    "tests/driver/test_optimizer_kinds.py": (
        "test_parameters_that_are_on_no_one_rank_refuse_a_whole_step"
    ),
    "tests/driver/test_streamed_calls.py": "*refused",
    "tests/parts/test_coming_batches.py": "*refused",
    "tests/parts/test_unequal_shares.py": "*refused",
}
DIFFERS = {"tests/capture/test_not_seen.py": "*"}
BESIDE = {
    "Memory: networks of `configure_model`, what a rank holds during and after a run": (
        "what_you_can_rely_on.md#memory",
        "tests/strategy/test_configure_model.py",
        "tests/strategy/test_limited_memory.py",
        "tests/driver/test_after_run.py",
    ),
    "Sizes that are left open": (
        "planning.md#automatic-sizes",
        "tests/strategy/test_automatic_sizes.py",
    ),
    "Unlike devices: shares by speed, new cuts, free placements": (
        "unlike_devices.md",
        "tests/strategy/test_balance.py",
        "tests/strategy/test_new_cuts.py",
        "tests/driver/test_other_stages.py",
        "tests/strategy/test_free_placements.py",
    ),
    "Streamed and delayed schedules, loops": (
        "schedules.md",
        "tests/strategy/test_streamed.py",
    ),
    "Precision, compiled stages, batch statistics": (
        "what_you_can_rely_on.md",
        "tests/strategy/test_stages.py",
    ),
    "Checkpoints, sharded checkpoints, divided states of optimizers": (
        "checkpoints.md",
        "tests/strategy/test_checkpoints.py",
        "tests/strategy/test_sharded_checkpoints.py",
        "tests/strategy/test_divided_states.py",
    ),
    "Launchers and the command line": (
        "tutorial_lightning.md",
        "tests/strategy/test_launchers.py",
        "tests/strategy/test_cli.py",
        "tests/strategy/test_pytorch_lightning.py",
    ),
    "Faults: exceptions, killed and stopped ranks, lost replicas, restarts": (
        "what_you_can_rely_on.md#failures",
        "tests/strategy/test_faults.py",
        "tests/strategy/test_lost_replica.py",
        "tests/strategy/test_manners.py",
        "tests/strategy/test_random_kills.py",
        "tests/strategy/test_restarts.py",
    ),
}
"""Tests beside the suite: by theme, the page that describes it, and the files."""

INTRO = """# What works, and the test behind it

*`make features` writes this page from the tests: change those, not the page.*

Each line is something that users of Lightning do with a network that is cut into stages. The name
in front is a row of the conformance suite (`tests/conformance/rows_*.py`): a LightningModule that
does this one thing. The row trains in real processes in float64. A test compares it with plain
Lightning on one device (two replicas: with `ddp` on two devices). Losses, weights, buffers, metrics
and return values agree to 1e-10 on every rank.

A row runs as one replica of two stages (1x2), one of three (1x3) and two replicas of two (2x2). A
small network runs in some of these shapes only; its row says in which. The docstring of a row has
the details.

`tests/conformance/test_pairs.py` combines rows at random, and `test_fuzz.py` makes 500 random
networks. [`tests/conformance/suite.py`](../tests/conformance/suite.py) says how to test a strategy
of your own with these rows.

```
make conformance                                                    # all
python -m pytest -m "" tests/conformance -k "TwoStages and Drops"   # one row
```

{rows} rows: {works} work, {refused} are refused in all shapes, {partly} in three stages.

"""

REFUSED_INTRO = """## Refused

Every rank raises an error that says what to use instead, before any weight has changed. Rows with a
shape behind their name are refused in that shape and work in the others. Some rows are refused
because their networks are small: where a network's Python cannot be captured as one graph, its
parts are cut one by one if they are large enough.

"""

DIFFERS_INTRO = """
## Differs from one device

[What is known to differ](what_you_can_rely_on.md#what-is-known-to-differ) has the list with
reasons. `torch.compile` does not see these changes; the check of calls 1, 2, 4, ... ends most of
such runs:

"""

MICROBATCHES_INTRO = """
The following rows equal one device on which the network runs once per micro-batch. Each micro-batch
has random generators of its own.

"""


def sentence_of(row: type[Row]) -> str:
    """The docstring of a row, as one paragraph of Markdown."""
    text = " ".join((row.__doc__ or "").split()).replace("``", "`").replace("|", "\\|")
    assert text, f"{row.__name__} has no docstring, which docs/features.md shows"
    return text


def summary_of(row: type[Row]) -> str:
    """The first sentence of a docstring, up to a colon or semicolon if enough stands there."""
    sentence = re.split(r"(?<=[.`)])\.? (?=[A-Z`])", sentence_of(row))[0]
    head = re.split(r"[;:] ", sentence)[0]
    shown = sentence if len(head.split()) < 4 or head.count("`") % 2 else head
    return shown.rstrip(".") + "."


def named(row: type[Row]) -> str:
    """The name of a row; where it is refused in some shapes and works in others, the former too."""
    where = refused_in(row)
    shapes = ", ".join(f"{replicas}x{stages}" for replicas, stages in where)
    return f"`{row.__name__}`" + (f" ({shapes})" if 0 < len(where) < len(runs_in(row)) else "")


def runs_in(row: type[Row]) -> list[tuple[int, int]]:
    known = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
    return [shape for shape in known if shape in row.shapes and shape[1] in row.cuts]


def refused_in(row: type[Row]) -> list[tuple[int, int]]:
    """The shapes in which a row is refused."""
    if row.refused:
        return runs_in(row)
    if row.equal_or_refused:
        return [shape for shape in runs_in(row) if shape not in row.works]
    return []


def section_of(row: type[Row]) -> int:
    return list(TITLES).index(row.__module__)


@cache
def tests_in(file: str) -> list[tuple[str, str]]:
    """Names of a file's tests, and what each says."""
    found = []
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            said = node.name.removeprefix("test_").replace("_", " ")
            doc = " ".join((ast.get_docstring(node) or f"{said.capitalize()}.").split())
            found.append((node.name, doc))
    return found


def tests(chosen: dict[str, str]) -> Iterator[str]:
    """A line for each chosen test of these files."""
    for file, ending in chosen.items():
        found = [s for name, s in tests_in(file) if name.endswith(ending.lstrip("*"))]
        assert found, f"{file} has no test that ends with {ending}"
        yield from (f"- {said}\n" for said in found)


def page() -> str:
    """All of `docs/features.md`."""
    rows = sorted(all_rows(), key=section_of)
    refused = [row for row in rows if refused_in(row)]
    everywhere = [row for row in refused if refused_in(row) == runs_in(row)]
    works = [row for row in rows if row not in everywhere]
    text = INTRO.format(
        rows=len(rows),
        works=len(works) - (len(refused) - len(everywhere)),
        refused=len(everywhere),
        partly=len(refused) - len(everywhere),
    )
    text += REFUSED_INTRO
    text += "".join(f"- {named(row)}: {sentence_of(row)}\n" for row in refused)
    text += "".join(tests(REFUSED))
    text += DIFFERS_INTRO
    text += "".join(tests(DIFFERS))
    text += MICROBATCHES_INTRO
    for row in works:
        if row.per_microbatch:
            text += f"- {named(row)}: {summary_of(row)}\n"
    text += "\n## Works\n"
    for file, title in TITLES.items():
        here = [row for row in works if row.__module__ == file and not row.per_microbatch]
        if here:
            text += f"\n### {title}\n\n"
            text += "".join(f"- {named(row)}: {summary_of(row)}\n" for row in here)
    text += "\n### Beside the rows\n\n| what | tests |\n| --- | --- |\n"
    for title, (link, *files) in BESIDE.items():
        assert all((ROOT / file).is_file() for file in files), title
        names = ", ".join(f"`{file}`" for file in files)
        text += f"| [{title}]({link}) | {names} |\n"
    return re.sub(r"[ \t]+\n", "\n", text)


if __name__ == "__main__":
    PAGE.write_text(page())
