"""Some calls of a network are compared with what the network's own Python computes.

TorchDynamo's guards compare at each call most, but not all, of the values that a graph depends on
(docs/what_you_can_rely_on.md has the list). A value that no guard compares stays in the graph as it
was at the capture. Also, the proof that samples of a batch do not affect each other ("meet") rests
on rules for torch's operators, of which one could be wrong. So in calls 1, 2, 4, 8, ... of a
network that is cut, its own Python runs too, on this rank and on a copy of the module
(:mod:`lightning_hybrid.driver.module_copy`), and its results are compared with those of the stages:

* on the whole batch, if results do not depend on how it is split. This also shows samples that
  meet.
* else (in training with dropout or batch normalisation) on the first micro-batch, with the random
  numbers that stages draw for it. Samples that meet are then noticed in evaluations only.

The Python runs before the call of the stages: where both change the same thing outside of the
module, the change by the stages remains.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid._torch.modules import BatchNorm
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.comm import told_text
from lightning_hybrid.driver.announcements import Announcements
from lightning_hybrid.driver.differences import (
    changed,
    differences,
    epsilon_of,
    first_samples,
    leaves_in,
    numbers_in,
)
from lightning_hybrid.driver.driver import Driver
from lightning_hybrid.driver.found_network import FoundNetwork, is_materialized
from lightning_hybrid.driver.module_copy import (
    ChooseSamples,
    ModuleCopy,
    RandomStates,
    WritesWeights,
)
from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import NetworkGraph
from lightning_hybrid.profiling import free_bytes, give_back_memory
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.stage import generators_of_microbatch, random_state, set_random_state

Verify = int | Literal["auto", False]

Made = dict[str, Any] | None
"""The results of a call by their names, changed attributes included; ``None``: it did not run."""

KindOfCall = tuple[str, bool, bool]
"""The name of a network, whether gradients are recorded, whether it is in training mode."""


class Verification:
    """Decides which calls are compared with the network's own Python.

    Args:
        root: the LightningModule.
        driver: the driver of this replica.
        verify: ``"auto"``: calls 1, 2, 4, 8, ... of each kind; a number n: calls 1, 1 + n,
            1 + 2 n, ...; ``False``: none.
        announcements: tells the user which calls are not compared, and why.

    Attributes:
        root: see above.
        driver: see above.
        verify: see above.
        counts: how many calls of each kind there were since the network was cut.
    """

    def __init__(
        self, root: nn.Module, driver: Driver, verify: Verify, announcements: Announcements
    ) -> None:
        self.root = root
        self.driver = driver
        self.verify = verify
        self._announcements = announcements
        self.counts = Counter[KindOfCall]()
        self._off = set[KindOfCall]()

    def begin(
        self, found: FoundNetwork, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> "Check | None":
        """Count the call that begins, and make a check of it if it is due.

        Args:
            found: the network.
            arguments: positional arguments of the call.
            keywords: keyword arguments of the call.

        Returns:
            The check; ``None``: this call is not to be checked.
        """
        if self.verify is False:
            return None
        kind = found.name, torch.is_grad_enabled(), found.module.training
        if kind in self._off or not (found.whole or found.driven):
            return None
        if found.driven:
            self.counts[kind] += 1
        number = self.counts[kind] or 1  # (the network may be cut in the middle of this call)
        if not self._is_due(number):
            return None
        return Check(self, found, kind, number, arguments, keywords)

    def _is_due(self, number: int) -> bool:
        if self.verify == "auto":
            return number & (number - 1) == 0
        return (number - 1) % self.verify == 0

    def give_up(self, check: "Check", reason: str) -> None:
        """Check no more calls of the kind of a check, and tell the user why.

        Args:
            check: the check that is not possible.
            reason: why, as a clause.
        """
        _, learns, training = check.kind
        self._off.add(check.kind)
        self._announcements.say(
            check.found, f"is not verified in its calls {_calls(learns, training)}: {reason}."
        )


def _calls(learns: bool, training: bool) -> str:
    if learns and training:
        return "in training"
    return f"{'with' if learns else 'without'} gradients, in {'train' if training else 'eval'} mode"


class Check:
    """Compares one call with what the network's own Python makes of the same arguments.

    Call :meth:`begin` or :meth:`begin_chain` before the stages run, and :meth:`compare` after.

    Args:
        verification: decides which calls are compared.
        found: the network.
        kind: the kind of the call.
        number: number of the call among those of its kind, from 1 on.
        arguments: positional arguments of the call.
        keywords: keyword arguments of the call.
    """

    def __init__(
        self,
        verification: Verification,
        found: FoundNetwork,
        kind: KindOfCall,
        number: int,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self._of = verification
        self.found = found
        self.kind = kind
        self.number = number
        self._driver = verification.driver
        self._device = verification.driver.device
        self._arguments = arguments
        self._keywords = keywords
        self._random, self._before = RandomStates(), random_state(self._device)
        self._copy: ModuleCopy | None = None
        self._start: Callable[[], AbstractContextManager[None]]
        self._divided = self._draws = self._sparing = False
        self._parts = self._first = 1
        self._expected: Made = None  # on the first micro-batch if the network draws, else on all
        self._raised: NetworkError | None = None

    # ------------------------------------------------------------------ before the stages run

    def begin_chain(self) -> None:
        """Run the Python of a network that is a chain of graphs, before the chain is called.

        It runs on a copy of the module, from the present states of torch's generators; the results
        are kept for :meth:`compare`.
        """
        self._before = random_state(self._device)
        self._start = self._own_draws
        with self._or_give_up():
            self._take((), writes=True)  # (the Python between the graphs may write to weights)
            self._expect()

    def begin(self, call: NetworkCall, values: Sequence[Any], *, synchronised: bool) -> None:
        """Run the Python of a network that is one graph, before its stages run.

        It runs on a copy of the module, on the whole batch or, if numbers depend on how it is
        split, on the first micro-batch. The results are kept for :meth:`compare`.

        Args:
            call: the call of the stages that follows.
            values: the arguments of its graph.
            synchronised: whether batch normalisation takes its statistics over all replicas.
        """
        self._of.counts[self.kind] = self.number  # (the network is cut by now)
        with self._or_give_up():
            self._begin(call, values, synchronised=synchronised)

    def _begin(self, call: NetworkCall, values: Sequence[Any], *, synchronised: bool) -> None:
        graph = call.specialization.graph
        mixes = _mixes_samples(self.found.module, graph)
        schedule = STREAMED.get(call.network.placement.schedule)
        if schedule is not None and schedule.delayed and torch.is_grad_enabled():
            raise _Inconclusive(
                f"under schedule={schedule.name!r} stages compute with older weights"
            )
        if synchronised and mixes:
            raise _Inconclusive("its batch statistics are those of all replicas")
        # calls of later batches that run ahead may have begun with other weights than those that
        # are fetched next
        self._driver.interrupt()
        parts, _ = call.specialization.split(graph.bind(values))
        self._parts = len(parts)
        self._first = graph.batch_of(parts[0]) or 0
        self._divided = graph.divided
        if graph.divided and (graph.uses_rng or (mixes and self._parts > 1)):
            raise _Inconclusive(
                "a part of it needs all samples, and another one draws, or takes statistics, for "
                "each micro-batch by itself"
            )
        self._draws = self._parts > 1 and (mixes or graph.uses_rng)
        draw = self._driver.calls.expect(call.learns(graph.bind(values)))
        self._start = partial(self._driver.calls.generators_of, draw)
        # (then the network draws from this rank's own generators)
        if graph.divided or self._driver.calls.as_on_one_device:
            self._start = self._own_draws
        batched = [
            values[graph.place[leaf.node]]
            for leaf in graph.leaves
            if leaf.rows is not None and leaf.rows.dim == 0 and not leaf.made
        ]
        self._take(batched, writes=graph.writes_parameters, transforms=graph.transforms)
        self._expect(self._first_part if self._draws else None)

    def _expect(self, rows: ChooseSamples | None = None) -> None:
        """Run the network's Python, and keep its results, or its error for :meth:`compare`.

        (What one device raises, as for an index that is too large, the stages raise too.)

        Args:
            rows: chooses samples of the batch; ``None``: all of them.
        """
        try:
            self._expected = self._python(rows)
        except NetworkError as error:
            self._raised = error

    def _take(self, batched: Sequence[Tensor], *, writes: bool, transforms: bool = False) -> None:
        """Copy the module and the arguments as they are now, and fetch the network's buffers.

        Its parameters are fetched too if the forward may write them, if it transforms functions, or
        on another device than a CPU; else one by one while the copy runs.

        Args:
            batched: the tensors among the arguments whose first dimension is the batch.
            writes: whether the forward may change parameters.
            transforms: whether the forward transforms functions, as `torch.vmap` does.

        Raises:
            _Inconclusive: the module is whole on no rank, or cannot be copied; or, with
                ``verify="auto"``, its absent weights would take too much memory.
        """
        if not is_materialized(self.found.module):
            raise _Inconclusive("it is made in configure_model, and whole on no rank")
        found = self.found
        prefix = f"{found.name}." if found.name else ""
        absent, room = self._driver.remote.absent_bytes(prefix), free_bytes()
        if self._of.verify == "auto" and room is not None and absent > _SHARE * room:
            raise _Inconclusive(
                f"the weights of the other stages have {absent / 1e9:.3g} GB, which have no memory "
                f"here, and {room / 1e9:.3g} GB are free; verify=1 looks at all calls"
            )
        give_back_memory()
        # (a copy that writes has weights of its own; on a GPU they come to it, one way or another)
        # (tensors inside of transforms are wrappers around weights, which outlive an operation)
        self._sparing = not (writes or transforms) and self._device.type == "cpu"
        self._driver.remote.bring(prefix, parameters=not self._sparing)
        arguments = self._arguments, self._keywords
        try:
            self._copy = ModuleCopy(self._of.root, found.module, *arguments, batched, writes=writes)
        except Exception as error:  # (copying an object may raise any error)
            self._raise_if_of_ranks(error)
            raise _Inconclusive(f"it cannot be copied ({_first_line(error)})") from error

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """Inside, an `_Inconclusive` error ends this check and all checks of calls of this kind."""
        try:
            yield
        except _Inconclusive as error:
            self._copy = None
            self._of.give_up(self, str(error))

    # ------------------------------------------------------------------ after

    def compare(self, result: Any) -> None:
        """Compare the results of the stages with those of the network's own Python.

        Args:
            result: what the call of the stages has returned.

        Raises:
            NetworkError: the results differ, the Python has raised an error, or samples meet.
        """
        if self._copy is None:
            return
        if self._raised is not None:
            raise self._raised
        found = _given(result, (self._arguments, self._keywords))
        with self._or_give_up():
            self._compare(found | self._attributes(self.found.module))
        self._copy = self._expected = None
        give_back_memory()

    def _compare(self, found: dict[str, Any]) -> None:
        """Compare results of the stages with those of the Python; if they differ, find out why.

        Args:
            found: by name, the results of the stages.

        Raises:
            NetworkError: the graph does not compute what the Python computes now, or results of a
                sample depend on other samples of the batch.
        """
        weights = dict(self.found.module.named_parameters())
        epsilon = epsilon_of((found, weights), self._device)
        apart = _differences(found, self._expected, epsilon, part=self._draws)
        # (else the split cannot be the cause)
        if apart and self._parts > 1 and not self._draws and not self._divided:
            # the cause may be rounding in parts, a graph that does not hold, or samples that meet
            part = self._python(self._first_part)
            numbers = numbers_in(found), numbers_in(self._expected)
            apart = _differences(found, part, epsilon, part=True) or _differences(*numbers, epsilon)
            if not apart:
                self._refuse_meeting(part, epsilon)
        if apart:
            raise self._stale(apart)

    def _refuse_meeting(self, part: Made, epsilon: float) -> None:
        """Refuse a network in which results of a sample depend on other samples of the batch.

        The Python runs once more on the whole batch, with copies of the first micro-batch's samples
        in place of the rest of the batch. If results of the first micro-batch are not those that it
        had in the whole batch (``self._expected``), samples meet.

        Args:
            part: results of the first micro-batch by itself. Only its sizes are used: the results
                of the whole batch are cut to them.
            epsilon: that of the lowest precision in which something was computed. On CPUs
                differences count from about 16 times ``epsilon`` on; on other devices those that
                :func:`~lightning_hybrid.driver.differences.differences` describes.

        Raises:
            NetworkError: samples meet.
        """
        others = self._python(self._among_copies)
        one, other = (first_samples(x, part) for x in (self._expected, others))
        # (as good as bit for bit on CPUs alone: GPUs may add up in another order each time)
        strict = (16 * epsilon) ** 2 if self._device.type == "cpu" else epsilon
        if apart := differences(one, other, strict):
            raise self._meet(apart)

    def _first_part(self, tensor: Tensor) -> Tensor:
        """The samples of the first micro-batch in a tensor of the whole batch."""
        return tensor.narrow(0, 0, self._first)

    def _among_copies(self, tensor: Tensor) -> Tensor:
        """A batch as large as ``tensor``, of copies of the samples of its first micro-batch."""
        order = torch.arange(len(tensor), device=tensor.device) % self._first
        return tensor.index_select(0, order)

    def _python(self, rows: ChooseSamples | None = None) -> Made:
        """Call the network's own Python on the copy, and give its results by name.

        Random generators start as in the call that is checked, and are put back.

        Args:
            rows: chooses samples of the batch; ``None``: all of them.

        Returns:
            By name, the output, the arguments after the call, and the attributes that it has set.

        Raises:
            _Inconclusive: the Python does not run on a copy, or lacks memory.
            NetworkError: the Python raises an error that it has not raised in a call before, or
                writes to parameters.
            Exception: weights of another rank cannot be fetched: it is lost or has failed, or this
                rank has failed in an exchange with it.
        """
        assert self._copy is not None
        if rows is not None and not self._copy.is_complete:
            raise _Inconclusive("a tensor with the size of the batch is none of its arguments")
        try:
            fetched = self._driver.remote.one_by_one() if self._sparing else nullcontext()
            with self._random.again(), self._start(), fetched:
                module, result, given = self._copy.call(self._device, rows)
        except Exception as error:  # (by the user's code, or for lack of memory)
            self._raise_if_of_ranks(error)
            memory = isinstance(error, _NO_MEMORY) or "allocate memory" in str(error)
            # if it has run before, the code behaves otherwise now: a difference to report
            if isinstance(error, WritesWeights) or (self.number > 1 and not memory):
                raise self._stale([f"its Python raises {_first_line(error)}"]) from error
            reason = f"its Python does not run on a copy of it ({_first_line(error)})"
            raise _Inconclusive(reason) from error
        # (attributes that the call of the copy has not set are not compared: hooks may set those
        # of the original module instead)
        set_here = changed(self._attributes(module), self._attributes(self._copy.module))
        return _given(result, given) | set_here

    def _raise_if_of_ranks(self, error: Exception) -> None:
        """Raise an error again if it says nothing about the Python, but ends the run.

        It is the loss or the failure of another rank, or has left an exchange of weights with a
        worker, which would wait for this rank for ever.

        Args:
            error: what the Python has raised, or copying what it needs.
        """
        if told_text(error) is not None or not self._driver.commands.workers.in_step:
            raise error

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Inside, torch's generators start as they were before the call.

        At its end they have again the states that they had when it was entered.
        """
        with generators_of_microbatch(None, self._device):
            set_random_state(self._before, self._device)
            yield

    def _attributes(self, module: nn.Module) -> dict[str, Any]:
        """The values in attributes of a module and its submodules, without parameters.

        They are keyed by the expressions that reach them (``self.net.count``). Of a network that is
        a chain of graphs, only attributes that hold tensors are looked at.
        """
        held: dict[str, Any] = {}
        for name, part in module.named_modules():
            for key, value in vars(part).items():
                if key in _OF_ALL_MODULES or isinstance(value, nn.Parameter):
                    continue
                # (in a chain of graphs tensors alone: its Python may note the time, for example)
                if self.found.whole or any(True for _ in tensors_in(value)):
                    held[f"self.{name}.{key}" if name else f"self.{key}"] = value
        return leaves_in(held)

    # ------------------------------------------------------------------ what was found

    def _stale(self, found: Sequence[str]) -> NetworkError:
        """Make the error that says that the stages compute something else than the Python.

        Args:
            found: descriptions of the differences.
        """
        return NetworkError(
            f"{self.found.shown} does not compute in its stages what its Python computes: in call "
            f"{self.number} {_calls(*self.kind[1:])} {_listed(found)}. TorchDynamo "
            "does not see every change of what code reads (a key that a dictionary has got since, "
            "the result of functools.cache, os.environ, an attribute of a class: "
            "docs/what_you_can_rely_on.md has the list), and goes on with what was there. Give the "
            "value to forward as an argument, or keep it in an attribute of the module; or leave "
            "the module that reads it uncut: name others (the strategy's network=[...]). "
            "verify=False looks no more."
        )

    def _meet(self, found: Sequence[str]) -> NetworkError:
        """Make the error that says that results of a sample depend on other samples.

        Args:
            found: descriptions of the differences.
        """
        return NetworkError(
            f"{self.found.shown}: the samples of a batch meet in call {self.number} "
            f"{_calls(*self.kind[1:])}, and they did not in its first one: with other samples in "
            f"the other micro-batches {_listed(found)}. In micro-batches the numbers are not those "
            "of one device. Use the strategy's num_microbatches=1."
        )


def _given(result: Any, given: tuple[Any, ...]) -> dict[str, Any]:
    """Put the results of a call under the names ``output``, ``arguments`` and ``keywords``.

    Args:
        result: what the call has returned.
        given: its positional and keyword arguments after the call, which has possibly changed them.
    """
    arguments, keywords = given
    return {"output": result, "arguments": arguments, "keywords": keywords}


def _differences(found: Any, expected: Made, epsilon: float, *, part: bool = False) -> list[str]:
    """Describe differences between results of the stages and expected ones, where both have one.

    (Of attributes, the copy gives those alone that its call has set.)

    Args:
        found: by name, the results of the stages.
        expected: by name, the results of the Python.
        epsilon: see :func:`~lightning_hybrid.driver.differences.differences`.
        part: see the same function.
    """
    known = {key: value for key, value in found.items() if key in (expected or ())}
    return differences(known, expected, epsilon, part=part)


_SHARE = 1 / 16
"""Share of the free memory that weights of other stages may take for a check, with ``"auto"``."""

_NO_MEMORY = MemoryError, torch.OutOfMemoryError
"""What lacks of memory raise, beside errors of torch's and of the system that say so."""


class _Inconclusive(Exception):
    """Calls of this kind cannot be compared; the message says why."""


_OF_ALL_MODULES = frozenset(vars(nn.Module()))


def _mixes_samples(module: nn.Module, graph: NetworkGraph) -> bool:
    """Whether a call normalises by statistics of its batch, in a pipeline those of a micro-batch.

    Args:
        module: the network; it is looked for layers of batch normalisation.
        graph: the captured graph; it is looked for calls of `F.batch_norm`.
    """
    norms = (part for part in module.modules() if isinstance(part, BatchNorm))
    if any(norm.training or norm.running_mean is None for norm in norms):
        return True
    return any(
        node.target is F.batch_norm
        and node.kwargs.get("training", node.args[5] if len(node.args) > 5 else False)
        for node in graph.graph.nodes
    )


def _listed(found: Sequence[str]) -> str:
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return f"{'; '.join(found[:3])}{more}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
