"""Whether stages still compute what the network's Python computes: looked at now and then.

TorchDynamo asks at each call whether what its graph depends on has changed, but not of everything
(docs/what_you_can_rely_on.md has the list). What it does not ask, a graph holds for ever. And of
operations that may do anything it is only tried, on random numbers, that samples do not meet in
them. So at calls 1, 2, 4, 8, ... of
a network that is cut its Python runs once more, on this rank and on a copy
(:mod:`lightning_hybrid.driver.module_copy`), and what both return is compared:

* on the whole batch, where results do not depend on how it is split: then samples that meet are
  seen, too;
* else (in training with dropout or batch normalisation) on the first micro-batch, with its random
  numbers. Where it draws, it also runs on the batch, and on one in which other samples stand in the
  places of all other micro-batches: what comes of the first one must stay what it is.

It runs before the stages do, so that what it leaves somewhere is what the call leaves there.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_hybrid._torch.modules import BatchNorm
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.capture import Capture, own_forward
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
from lightning_hybrid.driver.found_network import FoundNetwork
from lightning_hybrid.driver.module_copy import ModuleCopy, RandomStates, Rows, WritesWeights
from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import NetworkGraph, compute_whole, place_of
from lightning_hybrid.planning import free_bytes
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.stage import generators_of_microbatch, random_state, set_random_state

Verify = int | Literal["auto", False]

Made = dict[str, Any] | None
"""What a call has made, by name; ``None``: it did not run."""

Kind = tuple[str, bool, bool]
"""Name of a network, whether gradients are recorded, whether it is in training mode."""


class Verification:
    """Decides which calls are looked at.

    Args:
        root: the LightningModule.
        driver: of this replica.
        verify: ``"auto"``: calls 1, 2, 4, 8, ...; a number: the first call, and each that comes so
            many after the last one; ``False``: none.
        announcements: tells the user what is not looked at, and why.

    Attributes:
        root: see above.
        driver: see above.
        verify: see above.
        has_run: in which ways the Python of a kind of calls has run: on the whole batch, or not.
    """

    def __init__(
        self, root: nn.Module, driver: Driver, verify: Verify, announcements: Announcements
    ) -> None:
        self.root, self.driver, self.verify = root, driver, verify
        self._announcements = announcements
        self._counts = Counter[Kind]()
        self._off = set[Kind]()
        self.has_run = set[tuple[Kind, bool]]()

    def begin(
        self, found: FoundNetwork, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> "Check | None":
        """A call begins. Returns what looks at it, if it is its turn.

        Args:
            found: the network.
            arguments: of the call.
            keywords: of the call.
        """
        if self.verify is False:
            return None
        kind = found.name, torch.is_grad_enabled(), found.module.training
        if kind in self._off or not (found.whole or found.driven):
            return None
        if found.driven:
            self._counts[kind] += 1
        number = self._counts[kind] or 1  # a network that is not cut yet may be so in this call
        if not self._is_due(number):
            return None
        return Check(self, found, kind, number, arguments, keywords)

    def _is_due(self, number: int) -> bool:
        if self.verify == "auto":
            return number & (number - 1) == 0
        return (number - 1) % self.verify == 0

    def count(self, check: "Check") -> None:
        """Count a call of a network that is cut."""
        self._counts[check.kind] = check.number

    def give_up(self, check: "Check", reason: str) -> None:
        """Look no more at calls of a kind, and say why."""
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
    """Looks at one call.

    Args:
        verification: decides.
        found: the network.
        kind: of the call.
        number: of the call among those of its kind.
        arguments: of the call.
        keywords: of the call.
    """

    def __init__(
        self,
        verification: Verification,
        found: FoundNetwork,
        kind: Kind,
        number: int,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self._of, self.found, self.kind, self.number = verification, found, kind, number
        self._driver, self._device = verification.driver, verification.driver.device
        self._arguments, self._keywords = arguments, keywords
        self._random, self._before = RandomStates(), random_state(self._device)
        self._copy: ModuleCopy | None = None
        self._call: NetworkCall | None = None
        self._start: Callable[[], AbstractContextManager[None]]
        self._divided = False
        self._end: list[Tensor] = []
        self._parts = self._first = 1
        self._splits = True
        self._whole: Made = None
        self._part: Made = None
        self._others: Made = None
        self._raised: Exception | None = None

    # ------------------------------------------------------------------ before the stages run

    def begin_chain(self) -> None:
        """A chain of graphs is about to be called; it draws from one stream."""
        self._before, self._start = random_state(self._device), self._own_draws
        with self._or_give_up():
            self._take((), writes=True)  # (its Python may)
            self._run(draws=False)

    def begin(self, call: NetworkCall, values: Sequence[Any], *, synchronised: bool) -> None:
        """Run the network's own Python, before the stages run.

        Args:
            call: calls them.
            values: the arguments of its graph.
            synchronised: whether batch statistics are those of all replicas.
        """
        self._call = call
        self._of.count(self)
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
        # weights are fetched next, and what runs ahead was begun with those of before
        self._driver.interrupt()
        parts, _ = call.specialization.split(graph.bind(values))
        self._parts, self._first = len(parts), graph.batch_of(parts[0]) or 0
        self._divided = graph.divided
        if graph.divided and (graph.uses_rng or (mixes and self._parts > 1)):
            raise _Inconclusive(
                "a part of it needs all samples, and another one draws, or takes statistics, for "
                "each micro-batch by itself"
            )
        self._splits = self._parts > 1 and not mixes and not graph.divided
        draw = self._driver.calls.expect(call.learns(graph.bind(values)))
        self._start = partial(self._driver.calls.generators_of, draw)
        if graph.divided or self._driver.calls.follows:  # what it draws are this rank's own numbers
            self._start = self._own_draws
        batched = [
            values[graph.place[leaf.node]]
            for leaf in graph.leaves
            if leaf.rows is not None and leaf.rows.dim == 0 and not leaf.made
        ]
        self._take(batched, writes=graph.writes_parameters)
        self._run(draws=mixes or graph.uses_rng)

    def _take(self, batched: Sequence[Tensor], *, writes: bool) -> None:
        if not self.found.is_materialized:
            raise _Inconclusive("it is made in configure_model, and whole on no rank")
        found = self.found
        prefix = f"{found.name}." if found.name else ""
        absent, room = self._driver.remote.absent_bytes(prefix), free_bytes()
        if self._of.verify == "auto" and room is not None and absent > _SHARE * room:
            raise _Inconclusive(
                f"the weights of the other stages have {absent / 1e9:.3g} GB, which have no memory "
                f"here, and {room / 1e9:.3g} GB are free; verify=1 looks at all calls"
            )
        self._driver.remote.bring(prefix)
        arguments = self._arguments, self._keywords
        try:
            self._copy = ModuleCopy(self._of.root, found.module, *arguments, batched, writes=writes)
        except Exception as error:  # an object may refuse to be copied in any way it likes
            raise _Inconclusive(f"it cannot be copied ({_told(error)})") from error

    def _run(self, *, draws: bool) -> None:
        """Run the network's own Python.

        Args:
            draws: what a call makes depends on how the batch is split.
        """
        assert self._copy is not None
        missing, room = self._copy.missing_bytes(self._device), _free_bytes(self._device)
        if room is not None and missing > room:
            raise _Inconclusive(
                f"the weights of the other stages have {missing} bytes, and {room} are free on "
                f"{self._device}"
            )
        try:
            # what does not depend on the split is compared on all samples: it shows if they meet
            if self._parts == 1 or not draws:
                self._whole, _ = self._python()
                return
            self._part, _ = self._python(self._first_part)
            if self._splits:
                self._try_to_split()
        except _Inconclusive:
            raise
        except Exception as error:
            self._raised = error
        finally:
            self._copy.release()

    def _try_to_split(self) -> None:
        self._whole, states = self._python()
        others, same = self._python(self._among_copies)
        if all(map(torch.equal, states, same)):  # else what is drawn depends on values
            self._others = others

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """Where nothing can be said of calls of this kind: look no more at them."""
        try:
            yield
        except _Inconclusive as error:
            self._copy = None
            self._of.give_up(self, str(error))

    # ------------------------------------------------------------------ after

    def compare(self, result: Any) -> None:
        """Compare what the stages have given with what the network's own Python gave.

        Args:
            result: what it has returned.

        Raises:
            NetworkError: the network's own Python gives something else, or samples meet.
        """
        if self._copy is None:
            return
        if self._raised is not None:
            raise self._stale([f"its Python raises {_told(self._raised)}"]) from self._raised
        found = _given(result, (self._arguments, self._keywords))
        with self._or_give_up():
            self._compare(found | self._attributes(self.found.module))

    def _compare(self, found: dict[str, Any]) -> None:
        weights = dict(self.found.module.named_parameters())
        epsilon = epsilon_of((found, weights), self._device)
        if self._part is None:
            apart = _differences(found, self._whole, epsilon)
            if not apart:
                return
            # nothing was split, or nothing in which samples meet: the graph itself is another one
            if self._parts == 1 or self._divided:
                raise self._stale(apart)
            # rounded otherwise in parts, or stale, or samples meet
            self._part, _ = self._python(self._first_part)
            self._try_to_split()
        apart = _differences(found, self._part, epsilon, part=True)
        if self._whole is not None:
            apart = apart or _differences(numbers_in(found), numbers_in(self._whole), epsilon)
        if apart:
            raise self._stale(apart)
        if self._others is not None:
            one, other = (first_samples(x, self._part) for x in (self._whole, self._others))
            # (sums on GPUs may be in another order each time)
            apart = differences(one, other, epsilon, bits=self._device.type == "cpu")
        if apart:
            raise self._meet(apart)

    def _first_part(self, tensor: Tensor) -> Tensor:
        """The first micro-batch."""
        return tensor.narrow(0, 0, self._first)

    def _among_copies(self, tensor: Tensor) -> Tensor:
        """Samples of the first micro-batch in the places of all others."""
        order = torch.arange(len(tensor), device=tensor.device) % self._first
        return tensor.index_select(0, order)

    def _python(self, rows: Rows | None = None) -> tuple[Made, list[Tensor]]:
        """What the network's own Python makes of the batch, or of some rows for its samples.

        Returns:
            That, and the states of torch's generators afterwards.
        """
        assert self._copy is not None
        if rows is not None and not self._copy.is_complete:
            raise _Inconclusive("a tensor with the size of the batch is none of its arguments")
        way = self.kind, rows is None
        try:
            module, result, given = self._copy.call(self._device, self._draws(), rows)
        except Exception as error:  # of the user's code, or for lack of memory
            memory = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
            # a Python that has run before and fails now has changed, which is what is looked for
            if isinstance(error, WritesWeights) or (way in self._of.has_run and not memory):
                raise
            reason = f"its Python does not run on a copy of it ({_told(error)})"
            raise _Inconclusive(reason) from error
        self._of.has_run.add(way)
        # (hooks may keep things in the module that was copied; the copy has those of before)
        set_here = changed(self._attributes(module), self._attributes(self._copy.module))
        return _given(result, given) | set_here, self._end

    @contextmanager
    def _draws(self) -> Iterator[None]:
        """Inside, what is drawn is what the call draws, or its first micro-batch."""
        with self._random.again(), self._start():
            yield
            self._end = random_state(self._device)

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Inside, torch's generators are as they were before the call."""
        with generators_of_microbatch(None, self._device):
            set_random_state(self._before, self._device)
            yield

    def _attributes(self, module: nn.Module) -> dict[str, Any]:
        """What a module and its parts hold beside parameters, buffers and parts."""
        held: dict[str, Any] = {}
        for name, part in module.named_modules():
            for key, value in vars(part).items():
                if key in _OF_ALL_MODULES or isinstance(value, nn.Parameter):
                    continue
                # (Python between graphs may note the time)
                if self.found.whole or any(True for _ in tensors_in(value)):
                    held[f"self.{name}.{key}" if name else f"self.{key}"] = value
        return leaves_in(held)

    # ------------------------------------------------------------------ what was found

    def _stale(self, found: Sequence[str]) -> NetworkError:
        return NetworkError(
            f"{self.found.shown} does not compute in its stages what its Python computes: in call "
            f"{self.number} {_calls(*self.kind[1:])} {_listed(found)}.{self._cause()} TorchDynamo "
            "does not see every change of what code reads (a key that a dictionary has got since, "
            "the result of functools.cache, os.environ, an attribute of a class: "
            "docs/what_you_can_rely_on.md has the list), and goes on with what was there. Give the "
            "value to forward as an argument, or keep it in an attribute of the module; or leave "
            "the module that reads it uncut: name others (the strategy's network=[...]). "
            "verify=False looks no more."
        )

    def _meet(self, found: Sequence[str]) -> NetworkError:
        return NetworkError(
            f"{self.found.shown}: the samples of a batch meet in call {self.number} "
            f"{_calls(*self.kind[1:])}, and they did not in its first one: with other samples in "
            f"the other micro-batches {_listed(found)}. In micro-batches the numbers are not those "
            "of one device. Use the strategy's num_microbatches=1."
        )

    def _cause(self) -> str:
        """The first operation that the network has otherwise if it is captured anew."""
        if self._copy is None or self._call is None:
            return ""
        graphs: list[NetworkGraph] = []

        def run(graph: NetworkGraph, values: Sequence[Any]) -> Sequence[Any]:
            graphs.append(graph)
            return compute_whole(graph, values)

        def captured(module: nn.Module, *given: Any) -> Any:
            draws = not self._driver.calls.follows
            capture = Capture(module, own_forward(module), run, draws=draws)
            try:
                return capture(*given)
            finally:
                capture.close()

        with suppress(Exception):  # there is an error to tell already
            self._copy.call(self._device, self._draws(), through=captured)
        was = self._call.specialization.graph.layers
        for one, other in zip(was, graphs[0].layers if graphs else ()):
            if _text(one.node) != _text(other.node):
                place = place_of(other.node)
                return (
                    f" The first operation that it has otherwise now is {other.name!r} of "
                    f"{f'module {other.module!r}' if other.module else 'its forward'}"
                    f"{f' ({place})' if place else ''}."
                )
        return ""


def _given(result: Any, given: tuple[Any, ...]) -> dict[str, Any]:
    """What a call has returned, and its arguments, which it may have changed."""
    arguments, keywords = given
    return {"output": result, "arguments": arguments, "keywords": keywords}


def _differences(found: Any, expected: Made, epsilon: float, *, part: bool = False) -> list[str]:
    """Those of attributes, too, as far as the copy has set them."""
    known = {key: value for key, value in found.items() if key in (expected or ())}
    return differences(known, expected, epsilon, part=part)


_SHARE = 1 / 16
"""Of the memory that is free: what the weights of other stages may take, if nobody has asked."""


class _Inconclusive(Exception):
    """Nothing can be said of calls of this kind; the message says why."""


_OF_ALL_MODULES = frozenset(vars(nn.Module()))


def _mixes_samples(module: nn.Module, graph: NetworkGraph) -> bool:
    """Whether a call takes batch statistics, which are those of a micro-batch by agreement."""
    norms = (part for part in module.modules() if isinstance(part, BatchNorm))
    if any(norm.training or norm.running_mean is None for norm in norms):
        return True
    return any(
        node.target is F.batch_norm
        and node.kwargs.get("training", node.args[5] if len(node.args) > 5 else False)
        for node in graph.graph.nodes
    )


def _free_bytes(device: torch.device) -> int | None:
    """Memory that this rank can still take on its device; ``None``: its host's."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _listed(found: Sequence[str]) -> str:
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return f"{'; '.join(found[:3])}{more}"


def _text(node: fx.Node) -> tuple[str, ...]:
    return str(node.target), str(node.args), str(node.kwargs)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
