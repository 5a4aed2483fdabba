"""Run a training step on a copy of the module before a run, to find and capture its networks.

To choose sizes, this is needed before it is known which ranks are drivers. Rank 0 copies the
LightningModule, takes one batch of a copy of the loader and runs ``training_step`` on it, without a
backward. The user's module, loaders, loggers and random generators do not change, and nothing is
printed.
"""

import copy
import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid._lightning import (
    CombinedLoader,
    DummyLogger,
    LightningDataModule,
    LightningModule,
    Precision,
    Trainer,
    is_param_in_hook_signature,
)
from lightning_hybrid._lightning_private import random_states, set_random_states, training_source
from lightning_hybrid.driver import ForeseenCalls
from lightning_hybrid.errors import HybridError
from lightning_hybrid.profiling import CalledNetwork
from lightning_hybrid.stage import with_room_for

_SHARED_BYTES = 2**20
"""Larger tensors and arrays are taken for data, which a copy shares; smaller ones, which may be
counters, are copied."""


_NO_OPTIMIZERS = (
    "its training_step optimizes by itself (automatic_optimization=False), and there are no "
    "optimizers before the sizes are known. Give data_parallel_size and pipeline_parallel_size"
)


class CannotRehearse(HybridError):
    """Raised if a training step cannot be rehearsed on a copy of the module; the text says why."""


@contextmanager
def rehearsal(
    trainer: Trainer,
    module: LightningModule,
    names: tuple[str, ...] | None,
    device: torch.device,
    precision: Precision,
    *,
    shares: bool = False,
) -> Iterator[Sequence[CalledNetwork]]:
    """Run a training step on a copy of the module, and yield the networks that it has called.

    They are in the order of their first calls, and can be measured inside the context. Random
    generators are afterwards as they were before.

    Args:
        trainer: the Trainer, which is about to fit.
        module: the user's module, with all its weights in memory.
        names: dotted names of the modules that are networks; None: they are found by their calls.
        device: device of this rank.
        precision: Lightning's precision plugin; the step runs in its context.
        shares: whether to look for losses inside a network of which each micro-batch has a share,
            as backwards need that run inside the network's calls.

    Raises:
        CannotRehearse: module or loader cannot be copied, or no call of a network was seen.
    """
    states = random_states()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            looked = _rehearsed(trainer, module, names, device, precision, shares=shares)
            with closing(looked), precision.train_step_context():
                yield looked.seen
    finally:
        set_random_states(states)


def _rehearsed(
    trainer: Trainer,
    module: LightningModule,
    names: tuple[str, ...] | None,
    device: torch.device,
    precision: Precision,
    *,
    shares: bool,
) -> ForeseenCalls:
    """Run the training step of a copy on one batch, and return the calls of networks in it.

    See :func:`rehearsal` for the arguments.

    Raises:
        CannotRehearse: the module cannot be copied, or no call of a network was seen.
    """
    place, stand_in = with_room_for(module, device), copy.copy(trainer)
    # what the step logs must not reach the loggers
    stand_in.loggers = [DummyLogger()] if trainer.loggers else []
    copied = _copied(module, trainer, stand_in).to(place)
    looked = ForeseenCalls(copied, names, shares=shares)
    problems: list[str] = []
    # errors of the user's code are not raised here: the run will raise them
    try:
        with redirect_stdout(io.StringIO()), precision.train_step_context():
            _train_on_a_batch(training_source(trainer), copied, place, precision)
    except Exception as error:  # after the network's call it is no matter
        manual = "" if module.automatic_optimization else _NO_OPTIMIZERS
        problems.append(manual or _in_words(error))
    if not looked.seen:
        problems += looked.problems or ["no call of a module with parameters was seen"]
        raise CannotRehearse(problems[0])
    return looked


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, HybridError) else f"{type(error).__name__}: {error}"


def _copied(module: LightningModule, trainer: Trainer, stand_in: Trainer) -> LightningModule:
    """Copy a module with its weights; the copy logs and prints nothing.

    Args:
        module: the user's module.
        trainer: its Trainer, which is not copied.
        stand_in: the Trainer that the copy gets.

    Raises:
        CannotRehearse: it cannot be copied.
    """
    # not of the Trainer, which has loaders, loggers and process groups
    memo: dict[int, Any] = {id(trainer): stand_in, id(trainer.strategy): trainer.strategy}
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:  # modules may raise anything when they are copied
        raise CannotRehearse(f"the module cannot be copied ({_in_words(error)})") from error
    copied.trainer = stand_in
    for name in ("log", "log_dict", "print"):
        vars(copied)[name] = _nothing
    return copied


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: stands in for ``log``, ``log_dict`` and ``print`` of a copied module."""


# ---------------------------------------------------------------- what is run


def _train_on_a_batch(
    source: Any, copied: LightningModule, device: torch.device, precision: Precision
) -> None:
    """Run the ``training_step`` of a copied module on the first batch, with the transfer hooks.

    Args:
        source: what the Trainer takes training batches from; see `training_source`.
        copied: the copied module.
        device: device for the batch.
        precision: Lightning's precision plugin, which converts the batch.

    Raises:
        CannotRehearse: the loader cannot be copied, or the step takes a ``dataloader_iter``.
    """
    # a copy shares large tensors, since data sets may be too large to be copied
    source = copied if isinstance(source, LightningModule) else _shared_copy(source)
    datamodule = source if isinstance(source, LightningDataModule) else None
    batch = precision.convert_input(_first_batch(_train_loaders(source)))
    for hook, arguments in (
        ("on_before_batch_transfer", (0,)),
        ("transfer_batch_to_device", (device, 0)),
        ("on_after_batch_transfer", (0,)),
    ):
        own = getattr(type(datamodule), hook, None) is not getattr(LightningDataModule, hook)
        owner = datamodule if datamodule is not None and own else copied
        batch = getattr(owner, hook)(batch, *arguments)
    step = copied.training_step
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise CannotRehearse("its training_step takes a dataloader_iter")
    numbered = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    step(batch, 0) if numbered else step(batch)


def _train_loaders(source: Any) -> Any:
    makes = isinstance(source, LightningModule | LightningDataModule)
    return source.train_dataloader() if makes else source


def _first_batch(loaders: Any) -> Any:
    """Return the first batch of data loaders, made in this process.

    Args:
        loaders: copies of the user's loaders, whose options for loader processes are changed here.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    for loader in combined.flattened:
        if isinstance(loader, DataLoader):  # start no loader processes for one batch
            loader.num_workers = 0
            loader.timeout = 0
            loader.pin_memory = False
            loader.prefetch_factor = None
            loader.worker_init_fn = None
    batch, _, _ = next(iter(combined))
    return batch


def _shared_copy(thing: Any) -> Any:
    """Copy an object such as a data loader; large tensors and arrays are not copied but shared.

    So are classes, functions, modules and Trainers.

    Raises:
        CannotRehearse: it has something that cannot be copied, such as a generator.
    """
    kept: list[Any] = []
    file = io.BytesIO()
    pickler = _Sharing(kept, file, protocol=5)
    try:
        pickler.dump(thing)
        file.seek(0)
        unpickler = pickle.Unpickler(file)
        unpickler.persistent_load = lambda index: kept[index]  # type: ignore[method-assign]
        return unpickler.load()
    except Exception as error:  # objects may raise anything when they are copied
        raise CannotRehearse(
            f"the train loader cannot be copied, and its batches are not to be taken from the run "
            f"({_in_words(error)})"
        ) from error


class _Sharing(pickle.Pickler):
    """A pickler that replaces what a copy is to share by references.

    Args:
        kept: a list to which the shared objects are appended; a reference is an index in it.
        arguments: those of `pickle.Pickler`.
        keywords: likewise.
    """

    def __init__(self, kept: list[Any], *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._kept = kept

    def persistent_id(self, value: Any) -> int | None:
        large = isinstance(value, Tensor | np.ndarray) and value.nbytes > _SHARED_BYTES
        if not (large or isinstance(value, type | FunctionType | nn.Module | Trainer)):
            return None
        self._kept.append(value)
        return len(self._kept) - 1
