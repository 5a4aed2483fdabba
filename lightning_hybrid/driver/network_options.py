"""The options of a run by which its driver finds, cuts and drives networks."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_hybrid.driver.progress import StartProgress
from lightning_hybrid.planning import Plan
from lightning_hybrid.profiling import CalledNetwork
from lightning_hybrid.stage import StageOptions

Planner = Callable[[CalledNetwork, int, Sequence[Plan], bool], Plan]
"""Makes the plan of a network. Arguments: the network with the inputs of one micro-batch, the
number of micro-batches, the plans of the networks that are placed already, and whether the planner
chooses the cuts even if the user has given cut points."""


@dataclass(frozen=True, kw_only=True)
class DriverOptions:
    """How a driver finds, cuts and drives networks.

    Attributes:
        seed: seed of the random numbers inside networks.
        stages: how stages compute.
        planner: makes plans.
        progress: shows what is being done.
        say: tells the user something, in one line, once for all replicas.
        names: names of the modules that are networks; ``None``: they are found by their calls.
        microbatches: into how many micro-batches a batch is split; ``None``: by the batch's size.
        number_of_stages: into how many stages a network is cut; ``None``: as many as a replica has
            devices.
        cut_by_user: whether the user says where stages are cut.
        automatic: whether the user has asked for no number of stages: then a network that cannot be
            cut runs on the driver, and is no error.
        verify: which calls are compared with what the network's Python gives; see `Verification`.
        shared: names of the parameters and buffers that the workers have too; ``None``: all names.
        share: whether the weights of a network that is cut must be sent from replica 0 to the other
            replicas, since they may differ.
        trains: whether the run trains; then ranks free the memory of parameters that others own.
        folder: where ranks write files that others map, if possible.
        as_on_one_device: whether networks draw the random numbers of one device; see `StepCalls`.
        shards: whether states of optimizers are divided over the replicas.
        shares: whether backwards possibly run inside of calls, so that each capture looks for a
            loss of which each micro-batch has a share.
        inside: whether the user has asked for backwards inside of calls.
        accumulates: whether gradients of several batches are accumulated.
        scaled: multiplies a number by the factor by which a scaler multiplies losses before a
            backward.
        first_failure: gives the error of the rank that failed first; called if a driver of another
            replica has failed.
    """

    seed: int
    stages: StageOptions
    planner: Planner
    progress: StartProgress
    say: Callable[[str], None] = lambda _: None
    names: tuple[str, ...] | None = None
    microbatches: int | None = None
    number_of_stages: int | None = None
    cut_by_user: bool = False
    automatic: bool = False
    verify: int | Literal["auto", False] = False
    shared: Collection[str] | None = None
    share: bool = False
    trains: bool = False
    folder: str = ""
    as_on_one_device: bool = False
    shards: bool = False
    shares: bool = False
    inside: bool = False
    accumulates: bool = False
    scaled: Callable[[Tensor], Tensor] = lambda number: number
    first_failure: Callable[[], Exception] = lambda: RuntimeError("another rank has failed")
