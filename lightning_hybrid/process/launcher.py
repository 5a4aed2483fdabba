"""Launchers that part drivers and workers.

Every rank runs the Trainer up to ``strategy.setup``, or the function of ``fabric.launch`` up to
``fabric.setup``. There a worker leaves by :class:`Parted`, which is caught here; it serves its
driver until the run is over, and its call of ``fit/validate/test/predict/launch`` then returns with
the driver's results.

The first error of a run is put on top everywhere: a rank that fails writes it to the common
store, one that merely lost a peer reads it from there, and a worker speaks after its driver.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import MethodType, TracebackType
from typing import Any, Literal, NoReturn, Protocol, cast
from weakref import finalize, ref

from torch.multiprocessing.spawn import ProcessExitedException

from lightning_hybrid._lightning import ParallelStrategy, Trainer, chosen_in_children
from lightning_hybrid._lightning_private import (
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    TunerExit,
    call_teardown_hooks,
    end_run,
    set_num_threads,
)
from lightning_hybrid.comm import (
    ANOTHER_REPLICA,
    BackgroundThread,
    ConnectionLost,
    Coordinates,
    Failure,
    connection_lost,
    raised,
    told_text,
)
from lightning_hybrid.errors import HybridError, RemoteError
from lightning_hybrid.process.children import (
    Children,
    keep_ranks,
    leave_nobody,
    miss_nobody,
    not_caught,
)
from lightning_hybrid.process.faults import GRACE_S, is_loss, is_unnamed_loss
from lightning_hybrid.process.run_results import Results, TrainerResults, adopt_attributes
from lightning_hybrid.process.wrong_package import OTHER_PACKAGE

_LOOK_EVERY_S = 0.2
_MARK = "_lightning_hybrid_mark"
_ECHO_DELAY_S = 1.0  # enough for the rank that failed first to print its traceback


class Parted(BaseException):
    """Takes a worker from ``strategy.setup`` to its launcher; no ``except Exception`` stops it.

    Args:
        serve: serves the driver until the run is over, and returns its results.
    """

    def __init__(self, serve: Callable[[], Results]) -> None:
        super().__init__("this rank serves a driver")
        self.serve = serve


class Launched(Protocol):
    """What the launchers ask of a strategy."""

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands."""

    def hide_ranks(self) -> None:
        """The run is over: the environment speaks of all processes again."""

    def finish(self, returned: Any) -> None:
        """On a driver: end the run, in which the Trainer has returned this."""

    def fail(self, error: BaseException) -> Failure | None:
        """This rank fails: tell the others.

        Returns:
            The failure that came first, on another rank; ``None``: it is this one.
        """


class Part:
    """What is launched in every process: the user's function, and serving on a worker.

    Args:
        strategy: knows where this process stands.
        function: what the drivers run, and workers until they part.
    """

    def __init__(self, strategy: Launched, function: Callable[..., Any]) -> None:
        self._strategy, self._function = strategy, function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the function, or serve the driver that does."""
        _ErrorFromElsewhere.forget()
        strategy = self._strategy
        try:
            serve = None
            try:
                result = self._run(arguments, keywords)
            except Parted as parted:
                serve = parted.serve
            if serve is not None:
                return self._served(serve())
            strategy.finish(result)
            return result
        except BaseException as error:
            _raise_first(strategy, error)
        finally:
            strategy.hide_ranks()

    def _run(self, arguments: Any, keywords: Any) -> Any:
        return self._function(*arguments, **keywords)

    def _served(self, results: Results) -> Any:
        """On a worker, after the run: what it returns."""
        return results.value()


class TrainerPart(Part):
    """The Trainer's function, and serving on a worker.

    Args:
        function: a bound method of the Trainer. (The strategy is found through it: the launchers
            that pickle keep its identity.)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the function, or serve the driver that does."""
        trainer = cast(MethodType, self._function).__self__
        if not isinstance(trainer, Trainer):  # unpickled where another package was chosen
            raise HybridError(OTHER_PACKAGE)
        self._trainer, self._strategy = trainer, cast(Launched, trainer.strategy)
        return super().__call__(*arguments, **keywords)

    def _run(self, arguments: Any, keywords: Any) -> Any:
        try:
            return super()._run(arguments, keywords)
        except TunerExit:  # no fault: a tuner has seen enough
            end_run(self._trainer)

    def _served(self, results: Results) -> Any:
        call_teardown_hooks(self._trainer)
        adopt_attributes(self._trainer, cast(TrainerResults, results))
        return results.value()


def _raise_first(strategy: Launched, error: BaseException) -> NoReturn:
    """Raise ``error``, or what came first if that was on another rank."""
    if is_loss(error) and not isinstance(error, ConnectionLost):
        # from a collective of Lightning or torchmetrics, whose text does not say who is lost
        error = connection_lost(ANOTHER_REPLICA, cast(RuntimeError, error))
    first = strategy.fail(error)
    Children.failed = type(error).__name__
    lost = is_loss(error)  # one line says all, a traceback nothing
    if isinstance(error, KeyboardInterrupt | SystemExit):  # from outside: handled by the Trainer
        raise error
    if first is None and not lost:
        error.add_note(f"(raised on {strategy.coordinates})")
        raise error
    witness = first is None and not is_unnamed_loss(error)
    if first is None:
        first = Failure(str(error).strip().splitlines()[0])
    raised = error if told_text(error) == first.text else first.exception()
    Children.failed = type(raised).__name__
    # a worker's traceback is printed by its driver, which it has told
    told = raised is error and strategy.coordinates.is_driver
    _ErrorFromElsewhere.prepare(
        raised, strategy.coordinates, first.text, whole=told, at_once=told or witness
    )
    if raised is error:
        raise error
    raise raised from raised.__cause__  # and not from what this rank has noticed of it


def _part(function: Callable[..., Any]) -> Part:
    return function if isinstance(function, Part) else TrainerPart(function)


class HybridSubprocessLauncher(SubprocessScriptLauncher):
    """Starts the script once per device, as Lightning does for ``ddp``.

    Attributes:
        before_start: is called before other processes are started, and may refuse it.
    """

    before_start: Callable[[], None] = staticmethod(lambda: None)

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start the other processes of this node, then run ``function`` in this one."""
        miss_nobody()
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            if self.num_processes > 1:
                _require_script()
                self.before_start()
            self._call_children_scripts()
            keep_ranks(self.procs)
            Children.processes = self.procs
            atexit.register(leave_nobody)
        set_num_threads(self.num_processes)
        # Lightning's own observer may kill this process in the same instant as a child ends,
        # before it has said why
        observer = _Observer(Children.processes)
        observer.start()
        try:
            result = _part(function)(*args, **kwargs)
        finally:
            observer.close()
        Children.failed = ""
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Processes cannot be copied, and whoever copies a Trainer wants none."""
        return vars(self) | {"procs": []}


def _require_script() -> None:
    """The other ranks run the same file.

    Raises:
        HybridError: there is none.
    """
    main = sys.modules["__main__"]
    if main.__spec__ is None and (getattr(main, "__file__", None) or "<").startswith("<"):
        raise HybridError(
            f"The script cannot be started again for the other ranks: it has no file "
            f"(sys.argv[0] is {sys.argv[0]!r}; `python -` reads it from standard input, `-c` from "
            "the command line). Save it, and run `python FILE`, or use "
            "strategy='hybrid_gabra_fork'."
        )


class _AllProcesses:
    """A strategy as the launcher asks for it: about all processes, and not about replicas."""

    def __init__(self, strategy: ParallelStrategy, num_processes: int) -> None:
        self._asked, self.num_processes = strategy, num_processes

    @property
    def local_rank(self) -> int:
        """Set by the launcher in each process; it takes the results of number 0."""
        return int(os.environ["LOCAL_RANK"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # it is being unpickled
            raise AttributeError(name)
        return getattr(self._asked, name)


class HybridMultiProcessingLauncher(MultiProcessingLauncher):
    """Spawns or forks one process per device.

    Args:
        strategy: what is launched.
        start_method: how processes are made.
        num_processes: how many, on this host.
        coordinates_of: where the process of this local rank stands.
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
        """Start a process per device and return the result of the first.

        Raises:
            RemoteError: a process was killed, or ended by itself.
        """
        try:
            with chosen_in_children():
                return super().launch(_part(function), *args, trainer=trainer, **kwargs)
        except ProcessExitedException as error:
            # torch ends the others before they can say whom they miss
            lost = self._coordinates_of(error.error_index)
            raise RemoteError(f"Lost {lost}: {error}") from error


class _Observer(BackgroundThread):
    """Sees to it that this process is not in a run for long after a child has failed."""

    def __init__(self, children: Sequence["subprocess.Popen[bytes]"]) -> None:
        super().__init__(self._watch, "hybrid-observer")
        self._children = children
        self._over = threading.Event()
        self._after_a_failure = bool(Children.failed)

    def close(self) -> None:
        """The run is over."""
        self._over.set()
        self.join()

    def _watch(self) -> None:
        """Until all children have ended well, or one has not."""
        while True:
            codes = [child.poll() for child in self._children]
            if any(codes):
                break
            if all(code == 0 for code in codes) or self._over.wait(_LOOK_EVERY_S):
                return
        if self._over.wait(GRACE_S):
            return
        failed = next(child for child in self._children if child.returncode)
        reason = f" {not_caught()};" if self._after_a_failure else ""
        print(
            f"A process of this run (PID {failed.pid}) ended with code {failed.returncode};"
            f"{reason} the others did not end within {GRACE_S:.0f} s and are killed.",
            file=sys.stderr,
            flush=True,
        )
        for child in self._children:
            child.kill()
        os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


class _Mark:
    """Lives as long as the error that carries it; most errors take no weak references."""


class _ErrorFromElsewhere:
    """What this process prints of an error that came from another rank, if nobody catches it.

    As ``sys.excepthook`` it stays no longer than the error, which it does not keep alive: with an
    error live its frames, and with them the network and a batch.

    Args:
        error: the error.
        text: what to print.
        delay_s: for as long another rank, which prints more, may print first.
        usual: the hook that prints every other error.
    """

    def __init__(
        self, error: BaseException, text: str, delay_s: float, usual: Callable[..., Any]
    ) -> None:
        self._text, self._delay_s, self.usual = text, delay_s, usual
        vars(error)[_MARK] = mark = _Mark()
        self._mark = ref(mark)
        finalize(mark, self._leave).atexit = False

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._mark() is None or vars(error).get(_MARK) is not self._mark():
            self.usual(kind, error, trace)
            return
        time.sleep(self._delay_s)
        print(self._text, file=sys.stderr, flush=True)

    @classmethod
    def prepare(
        cls, error: BaseException, here: Coordinates, first: str, *, whole: bool, at_once: bool
    ) -> None:
        """Should ``error`` stay uncaught: print it after the one that came first.

        Args:
            error: of this rank.
            here: this rank.
            first: the text of the first failure, a traceback.
            whole: print all of it; else another rank does, and a line reminds of it.
            at_once: do not wait for another rank to print first.
        """
        own = first.startswith(str(here))
        if whole:
            text = f"{first.strip()}\n({here} ends because of this.)"
        else:
            short = " ".join(dict.fromkeys((first.strip().splitlines()[0], raised(first))))
            text = f"{here} ends because of {'its own error' if own else 'another'}: {short}"
            told = error if isinstance(error, RemoteError) else error.__cause__
            text = "\n".join((text, *getattr(told, "__notes__", ())))
        cls.forget()
        sys.excepthook = cls(error, text, 0.0 if at_once else _ECHO_DELAY_S, sys.excepthook)

    @staticmethod
    def forget() -> None:
        """The error was caught: the script goes on."""
        if isinstance(sys.excepthook, _ErrorFromElsewhere):
            sys.excepthook._leave()

    def _leave(self) -> None:
        if sys.excepthook is self:  # else somebody has put another hook around it
            sys.excepthook = self.usual
