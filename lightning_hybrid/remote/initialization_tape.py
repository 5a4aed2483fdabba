"""Records the operations that initialise tensors without memory, to make their numbers later.

A network built under a `Tape` has all its weights on the meta device. The tape holds, per storage,
the operations that write to it, with the state that the random generator had; playing them gives
the numbers that one device has, for one storage at a time.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import has_tensors, schema, storage_key, version
from lightning_hybrid._trees import Token, rebuild, tensors_in
from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote.deferred import empty_like_on, is_deferred, value_of
from lightning_hybrid.remote.mapped_files import (
    FilePart,
    MappedFiles,
    in_mapped_file,
    let_go_of_file,
)
from lightning_hybrid.remote.own_memory import memory_for

_SNAPSHOT_BYTES = 2**20
"""Real tensors up to this size are copied when a recorded operation reads them."""

_WHOLE = {
    f"aten::{name}" for name in ("normal_", "uniform_", "fill_", "zero_", "copy_", "exponential_")
}
"""Operations that overwrite the whole tensor."""


@dataclass(frozen=True)
class View(Token):
    """The place of a tensor without memory: its storage, and the part of the storage.

    Attributes:
        key: number of the storage, unique while the storage exists.
        size: shape of the tensor.
        stride: its strides, in elements.
        offset: its offset from the start of the storage, in elements.
        dtype: its type.
    """

    key: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Make the tensor that lies at this place in a real storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class RealTensor:
    """A real tensor that a recorded operation reads.

    Attributes:
        tensor: a copy of the real tensor; or the tensor itself, if it is larger than
            `_SNAPSHOT_BYTES` or is deferred.
        version: its version counter at the recording, to notice later changes; ``None``: it is a
            copy, or cannot be checked.
    """

    tensor: Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> RealTensor:
        """Record a tensor as its numbers are now."""
        if is_deferred(tensor):
            return cls(tensor, None)
        tensor = tensor.detach()
        if tensor.nbytes <= _SNAPSHOT_BYTES:
            return cls(tensor.clone(), None)
        return cls(tensor, None if tensor.is_inference() else version(tensor))

    def value(self) -> Tensor:
        """Return the numbers that the tensor had at the recording.

        Raises:
            DeferredError: the tensor was changed in place since.
        """
        if self.version is not None and version(self.tensor) != self.version:
            raise DeferredError(
                f"a tensor of size {tuple(self.tensor.shape)} was copied into a weight in "
                "configure_model and changed in place afterwards; give the weight a copy of it "
                "(tensor.clone()), or build that module in __init__"
            )
        return value_of(self.tensor)


@dataclass(frozen=True)
class RecordedOperation:
    """A recorded operation.

    Attributes:
        function: the operation; or a `RealTensor`, whose numbers are put into the result.
        arguments: its arguments by position, with a `View` for each tensor without memory.
        keywords: its arguments by name, likewise.
        results: the places of the tensors that it returns; None: in a storage that existed before.
        reads: keys of the storages whose numbers it needs.
        writes: keys of the storages that it changes or makes.
        replaces: key of the storage that it overwrites as a whole without reading it.
        generator: the generator from which it draws random numbers; ``None``: it draws none.
        state: the state that the generator had before it.
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
        """Run the operation on real tensors, with the random numbers that it drew originally.

        Args:
            arguments: its arguments by position, real tensors in the place of views.
            keywords: its arguments by name, likewise.

        Returns:
            The tensors that it returns.
        """
        if isinstance(self.function, RealTensor):
            return [self.function.value()]
        with _generator_at(self.generator, self.state):
            returned = self.function(*arguments, **keywords)
        return [tensor for _, tensor in tensors_in(returned)]


class Tape:
    """Records operations on tensors without memory, and plays them to make the numbers.

    Args:
        device: the device on which the numbers are made.

    Attributes:
        device: see above.
        marking: whether tensors that are written to are marked; see :meth:`is_marked`.
        marked: keys of the storages of the tensors that are marked.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._steps: dict[int, RecordedOperation] = {}
        self._count = 0
        self._writers: dict[int, list[int]] = {}
        # (kept, since a key is unique only while its storage exists)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.marked: set[int] = set()
        self.marking = False

    # ------------------------------------------------------------------ recording

    def view(self, tensor: Tensor) -> View:
        """Return the place of a tensor on the meta device. The tape then knows its storage."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        self._storages.setdefault(key, storage)
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return View(key, size, stride, int(tensor.storage_offset()), tensor.dtype)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the meta device, and in a storage that this tape knows."""
        return tensor.is_meta and storage_key(tensor.untyped_storage()) in self._storages

    def bytes_behind(self, view: View) -> int:
        """Return the size in bytes of the storage that a view lies in."""
        return self._storages[view.key].nbytes()

    def is_marked(self, tensor: Tensor) -> bool:
        """Whether something was written to a tensor while ``marking`` was on."""
        return self.view(tensor).key in self.marked

    def holds_memory(self, tensor: Tensor) -> bool:
        """Whether the tape keeps large real tensors in memory to make a tensor's numbers of.

        Numbers that are drawn, or read from a mapped file, take no memory.
        """
        steps = (self._steps[number] for number in self._needed({self.view(tensor).key}))
        read = (part for step in steps for part in _real_tensors(step))
        return any(
            real.tensor.nbytes > _SNAPSHOT_BYTES
            and not (is_deferred(real.tensor) or in_mapped_file(real.tensor))
            for real in read
        )

    def file_part(self, tensor: Tensor, files: MappedFiles) -> FilePart | None:
        """Return where in a file the numbers of a tensor are, if they are there as they are.

        ``None``: they are drawn, computed, converted, or in memory.

        Args:
            tensor: a tensor without memory.
            files: the files that are mapped.
        """
        view = self.view(tensor)
        source = self._copied_to(view) if self._covers(view) and tensor.is_contiguous() else None
        if source is None or is_deferred(source.tensor) or source.version is None:
            return None
        read = source.tensor
        alike = (read.shape, read.dtype) == (tensor.shape, tensor.dtype)
        return files.part_of(read) if alike and version(read) == source.version else None

    def _copied_to(self, view: View) -> RealTensor | None:
        """Return the real tensor that was copied to a place last, perhaps by way of others.

        ``None``: the numbers at this place are drawn or computed.

        Args:
            view: the place, which is a whole storage.
        """
        before = self._count
        while True:
            writers = self._writers.get(view.key, [])
            last = bisect.bisect_left(writers, before) - 1
            if last < 0:
                return None
            before = writers[last]
            source = _source_of(self._steps[before], view)
            if not isinstance(source, View):
                return source
            view = source

    def lift(self, tensor: Tensor) -> Tensor:
        """Make a new tensor without memory, and record that it has the numbers of another one.

        Args:
            tensor: the other one: a real tensor, which is copied if it is small, or a deferred one.
        """
        twin = self.made(tensor)
        self.put(twin, tensor)
        return twin

    def put(self, tensor: Tensor, value: Tensor) -> None:
        """Record that a tensor gets the numbers of another one.

        Args:
            tensor: a tensor without memory.
            value: the tensor with the numbers: a real one, which is copied if it is small, or a
                deferred one.
        """
        view, nothing = self.view(tensor), frozenset[int]()
        self._add(
            RecordedOperation(RealTensor.of(value), (), {}, (view,), nothing, frozenset({view.key}))
        )

    def made(self, like_this: Tensor) -> Tensor:
        """Make a new tensor without memory, of the size and type of another one.

        The tape knows it, and records no numbers for it.
        """
        twin = empty_like_on(like_this, "meta")
        self.view(twin)
        return twin

    def record(
        self,
        function: Any,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        results: Sequence[Tensor],
        written: Sequence[View],
        random: tuple[torch.Generator, Tensor] | None,
    ) -> None:
        """Record an operation.

        Args:
            function: the operation.
            given: its arguments and keywords, with a `View` for each tensor without memory.
            results: the tensors that it has returned on the meta device.
            written: those of its arguments that it writes to.
            random: the generator that it draws from, and the state of that before; ``None``: it
                draws no random numbers.
        """
        arguments, keywords = given
        reads = _keys(given)
        known = set(self._storages)
        places = [self.view(result) for result in results]
        made = tuple(place if place.key not in known else None for place in places)
        writes = {view.key for view in written} | {place.key for place in made if place}
        if not writes:
            return  # (it only makes a view)
        replaces = None
        if len(written) == 1 and schema(function).name in _WHOLE and self._covers(written[0]):
            reads = _keys((arguments[1:], keywords))
            replaces = written[0].key if written[0].key not in reads else None
        self._add(
            RecordedOperation(
                function, arguments, keywords, made, frozenset(reads), frozenset(writes), replaces,
                *(random or (None, None)),
            )
        )  # fmt: skip

    def forget(self) -> None:
        """Drop operations and storages that the numbers of no living tensor depend on.

        For example, those of weights that a later load has overwritten.
        """
        living = {key for key, storage in self._storages.items() if has_tensors(storage)}
        needed = {number: self._steps[number] for number in self._needed(living)}
        kept = living.union(*(step.reads | step.writes for step in needed.values()))
        self._steps = needed
        self._storages = {k: s for k, s in self._storages.items() if k in kept}
        self.marked &= kept
        self._writers = {
            key: [number for number in numbers if number in needed]
            for key, numbers in self._writers.items()
            if key in kept
        }

    def _covers(self, view: View) -> bool:
        """Whether a view has as many bytes as its storage."""
        numbers = torch.Size(view.size).numel()
        return numbers * view.dtype.itemsize == self.bytes_behind(view)

    def _add(self, step: RecordedOperation) -> None:
        if self.marking:
            self.marked |= step.writes
        for key in step.writes:
            self._writers.setdefault(key, []).append(self._count)
        self._steps[self._count] = step
        self._count += 1

    # ------------------------------------------------------------------ playing

    def real(self, views: Sequence[View]) -> list[Tensor]:
        """Play the tape to make the real tensors with these places.

        Returns:
            The tensors, in the order of ``views``; those in one storage share memory.
        """
        memory: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), torch.inference_mode(False):
            for number in self._needed({view.key for view in views}):
                self._play(self._steps[number], memory)
            return [self._tensor_at(view, memory) for view in views]

    def _needed(self, keys: set[int]) -> list[int]:
        """Numbers of the recorded operations that the contents of some storages depend on.

        They are in the order in which they were recorded.

        Args:
            keys: keys of the storages.
        """
        waiting: list[int] = []  # negative numbers, so that the heap gives the latest step first
        found: list[int] = []

        def want(key: int, before: int) -> None:
            # wait for the last step before another one that writes to the storage
            writers = self._writers.get(key, [])
            place = bisect.bisect_left(writers, before)
            if place:
                heapq.heappush(waiting, -writers[place - 1])

        for key in keys:
            want(key, self._count)
        while waiting:
            number = -heapq.heappop(waiting)
            # (it is there several times if several later steps depend on it)
            if found and found[-1] == number:
                continue
            found.append(number)
            step = self._steps[number]
            # (the former numbers of a storage that is overwritten as a whole are not needed)
            for key in step.reads | step.writes - {step.replaces}:
                want(key, number)
        return found[::-1]

    def _play(self, step: RecordedOperation, memory: dict[int, torch.UntypedStorage]) -> None:
        """Run a recorded operation on real memory.

        Args:
            step: the operation.
            memory: the real storages that were made so far, by key; new ones are added.
        """
        arguments, keywords = rebuild(
            (step.arguments, step.keywords),
            lambda value: self._tensor_at(value, memory) if isinstance(value, View) else value,
        )
        for view, tensor in zip(step.results, step.run(arguments, keywords)):
            if view is None:
                continue
            same = tensor.stride() == view.stride and tensor.storage_offset() == view.offset
            fits = tensor.untyped_storage().nbytes() == self._storages[view.key].nbytes()
            if same and fits and not isinstance(step.function, RealTensor):
                memory[view.key] = tensor.untyped_storage()
            else:  # (a constant must not be written to; or the layout is not that on meta)
                _write(self._tensor_at(view, memory, tensor.device), tensor)
                # (else what was read would be in memory beside all copies of it)
                let_go_of_file(tensor)

    def _tensor_at(
        self,
        view: View,
        memory: dict[int, torch.UntypedStorage],
        device: torch.device | None = None,
    ) -> Tensor:
        """Make the real tensor that lies at a place in its storage.

        Args:
            view: the place.
            memory: the real storages that were made so far, by key; a storage that is missing is
                added, uninitialised.
            device: where a new storage is; ``None``: on the tape's device.
        """
        if view.key not in memory:
            size = self.bytes_behind(view)
            memory[view.key] = memory_for(size, device or self.device)
        return view.of(memory[view.key])


def _source_of(step: RecordedOperation, view: View) -> RealTensor | View | None:
    """Return what an operation copies to a place: a real tensor, or the whole of another storage.

    ``None``: it computes, converts, or writes to a part of the place.
    """
    if isinstance(step.function, RealTensor):
        return step.function if step.results == (view,) else None
    if step.replaces != view.key or schema(step.function).name != "aten::copy_":
        return None
    place, source, *_ = step.arguments
    if place != view:
        return None
    if isinstance(source, View):
        return source if replace(source, key=view.key) == view else None
    return source if isinstance(source, RealTensor) else None


def _real_tensors(step: RecordedOperation) -> Iterator[RealTensor]:
    waiting = [step.function, *step.arguments, *step.keywords.values()]
    while waiting:
        part = waiting.pop()
        if isinstance(part, RealTensor):
            yield part
        elif isinstance(part, list | tuple):
            waiting += part


def _write(place: Tensor, value: Tensor) -> None:
    """Copy the numbers of ``value`` into ``place``, which may be an expanded tensor."""
    for dim, stride in enumerate(place.stride()):
        if stride == 0 and place.shape[dim]:
            place, value = place.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    place.copy_(value)


def _keys(value: Any) -> set[int]:
    """Return the keys of the storages of the views in nested arguments."""
    found = set[int]()
    rebuild(value, lambda leaf: found.add(leaf.key) if isinstance(leaf, View) else None)
    return found


@contextlib.contextmanager
def _generator_at(generator: torch.Generator | None, state: Tensor | None) -> Iterator[None]:
    """Inside, a generator starts from a state; afterwards it is as it was before.

    Args:
        generator: the generator; ``None``: nothing is done.
        state: the state; ``None``: nothing is done.
    """
    if generator is None or state is None:
        yield
        return
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)
