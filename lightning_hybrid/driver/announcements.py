"""What the user is told of networks that are found and cut: each thing once."""

import re
from collections import Counter

from torch import nn

from lightning_hybrid._torch.modules import BatchNorm, is_compiled
from lightning_hybrid.driver.found_network import FoundNetwork
from lightning_hybrid.driver.network_options import NetworkOptions
from lightning_hybrid.graph import NetworkGraph
from lightning_hybrid.planning import Plan
from lightning_hybrid.schedules import STREAMED

_MANY = 8
"""As often as this a network is captured again before its user is told what that costs."""


class Announcements:
    """The lines of one run.

    Args:
        options: how lines are said, and progress shown.
    """

    def __init__(self, options: NetworkOptions) -> None:
        self._options = options
        self._said: set[tuple[str, str]] = set()
        self._again: Counter[tuple[str, str]] = Counter()

    def doing(self, found: FoundNetwork, what: str) -> None:
        """What is being done with a network now."""
        self._options.progress.doing(f"{what} {found.name or 'self'!r}")

    def captured(self, found: FoundNetwork) -> None:
        """A graph is captured, and its stages are there if it is cut for the first time."""
        if found.whole:
            self._options.progress.over()
        else:  # what follows may be another graph
            self.doing(found, "capturing")

    def say(self, found: FoundNetwork, text: str) -> None:
        """Say something of a network, unless it was said before."""
        if (found.name, text) not in self._said:
            self._said.add((found.name, text))
            self._options.say(f"{found.shown} {text}")

    def becomes_several_graphs(self, found: FoundNetwork) -> None:
        """A network is a chain of graphs."""
        self.say(
            found,
            "becomes several graphs, with its own Python between them on the driver, since it "
            f"cannot be captured as one:\n{found.reason}",
        )

    def runs_its_own_python(self, found: FoundNetwork, reason: str) -> None:
        """The modules that a network calls are looked at in its place."""
        # parts of one module mostly fail by the same line of code: it is shown once
        known = ("", reason) in self._said
        self._said.add(("", reason))
        why = ", for the same reason" if known else f":\n{reason}"
        self.say(
            found,
            "runs its own Python on the driver, and the modules that it calls are cut in its "
            f"place, since it cannot be captured as one graph{why}",
        )

    def takes_batches_whole(self, found: FoundNetwork, reason: str) -> None:
        """A network's batches are not split."""
        self.say(
            found,
            f"takes each batch whole (num_microbatches=1): {reason}, so the numbers would depend "
            "on how the batch is split.",
        )

    def is_split(self, found: FoundNetwork, graph: NetworkGraph) -> None:
        """A network's batches are split, and that is not all that there is to say of it."""
        said = "goes through its stages in micro-batches"
        if graph.split_by != "proof":
            self.say(
                found,
                f"{said} ({graph.split_by}): what needs all samples is computed on the driver.",
            )
        if graph.tried:
            self.say(
                found,
                f"{said}. It was only tried, on random numbers, that samples do not meet in "
                f"{', '.join(graph.tried)}. If they meet for other numbers, give "
                "num_microbatches=1.",
            )

    def captured_again(self, found: FoundNetwork) -> None:
        """A network has another graph, because of a value that its Python looks at."""
        reason = found.capture.reason
        if reason is None:
            return
        kind = found.name, re.sub(r"\d+", "", reason)  # a list that grows has another length now
        self._again[kind] += 1
        if self._again[kind] == 1:
            self._options.say(f"{found.shown} was captured again: {reason}")
        elif self._again[kind] == _MANY:
            self._options.say(
                f"{found.shown} was captured {_MANY} times for values of one kind. Its numbers are "
                "right, but a capture takes as long as many steps, and keeps memory. Change that "
                "value outside of the network's forward (in training_step, or in a hook of the "
                f"LightningModule): {reason}"
            )

    def planned(self, found: FoundNetwork, plan: Plan) -> None:
        """A network has a plan."""
        self._options.say(f"{found.shown}: {plan.describe()}".rstrip())
        schedule = STREAMED.get(plan.schedule)
        if schedule is not None and schedule.trades and self._options.training:
            delays = ", ".join(map(str, plan.delays))
            self._options.say(
                f"schedule={schedule.name!r} is not exact: {schedule.trades} (here {delays}), and "
                "training may end elsewhere than with schedule='gpipe'. See docs/schedules.md; "
                f"{schedule.paper}."
            )
        if is_compiled(found.module) and not self._options.compiled:
            self._options.say(
                f"{found.shown} is compiled by you (torch.compile), and its stages are not: "
                "the strategy's compile_stages=True compiles them, with the default backend."
            )
        normalised = any(isinstance(m, BatchNorm) for m in found.module.modules())
        if normalised and plan.microbatches > 1 and self._options.training:
            self._options.say(
                f"{found.shown} has batch normalisation: in training its statistics "
                f"are those of a micro-batch (1/{plan.microbatches} of a replica's batch), as in "
                "every pipeline. num_microbatches=1 gives the numbers of the whole batch, "
                "the Trainer's sync_batchnorm=True those of all replicas' micro-batches."
            )

    def stays(self, name: str, module: nn.Module, reason: str, *, alone: bool) -> None:
        """Say that a network stays on the driver, and why.

        Args:
            name: of the module.
            module: the module.
            reason: what it has, takes or is, in one or several lines.
            alone: no other network can be cut.
        """
        how = ", as under ddp over the replicas" if alone else ""
        stays = "\nIt stays" if "\n" in reason else ": it stays"
        self._options.say(
            f"Network {name or 'self'!r} ({type(module).__name__}) {reason}{stays} on the "
            f"driver{how}."
        )
