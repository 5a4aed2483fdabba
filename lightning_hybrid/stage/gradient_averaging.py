"""Averages gradients over the ranks of R replicas that have the same stages, and copies buffers.

Gradients travel in buckets, in the reverse order of the parameters, which is about the order in
which the backward pass finishes them. :meth:`AveragingGroup.arm` is called right before the last
micro-batch's backward; from then on a bucket leaves as soon as its last gradient is final, while
the rest of that backward still runs. :meth:`AveragingGroup.finish` sends what is left and waits.

The algorithm is the backend's: gloo runs a ring, NCCL a ring or a tree (``NCCL_ALGO`` decides).
A ring of m ranks moves 2 (m - 1) / m times the bytes of the gradients out of every rank.

:class:`Broadcasts` copies tensors of one rank to all of a group: small ones together in a buffer,
large ones from their own memory; as bytes, since NCCL takes neither every type nor every order in
memory.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_hybrid._torch.modules import BatchNorm
from lightning_hybrid._torch.tensors import as_they_are, copy_each
from lightning_hybrid.comm import ANOTHER_REPLICA, Group, Survivors, bytes_of, start, wait
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote import is_deferred

MESSAGE_BYTES = 25 * 2**20
"""At most so many bytes of small tensors are sent together."""
_LARGE_BYTES = 2**20
"""From this size on a tensor is sent by itself, from its own memory."""


class Broadcasts:
    """Broadcasts tensors in one group; small ones through a buffer, which is kept between calls.

    Args:
        group: the ranks that take part.
        peer: the name of the other ranks in an error.
    """

    def __init__(self, group: Group, peer: str = ANOTHER_REPLICA) -> None:
        self._group = group
        self._peer = peer
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def send(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy tensors' values from one rank to all others; all ranks of the group call it.

        Autograd does not notice the write.

        Args:
            tensors: dense tensors on the device of the group; on all ranks of the same sizes and
                types, and in the same order.
            source: index in the group of the rank whose values are sent.
        """
        waiting, nbytes = list[Tensor](), 0
        # wide types first, so that in the buffer each lies at a multiple of its element size
        for tensor in sorted(tensors, key=lambda tensor: -tensor.itemsize):
            if tensor.nbytes >= _LARGE_BYTES:
                self._send_large(tensor.data, source)
                continue
            if nbytes + tensor.nbytes > MESSAGE_BYTES:
                self._send_together(waiting, nbytes, source)
                waiting, nbytes = [], 0
            waiting.append(tensor.data)
            nbytes += tensor.nbytes
        if nbytes:
            self._send_together(waiting, nbytes, source)

    def _send_large(self, tensor: Tensor, source: int) -> None:
        # (a tensor that is not contiguous has gaps in its memory, or another order)
        laid_out = tensor.resolve_conj().resolve_neg().contiguous()
        self._broadcast(bytes_of(laid_out), source)
        if laid_out is not tensor:
            tensor.copy_(laid_out)

    def _send_together(self, tensors: list[Tensor], nbytes: int, source: int) -> None:
        # the buffer only grows: to free and allocate GPU memory in each step would make the host
        # wait
        device = tensors[0].device
        if self._buffer.numel() < nbytes or self._buffer.device != device:
            with torch.inference_mode(False):  # (it is kept, and an evaluation may come first)
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        flat = self._buffer[:nbytes]
        parts = [
            part.view(tensor.dtype).view(tensor.shape)
            for tensor, part in zip(tensors, flat.split([tensor.nbytes for tensor in tensors]))
        ]
        here = self._group.rank() == source
        if here:
            copy_each(parts, tensors)
        self._broadcast(flat, source)
        if not here:
            copy_each(tensors, parts)

    def _broadcast(self, memory: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        wait(start(self._group.broadcast, [memory], options, peer=self._peer), self._peer)


FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""A bucket that has reached this size takes no more gradients; the first value is for the first
bucket. As in DistributedDataParallel: large enough for the link, and the first one small, to
start early."""


ONLY_DENSE = (
    "Replicas, and copies of a stage, average dense gradients, and here is a sparse one "
    "(nn.Embedding(sparse=True)). Use sparse=False, or one replica without copies."
)
"""Text of the error for sparse gradients."""


class _Bucket:
    """Gradients of some parameters in one flat tensor, which is kept between steps.

    Behind the gradients the tensor has one count per parameter: 1 or 0, whether this rank has a
    gradient for it; after the sum over the ranks, how many have one. A parameter that no replica
    used keeps ``grad is None``, as on one device.

    Args:
        parameters: parameters of one type on one device.

    Attributes:
        parameters: as given.
        flat: the tensor.
        numbers: view of the part of ``flat`` that has the gradients.
        counts: view of the part of ``flat`` that has the counts.
        views: for each parameter, its gradient in ``flat``, in the parameter's shape.
        missing: indices of the parameters whose gradients are not final yet in this step.
    """

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        numbers = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.empty(numbers + len(parameters), dtype=first.dtype, device=first.device)
        self.numbers, self.counts = self.flat.split([numbers, len(parameters)])
        views = self.numbers.split([p.numel() for p in parameters])
        self.views = [view.view_as(p) for view, p in zip(views, parameters)]
        self.missing = set(range(len(parameters)))

    def fill(self, scale: float, aside: Mapping[Tensor, Tensor] | None) -> None:
        """Copy the parameters' gradients, times ``scale``, into the flat tensor; set the counts.

        Args:
            scale: factor of the gradients; the counts are 1 or 0.
            aside: by parameter, the tensor whose ``grad`` is the parameter's gradient; ``None``:
                the gradients are in ``parameter.grad``.

        Raises:
            HybridError: a gradient is sparse.
        """
        # Replicas must agree on what travels although each may have used other parameters: every
        # gradient has its place in the buffer, and the counts tell afterwards who had one.
        gradients = [_gradient(parameter, aside) for parameter in self.parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if any(gradient.is_sparse for gradient in present):
            raise HybridError(ONLY_DENSE)
        if len(present) == len(gradients):
            copy_each(self.views, present)  # one call: networks may have hundreds of small ones
            self.counts.fill_(1.0)
        else:
            for index, (view, gradient) in enumerate(zip(self.views, gradients)):
                self.counts[index] = gradient is not None
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient)
        if scale != 1:
            # before the sum and not after it: in float16 a sum of many may be too large
            self.numbers.mul_(scale)

    def found(self, aside: Mapping[Tensor, Tensor] | None) -> list[tuple[Tensor, Tensor]]:
        """After an average: each parameter that any replica had a gradient for, with its average.

        Args:
            aside: as in :meth:`fill`.

        Returns:
            Pairs of a parameter and its average, which is a view of this bucket's memory.
        """
        pairs: list[tuple[Tensor, Tensor]] = list(zip(self.parameters, self.views))
        if all(_gradient(parameter, aside) is not None for parameter in self.parameters):
            return pairs
        # (the host waits for the device here, but only if there are unused parameters)
        return [pair for pair, count in zip(pairs, self.counts.tolist()) if count > 0]

    def write_back(self, *, kept: bool = True) -> None:
        """Write the averages into the parameters' gradients, and set :attr:`missing` to all again.

        A parameter without a gradient on this rank gets one if another rank had a gradient for it.

        Args:
            kept: whether this rank uses the averages. If not, the caller must clear the gradients
                afterwards: possibly they are not written.
        """
        # written into existing gradients, which an optimizer or the user may hold references to
        self.missing = set(range(len(self.parameters)))
        present = [p.grad for p in self.parameters if p.grad is not None]
        if len(present) == len(self.parameters):
            if kept:
                copy_each(present, self.views)
            return
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views)):
            if parameter.grad is not None:
                parameter.grad.copy_(view)
            elif self.counts[index] > 0:  # the host waits for the device, for unused parameters
                parameter.grad = view.clone()


def _gradient(parameter: Tensor, aside: Mapping[Tensor, Tensor] | None) -> Tensor | None:
    found = parameter if aside is None else aside.get(parameter)
    return None if found is None else found.grad


class AveragingGroup:
    """Averages gradients, and copies weights and buffers, among the ranks with the same stages.

    In each replica as many ranks have the stages as the stages have copies (ranks that take
    micro-batches in turn). All of these ranks must make the same calls that average or copy, in the
    same order. On a driver that has a copy of a stage of workers, its parameters are proxies; this
    class reads and writes their memory.

    Args:
        parameters: the parameters of the stages, in the same order on all these ranks.
        buffers: returns the buffers that the stages have now (the user's code may replace one), in
            the same order on all these ranks.
        group: the group of these ranks, replica by replica.
        copies: how many ranks of each replica have the stages. Each has a part of the gradients of
            its replica: the parts of a replica are summed, and the sums of replicas are averaged.
        owns: whether this rank steps the parameters; if not, its gradients are ``None`` after an
            average.
        survivors: the replicas that go on if one is lost (``BySpeed(on_loss="continue")``): then
            :meth:`finish` waits for nothing, and gradients stay those of this replica until
            :meth:`take`. ``None``: the run ends if a replica is lost.

    Attributes:
        trainable: the parameters that are averaged; ``None``: those with ``requires_grad`` on this
            rank.
        aside_of: number of the call whose averages :meth:`take_aside` would take; ``None``: no
            averages were begun by :meth:`arm_aside`.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        buffers: Callable[[], Iterable[Tensor]],
        group: Group,
        copies: int = 1,
        *,
        owns: bool = True,
        survivors: Survivors | None = None,
    ) -> None:
        self.trainable: Collection[Tensor] | None = None
        self._owns = owns
        self._parameters = list(parameters)
        self._buffers = buffers
        self._group = group
        self._copies = copies
        self._survivors = survivors
        self._armed = False
        self._whole = True
        self._waits = False  # whether sums were begun for which no `take` came
        self.aside_of: int | None = None
        self._aside: Mapping[Tensor, Tensor] | None = None
        self._buckets: list[_Bucket] = []
        self._sent: list[dist.Work | None] = []  # transfers of the buckets that were sent, in order
        self._trainable: list[bool] | None = None
        self._place: dict[Tensor, tuple[_Bucket, int]] = {}
        self._hooks: dict[Parameter, RemovableHandle] = {}

    def keep_on_one_copy(self) -> None:
        """Prepare for a backward, in which each copy of the stages adds gradients by itself.

        Called before each backward that computes gradients of parameters; sends nothing. If all
        copies hold the same gradients, as after an average, only the first copy keeps them: the
        others set theirs to ``None``, so that the next average does not count them several times.
        """
        if self._copies > 1 and self._whole and self._group.rank() % self._copies:
            self._clear()
        self._whole = False

    def _clear(self) -> None:
        with as_they_are():
            for parameter in self._parameters:
                if self._trains(parameter):
                    parameter.grad = None

    def _trains(self, parameter: Parameter) -> bool:
        trainable = self.trainable
        return parameter.requires_grad if trainable is None else parameter in trainable

    def arm(self, final: Iterable[Parameter] = ()) -> None:
        """Begin to average: a backward sends each bucket of gradients that it completes.

        Call it right before the last backward of a step, which makes the gradients final, on all
        ranks of the group; then :meth:`finish`. Discards averages of :meth:`arm_aside`.

        Args:
            final: parameters whose gradients are final already; parameters that are not averaged
                here are ignored.
        """
        if self._size == 1 and self._survivors is None:
            return
        self.keep_on_one_copy()
        self._drop_aside()
        # parameters that the user freezes or thaws in a run change the buckets, on all replicas
        trainable = [self._trains(parameter) for parameter in self._parameters]
        if trainable != self._trainable:
            self._trainable = trainable
            with as_they_are():
                self._make_buckets([p for p in self._parameters if self._trains(p)])
        self._armed = True
        self._sent.clear()
        for parameter in final:
            if parameter in self._place:
                self._gradient_ready(parameter)

    def finish(self) -> None:
        """Complete the averages that :meth:`arm` has begun; all ranks of the group call it.

        Call it after :meth:`arm` and the backward: sends the buckets that the backward has not
        completed, waits for all transfers, and writes the averages to the parameters' ``grad``.
        With survivors it waits for nothing and writes nothing: :meth:`is_complete` and :meth:`take`
        do. Without :meth:`arm` before it does nothing.
        """
        if not self._armed:
            return
        self._armed = False
        # a parameter that no backward of this replica has used may have a gradient on another
        # replica, which waits for this bucket
        for bucket in self._buckets:
            bucket.missing.clear()
        with as_they_are():
            self._send_full_buckets()
            if self._survivors is not None:
                self._waits = True
                return
            for bucket, work in zip(self._buckets, self._sent):
                assert work is not None
                wait(work, ANOTHER_REPLICA)
                bucket.write_back(kept=self._owns)
        self._sent.clear()  # (a reference to a transfer would keep its group from closing)
        self._whole = True
        if not self._owns:
            self._clear()

    def arm_aside(
        self, call: int, leaves: Mapping[Tensor, Tensor], final: Iterable[Parameter] = ()
    ) -> None:
        """Like :meth:`arm`, for gradients that are collected by other tensors than the parameters.

        For backwards inside of a call (`1f1b`): all ranks of the group call it before the last of
        them, :meth:`send_aside` after it, and :meth:`take_aside` in the user's backward.

        Args:
            call: number of the call of the network, for :attr:`aside_of`.
            leaves: by parameter, the leaf of autograd that collects its gradient. A parameter that
                is not in it counts as one without a gradient.
            final: parameters whose leaves have their final gradients already.
        """
        if self._size == 1:
            return
        self.arm()
        self.aside_of = call
        # (weakly, since no backward may follow)
        self._aside = WeakValueDictionary(leaves)
        for parameter, leaf in leaves.items():
            ready = partial(self._gradient_ready, parameter)
            leaf.register_post_accumulate_grad_hook(lambda _, ready=ready: ready())
        for parameter in final:
            if parameter in self._place:
                self._gradient_ready(parameter)

    def send_aside(self) -> None:
        """Send the buckets that no backward since :meth:`arm_aside` has sent, without waiting.

        All ranks of the group call it, at the end of the call of the network.
        """
        if self._armed:
            self._armed = False
            for bucket in self._buckets:
                bucket.missing.clear()
            with as_they_are():
                self._send_full_buckets()

    def take_aside(self) -> list[tuple[Tensor, Tensor]]:
        """Wait for the averages that :meth:`arm_aside` has begun, and return them.

        Returns:
            Pairs of a parameter that any replica had a gradient for, and its average. The memory of
            the averages is overwritten by the next averages.
        """
        aside = self._aside
        self._drop_aside()
        with as_they_are():
            return [pair for bucket in self._buckets for pair in bucket.found(aside)]

    def _drop_aside(self) -> None:
        """Discard the averages begun by :meth:`arm_aside`.

        Waits for their transfers, so that the buckets are free.
        """
        if self.aside_of is not None:
            for bucket, work in zip(self._buckets, self._sent):
                assert work is not None
                wait(work, ANOTHER_REPLICA)
                bucket.missing = set(range(len(bucket.parameters)))
            self._sent.clear()
            self._aside = self.aside_of = None

    def is_complete(self) -> bool:
        """With survivors: wait for the averages that :meth:`finish` has begun.

        Returns:
            Whether all averages are there; false: a replica was lost, or a rank has failed. Without
            survivors true, at once.
        """
        survivors = self._survivors
        return survivors is None or all(survivors.has_ended(work) for work in self._sent)

    def sum_again(self) -> None:
        """After a replica was lost: begin to average the same gradients again, over the others.

        All ranks of the replicas that are left call it, after :meth:`Survivors.go_on_with`, which
        makes new groups. Does nothing if no average waits for :meth:`take`.
        """
        if self._waits:
            # (into new memory: older sums that were given up may still be under way)
            self._trainable = None
            self._waits = False
            self.reduce()

    def take(self, scale: float) -> None:
        """With survivors: write the averages into the gradients, once all ranks have all averages.

        Does nothing if :meth:`finish` has begun none.

        Args:
            scale: factor that the averages are multiplied with (:attr:`Survivors.scale`).
        """
        if not self._waits:
            return
        self._waits = False
        self._whole = True
        with as_they_are():
            for bucket in self._buckets:
                bucket.numbers.mul_(scale)
                bucket.write_back()
        self._sent.clear()

    @property
    def _size(self) -> int:
        size: int = self._group.size()
        return size

    def reduce(self) -> None:
        """Average the parameters' gradients outside of a backward; all ranks of the group call it.

        With survivors it only begins to: see :meth:`finish`.
        """
        self.arm()
        self.finish()

    def broadcast_buffers(self, among: Iterable[Tensor] | None = None) -> None:
        """Give every rank the buffers of the group's first rank, which is in replica 0.

        All ranks of the group call it. DDP does the same with the buffers of rank 0.

        Args:
            among: only buffers that are in it (the same objects) are sent; ``None``: all.
        """
        if self._size == 1:
            return
        buffers = list(self._buffers())
        if among is not None:
            wanted = set(map(id, among))
            buffers = [buffer for buffer in buffers if id(buffer) in wanted]
        with as_they_are():
            Broadcasts(self._group).send(buffers)

    def broadcast_weights(self) -> None:
        """Give every rank the first rank's weights and buffers; all ranks of the group call it."""
        if self._size == 1:
            return
        self.broadcast_buffers()
        with as_they_are():
            Broadcasts(self._group).send(self._parameters)

    def close(self) -> None:
        """Remove this object's hooks from the parameters; it must not be used afterwards."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _gradient_ready(self, parameter: Tensor) -> None:
        # called in every backward, also of earlier micro-batches, whose gradients are not final
        if not self._armed:
            return
        bucket, index = self._place[parameter]
        bucket.missing.discard(index)
        if not bucket.missing:
            with as_they_are():  # (autograd may have a thread for each device)
                self._send_full_buckets()

    def _send_full_buckets(self) -> None:
        # Always in order, whichever is full first: collectives pair by their order.
        for bucket in self._buckets[len(self._sent) :]:
            if bucket.missing:
                break
            bucket.fill(self._copies / self._size, self._aside)
            if self._survivors is not None:
                self._sent.append(self._survivors.start(self._group, bucket.flat))
            else:
                work = start(self._group.allreduce, [bucket.flat], peer=ANOTHER_REPLICA)
                self._sent.append(work)

    def _make_buckets(self, parameters: Sequence[Parameter]) -> None:
        # one bucket is one flat tensor, so all in it are of one type and on one device
        self._buckets = []
        self._place = {}
        waiting: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
        for parameter in reversed(parameters):
            group = waiting.setdefault((parameter.dtype, parameter.device), [])
            group.append(parameter)
            limit = BUCKET_BYTES if self._buckets else FIRST_BUCKET_BYTES
            if sum(p.numel() * p.element_size() for p in group) >= limit:
                self._buckets.append(_Bucket(waiting.pop((parameter.dtype, parameter.device))))
        self._buckets += [_Bucket(group) for group in waiting.values()]
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                self._place[parameter] = (bucket, index)
                # (torch allows no such hook on a frozen parameter)
                if parameter.requires_grad and parameter not in self._hooks:
                    hook = parameter.register_post_accumulate_grad_hook(self._gradient_ready)
                    self._hooks[parameter] = hook


def state_buffers(module: nn.Module) -> list[Tensor]:
    """List the buffers of a module that training possibly reads: codebooks, queues, prototypes.

    All replicas must have those of replica 0 in each step
    (:meth:`AveragingGroup.broadcast_buffers`), to compute what DDP computes. Buffers of batch
    normalisation are not listed: training only writes its running statistics.
    """
    parts = (part for part in module.modules() if not isinstance(part, BatchNorm))
    return [buffer for part in parts for buffer in part.buffers(recurse=False)]


def broadcast_module(module: nn.Module, group: Group) -> None:
    """Give every rank the weights and buffers of a group's first rank; all ranks call it.

    Deferred tensors are left out: they follow when they are made, by
    :meth:`AveragingGroup.broadcast_weights`.

    Args:
        module: the same module on every rank.
        group: a gloo group.
    """
    if group.size() == 1:
        return
    everything = (*module.parameters(), *module.buffers())
    tensors = [t.detach() for t in everything if not is_deferred(t)]
    sent = [t.cpu().contiguous() for t in tensors]
    Broadcasts(group).send([value for value in sent if value.numel()])
    for tensor, value in zip(tensors, sent):
        tensor.copy_(value)
