"""The matrix of networks of transformers: how they are made, where, and how they are trained.

Each cell is trained in two stages with two micro-batches, in float64, and losses and weights are
compared with a loop of one process. ``matrix.json`` has what came out, and docs/networks.md the
table of it; both are written by ``python tests/real/matrix.py [PART OF A CELL'S NAME ...]``.
"""

import itertools
import json
import os
import re
import sys
import tempfile
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import torch  # noqa: E402
from prepared import start_ranks  # noqa: E402

MODELS = ("llama", "qwen3", "mistral", "gemma2", "gpt2", "bert-mlm", "t5", "vit", "whisper")
MODELS += ("mixtral",)
SOURCES, PLACES = ("config", "folder"), ("__init__", "configure_model")
VARIANTS = ("plain", "lora", "checkpointing", "lora+checkpointing")
RESULTS = HERE / "matrix.json"
PAGE = ROOT / "docs/networks.md"
MARK = "<!-- pretrained -->"
LIBRARIES = ("transformers.modeling_utils", "transformers.generation", "peft")
"""What ranks have imported before they are forked."""
TOLERANCE = 1e-9
WELL_DIVIDED = 0.9
"""A rank that holds more than this share of a network is told."""


class Cell(NamedTuple):
    """What is trained.

    Attributes:
        model: which network.
        source: it is made from its config, or loaded from a folder.
        place: the method of the LightningModule in which this happens.
        variant: of the training.
    """

    model: str
    source: str
    place: str
    variant: str

    @property
    def name(self) -> str:
        return " ".join(self)


CELLS = [Cell(*each) for each in itertools.product(MODELS, SOURCES, PLACES, VARIANTS)]


class Failed(AssertionError):
    """A cell that is neither equal nor refused."""


def run_ranks(command: list[str], count: int, folder: Path, timeout_s: float) -> None:
    """Run a script in so many ranks, to their end.

    Raises:
        Failed: one has not ended well, or in time; with the last lines that they have printed.
    """
    output = folder / f"output{count}.txt"
    path = os.pathsep.join((str(HERE), str(ROOT)))
    usual = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    env = os.environ | usual
    ranks = start_ranks(command, count, env=env, cwd=folder, output=output, libraries=LIBRARIES)
    try:
        codes = [rank.wait(timeout_s) for rank in ranks]
        how = f"ended with {codes}" if any(codes) else ""
    except TimeoutError as error:
        how = str(error)
    finally:
        for rank in ranks:
            rank.kill()
    if how:
        last = "\n".join(output.read_text(errors="replace").splitlines()[-60:])
        raise Failed(f"{count} ranks: {how}\n{last}")


def run(cell: Cell, folder: Path) -> dict[str, Any]:
    """What comes out of a cell: ``difference`` (and what the fullest rank holds) or ``refused``.

    Raises:
        Failed: it is neither equal nor refused.
    """
    command = [str(HERE / "cell_script.py"), str(folder), *cell]
    run_ranks(command, 1, folder, 120)
    run_ranks(command, 2, folder, 240)
    first = torch.load(folder / "rank0.pt")
    if "refused" in first:
        line = first["refused"].splitlines()[0]
        return {"refused": re.sub(r"[^\s(]*/site-packages/", "", line)}
    expected = torch.load(folder / "alone.pt")
    assert (first["stages"], first["microbatches"]) == (2, 2), "the plan is another"
    assert first["losses"][0] != first["losses"][-1]
    assert first["weights"].keys() == expected["weights"].keys()
    moved = [n for n, w in expected["weights"].items() if not w.equal(expected["before"][n])]
    assert len(moved) > 8, "nothing was trained"
    differences = [abs(a - b) for a, b in zip(first["losses"], expected["losses"], strict=True)]
    for name, weight in expected["weights"].items():
        assert first["weights"][name].dtype is weight.dtype, name
        differences.append(float((first["weights"][name] - weight).abs().max()))
    if not max(differences) <= TOLERANCE:
        raise Failed(f"different: {max(differences):.0e}")
    result = {"difference": float(f"{max(differences):.0e}")}
    if cell.place == "configure_model":
        whole = sum(weight.nbytes for weight in expected["weights"].values())
        held = max(first["held"], whole - first["held"]) / whole
        assert held < 1, "a rank has all of it"
        if held > WELL_DIVIDED:
            result["held"] = round(held, 2)
    return result


def read() -> dict[str, dict[str, Any]]:
    """What came out when all of it ran last."""
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    return found


def table() -> str:
    """The table of the page, with the reasons of refusals below."""
    results, reasons = read(), list[str]()
    columns = [f"{source}, `{place}`" for source in SOURCES for place in PLACES]
    lines = [f"| network | trained | {' | '.join(columns)} |", f"| {'--- | ' * 6}".rstrip()]

    def shown(cell: Cell) -> str:
        if cell.name not in results:
            return "not run"
        result = results[cell.name]
        if "difference" in result:
            held = f" ({result['held']:.0%})" if "held" in result else ""
            return f"{result['difference']:.0e}{held}"
        [(kind, reason)] = result.items()
        if reason not in reasons:
            reasons.append(reason)
        return f"{kind} ({reasons.index(reason) + 1})"

    for model, variant in itertools.product(MODELS, VARIANTS):
        cells = (Cell(model, s, p, variant) for s in SOURCES for p in PLACES)
        lines.append(f"| {model} | {variant} | {' | '.join(map(shown, cells))} |")
    equal = sum("difference" in result for result in results.values())
    lines += ["", f"{equal} of {len(CELLS)} cells are equal."]
    lines += ["", *(f"{n}. {reason}" for n, reason in enumerate(reasons, 1))] if reasons else []
    return "\n".join(lines)


def page_with_table(page: str) -> str:
    """The page, with the table of now."""
    before, _, after = page.split(MARK)
    return f"{before}{MARK}\n{table()}\n{MARK}{after}"


def note(cell: Cell, result: dict[str, Any]) -> None:
    """Write a result to the file and to the page, beside others who do."""
    with Path(__file__).open() as lock:
        flock(lock, LOCK_EX)
        results = (read() if RESULTS.exists() else {}) | {cell.name: result}
        in_order = {each.name: results[each.name] for each in CELLS if each.name in results}
        RESULTS.write_text(json.dumps(in_order, indent=1) + "\n")
        PAGE.write_text(page_with_table(PAGE.read_text()))


def main(words: list[str]) -> None:
    for cell in CELLS:
        if words and not any(word in cell.name for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = run(cell, Path(folder))
            except (AssertionError, RuntimeError) as error:
                lines = str(error).splitlines() or [type(error).__name__]
                print("\n".join(lines), file=sys.stderr)
                result = {"failed": lines[-1]}
        print(cell.name, result, flush=True)
        note(cell, result)


if __name__ == "__main__":
    main(sys.argv[1:])
