"""Run a training step on a copy of the module before a run, to find and capture its networks.

With automatic sizes this is needed before it is known which ranks are drivers. Rank 0 copies the
LightningModule, takes one batch of a copy of the loader (else ``example_input_array``) and runs
``training_step`` on it, without a backward. The user's module, loaders, loggers and random
generators do not change, and nothing is printed.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
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
    move_data_to_device,
)
from lightning_hybrid._lightning_private import random_states, set_random_states, training_source
from lightning_hybrid.driver import LookAhead
from lightning_hybrid.errors import HybridError
from lightning_hybrid.planning import CalledNetwork
from lightning_hybrid.stage import with_room_for

_SHARED_BYTES = 2**20
"""Larger tensors and arrays are taken for data, which a copy shares; smaller ones, which may be
counters, are copied."""

Maker = Callable[[LightningModule], Any]
"""A function from a copy of the module to the source of its train loaders: the copy itself, a copy
of the data module, or copies of the loaders."""


class CannotRehearse(HybridError):
    """Raised if a training step cannot be run before the run; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What a rehearsed training step has shown.

    Attributes:
        networks: the networks that were called, in the order of their first calls.
        divided: function from the number of replicas to the number of parts into which the user's
            code divides the batch of a single replica; 1: it does not divide it.
    """

    networks: Sequence[CalledNetwork]
    divided: Callable[[int], int]


@contextmanager
def rehearsal(
    trainer: Trainer,
    module: LightningModule,
    names: tuple[str, ...] | None,
    device: torch.device,
    precision: Precision,
    supposing: Callable[[int], AbstractContextManager[None]],
) -> Iterator[Rehearsed]:
    """Run a training step on a copy of the module; inside, its networks may be measured.

    Args:
        trainer: the Trainer, which is about to fit.
        module: the user's module, with all its weights in memory.
        names: names of the modules that are networks; None: they are found.
        device: device of this rank.
        precision: Lightning's precision plugin, whose context is entered.
        supposing: makes a context in which the user's code finds this number of replicas.

    Raises:
        CannotRehearse: no call of a network was seen.
    """
    source = training_source(trainer)
    # a copy shares large tensors, since data sets may be too large to be copied
    shared = cache(lambda: _shared_copy(source))

    def maker(copied: LightningModule) -> Any:
        return copied if isinstance(source, LightningModule) else shared()

    @cache
    def batch_size(replicas: int) -> int:
        with supposing(replicas), redirect_stdout(io.StringIO()):
            return _batch_size(maker(copied))

    def divided(replicas: int) -> int:
        if replicas == 1 or not isinstance(source, LightningModule | LightningDataModule):
            return 1
        # compare the loaders' batch sizes with one replica and with several
        alone, one_of_several = batch_size(1), batch_size(replicas)
        return max(1, round(alone / one_of_several)) if alone and one_of_several else 1

    states = random_states()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            copied, looked = _look(trainer, module, names, device, precision, maker)
            with closing(looked), precision.train_step_context():
                yield Rehearsed(networks=looked.seen, divided=divided)
    finally:
        set_random_states(states)


def _look(
    trainer: Trainer,
    module: LightningModule,
    names: tuple[str, ...] | None,
    device: torch.device,
    precision: Precision,
    maker: Maker,
) -> tuple[LightningModule, LookAhead]:
    """Try the training step on a batch, then the call on the example; the copy, and what was seen.

    Raises:
        CannotRehearse: no call of a network was seen in either.
    """
    # errors of the user's code are not raised here: the run will raise them
    problems, place = [], with_room_for(module, device)
    for attempt in (_train_on_a_batch, _call_on_the_example):
        try:
            stand_in = copy.copy(trainer)
            # what the step logs must not reach the loggers
            stand_in.loggers = [DummyLogger()] if trainer.loggers else []
            copied = _copied(module, trainer, stand_in).to(place)
            looked = LookAhead(copied, names)
            with redirect_stdout(io.StringIO()), precision.train_step_context():
                try:
                    attempt(maker, copied, place, precision)
                except Exception as error:
                    if not looked.seen:
                        raise
                    problems.append(_told(error))  # an error after the network's call is no matter
            if looked.seen:
                return copied, looked
            problems += looked.problems or ["no call of a module with parameters was seen"]
        except Exception as error:
            problems.append(_told(error))
    raise CannotRehearse(problems[0])


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, HybridError) else f"{type(error).__name__}: {error}"


def _copied(module: LightningModule, trainer: Trainer, stand_in: Trainer) -> LightningModule:
    """A copy of the module, with weights of its own, that logs nothing."""
    # not of the Trainer, which has loaders, loggers and process groups
    memo: dict[int, Any] = {id(trainer): stand_in, id(trainer.strategy): trainer.strategy}
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:  # modules may raise anything when they are copied
        raise CannotRehearse(f"the module cannot be copied ({_told(error)})") from error
    copied.trainer = stand_in
    for name in ("log", "log_dict", "print"):
        vars(copied)[name] = _nothing
    return copied


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for `log`, `log_dict` and `print` on the copy: does nothing."""


# ---------------------------------------------------------------- what is run


def _train_on_a_batch(
    maker: Maker, copied: LightningModule, device: torch.device, precision: Precision
) -> None:
    """Run ``training_step`` on the first batch, with the hooks that transfer it."""
    source = maker(copied)
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


def _batch_size(source: Any) -> int:
    """The sum of the loaders' ``batch_size``; 0: they have none, or cannot be made."""
    try:
        loaders = _train_loaders(source)
    except Exception:  # the user's code may raise anything for several replicas
        return 0
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    sizes = [getattr(loader, "batch_size", None) for loader in combined.flattened]
    return sum(size for size in sizes if isinstance(size, int))


def _call_on_the_example(
    maker: Maker, copied: LightningModule, device: torch.device, precision: Precision
) -> None:
    """Call the module on its ``example_input_array``."""
    example = copied.example_input_array
    if example is None:
        raise CannotRehearse("the module has no example_input_array")
    example = move_data_to_device(precision.convert_input(example), device)
    if isinstance(example, dict):
        copied(**example)
    else:
        copied(*(example if isinstance(example, tuple) else (example,)))


def _first_batch(loaders: Any) -> Any:
    """The first batch of copies of loaders, made in this process."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    for loader in combined.flattened:
        if isinstance(loader, DataLoader):  # start no loader processes for one batch
            loader.num_workers, loader.timeout, loader.pin_memory = 0, 0, False
            loader.prefetch_factor, loader.worker_init_fn = None, None
    batch, _, _ = next(iter(combined))
    return batch


def _shared_copy(thing: Any) -> Any:
    """Copy an object, but share large tensors and arrays, classes, functions and modules.

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
            f"({_told(error)})"
        ) from error


class _Sharing(pickle.Pickler):
    """Pickles an object with references in place of what its copy shares, listed in ``kept``."""

    def __init__(self, kept: list[Any], *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._kept = kept

    def persistent_id(self, value: Any) -> int | None:
        large = isinstance(value, Tensor | np.ndarray) and value.nbytes > _SHARED_BYTES
        if not (large or isinstance(value, type | FunctionType | nn.Module | Trainer)):
            return None
        self._kept.append(value)
        return len(self._kept) - 1
