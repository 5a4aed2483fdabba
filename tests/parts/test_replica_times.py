"""Speeds of replicas are told from the middle of what all of them have measured."""

import torch

from lightning_hybrid.parts.replica_times import FEWEST, FIRST, ReplicaTimes


def test_speeds_are_those_of_the_median_batch_since_they_were_asked() -> None:
    times = ReplicaTimes(torch.device("cpu"))
    for _ in range(FIRST):
        times.note([100.0, 1.0])
    assert times.speeds() is None
    for number in range(FEWEST):
        times.note([0.5, 0.25 if number else 50.0])  # one that was disturbed
    times.note([0.0, 7.0])  # somebody does not know
    assert times.speeds() == (2.0, 4.0)
    assert times.speeds() is None


def test_a_batch_takes_until_its_last_backward() -> None:
    times = ReplicaTimes(torch.device("cpu"))
    assert times.batch_arrives() == 0.0
    times.backward_is_over()
    times.backward_is_over()
    assert times.batch_arrives() > 0.0
    assert times.batch_arrives() == 0.0  # no backward
