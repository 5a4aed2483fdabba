"""Random numbers inside the network: one generator per micro-batch, whatever the stages.

A stage that draws (dropout) would draw other numbers than one device does, and other ones again
under another number of stages. So each micro-batch has a generator of its own, seeded from the
run's seed, the replica, the batch, the call and the micro-batch, and its *state travels with the
activations*: stage k + 1 goes on where stage k stopped. The numbers then depend on the seed and
on the micro-batch alone. The generators of the user's code are never touched.
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
"""Of two threads that ask torch for a state, both may wait for ever (torch 2.13): one has the
generator's lock, and gives Python's to the other, which keeps that while it waits for the
generator."""


def draw_number(batch: int, call: int) -> int:
    """The number of a call, for its random numbers.

    Args:
        batch: how many training batches the run has seen before; it is in the checkpoint, so that
            a run that is resumed draws what it would have drawn.
        call: how many differentiable calls this batch has seen before.
    """
    return batch << 16 | call


def microbatch_seed(seed: int, replica: int, draw: int, microbatch: int) -> int:
    """The seed of one micro-batch's generators (64 bits); ``draw`` as by :func:`draw_number`."""
    text = f"{seed}/{replica}/{draw}/{microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def random_state(device: torch.device) -> list[Tensor]:
    """The states of the generators that a layer on ``device`` may draw from, as byte tensors.

    They are on the CPU, and to ask a GPU's generator for its state waits for no kernel.
    """
    with _one_at_a_time:
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return states


@cache
def state_specs(device: torch.device) -> tuple[TensorSpec, ...]:
    """Shapes and types of what :func:`random_state` gives, for a receiver."""
    return tuple(TensorSpec.of(state) for state in random_state(device))


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Go on from ``states``, as :func:`random_state` gave them."""
    with _one_at_a_time:
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)


@contextmanager
def generators_of_microbatch(seed: int | None, device: torch.device) -> Iterator[None]:
    """Inside, draw from a micro-batch's generators; afterwards the old ones are back.

    Args:
        seed: where the micro-batch's generators start; ``None`` where a state follows.
        device: the device whose generators are meant, beside the CPU's.
    """
    before = random_state(device)
    try:
        if seed is not None:
            with _one_at_a_time:
                torch.manual_seed(seed)
        yield
    finally:
        set_random_state(before, device)
