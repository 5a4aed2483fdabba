"""What a driver tells and asks the workers of its replica.

:class:`Workers` sends and hears. :class:`Commands` also keeps the proxies of remote tensors in
step: what was changed here travels before a command, and what it changes there is stale here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from lightning_hybrid.comm import Answer, Guard, Heartbeat, Mesh, signals_deferred
from lightning_hybrid.comm.protocol import Command, TakeWeights
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote import RemoteTensors
from lightning_hybrid.stage import Engine


class Workers:
    """The channels to the workers of a replica.

    Args:
        mesh: the groups.

    Attributes:
        ranks: ``pp_rank`` of each worker.
        passing_now: whether the pipeline runs.
        in_step: whether the workers wait for a command when no pass is under way, and not for what
            this rank was to send in a pass that it has left with an error.
        before_weights_change: called before weights are sent that are not those that workers have.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.ranks = range(1, mesh.coordinates.ranks_per_replica)
        self._channels = {rank: mesh.channel(rank) for rank in self.ranks}
        self._heartbeat: Heartbeat | None = None
        if self._channels:
            self._heartbeat = Heartbeat([*self._channels.values()], mesh.timeout)
        # (NCCL waits for ever for a rank that is gone: somebody else has to notice)
        self._guard = Guard.where_needed(mesh)
        self._in_pass = False  # workers may be waiting for a stage of this rank
        self.passing_now, self.in_step = False, True
        self.before_weights_change: Callable[[], None] = lambda: None

    def send(self, rank: int, command: Command) -> None:
        """Send a command to one worker, without waiting.

        Raises:
            HybridError: in the middle of a pass; see :meth:`passing`.
        """
        self.refuse_in_pass()
        if isinstance(command, TakeWeights):
            self.before_weights_change()
        self._channels[rank].send(command)

    def hear(self, ranks: Iterable[int]) -> list[Answer]:
        """Wait for an answer of each of these workers.

        Raises:
            Exception: of a worker, now or before; caused by a RemoteError.
        """
        # all are received first: one that is left on its channel would answer the next question
        answers = [self._channels[rank].receive(Answer) for rank in ranks]
        for answer in answers:
            if answer.failure is not None:
                raise answer.failure.exception()
        return answers

    @contextmanager
    def passing(self, engine: Engine) -> Iterator[None]:
        """Inside, the pipeline runs.

        A worker that waits for an earlier stage of this rank would take a command for what it waits
        for, and could not answer. With one stage per rank it hears a command after the pass.
        """
        self._in_pass = len(engine.owned) > 1
        self.passing_now = True
        try:
            yield
        except BaseException:
            self.in_step = self.in_step and engine.passed
            raise
        finally:
            self._in_pass = self.passing_now = False

    def refuse_in_pass(self) -> None:
        """Raise HybridError if workers may be waiting for a stage of this rank."""
        if self._in_pass:
            raise HybridError(
                "A weight, buffer or gradient that another rank owns was read or changed, or an "
                "optimizer stepped, in the middle of a pass through the stages, as by a hook on a "
                "module or parameter. Where a device has several stages that is not possible: give "
                "each device one (the strategy's contiguous=True, or such a plan)."
            )

    def flush(self) -> None:
        """Wait until all workers have taken everything."""
        for channel in self._channels.values():
            channel.flush()

    def close(self, *, failed: bool = False) -> None:
        """Tell the workers no more that this rank is alive."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._guard is not None:
            self._guard.close(failed=failed)


class Commands:
    """Commands that see and may change what the workers own.

    Args:
        workers: of this replica.
        remote: the tensors that they own, as the user's code sees them here.
    """

    def __init__(self, workers: Workers, remote: RemoteTensors) -> None:
        self.workers, self.remote = workers, remote

    def tell(self, command: Command) -> None:
        """Send a command to every worker, without waiting.

        Raises:
            HybridError: in the middle of a pass; see :meth:`Workers.passing`.
        """
        self.tell_each(dict.fromkeys(self.workers.ranks, command))

    def tell_each(self, commands: Mapping[int, Command]) -> None:
        """Likewise, a command of its own to each of some workers.

        Args:
            commands: by ``pp_rank`` of the worker.
        """
        if not commands:
            return
        self.workers.refuse_in_pass()  # before anything is taken from the proxies
        self.remote.flush()
        for rank, command in commands.items():
            # before it is sent: who reads from here on is to have what is there after the command
            self.remote.outdate(*command.outdates)
            self.workers.send(rank, command)

    @signals_deferred
    def ask(self, command: Command) -> list[Answer]:
        """Send a command to every worker and wait for all answers, in the order of the ranks.

        Raises:
            Exception: of a worker, now or before; caused by a RemoteError.
        """
        self.tell(command)
        return self.workers.hear(self.workers.ranks)
