"""Random numbers inside of stages: the seeds of micro-batches, and the states of generators.

With torch's own generators a stage that draws random numbers (dropout) would draw other numbers
than one device does, and they would depend on the number of stages. So each micro-batch has a
generator of its own, seeded from the run's seed, the replica, the batch, the call and the
micro-batch, and the generator's *state travels with the activations*: stage k + 1 goes on where
stage k stopped. The numbers then depend on the seed and on the micro-batch alone, and the
generators of the user's code are as before after a call.

Except where a call continues the generators of the code around it (`rng="device"`, and networks
that are several graphs): then `driver/driven_network.py` takes their states into the call and puts
them back after it (`CallKey.continues_generators`, `StepCalls.as_on_one_device`).
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from lightning_hybrid.comm import TensorSpec

_one_at_a_time = Lock()
"""Held while the state of a generator is read or set. Without it two threads that do so may
deadlock (torch 2.13): one has the generator's lock and waits for Python's, the other has
Python's and waits for the generator's."""


def seed_number_of(batch: int, call: int) -> int:
    """Number a differentiable call of a network for its random numbers.

    The number is the argument ``draw`` of :func:`microbatch_seed`.

    Args:
        batch: how many training batches the run has seen before; it is in the checkpoint, so that a
            run that is resumed draws what it would have drawn.
        call: how many differentiable calls this batch has seen before; below 2^16.
    """
    return batch << 16 | call


def microbatch_seed(seed: int, replica: int, draw: int, microbatch: int) -> int:
    """Compute the seed (64 bits) of the random generators of one micro-batch.

    Args:
        seed: seed of the run's networks.
        replica: number of the replica (``dp_rank``).
        draw: number of the call: from :func:`seed_number_of`, or a negative one if the call is not
            differentiable (``StepCalls.take_seed_number``).
        microbatch: number of the micro-batch in the call.
    """
    # a hash: four numbers become one, and neighbours among them get streams that are not related
    text = f"{seed}/{replica}/{draw}/{microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def random_state(device: torch.device) -> list[Tensor]:
    """Read the states of the generators that a layer on ``device`` may draw from, as byte tensors.

    First that of the CPU's generator, then, if ``device`` is a GPU, that of the GPU's. The tensors
    are on the CPU; reading a GPU's generator waits for no kernel.
    """
    with _one_at_a_time:
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return states


@cache
def state_specs(device: torch.device) -> tuple[TensorSpec, ...]:
    """Specs of the tensors that :func:`random_state` returns, for a receiver of such tensors."""
    return tuple(TensorSpec.of(state) for state in random_state(device))


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Set the generators of ``device`` to ``states``, which :func:`random_state` has returned."""
    with _one_at_a_time:
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)


@contextmanager
def generators_of_microbatch(seed: int | None, device: torch.device) -> Iterator[None]:
    """Context for a micro-batch's random numbers: at its end the generators have their old states.

    Args:
        seed: seed that the generators get at the beginning; ``None``: they are not seeded, and the
            caller sets their states inside (:func:`set_random_state`).
        device: the generators are the CPU's and, if this is a GPU, that GPU's.
    """
    before = random_state(device)
    try:
        if seed is not None:
            with _one_at_a_time:
                torch.manual_seed(seed)
        yield
    finally:
        set_random_state(before, device)
