"""Launchers: start a process for each device; a worker's process is a server.

Where this package starts the processes, workers run no script; if sizes are left open, rank 0 runs
it alone until they are chosen, and then other drivers are started. A launcher of a cluster starts
the script on every rank. There a rank serves from the moment when it is known to be a worker, and
does not come back to the script (:mod:`lightning_hybrid.worker.server`).

Every rank of a failed run shows the first error: the rank that fails first writes it to the common
store, and a rank that has merely lost a peer reads it from there.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable, Collection
from subprocess import Popen
from types import MethodType, TracebackType
from typing import Any, Literal, NoReturn, Protocol, cast

from torch.multiprocessing.spawn import ProcessExitedException

from lightning_hybrid._lightning import OTHER_PACKAGE, ParallelStrategy, Trainer
from lightning_hybrid._lightning_private import (
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    TunerExit,
    end_run,
    script_command,
    set_num_threads,
)
from lightning_hybrid._which_lightning import chosen_in_children
from lightning_hybrid.comm import (
    ANOTHER_REPLICA,
    ConnectionLost,
    Coordinates,
    Failure,
    connection_lost,
    raised,
    told_text,
)
from lightning_hybrid.errors import HybridError, PlanError, RemoteError
from lightning_hybrid.process import (
    Children,
    KilledRanksWatch,
    Servers,
    is_loss,
    is_unnamed_loss,
    keep_ranks,
    leave_nobody,
    miss_nobody,
    start_server,
)

_TOLD = "_lightning_hybrid_told"  # attribute of an error, for `_ShortTexts`
_ECHO_DELAY_S = 1.0  # enough for the rank that failed first to print its traceback


class LaunchableStrategy(Protocol):
    """The attributes and methods of a strategy that launchers use."""

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of this rank."""

    def hide_ranks(self) -> None:
        """Set the environment variables of ranks back to the launcher's numbers, after a run."""

    def finish(self) -> None:
        """End the run when its function has returned; all ranks do so together."""

    def fail(self, error: BaseException) -> Failure | None:
        """Tell the other ranks that this one has failed.

        Returns:
            The failure of another rank that came first; ``None``: this rank is the first to fail.
        """


class LaunchedFunction:
    """A function with the end of its run: calls it, then ends the run or reports its error.

    Every process that runs the script calls this.

    Args:
        strategy: the strategy of this process.
        function: the user's function.
    """

    def __init__(self, strategy: LaunchableStrategy, function: Callable[..., Any]) -> None:
        self._strategy = strategy
        self._function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function with these arguments, end the run, and return what it returns.

        Raises:
            BaseException: the error of the first rank that has failed.
        """
        strategy = self._strategy
        try:
            result = self._run(arguments, keywords)
            strategy.finish()
            return result
        except BaseException as error:
            _raise_first(strategy, error)
        finally:
            strategy.hide_ranks()

    def _run(self, arguments: Any, keywords: Any) -> Any:
        return self._function(*arguments, **keywords)


class LaunchedTrainerMethod(LaunchedFunction):
    """A :class:`LaunchedFunction` for a bound method of a Trainer.

    Args:
        function: the method. (The strategy is found through its Trainer, so that the two stay
            together when a launcher pickles them.)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the method with these arguments, end the run, and return what it returns.

        Raises:
            HybridError: the Trainer is of the package of Lightning that this process does not use.
            BaseException: the error of the first rank that has failed.
        """
        trainer = cast(MethodType, self._function).__self__
        if not isinstance(trainer, Trainer):  # this process uses Lightning's other package
            raise HybridError(OTHER_PACKAGE)
        self._trainer = trainer
        self._strategy = cast(LaunchableStrategy, trainer.strategy)
        return super().__call__(*arguments, **keywords)

    def _run(self, arguments: Any, keywords: Any) -> Any:
        try:
            return super()._run(arguments, keywords)
        except TunerExit:  # no failure: a tuner ends the run when it has its result
            end_run(self._trainer)


def _raise_first(strategy: LaunchableStrategy, error: BaseException) -> NoReturn:
    """Report an error to all ranks; raise it, or the failure of another rank that came first.

    Of an error that came from another rank, only a short text is printed if nobody catches it.

    Args:
        strategy: the strategy of this process.
        error: what this rank has raised.
    """
    if is_loss(error) and not isinstance(error, ConnectionLost):
        # from a collective of Lightning or torchmetrics, whose text does not name the lost rank
        error = connection_lost(ANOTHER_REPLICA, cast(RuntimeError, error))
    first = strategy.fail(error)
    Children.failed = type(error).__name__
    lost = is_loss(error)  # its traceback is of no use: one line is printed
    if isinstance(error, KeyboardInterrupt | SystemExit):  # these are the Trainer's to handle
        raise error
    if first is None and not lost:
        error.add_note(f"(raised on {strategy.coordinates})")
        raise error
    witness = first is None and not is_unnamed_loss(error)
    if first is None:
        first = Failure(str(error).strip().splitlines()[0])
    raised = error if told_text(error) == first.text else first.exception()
    Children.failed = type(raised).__name__
    # a driver prints the traceback that a worker has sent it, the worker one line
    told = raised is error and strategy.coordinates.is_driver
    _shorten(raised, strategy.coordinates, first.text, whole=told, at_once=told or witness)
    if raised is error:
        raise error
    raise raised from raised.__cause__  # not chained to this rank's own, later error


def _part(function: Callable[..., Any]) -> LaunchedFunction:
    return function if isinstance(function, LaunchedFunction) else LaunchedTrainerMethod(function)


class HybridSubprocessLauncher(SubprocessScriptLauncher):
    """Starts the other processes of this host: servers for workers, the script for other drivers.

    Attributes:
        before_start: called before the script is started again, with the number of processes that
            will run it; may raise an error to prevent that.
        servers: called with the Trainer (``None`` under Fabric) before processes are started;
            returns the local ranks whose processes are servers. It is empty where it is not known
            yet which ranks are workers.
    """

    before_start: Callable[[int], None] = staticmethod(lambda number: None)
    servers: Callable[[Trainer | None], Collection[int]] = staticmethod(lambda trainer: ())

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it can be used in a notebook: on one host, where servers need no script."""
        return self.num_nodes == 1

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start the other processes of this host, then run a function in this one.

        Processes that an earlier run has started are used again.

        Args:
            function: a bound method of a Trainer, or a `LaunchedFunction`.
            args: its arguments.
            trainer: the Trainer; ``None`` under Fabric.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.

        Raises:
            RemoteError: a process has ended by the failure of an earlier run.
            BaseException: the error of the first rank that has failed.
        """
        miss_nobody()
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        set_num_threads(self.num_processes)  # (before servers start, which inherit the number)
        if Children.processes or not environment.creates_processes_externally:
            self._start_missing(trainer)
        # in place of Lightning's observer, which may kill this process at the moment when a child
        # ends, before this process has reported the failure
        watch = KilledRanksWatch(Children.processes)
        watch.start()
        try:
            result = _part(function)(*args, **kwargs)
        finally:
            watch.close()
            Children.lose = Children.name_of = None
        Children.failed = ""
        return result

    def _start_missing(self, trainer: Trainer | None) -> None:
        """Start the processes of this host that no earlier run of this script has started.

        Args:
            trainer: the Trainer; ``None`` under Fabric.

        Raises:
            PlanError: some of them would have to run the script, and an earlier run has started
                others.
            HybridError: the script cannot be started again.
        """
        missing = range(1 + len(Children.processes), self.num_processes)
        if not missing:
            return
        servers = {*self.servers(trainer)} & {*missing}
        scripts = [rank for rank in missing if rank not in servers]
        if scripts and Children.processes:
            raise PlanError(
                f"devices={self.num_processes}: an earlier run of this script had "
                f"{missing.start}, and a script cannot be started for another driver later. Let "
                "the first run have the most devices, or use a script for each."
            )
        if scripts:
            _require_script()
            self.before_start(len(scripts))
        if len(scripts) == len(missing):
            self._call_children_scripts()
            new = self.procs
        else:
            new = [self._start(rank, served=rank in servers) for rank in missing]
        Children.processes = [*Children.processes, *new]
        Servers.ranks.update(servers)
        keep_ranks(new)
        atexit.register(leave_nobody)

    def start_drivers(self, ranks: Collection[int]) -> "list[Popen[bytes]]":
        """Start the script for drivers in the places of servers of this host.

        Args:
            ranks: local ranks of the servers, which still run.

        Returns:
            The processes of these servers, which are to end.

        Raises:
            PlanError: the weights of all drivers have no room in the memory of this host.
        """
        self.before_start(len(ranks))
        children, ending = Children.processes, [Children.processes[rank - 1] for rank in ranks]
        for rank in ranks:
            children[rank - 1] = self._start(rank, served=False)
        keep_ranks([children[rank - 1] for rank in ranks])
        return ending

    def _start(self, rank: int, *, served: bool) -> "Popen[bytes]":
        """Start the process of one rank of this host, after setting ``MASTER_ADDR`` and the like.

        Args:
            rank: local rank of the process.
            served: whether the process is a server; else it runs the script.
        """
        environment = self.cluster_environment
        # (for later Trainers too)
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        if served:
            return start_server(rank)
        command, folder = script_command(rank)
        # as Lightning sets them for `ddp`; see `lightning_hybrid.run.replica_world`
        size = str(self.num_processes)
        os.environ.update({"NODE_RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": size})
        return Popen(command, env=os.environ | {"LOCAL_RANK": str(rank)}, cwd=folder)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without the started processes."""
        return vars(self) | {"procs": []}


def has_script() -> bool:
    """Whether the program of this process is a file or module that could be started again."""
    main = sys.modules["__main__"]
    if hasattr(sys, "ps1"):  # a notebook or a prompt
        return False
    return main.__spec__ is not None or not (getattr(main, "__file__", None) or "<").startswith("<")


def _require_script() -> None:
    """Check that the program of this process can be started again for other ranks.

    Raises:
        HybridError: it cannot, as in a notebook.
    """
    if not has_script():
        raise HybridError(
            "The script cannot be started again for the other replicas: it has no file "
            f"(sys.argv[0] is {sys.argv[0]!r}; a notebook has none, `python -` reads it from "
            "standard input, `-c` from the command line). Use one replica "
            "(data_parallel_size=1), save it and run `python FILE`, or use "
            "strategy='hybrid_gabra_notebook'."
        )


class _AllProcesses:
    """Wraps a strategy for Lightning's launcher, which starts ``num_processes`` processes.

    Here ``num_processes`` and ``local_rank`` count all processes of this host; the strategy itself
    counts drivers alone. All other attributes are the strategy's.

    Args:
        strategy: the strategy.
        num_processes: number of all processes of this host.
    """

    def __init__(self, strategy: ParallelStrategy, num_processes: int) -> None:
        self._asked = strategy
        self.num_processes = num_processes

    @property
    def local_rank(self) -> int:
        """Local rank that the launcher has set in this process; process 0 returns the results."""
        return int(os.environ["LOCAL_RANK"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # unpickling asks for these before there is `_asked`
            raise AttributeError(name)
        return getattr(self._asked, name)


class HybridMultiProcessingLauncher(MultiProcessingLauncher):
    """Spawns or forks one process per device of this host.

    Args:
        strategy: the strategy that is launched.
        start_method: how processes are started.
        num_processes: number of all processes of this host.
        coordinates_of: function from the local rank of a process to its coordinates.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        start_method: Literal["spawn", "fork", "forkserver"],
        num_processes: int,
        coordinates_of: Callable[[int], Coordinates],
    ) -> None:
        super().__init__(strategy, start_method=start_method)
        self._strategy = cast(ParallelStrategy, _AllProcesses(strategy, num_processes))
        self._coordinates_of = coordinates_of

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start a process per device, run a function in each, and return what the first returns.

        Args:
            function: a bound method of a Trainer, or a `LaunchedFunction`.
            args: its arguments.
            trainer: the Trainer, which gets the results of the first process.
            kwargs: its keyword arguments.

        Raises:
            RemoteError: a process was killed, or ended without an exception.
        """
        try:
            with chosen_in_children():
                return super().launch(_part(function), *args, trainer=trainer, **kwargs)
        except ProcessExitedException as error:
            # name the rank here: torch ends the others before they can report it
            lost = self._coordinates_of(error.error_index)
            raise RemoteError(f"Lost {lost}: {error}") from error


class _ShortTexts:
    """A ``sys.excepthook`` that prints a short text for each error that `_shorten` has marked.

    Args:
        usual: the hook that was set before, which prints every other error.
    """

    def __init__(self, usual: Callable[..., Any]) -> None:
        self._usual = usual

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if _TOLD not in vars(error):
            self._usual(kind, error, trace)
            return
        text, delay_s = vars(error)[_TOLD]
        time.sleep(delay_s)
        print(text, file=sys.stderr, flush=True)


def _shorten(
    error: BaseException, here: Coordinates, first: str, *, whole: bool, at_once: bool
) -> None:
    """Mark an error: if nobody catches it, a short text is printed in place of its traceback.

    Sets ``sys.excepthook`` for that.

    Args:
        error: the error that this rank is about to raise.
        here: coordinates of this rank.
        first: text of the first failure of the run, with a traceback.
        whole: whether to print all of ``first``; else one line, since another rank prints it all.
        at_once: whether to print at once; else a second later, after the rank that failed first.
    """
    own = first.startswith(str(here))
    if whole:
        text = f"{first.strip()}\n({here} ends because of this.)"
    else:
        short = " ".join(dict.fromkeys((first.strip().splitlines()[0], raised(first))))
        text = f"{here} ends because of {'its own error' if own else 'another'}: {short}"
    vars(error)[_TOLD] = text, 0.0 if at_once else _ECHO_DELAY_S
    if not isinstance(sys.excepthook, _ShortTexts):
        sys.excepthook = _ShortTexts(sys.excepthook)
