"""The lines that tell the user about networks that are found and cut, each of them once."""

import re
from weakref import WeakKeyDictionary

from torch import nn

from lightning_hybrid._torch.modules import BatchNorm, is_compiled
from lightning_hybrid.driver.found_network import FoundNetwork
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.graph import NetworkGraph
from lightning_hybrid.planning import Plan
from lightning_hybrid.schedules import STREAMED

_SAID: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The lines that were printed about each network, in all runs of this process."""


class Announcements:
    """Prints to the user how the networks of a run are found and cut, each line once.

    What was said of a network in an earlier run, as in a fit before a test, is not said again.

    Args:
        options: has the functions that print a line and show progress.
    """

    def __init__(self, options: DriverOptions) -> None:
        self._options = options

    def doing(self, found: FoundNetwork, what: str) -> None:
        """Show the user, by the lines of `StartProgress`, what is done with a network now.

        Args:
            found: the network.
            what: a participle that the network's name follows ("planning", "checking the stages
                of").
        """
        self._options.progress.doing(f"{what} {found.name or 'self'!r}")

    def say(self, found: FoundNetwork, text: str) -> None:
        """Print a line about a network, unless the same line was printed before.

        Args:
            found: the network; its name begins the line.
            text: the rest of the line, a predicate.
        """
        if self._is_new(found, text):
            self._options.say(f"{found.shown} {text}")

    def _is_new(self, found: FoundNetwork, text: str) -> bool:
        """Whether a line about a network was not printed before; it counts as printed now."""
        said = _SAID.setdefault(found.module, set())
        is_new = text not in said
        said.add(text)
        return is_new

    def becomes_several_graphs(self, found: FoundNetwork) -> None:
        """Say that a network itself is cut, as a chain of graphs with its Python between them.

        The reason is printed from ``found.reason``.
        """
        self.say(
            found,
            "becomes several graphs, with its own Python between them on the driver, since it "
            f"cannot be captured as one:\n{found.reason}",
        )

    def runs_its_own_python(self, found: FoundNetwork, reason: str) -> None:
        """Say that a network cannot be captured as one graph, so the modules it calls are cut.

        Its own Python then runs on the driver. (:meth:`becomes_several_graphs`: the network itself
        is cut, as a chain of graphs.)

        Args:
            found: the network.
            reason: why it cannot be captured, as indented lines that stand below the message.
        """
        self.say(
            found,
            "runs its own Python on the driver, and the modules that it calls are cut in its "
            f"place, since it cannot be captured as one graph:\n{reason}",
        )

    def takes_batches_whole(self, found: FoundNetwork, reason: str) -> None:
        """Say that the batches of a network are not split into micro-batches, and why.

        Args:
            found: the network.
            reason: why, as a clause, with a full stop or without.
        """
        self.say(
            found,
            "takes each batch whole (num_microbatches=1), since its numbers could depend on how "
            f"it is split: {reason.rstrip('.')}.",
        )

    def say_it_is_split(self, found: FoundNetwork, graph: NetworkGraph) -> None:
        """Say that batches of a network are split, if there is more to say about that.

        That is so if a part of the network takes the batch whole. Else nothing is printed.

        Args:
            found: the network.
            graph: the captured graph that the call has run, which knows that.
        """
        if graph.split_by != "proof":
            self.say(
                found,
                f"goes through its stages in micro-batches ({graph.split_by}): what needs all "
                "samples is computed on the driver.",
            )

    def backwards_follow(self, found: FoundNetwork, reason: str) -> None:
        """Say that backwards do not run inside of a network's calls, but after all forwards.

        Args:
            found: the network.
            reason: why, as a clause.
        """
        # (the name was that of another schedule before)
        other = (
            " The schedule that begins with later batches of accumulate_grad_batches early is "
            "'1f1b_stream'."
        )
        self.say(
            found,
            "runs all forwards of a batch before its backwards, as under schedule='gpipe', since "
            f"{reason.rstrip('.')}.{other if self._options.accumulates else ''}",
        )

    def captured_again(self, found: FoundNetwork) -> None:
        """Say that a network was captured again, and which condition of its graph failed.

        The condition is ``found.capture.reason``. It is said once for conditions that differ in
        numbers alone, and not if TorchDynamo has given no reason.
        """
        reason = found.capture.reason
        if reason is None:
            return
        # (without numbers, as the length of a list)
        if self._is_new(found, re.sub(r"\d+", "", reason)):
            self._options.say(
                f"{found.shown} was captured again, which takes as long as many steps and keeps "
                f"memory, for another {_what_to_do(reason)}: {reason}"
            )

    def planned(self, found: FoundNetwork, plan: Plan) -> None:
        """Print the plan of a network, and warnings that follow from it.

        Warnings are about a schedule that is not exact, a network that the user has compiled while
        its stages are not, and batch normalisation in micro-batches.
        """
        self._options.say(f"{found.shown}: {plan.describe()}".rstrip())
        schedule = STREAMED.get(plan.schedule)
        if schedule is not None and schedule.trades and self._options.trains:
            delays = ", ".join(map(str, plan.delays))
            self._options.say(
                f"schedule={schedule.name!r} is not exact: {schedule.trades} (here {delays}), and "
                "training may end elsewhere than with schedule='gpipe'. See docs/schedules.md; "
                f"{schedule.paper}."
            )
        if is_compiled(found.module) and not self._options.stages.compiled:
            self._options.say(
                f"{found.shown} is compiled by you (torch.compile), and its stages are not: "
                "the strategy's compile_stages=True compiles them, with the default backend."
            )
        normalised = any(isinstance(m, BatchNorm) for m in found.module.modules())
        if normalised and plan.microbatches > 1 and self._options.trains:
            self._options.say(
                f"{found.shown} has batch normalisation: in training its statistics "
                f"are those of a micro-batch (1/{plan.microbatches} of a replica's batch), as in "
                "every pipeline. num_microbatches=1 gives the numbers of the whole batch, "
                "the Trainer's sync_batchnorm=True those of all replicas' micro-batches."
            )

    def stays(self, name: str, module: nn.Module, reason: str, *, alone: bool) -> None:
        """Say that a network stays on the driver, and why.

        Args:
            name: name of the network.
            module: the network.
            reason: a predicate of the network, in one or several lines.
            alone: whether no other network can be cut, so that the replicas train as under ddp;
                the line then says so.
        """
        how = ", as under ddp over the replicas" if alone else ""
        stays = "\nIt stays" if "\n" in reason else ": it stays"
        self._options.say(
            f"Network {name or 'self'!r} ({type(module).__name__}) {reason}{stays} on the "
            f"driver{how}."
        )


_STYLE = re.compile(r"(not )?(len\()?(kw)?args\)?( == \d+)?")
"""Conditions on how many arguments a network was given by position, or by name."""


def _what_to_do(reason: str) -> str:
    """What has changed when a network was captured again, and what the user can do about it.

    The text completes "it was captured again for another ...".

    Args:
        reason: the condition that has failed, as TorchDynamo words it.
    """
    guard = reason.partition(" #")[0]
    if _STYLE.fullmatch(guard):
        return (
            "way to pass arguments (by position or by name, more or fewer): each is captured once"
        )
    if "0/1 specialization" in reason:
        return (
            "size: a tensor has a single entry here, as with a last batch of one sample (the "
            "DataLoader's drop_last=True leaves it out)"
        )
    if "size mismatch" in guard:
        return (
            "size. If its Python looks at that size, pad the batches to a few sizes; else any goes"
        )
    if "len(" in guard:
        return "number of entries. Give it one tensor of all (torch.stack), or always as many"
    return "value. If it changes often, use it in training_step, not forward, or make it a tensor"
