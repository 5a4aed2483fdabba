"""A step of the user's on a copy of the module, before a run: what will be computed in it?

With automatic sizes nobody knows yet who will run the user's code. Rank 0 looks ahead: it copies
the LightningModule, takes one batch of a copy of the loader (else ``example_input_array``) and runs
``training_step`` on them up to its end, without a backward. The user's own module, loaders, loggers
and generators stay what they are, and so does what the script prints and draws.
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
"""A tensor or array of more than this is data that is read; a smaller one may be a counter."""

Maker = Callable[[LightningModule], Any]
"""Gives what makes the train loaders, for a copy of the module: that, a copy of the data module, or
copies of the loaders."""


class CannotRehearse(HybridError):
    """Raised where a training step cannot be tried before the run; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What is known of a training step before the run.

    Attributes:
        networks: those that were called, in the order of their first calls.
        divided: tells into how many parts the user's code divides the batch of one replica when
            there are several; 1: each takes as much as one alone.
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
    """What the networks of a module do in a training step; inside, they may be measured.

    Args:
        trainer: Lightning's, about to fit.
        module: the user's, whose weights are all here.
        names: of the modules that are networks; None: they are found.
        device: of this rank.
        precision: Lightning's; inside, it surrounds what is computed.
        supposing: inside of it the user's code finds so many replicas.

    Raises:
        CannotRehearse: no network was seen.
    """
    source = training_source(trainer)
    # data sets are too large to be copied, so what they read is shared
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
        # loaders that divide the batch say so themselves when they are asked as one of several
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
    # what the user's code raises here, it would raise in the run, where it belongs
    problems, place = [], with_room_for(module, device)
    for attempt in (_train_on_a_batch, _call_on_the_example):
        try:
            stand_in = copy.copy(trainer)
            # what the step logs must reach nobody
            stand_in.loggers = [DummyLogger()] if trainer.loggers else []
            copied = _copied(module, trainer, stand_in).to(place)
            looked = LookAhead(copied, names)
            with redirect_stdout(io.StringIO()), precision.train_step_context():
                try:
                    attempt(maker, copied, place, precision)
                except Exception as error:
                    if not looked.seen:
                        raise
                    problems.append(_told(error))  # after the network's call: enough was seen
            if looked.seen:
                return copied, looked
            problems += looked.problems or ["no call of a module with parameters was seen"]
        except Exception as error:
            problems.append(_told(error))
    raise CannotRehearse(problems[0])


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, HybridError) else f"{type(error).__name__}: {error}"


def _copied(module: LightningModule, trainer: Trainer, stand_in: Trainer) -> LightningModule:
    """A copy with its own weights that neither logs nor steps."""
    # a copy of the Trainer would be one of loaders, loggers and process groups
    memo: dict[int, Any] = {id(trainer): stand_in, id(trainer.strategy): trainer.strategy}
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:  # a module may refuse to be copied in any way it likes
        raise CannotRehearse(f"the module cannot be copied ({_told(error)})") from error
    copied.trainer = stand_in
    for name in ("log", "log_dict", "print"):
        vars(copied)[name] = _nothing
    return copied


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for `log`, `step` and the like on the copy that is rehearsed: does nothing."""


# ---------------------------------------------------------------- what is run


def _train_on_a_batch(
    maker: Maker, copied: LightningModule, device: torch.device, precision: Precision
) -> None:
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
    """Samples of a batch by what the loaders say of themselves; 0: they do not."""
    try:
        loaders = _train_loaders(source)
    except Exception:  # what is made for one replica may refuse to be made for several
        return 0
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    sizes = [getattr(loader, "batch_size", None) for loader in combined.flattened]
    return sum(size for size in sizes if isinstance(size, int))


def _call_on_the_example(
    maker: Maker, copied: LightningModule, device: torch.device, precision: Precision
) -> None:
    example = copied.example_input_array
    if example is None:
        raise CannotRehearse("the module has no example_input_array")
    example = move_data_to_device(precision.convert_input(example), device)
    if isinstance(example, dict):
        copied(**example)
    else:
        copied(*(example if isinstance(example, tuple) else (example,)))


def _first_batch(loaders: Any) -> Any:
    """The first batch of copies of loaders, in this process."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    for loader in combined.flattened:
        if isinstance(loader, DataLoader):  # nothing is started for one batch
            loader.num_workers, loader.timeout, loader.pin_memory = 0, 0, False
            loader.prefetch_factor, loader.worker_init_fn = None, None
    batch, _, _ = next(iter(combined))
    return batch


def _shared_copy(thing: Any) -> Any:
    """A copy that reads the same data: its state is its own, large tensors and code are not.

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
    except Exception as error:  # an object may refuse to be copied in any way it likes
        raise CannotRehearse(
            f"the train loader cannot be copied, and its batches are not to be taken from the run "
            f"({_told(error)})"
        ) from error


class _Sharing(pickle.Pickler):
    """Pickles an object without its large tensors, classes and modules, which a copy may share."""

    def __init__(self, kept: list[Any], *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._kept = kept

    def persistent_id(self, value: Any) -> int | None:
        large = isinstance(value, Tensor | np.ndarray) and value.nbytes > _SHARED_BYTES
        if not (large or isinstance(value, type | FunctionType | nn.Module | Trainer)):
            return None
        self._kept.append(value)
        return len(self._kept) - 1
