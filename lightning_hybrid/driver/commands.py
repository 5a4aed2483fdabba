"""Commands from a driver to the workers of its replica, and their answers.

:class:`Workers` sends and receives. :class:`Commands` also keeps the proxies of remote tensors up
to date: it sends changes made here before a command, and marks as stale what the command changes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from lightning_hybrid.comm import Answer, Heartbeat, Mesh, NcclGuard, signals_deferred, switches
from lightning_hybrid.comm.protocol import Command, ReadWeights, TakeSwitches, TakeWeights
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote import Proxies
from lightning_hybrid.stage import Engine, LendingLine

T = TypeVar("T")


class Workers:
    """The channels to the workers of a replica.

    Args:
        mesh: the process groups and channels of this rank.

    Attributes:
        ranks: ``pp_rank`` of each worker.
        lines: by ``pp_rank`` of each worker, what copies tensors between its device and this one,
            in both directions.
        passing_now: whether a pass through the pipeline is under way.
        left_by: the error with which this rank has left a pass or an exchange before its end, so
            that workers may still wait for its tensors instead of for a command; ``None``: it has
            left none. Whoever has caught it gets it again from the next command.
        before_weights_change: a function that is called before weights are sent to workers.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.ranks = range(1, mesh.coordinates.ranks_per_replica)
        self._channels = {rank: mesh.channel(rank) for rank in self.ranks}
        self.lines = {rank: LendingLine(mesh, rank) for rank in self.ranks}
        self._heartbeat: Heartbeat | None = None
        if self._channels:
            self._heartbeat = Heartbeat([*self._channels.values()], mesh.timeout)
        # (NCCL would wait for ever for a rank that is gone)
        self._guard = NcclGuard.where_needed(mesh)
        self._in_pass = False  # whether workers may be waiting for an earlier stage of this rank
        self.passing_now = False
        self.left_by: BaseException | None = None
        self.before_weights_change: Callable[[], None] = lambda: None

    @property
    def in_step(self) -> bool:
        """Whether the workers can be asked: this rank has left no pass or exchange by an error."""
        return self.left_by is None

    def send(self, rank: int, command: Command) -> None:
        """Send a command to one worker, without waiting until it is carried out.

        Args:
            rank: ``pp_rank`` of the worker.
            command: the command. If its ``goes_with_next`` is true, it is kept until the next
                command is sent.

        Raises:
            HybridError: a pass is under way in which workers can take no command; see
                :meth:`passing`.
            BaseException: workers are not in step any more, by this error (:attr:`left_by`).
        """
        self.refuse_unheard()
        if isinstance(command, TakeWeights | ReadWeights):
            self.before_weights_change()
        channel = self._channels[rank]
        send = channel.send_with_next if command.goes_with_next else channel.send
        send(command)

    def hear(self, ranks: Iterable[int]) -> list[Answer]:
        """Wait for one answer of each of some workers.

        Args:
            ranks: ``pp_rank`` of each of them.

        Returns:
            The answers, in the order of ``ranks``.

        Raises:
            Exception: a worker has failed, now or before; caused by a RemoteError.
        """
        # (all are received first: an answer that is left would be taken for a later one)
        answers = [self._channels[rank].receive(Answer) for rank in ranks]
        for answer in answers:
            if answer.failure is not None:
                raise answer.failure.exception()
        return answers

    @contextmanager
    def passing(self, engine: Engine) -> Iterator[None]:
        """Inside, a pass through the pipeline is under way.

        If this rank has several stages, no command may be sent inside: a worker that waits for an
        earlier stage of this rank cannot answer. With one stage per rank, a worker carries a
        command out after its part of the pass.

        After an error inside, :attr:`in_step` is False, unless the pass has come to its end.

        Args:
            engine: runs this rank's stages in the pass.
        """
        self._in_pass = len(engine.owned) > 1
        self.passing_now = True
        try:
            yield
        except BaseException as error:
            if not engine.passed:
                self._leave_by(error)
            raise
        finally:
            self._in_pass = self.passing_now = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Inside, this rank and workers exchange tensors, beside a pass through the pipeline.

        After an error inside, workers possibly still wait for it: :attr:`in_step` is then False.
        """
        try:
            yield
        except BaseException as error:  # they still wait for it
            self._leave_by(error)
            raise

    def _leave_by(self, error: BaseException) -> None:
        # (the first one is the cause of the others)
        self.left_by = self.left_by or error

    def refuse_unheard(self) -> None:
        """Refuse to send a command that workers possibly do not hear, as they wait for this rank.

        Raises:
            HybridError: a pass is under way in which they do; see :meth:`passing`.
            BaseException: this rank has left a pass or an exchange by this error, which somebody
                has caught. Without it this rank would wait for their answers, and they for it.
        """
        if self.left_by is not None and self.ranks:
            raise self.left_by
        if self._in_pass:
            raise HybridError(
                "A weight, buffer or gradient that another rank owns was read or changed, or an "
                "optimizer stepped, in the middle of a pass through the stages, as by a hook on a "
                "module or parameter. Where a device has several stages that is not possible: give "
                "each device one (Search(contiguous=True), or such a plan)."
            )

    def flush(self) -> None:
        """Wait until all workers have received all messages that were sent to them."""
        for channel in self._channels.values():
            channel.flush()

    def close(self, *, failed: bool = False) -> None:
        """Send no more heartbeats, and tell the NCCL guards of other ranks that the run is over.

        Args:
            failed: whether the run has failed; then other ranks abort their NCCL operations.
        """
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._guard is not None:
            self._guard.close(failed=failed)


class Commands:
    """Sends commands to workers, and keeps the proxies of what the workers own up to date.

    Before a command, changes that were made here to proxies are sent to the owners, and torch's
    settings to workers that were told others. What the command changes at the workers is marked as
    stale here.

    Args:
        workers: the channels to the workers of this replica.
        remote: the proxies of the tensors that workers own.
    """

    def __init__(self, workers: Workers, remote: Proxies) -> None:
        self.workers = workers
        self.remote = remote
        self._switches: dict[int, object] = {}  # by rank, the settings that it was told

    def tell(self, command: Command) -> None:
        """Send a command to every worker, without waiting.

        Raises:
            HybridError: a pass is under way in which workers can take no command; see
                :meth:`Workers.passing`.
        """
        self.tell_each(dict.fromkeys(self.workers.ranks, command))

    def tell_each(self, commands: Mapping[int, Command]) -> None:
        """Send some workers commands, without waiting.

        Args:
            commands: the commands, by ``pp_rank`` of the worker.

        Raises:
            HybridError: see :meth:`tell`.
        """
        if not commands:
            return
        self.workers.refuse_unheard()  # before anything is taken from the proxies
        self.remote.flush()
        now, first = switches(), True
        for rank, command in commands.items():
            # (once one has heard of it, it may wait for those that have not)
            with nullcontext() if first else self.workers.joined():
                if self._switches.get(rank) != now:
                    self.workers.send(rank, TakeSwitches(now))
                    self._switches[rank] = now
                # (before it is sent: a read from now on must give what is there after the command)
                self.remote.outdate(*command.outdates)
                self.workers.send(rank, command)
            first = False

    def ask(self, command: Command) -> list[Answer]:
        """Send a command to every worker and wait for all answers.

        Returns:
            The answers, in the order of ``pp_rank``.

        Raises:
            Exception: a worker has failed, now or before; caused by a RemoteError.
        """
        answers, _ = self.ask_beside(command, lambda: None)
        return answers

    @signals_deferred
    def ask_beside(self, command: Command, compute: Callable[[], T]) -> tuple[list[Answer], T]:
        """Ask like :meth:`ask`, and compute something here while the workers carry it out.

        Args:
            command: the command.
            compute: what is called here meanwhile; it must not send commands.

        Returns:
            The answers, in the order of ``pp_rank``, and what ``compute`` has returned.

        Raises:
            Exception: see :meth:`ask`; or ``compute`` has raised it.
        """
        self.tell(command)
        try:
            mine = compute()
        finally:  # (an answer that is left would be taken for a later one)
            answers = self.workers.hear(self.workers.ranks)
        return answers, mine
