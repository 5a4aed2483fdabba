"""The Trainer with a device for each of its processes, over groups with NCCL's rules."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_script
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DistributedSampler

from lightning_hybrid.stage.random_numbers import microbatch_seed, seed_number_of

SCRIPT = Path(trainer_script.__file__)
ROOT = SCRIPT.parents[2]
STEPS, PARTS = 4, 2


def train(folder: Path, *, blocking: bool = False, **config: Any) -> list[dict[str, Any]]:
    """What each driver has seen, perhaps one whose launches block."""
    defaults = {"steps": STEPS, "microbatches": PARTS, "looks": False, "waits": False}
    config = {"trainer": {}, "strategy": {}} | defaults | config
    (folder / "config.json").write_text(json.dumps(config))
    # (servers emulate devices too)
    paths = [str(SCRIPT.parent / "at_start"), str(ROOT), str(SCRIPT.parent)]
    paths.append(str(ROOT / "tests" / "helpers"))
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    variables["CUDA_LAUNCH_BLOCKING"] = f"{int(blocking)}"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=os.environ | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = range(0, config["replicas"] * config["stages"], config["stages"])
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in ranks]


def one_cpu(
    network: str, replicas: int, clip: float | None = None, parts: int = PARTS
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """The losses of each replica and the weights; buffers are those of replica 0."""
    module = trainer_script.made(network)
    nets = [module.net, *(deepcopy(module.net) for _ in range(replicas - 1))]
    optimizer = module.configure_optimizers()
    samples = trainer_script.samples(network, STEPS, replicas)
    x, y = samples.tensors
    shares = [  # as Lightning has them for `ddp`
        list(DistributedSampler(samples, replicas, replica, shuffle=replicas > 1, seed=0))
        for replica in range(replicas)
    ]
    losses: list[list[float]] = [[] for _ in nets]
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica, net in enumerate(nets):
            net.load_state_dict(dict(module.net.named_parameters()), strict=False)
            net.zero_grad()
            mine = shares[replica][step * trainer_script.BATCH :][: trainer_script.BATCH]
            outputs = []
            for index, part in enumerate(x[mine].chunk(parts)):
                torch.manual_seed(microbatch_seed(0, replica, seed_number_of(step, 0), index))
                with sdpa_kernel(SDPBackend.MATH):  # as on the devices
                    outputs.append(net(part))
            loss = nn.functional.cross_entropy(torch.cat(outputs), y[mine])
            loss.backward()
            losses[replica].append(loss.item())
        for own, *others in zip(*(net.parameters() for net in nets)):
            own.grad = sum((each.grad for each in others), own.grad) / replicas
        if clip is not None:
            assert nn.utils.clip_grad_norm_(module.net.parameters(), clip) > clip
        optimizer.step()
    return losses, module.state_dict()


@pytest.mark.parametrize(
    ("network", "replicas", "stages", "schedule"),
    [
        ("resattnet", 1, 2, "gpipe"),
        ("resattnet", 2, 1, "gpipe"),
        ("transformer", 1, 3, "zero_bubble"),
        ("transformer", 2, 2, "gpipe"),
        ("loss inside", 1, 3, "1f1b"),
        ("loss inside", 2, 2, "1f1b"),
    ],
)
def test_the_trainer_trains_as_one_cpu(
    tmp_path: Path, network: str, replicas: int, stages: int, schedule: str
) -> None:
    ranks = train(tmp_path, network=network, replicas=replicas, stages=stages, schedule=schedule)
    losses, weights = one_cpu(network, replicas, parts=PARTS if stages > 1 else 1)
    for replica, rank in enumerate(ranks):
        number = replica * stages
        assert rank["losses"] == pytest.approx(losses[replica], abs=1e-10)
        for name, value in weights.items():
            torch.testing.assert_close(
                rank["weights"][name], value, rtol=1e-10, atol=1e-10, msg=f"{number}: {name}"
            )
        # in a steady step no engine waits for its device: each has two passes in a step
        assert len(rank["passes"]) >= (2 * STEPS if stages > 1 else 0)
        assert not any(rank["passes"][4:])
        # and a rank has nothing on another's device
        assert [n for n, peak in enumerate(rank["peak"]) if peak] == [number]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_where_a_launch_lasts_until_it_is_done_no_rank_waits_for_ever(
    tmp_path: Path, schedule: str
) -> None:
    """With `CUDA_LAUNCH_BLOCKING=1`, which holds a rank that sends until another one receives."""
    shape = {"replicas": 1, "stages": 3, "microbatches": 4, "schedule": schedule}
    driver, *_ = train(tmp_path, network="loss inside", blocking=True, **shape)
    [losses], _ = one_cpu("loss inside", 1, parts=4)
    assert driver["losses"] == pytest.approx(losses, abs=1e-10)


@pytest.mark.parametrize(
    ("network", "waits"), [("resattnet", False), ("prints", False), ("prints", True)]
)
def test_who_validates_and_looks_at_weights_and_gradients_finds_what_one_device_has(
    tmp_path: Path, network: str, waits: bool
) -> None:
    """Also where a network waits on the CPU until it is cut, since a device has no room for it."""
    # (the emulated devices have no inference mode)
    options = {"trainer": {"inference_mode": False}, "looks": True, "microbatches": 1}
    options["waits"] = waits
    found = []
    for stages in (1, 2):
        folder = tmp_path / f"{stages}"
        folder.mkdir()
        shape = {"network": network, "replicas": 1, "stages": stages, "schedule": "gpipe"}
        found.append(train(folder, **shape, **options)[0])
    one, two = found
    assert len(one["found"]) > 2 * STEPS
    assert two["found"] == pytest.approx(one["found"], rel=1e-9)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-9)
    assert not any(value.is_cuda for value in two["weights"].values())


CLIP = 0.1


@pytest.mark.parametrize(
    ("trainer", "verify", "waits"),
    [
        # the norms of a rank's gradients come in one copy
        ({"gradient_clip_val": CLIP}, False, [1, 1, 1]),
        # calls 1 and 3 are checked: before them the worker's weights are fetched, and behind them
        # the driver compares
        ({}, 2, [None, 0, None]),
    ],
    ids=["clipping", "verify"],
)
def test_a_step_waits_for_its_device_only_for_what_is_clipped_or_checked(
    tmp_path: Path, trainer: dict[str, Any], verify: Any, waits: list[int | None]
) -> None:
    shape = {"network": "transformer", "replicas": 1, "stages": 2, "schedule": "gpipe"}
    [driver] = train(tmp_path, **shape, trainer=trainer, strategy={"verify": verify})
    losses, weights = one_cpu("transformer", 1, trainer.get("gradient_clip_val"))
    assert driver["losses"] == pytest.approx(losses[0], abs=1e-10)
    for name, value in weights.items():
        torch.testing.assert_close(driver["weights"][name], value, rtol=1e-10, atol=1e-10)
    found = [n if most is not None else None for n, most in zip(driver["waits"], waits)]
    assert found == waits
