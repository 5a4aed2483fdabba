"""The private names of Lightning that this package uses, each with its reason, all in this file.

The protected ones that subclasses of its strategies and launchers use are listed with their reasons
in ``tests/test_architecture.py``, which finds any others.
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
    """Have an optimizer of Fabric clear gradients as the optimizer that it wraps does.

    It inherits ``zero_grad`` from the class of that optimizer, and not the one of the instance. So
    it would read each gradient, which would be fetched from its owner into new memory.
    """

    def zero_grad(self: Any, *arguments: Any, **keywords: Any) -> None:
        self.optimizer.zero_grad(*arguments, **keywords)

    fabric.wrappers._FabricOptimizer.zero_grad = zero_grad  # type: ignore[attr-defined]


_ASKED: set[type[Any]] = set()


def script_command(local_rank: int) -> tuple[Sequence[str], str | None]:
    """The command that runs this script again, and in which folder, as Lightning starts it."""
    hydra = _script._HYDRA_AVAILABLE and import_module("hydra.core.hydra_config").HydraConfig
    if hydra and hydra.initialized():
        command: tuple[Sequence[str], str] = _script._hydra_subprocess_cmd(local_rank)
        return command
    return _script._basic_subprocess_cmd(), None


def set_rank_of_messages(rank: int) -> None:
    """Rank 0 prints what `rank_zero_info` and its like are given, as in `DDPStrategy`."""
    vars(pytorch.utilities.rank_zero.rank_zero_only)["rank"] = rank


def rebuilt_loader(loader: Any, batches: Iterable[list[Any]]) -> Any:
    """A ``DataLoader`` like another one, whose batches are made of other samples.

    Args:
        loader: the other one.
        batches: a batch sampler.
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
    """Where batches to train on come from: a module or data module with a hook, or loaders.

    Rank 0 looks at one batch before it is known how the data is divided; what the Trainer itself
    asks for then is divided, and kept for the run.
    """
    return trainer.fit_loop._data_source.instance


def begin_batches_alone(trainer: Trainer, alone: bool) -> None:
    """Whether each rank begins its batches without a word to the others.

    Before each batch Lightning broadcasts from rank 0 whether it was told to end, for which all
    would wait. After a batch each rank looks at what it was told itself, in any case.
    """
    loop = vars(trainer.fit_loop.epoch_loop)
    loop.pop("_broadcast_sigterm_tensor", None)
    if alone:
        loop["_broadcast_sigterm_tensor"] = lambda: None


def tell_to_end(trainer: Trainer) -> None:
    """Have the Trainer end after this batch, as SIGTERM does."""
    trainer._signal_connector.received_sigterm = True


def load_evaluation_data_anew(trainer: Trainer) -> None:
    """Have the next validation make its loaders again, since fewer replicas share the data."""
    trainer.fit_loop.epoch_loop.val_loop._combined_loader = None


def end_run(trainer: Trainer) -> None:
    """What the Trainer does when it meets a :class:`TunerExit`, which our launcher meets first."""
    _call_teardown_hook(trainer)
    trainer._teardown()
    trainer.state.status = TrainerStatus.FINISHED
    trainer.state.stage = None


def ask_strategy_whether_distributed(kind: type[Any]) -> None:
    """Have strategies of this kind say themselves whether their data is divided over replicas.

    Lightning takes every subclass of its ``DDPStrategy`` for distributed and has no way to ask.
    With one replica it would replace the user's sampler by one that shuffles, and refuse to look
    for a batch size. Its own strategies are not touched, and nothing is done a second time.
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
    """``LightningModule.device`` is the driver's, though only a part of it has moved there."""
    module._device = root_device
