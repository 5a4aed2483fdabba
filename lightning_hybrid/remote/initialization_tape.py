"""What makes the numbers of tensors that have no memory yet, operation by operation.

A network built under a `Tape` has all its weights on the meta device. The tape holds, per piece of
memory (a storage), the operations that write to it, with the state that the random generator had;
playing them again gives the numbers that one device has, for one storage at a time.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import schema, storage_key, version
from lightning_hybrid._trees import Token, rebuild, tensors_in
from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote.deferred import is_deferred, like, value_of

_SNAPSHOT_BYTES = 2**20
"""Real tensors up to this size are copied when an operation on the tape reads them."""

_MAPPED_BYTES = 2**20
"""From this size on memory is taken from the system piece by piece."""

_WHOLE = {
    f"aten::{name}" for name in ("normal_", "uniform_", "fill_", "zero_", "copy_", "exponential_")
}
"""Operations after which nothing is left of what the memory held before."""


@dataclass(frozen=True)
class View(Token):
    """A tensor without memory: the storage that it lies in, and where in it.

    Attributes:
        key: number of the storage, which names it while it lives.
        size: its shape.
        stride: steps of the dimensions, in elements.
        offset: from the start of the storage, in elements.
        dtype: of its elements.
    """

    key: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The same view of real memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Constant:
    """A real tensor that an operation has read.

    Attributes:
        tensor: a copy of it, or itself if it is larger than `_SNAPSHOT_BYTES`, or has no memory.
        version: torch's count of its changes when it was read; ``None``: it is not checked.
    """

    tensor: Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> Constant:
        if is_deferred(tensor):
            return cls(tensor, None)
        tensor = tensor.detach()
        if tensor.nbytes <= _SNAPSHOT_BYTES:
            return cls(tensor.clone(), None)
        return cls(tensor, None if tensor.is_inference() else version(tensor))

    def value(self) -> Tensor:
        if self.version is not None and version(self.tensor) != self.version:
            raise DeferredError(
                f"a tensor of size {tuple(self.tensor.shape)} was copied into a weight in "
                "configure_model and changed in place afterwards; give the weight a copy of it "
                "(tensor.clone()), or build that module in __init__"
            )
        return value_of(self.tensor)


@dataclass(frozen=True)
class Step:
    """One operation on the tape.

    Attributes:
        function: the operation; or a constant, whose numbers it brings.
        arguments: by position, with a `View` for each tensor without memory.
        keywords: arguments by name, likewise.
        results: where the tensors that it returns lie; None: in memory that it was given.
        reads: keys of the storages whose numbers it needs.
        writes: keys of the storages that it changes or makes.
        replaces: key of the storage of whose former numbers nothing is left.
        generator: what it draws random numbers from; ``None``: nothing.
        state: that the generator had before it.
    """

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: tuple[View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    replaces: int | None = None
    generator: torch.Generator | None = None
    state: Tensor | None = None

    def run(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Tensor]:
        """Run the operation on real tensors, with the random numbers of its turn."""
        if isinstance(self.function, Constant):
            return [self.function.value()]
        with _generator_at(self.generator, self.state):
            returned = self.function(*arguments, **keywords)
        return [tensor for _, tensor in tensors_in(returned)]


class Tape:
    """The operations that made tensors without memory, in their order.

    Args:
        device: the device that the numbers are made on, as on one device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._steps: list[Step] = []
        self._writers: dict[int, list[int]] = {}
        # a key is only a name while its storage lives
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._marked: set[int] = set()
        self.marking = False

    # ------------------------------------------------------------------ recording

    def view(self, tensor: Tensor) -> View:
        """Where a tensor on the meta device lies."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        self._storages.setdefault(key, storage)
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return View(key, size, stride, int(tensor.storage_offset()), tensor.dtype)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor on the meta device was made under this tape."""
        return tensor.is_meta and storage_key(tensor.untyped_storage()) in self._storages

    def bytes_behind(self, view: View) -> int:
        """The size of the storage that a view lies in."""
        return self._storages[view.key].nbytes()

    def is_marked(self, tensor: Tensor) -> bool:
        """Whether something was written to a tensor while ``marking`` was on."""
        return self.view(tensor).key in self._marked

    def lift(self, tensor: Tensor) -> Tensor:
        """A tensor without memory that has the numbers of a real one."""
        twin = like(tensor, "meta")
        view = self.view(twin)
        nothing: frozenset[int] = frozenset()
        self._add(Step(Constant.of(tensor), (), {}, (view,), nothing, frozenset({view.key})))
        return twin

    def record(
        self,
        function: Any,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        results: Sequence[Tensor],
        written: Sequence[View],
        random: tuple[torch.Generator, Tensor] | None,
    ) -> None:
        """Write down an operation.

        Args:
            function: the operation.
            given: its arguments, with a `View` for each tensor without memory.
            results: what it returned on the meta device.
            written: its arguments that it writes to.
            random: the generator that it draws from, and that one's state before.
        """
        arguments, keywords = given
        reads = _keys(given)
        known = set(self._storages)
        places = [self.view(result) for result in results]
        made = tuple(place if place.key not in known else None for place in places)
        writes = {view.key for view in written} | {place.key for place in made if place}
        if not writes:
            return  # a view of what there is
        replaces = None
        if len(written) == 1 and schema(function).name in _WHOLE and self._covers(written[0]):
            reads = _keys((arguments[1:], keywords))
            replaces = written[0].key if written[0].key not in reads else None
        self._add(
            Step(
                function, arguments, keywords, made, frozenset(reads), frozenset(writes), replaces,
                *(random or (None, None)),
            )
        )  # fmt: skip

    def _covers(self, view: View) -> bool:
        numbers = torch.Size(view.size).numel()
        return numbers * view.dtype.itemsize == self.bytes_behind(view)

    def _add(self, step: Step) -> None:
        if self.marking:
            self._marked |= step.writes
        for key in step.writes:
            self._writers.setdefault(key, []).append(len(self._steps))
        self._steps.append(step)

    # ------------------------------------------------------------------ playing

    def real(self, views: Sequence[View]) -> list[Tensor]:
        """Make the numbers behind some views; views of one storage share their memory."""
        memory: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), torch.inference_mode(False):
            for number in self._needed({view.key for view in views}):
                self._play(self._steps[number], memory)
            return [self._look(view, memory) for view in views]

    def _needed(self, keys: set[int]) -> list[int]:
        """Numbers of the steps that decide what some storages hold, in order."""
        waiting: list[int] = []  # negative, since the latest comes first
        found: list[int] = []

        def want(key: int, before: int) -> None:
            writers = self._writers.get(key, [])
            place = bisect.bisect_left(writers, before)
            if place:
                heapq.heappush(waiting, -writers[place - 1])

        for key in keys:
            want(key, len(self._steps))
        while waiting:
            number = -heapq.heappop(waiting)
            # several later steps wanted it: equal numbers leave the heap one after the other
            if found and found[-1] == number:
                continue
            found.append(number)
            step = self._steps[number]
            # what is overwritten as a whole need not be made before
            for key in step.reads | step.writes - {step.replaces}:
                want(key, number)
        return found[::-1]

    def _play(self, step: Step, memory: dict[int, torch.UntypedStorage]) -> None:
        arguments, keywords = rebuild(
            (step.arguments, step.keywords),
            lambda value: self._look(value, memory) if isinstance(value, View) else value,
        )
        for view, tensor in zip(step.results, step.run(arguments, keywords)):
            if view is None:
                continue
            same = tensor.stride() == view.stride and tensor.storage_offset() == view.offset
            fits = tensor.untyped_storage().nbytes() == self._storages[view.key].nbytes()
            if same and fits and not isinstance(step.function, Constant):
                memory[view.key] = tensor.untyped_storage()
            else:  # a constant is not ours to write to; or the meta device has another layout
                self._look(view, memory, tensor.device).copy_(tensor)

    def _look(
        self,
        view: View,
        memory: dict[int, torch.UntypedStorage],
        device: torch.device | None = None,
    ) -> Tensor:
        if view.key not in memory:
            size = self.bytes_behind(view)
            memory[view.key] = memory_for(size, device or self.device)
        return view.of(memory[view.key])


def memory_for(size: int, device: torch.device) -> torch.UntypedStorage:
    """Memory that goes back to the system as soon as nobody has it.

    C's allocator gives back only what lies at the end of its heap. A network's weights, made and
    dropped one after the other between small objects that live on, would stay in the process.

    Args:
        size: in bytes.
        device: where; only the CPU's memory is C's.
    """
    if device.type != "cpu" or size < _MAPPED_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.UntypedStorage(size, device=device)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()


def _keys(value: Any) -> set[int]:
    """The storages that the tensors in nested arguments lie in."""
    found = set[int]()
    rebuild(value, lambda leaf: found.add(leaf.key) if isinstance(leaf, View) else None)
    return found


@contextlib.contextmanager
def _generator_at(generator: torch.Generator | None, state: Tensor | None) -> Iterator[None]:
    """Inside, a generator goes on from a state that it had."""
    if generator is None or state is None:
        yield
        return
    # numbers are made whenever somebody needs them, in the middle of other draws
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)
