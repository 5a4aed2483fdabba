"""What ranks find out about messages and averages, in two threads of one process."""

from functools import partial

import torch
from ranks import gloo_groups, together

from lightning_hybrid.comm.connections import GroupHandle
from lightning_hybrid.process import look_around

CPU = torch.device("cpu")


def test_two_ranks_know_what_a_step_takes_beside_computing() -> None:
    groups = [GroupHandle(group) for group in gloo_groups(60)]
    machines = together(*(partial(look_around, g, CPU, "gloo", (1.0, 0.5)) for g in groups))
    for machine in machines:
        rates = machine.rates
        assert rates.ranks == 2
        assert rates.message_s > rates.reduce_s > 0
        assert rates.reduced_s(1e6, 2) > rates.reduce_s
        assert machine.cluster(1, 2).rates is rates
        assert machine.cluster(1, 2).capacities == (1.0, 0.5)
