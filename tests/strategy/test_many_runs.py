"""Streamed schedules in real processes, all combinations, against models on one device."""

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import USUAL
from prepared import start_ranks
from runs_script import DEFAULTS, OPTIMIZERS, SIZE, ends_of, network, samples, train
from serial_schedules import train_serially
from torch import Tensor, nn
from torch.func import functional_call

from lightning_hybrid.schedules import STREAMED

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.conformance,
    pytest.mark.timeout(3600),
    # Lightning's advice on workers of loaders
    pytest.mark.filterwarnings("ignore"),
]
SCRIPT = Path(__file__).with_name("runs_script.py")
Seen = list[dict[str, Any]]
"""Of each run, on the driver."""


def write(folder: Path, stages: int, runs: Sequence[dict[str, Any]]) -> None:
    (folder / "runs.json").write_text(json.dumps({"stages": stages, "runs": runs}))


def run_all(folder: Path, stages: int, runs: Sequence[dict[str, Any]]) -> Seen:
    """Train all of them in one group of processes. Returns what the driver has seen."""
    write(folder, stages, runs)
    output = folder / "output.txt"
    command = [str(SCRIPT), str(folder)]
    ranks = start_ranks(command, stages, env=os.environ | USUAL, cwd=folder, output=output)
    try:
        for process in ranks:
            assert process.wait(timeout=3000) == 0, output.read_text()
    finally:
        for process in ranks:
            process.kill()
    seen: Seen = torch.load(folder / "rank0.pt", weights_only=False)
    return seen


def square_gradient(output: Tensor) -> Tensor:
    return 2 * output / output.numel()


def by_formula(run: dict[str, Any], stages: int, dtype: torch.dtype) -> nn.Sequential:
    """The network after a run, by the formula of its schedule."""
    run = {**DEFAULTS, **run}
    net = network().to(dtype)
    kind, options = OPTIMIZERS[run["optimizer"]]
    ends = ends_of(stages)
    train_serially(
        [net[a:b] for a, b in pairwise(ends)],
        kind(net.parameters(), **options),
        samples(run["epoch"]).to(dtype).split(SIZE),
        square_gradient,
        STREAMED[run["schedule"]].look_aheads(stages),
        run["weights"],
    )
    return net


def assert_close(seen: dict[str, Any], expected: nn.Module, tolerance: float, name: Any) -> None:
    """Weights that the driver has at the end of a run."""
    for key, value in expected.state_dict().items():
        far = (seen["weights"][key] - value).abs().max().item()
        assert far <= tolerance, f"{name}, {key}: off by {far}"


WEIGHTS = ["stash", "recompute", "current"]
DELAYED = [
    *product(["pipedream", "ddg", "fdg"], WEIGHTS, ["momentum", "AdamW"]),
    *product(["akintoye"], WEIGHTS, ["plain"]),
]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_delayed_processes_train_as_their_formulas(tmp_path: Path, stages: int) -> None:
    """All combinations in one group of processes, 30 steps each."""
    names = ("schedule", "weights", "optimizer")
    runs = [dict(zip(names, each)) for each in DELAYED]
    for run, seen in zip(runs, run_all(tmp_path, stages, runs), strict=True):
        assert_close(seen, by_formula(run, stages, torch.float64), 1e-9, run)


def by_autograd(run: dict[str, Any], ahead: Sequence[int]) -> tuple[list[float], nn.Sequential]:
    """Losses, and the network after a run: each batch at weights of mixed ages, stepped at once.

    Where the run saves, nothing is under way.
    """
    run = {**DEFAULTS, **run}
    kind, options = OPTIMIZERS[run["optimizer"]]
    dtype = PRECISIONS[run["precision"]][0]
    net, ends = network().to(dtype), ends_of(len(ahead))
    optimizer = kind(net.parameters(), **options)
    stage = {n: sum(int(n.split(".")[0]) >= end for end in ends[1:]) for n in net.state_dict()}
    is_mixed = run["precision"].endswith("mixed")
    history: list[dict[str, Tensor]] = []
    losses, restart = [], 0
    for t, x in enumerate(samples(run["epoch"]).to(dtype).split(SIZE)):
        history.append({n: p.detach().clone() for n, p in net.named_parameters()})
        restart = t if t in run["saves_after"] else restart
        seen = {n: history[max(restart, t - ahead[k])][n] for n, k in stage.items()}
        mixed = {n: value.requires_grad_() for n, value in seen.items()}
        with torch.autocast("cpu", torch.bfloat16) if is_mixed else nullcontext():
            loss = functional_call(net, mixed, (x,)).square().mean()
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, [*mixed.values()])
        for (_, parameter), gradient in zip(net.named_parameters(), gradients):
            parameter.grad = gradient
        optimizer.step()
    return losses, net


# kind of numbers, and how far 30 steps may be off. The same operations run in the same order on
# both sides. Where a library of matrices rounds otherwise in another process, a weight of about
# 1 moves by a few units in its last place, of 2^-52, 2^-23 and 2^-8. Mixed precision has weights
# in float32; their gradients are rounded to bfloat16, and steps are a hundredth of a weight.
PRECISIONS = {
    "64-true": (torch.float64, 1e-12),
    "32-true": (torch.float32, 1e-5),
    "bf16-true": (torch.bfloat16, 2**-6),
    "bf16-mixed": (torch.float32, 1e-3),
}


def test_delayed_processes_train_in_each_precision(tmp_path: Path) -> None:
    names = ("schedule", "precision", "optimizer")
    combinations = product(["pipedream", "fdg"], PRECISIONS, ["momentum", "AdamW"])
    runs = [dict(zip(names, each)) for each in combinations]
    for run, seen in zip(runs, run_all(tmp_path, 3, runs), strict=True):
        dtype, tolerance = PRECISIONS[run["precision"]]
        losses, net = by_autograd(run, STREAMED[run["schedule"]].look_aheads(3))
        assert seen["losses"] == pytest.approx(losses, abs=tolerance), run
        assert {value.dtype for value in seen["weights"].values()} == {dtype}
        assert_close(seen, net, tolerance, run)


def resumed(run: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """The rest of a run that has been saved there after so many batches."""
    return {**run, "saves_to": f"{folder}/again", "resumes": f"{folder}/{number}.ckpt"}


@pytest.mark.parametrize(
    ("schedule", "weights"), [("pipedream", "stash"), ("fdg", "stash"), ("fdg", "recompute")]
)
def test_every_checkpoint_of_a_delayed_run_goes_on_as_the_run_did(
    tmp_path: Path, schedule: str, weights: str
) -> None:
    """Each is resumed; one is at the end of an epoch, and two follow each other."""
    after = [1, 3, 4, 8, 10, 13, 15]
    run = {"schedule": schedule, "weights": weights, "optimizer": "AdamW"}
    run |= {"steps": 16, "epoch": 10, "saves_after": after, "saves_to": f"{tmp_path}"}
    runs = [run, *(resumed(run, tmp_path, number) for number in after)]
    whole, *parts = run_all(tmp_path, 3, runs)
    for number, part in zip(after, parts, strict=True):
        assert part["losses"] == pytest.approx(whole["losses"][number:], abs=1e-12)
        for key, value in part["weights"].items():
            torch.testing.assert_close(value, whole["weights"][key], rtol=0, atol=1e-12)


def test_1f1b_saves_and_resumes_in_the_middle_of_a_window_as_one_device_does(
    tmp_path: Path,
) -> None:
    """Windows of 4, 4 and 2 batches; gradients that were added up are in no checkpoint."""
    after = [2, 4, 5, 10, 13]
    run: dict[str, Any] = {"schedule": "1f1b_stream", "optimizer": "AdamW", "window": 4}
    run |= {"steps": 6, "epoch": 10, "saves_after": after, "saves_to": f"{tmp_path}"}
    runs = [run, *(resumed(run, tmp_path, number) for number in after)]
    seen = run_all(tmp_path, 3, runs)
    undisturbed = {**run, "saves_after": []}
    torch.set_num_threads(1)
    expected = [train(each, 1, tmp_path) for each in [undisturbed, *runs[1:]]]
    for number, (found, wanted) in enumerate(zip(seen, expected, strict=True)):
        assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-12), number
        for key, value in wanted["weights"].items():
            torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=1e-12)
    # a window that has been saved whole goes on as if nothing had been
    for number in (4, 10):
        rest = seen[1 + after.index(number)]
        assert rest["losses"] == pytest.approx(seen[0]["losses"][number:], abs=1e-12)
