"""The private names of Lightning that this package uses, each with its reason, all in this file.

Not here are protected methods and attributes that our subclasses of Lightning's strategies and
launchers use. They are listed with their reasons in ``tests/test_architecture.py``.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from torch import device

from lightning_hybrid._lightning import (
    LightningModule,
    Trainer,
    TrainerStatus,
    fabric,
    pytorch,
)

# a loader of the user's class, made again with other batches, as Lightning does for its sampler
_get_dataloader_init_args_and_kwargs = pytorch.utilities.data._get_dataloader_init_args_and_kwargs
_reinstantiate_wrapped_cls = fabric.utilities.data._reinstantiate_wrapped_cls

# gives a process its own memory of modules that torch has sent to it
disable_module_memory_sharing = (
    fabric.strategies.launchers.multiprocessing._disable_module_memory_sharing
)

# shares the cores among the processes of a node, as Lightning's launchers do
set_num_threads = fabric.utilities.distributed._set_num_threads_if_needed

# the states of the random generators that Lightning collects, of torch, numpy and Python
random_states = partial(fabric.utilities.seed._collect_rng_states, include_cuda=False)
set_random_states = fabric.utilities.seed._set_rng_states

# asynchronous saving wraps another checkpoint IO, and only this class says so
WrappingCheckpointIO = pytorch.strategies.strategy._WrappingCheckpointIO

# The launchers: there are no public ones, and a run ends between the launch of the processes and
# the Trainer's handling of exceptions.
MultiProcessingLauncher = pytorch.strategies.launchers._MultiProcessingLauncher
SubprocessScriptLauncher = pytorch.strategies.launchers._SubprocessScriptLauncher

_script = fabric.strategies.launchers.subprocess_script
_call_teardown_hook = pytorch.trainer.call._call_teardown_hook
_AcceleratorConnector = pytorch.trainer.trainer._AcceleratorConnector

# how the learning-rate finder and the batch-size finder leave a run
TunerExit = pytorch.utilities.exceptions._TunerExitException


def let_fabric_clear_gradients() -> None:
    """Patch Fabric's optimizer wrapper: its ``zero_grad`` calls that of the wrapped optimizer.

    By itself the wrapper inherits ``zero_grad`` from the optimizer's class and passes over one that
    was set on the instance. It would read each gradient, and so have it fetched from the rank that
    owns it. The patch holds for all optimizers of Fabric in this process.
    """

    def zero_grad(self: Any, *arguments: Any, **keywords: Any) -> None:
        self.optimizer.zero_grad(*arguments, **keywords)

    fabric.wrappers._FabricOptimizer.zero_grad = zero_grad  # type: ignore[attr-defined]


_ASKED: set[type[Any]] = set()


def script_command(local_rank: int) -> tuple[Sequence[str], str | None]:
    """Return the command by which Lightning would start this script again, and its folder.

    Args:
        local_rank: number of the new process on its host.

    Returns:
        The words of the command, and the folder to start it in; ``None``: the current one.
    """
    hydra = _script._HYDRA_AVAILABLE and import_module("hydra.core.hydra_config").HydraConfig
    if hydra and hydra.initialized():
        command: tuple[Sequence[str], str] = _script._hydra_subprocess_cmd(local_rank)
        return command
    return _script._basic_subprocess_cmd(), None


def set_rank_of_messages(rank: int) -> None:
    """Set the rank by which `rank_zero_info` and its like decide whether to print here.

    Args:
        rank: rank of this process as Lightning counts it; the process with rank 0 prints.
    """
    vars(pytorch.utilities.rank_zero.rank_zero_only)["rank"] = rank


def rebuilt_loader(loader: Any, batches: Iterable[list[Any]]) -> Any:
    """Make a ``DataLoader`` with the options of another one, but with another batch sampler.

    Args:
        loader: the loader whose class, data set and options the new one gets.
        batches: the batch sampler of the new loader: it yields lists of indices of samples.
    """
    arguments, keywords = _get_dataloader_init_args_and_kwargs(loader, loader.sampler)
    # of one made in a hook these are what the user gave, maybe a batch size by its place
    names = getattr(loader, "__pl_saved_arg_names", ())
    keywords = {**dict(zip(names, arguments)), **keywords}
    arguments = arguments[len(names) :]
    for name in ("batch_size", "shuffle", "sampler", "drop_last"):  # which the batches decide
        keywords.pop(name, None)
    keywords["batch_sampler"] = batches
    return _reinstantiate_wrapped_cls(loader, *arguments, **keywords)


LOADING = "train_dataloader()"
"""Name of the barrier at which ranks wait for each other when they have made train loaders."""


def training_source(trainer: Trainer) -> Any:
    """Return what the Trainer takes training batches from, without calling anything.

    That is the LightningModule or data module that has ``train_dataloader``, or the loaders that
    ``trainer.fit`` was given. It is for a look at one batch before the number of replicas is known:
    loaders that the Trainer makes are divided among the replicas, and kept for the run.
    """
    return trainer.fit_loop._data_source.instance


def begin_batches_alone(trainer: Trainer, alone: bool) -> None:
    """Switch off, or on again, the broadcast for which all ranks wait before each training batch.

    By this broadcast Lightning has rank 0 tell the others whether it has received SIGTERM. Without
    it each rank still looks after a batch whether it has received the signal itself.

    Args:
        trainer: the Trainer whose training loop is changed.
        alone: ``True``: ranks begin batches without the broadcast; ``False``: as Lightning does.
    """
    loop = vars(trainer.fit_loop.epoch_loop)
    loop.pop("_broadcast_sigterm_tensor", None)
    if alone:
        loop["_broadcast_sigterm_tensor"] = lambda: None


def tell_to_end(trainer: Trainer) -> None:
    """Have the Trainer end after the current batch, as if this process had received SIGTERM."""
    trainer._signal_connector.received_sigterm = True


def load_evaluation_data_anew(trainer: Trainer) -> None:
    """Drop the Trainer's validation loaders, so that the next validation makes new ones.

    For use when a replica is lost: fewer replicas then divide the data.
    """
    trainer.fit_loop.epoch_loop.val_loop._combined_loader = None


def end_run(trainer: Trainer) -> None:
    """Tear the Trainer down and mark its run as finished, as Lightning does for a `TunerExit`.

    Our launcher catches that exception before the Trainer would.
    """
    _call_teardown_hook(trainer)
    trainer._teardown()
    trainer.state.status = TrainerStatus.FINISHED
    trainer.state.stage = None


def ask_strategy_whether_distributed(kind: type[Any]) -> None:
    """Patch Lightning so that it asks strategies of a class for their ``is_distributed``.

    By itself Lightning takes every instance of its ``DDPStrategy`` for distributed. With one
    replica it would then replace the user's sampler by one that shuffles, and refuse to look for a
    batch size. Other strategies are treated as before. A second call for a class does nothing.

    Args:
        kind: class of the strategies, with a property ``is_distributed``.
    """
    if kind in _ASKED:
        return
    _ASKED.add(kind)
    theirs: property = vars(_AcceleratorConnector)["is_distributed"]

    def is_distributed(self: _AcceleratorConnector) -> bool:
        if isinstance(self.strategy, kind):
            return bool(self.strategy.is_distributed)
        return bool(theirs.__get__(self))

    setattr(_AcceleratorConnector, "is_distributed", property(is_distributed))  # noqa: B010 (mypy)


def set_module_device(module: LightningModule, root_device: device) -> None:
    """Set what ``module.device`` returns, and move nothing.

    For a module of which only a part has moved to that device.
    """
    module._device = root_device
