"""What a driver's run leaves for the later lines of the script on its workers.

A worker has run neither the loops nor the callbacks. It gets what the driver's run has returned
and logged, and the plain data (numbers, texts, lists, tensors) that the run has changed in the
LightningModule, the data module, the callbacks and the loggers: ``checkpoint.best_model_path``,
``timer.time_elapsed()``, ``model.batch_size`` after a search for it, ``model.history``.
"""

import math
import pickle
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_hybrid._lightning import (
    Callback,
    Logger,
    LRSchedulerConfig,
    Strategy,
    Trainer,
    move_data_to_device,
)
from lightning_hybrid._lightning_private import (
    batch_counts,
    loaders_of,
    random_states,
    set_batch_counts,
    set_loaders,
    set_random_states,
)
from lightning_hybrid.errors import HybridError
from lightning_hybrid.planning import Plan

LIMIT_BYTES = 16 * 2**20
"""An attribute larger than this is a data set or the like, and stays where it is."""

# what has an identity: a copy of it on another rank would be a second one
_NOT_PLAIN = (nn.Module, nn.Parameter, Optimizer, DataLoader, Trainer, Strategy, Callback, Logger)
# of a class, what a run may count in: not its code
_COUNTS = (int, float, str, list, dict, set, deque, Tensor)
_FRAMEWORKS = (
    *("lightning", "pytorch_lightning", "lightning_fabric", "torch", "lightning_hybrid"),
    *("builtins", "abc", "typing", "collections"),
)
_Key = tuple[str, str]  # owner ("module", "callback 0"), attribute


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a driver, of whatever has begun its run.

    Attributes:
        returned: what the run returns, pickled; see :meth:`value`.
        random: states of the generators, so that later draws are the same on all ranks.
        trained: by name, whether a parameter requires gradients.
        modes: by name, whether a module is in training mode.
        plans: the plans of the networks, by name; filled in by the strategy.
    """

    returned: bytes
    random: Mapping[str, Any]
    trained: Mapping[str, bool]
    modes: Mapping[str, bool]
    plans: dict[str, Plan] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, returned: Any, **more: Any) -> Self:
        """Those of a run that went well.

        Args:
            module: that was trained.
            returned: what the run returns.
            more: the attributes of a subclass.
        """
        return cls(
            returned=_pickled_or_why_not(returned),
            random=random_states(),
            trained={name: p.requires_grad for name, p in module.named_parameters()},
            modes={name: part.training for name, part in module.named_modules()},
            **more,
        )

    def adopt(self, module: nn.Module) -> None:
        """On a worker: have the generators and flags of its driver."""
        set_random_states(dict(self.random))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.trained.get(name, parameter.requires_grad))
        for name, part in module.named_modules():
            part.training = self.modes.get(name, part.training)

    def value(self) -> Any:
        """What the run returns on this rank: a copy of what it returns on the driver.

        ``None`` with a warning where there can be no copy: of an open file, of an instance of a
        class that was made in a function.
        """
        try:
            return pickle.loads(self.returned)
        except Exception as error:  # the reason for what could not be pickled, or a class's own
            warnings.warn(
                "What this run returns cannot be copied to other ranks, and is None on this one, "
                f"which is no driver ({type(error).__name__}: {error}). Return tensors, numbers "
                "and texts, or use the values where is_global_zero is true.",
                stacklevel=2,
            )
            return None


@dataclass(frozen=True, kw_only=True)
class TrainerResults(Results):
    """The results of a driver's Trainer.

    Attributes:
        callback_metrics: the Trainer's.
        logged_metrics: likewise.
        progress_bar_metrics: likewise.
        attributes: changed plain data by owner and name, each pickled.
        loops: the state of the fit loop (epoch, step).
        batches: how many there were, by loop.
        state: the Trainer's state.
        should_stop: the Trainer's.
        loaders: what is known of those of each loop; see :func:`loaders_of`.
        schedulers: what is known of the learning-rate schedulers.
        adopted: on a worker, which of the attributes it has taken.
    """

    callback_metrics: Mapping[str, Tensor]
    logged_metrics: Mapping[str, Tensor]
    progress_bar_metrics: Mapping[str, float]
    attributes: Mapping[_Key, bytes]
    loops: Mapping[str, Any]
    batches: list[Any]
    state: Any
    should_stop: bool
    loaders: list[Any]
    schedulers: list[dict[str, Any]]
    adopted: set[_Key] = field(default_factory=set)


class Snapshot:
    """The plain data of a Trainer's surroundings when drivers and workers part."""

    def __init__(self, trainer: Trainer) -> None:
        self._digests = {key: _digest(data) for key, data in _plain_data(trainer)}

    def changes(self, trainer: Trainer) -> dict[_Key, bytes]:
        """What is different now, pickled."""
        return {
            key: data
            for key, data in _plain_data(trainer)
            if self._digests.get(key) != _digest(data)
        }


def collect_results(trainer: Trainer, returned: Any, before: Snapshot) -> TrainerResults:
    """On a driver: the results of a run that went well."""
    cpu = torch.device("cpu")
    return TrainerResults.of(
        trainer.lightning_module,
        returned,
        callback_metrics=move_data_to_device(dict(trainer.callback_metrics), cpu),
        logged_metrics=move_data_to_device(dict(trainer.logged_metrics), cpu),
        progress_bar_metrics=dict(trainer.progress_bar_metrics),
        attributes=before.changes(trainer),
        loops=trainer.fit_loop.state_dict(),
        batches=batch_counts(trainer),
        state=trainer.state,
        should_stop=trainer.should_stop,
        loaders=[
            None if loaders is None else _described(loaders, f"trainer.{name}")
            for name, loaders in loaders_of(trainer)
        ],
        schedulers=[
            _scheduler(config, index) for index, config in enumerate(trainer.lr_scheduler_configs)
        ],
    )


def _described(loaders: Any, what: str) -> Any:
    """Stand-ins in the structure of the loaders."""
    if isinstance(loaders, Mapping):
        return {key: _described(value, f"{what}[{key!r}]") for key, value in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [_described(value, f"{what}[{i}]") for i, value in enumerate(loaders)]
    length = None
    with suppress(Exception):  # an iterable may have none, and say so in any way it likes
        length = len(loaders)
    return StandIn(what, _numbers(loaders), length)


def _scheduler(config: LRSchedulerConfig, index: int) -> dict[str, Any]:
    """The fields of a configuration, its scheduler as a stand-in."""
    scheduler = config.scheduler
    state: dict[str, Any] = {}
    for key, value in scheduler.state_dict().items():
        data = _pickled(value)
        if data is not None:
            state[key] = pickle.loads(data)
    stand_in = StandIn(
        f"trainer.lr_scheduler_configs[{index}].scheduler ({type(scheduler).__name__})",
        {**_numbers(scheduler), **state},
        state=state,
    )
    return vars(config) | {"scheduler": stand_in}


def _numbers(thing: Any) -> dict[str, Any]:
    """The public attributes of an object that are numbers, texts or None."""
    plain = (int, float, str, type(None))
    attributes = getattr(thing, "__dict__", {})
    return {k: v for k, v in attributes.items() if isinstance(v, plain) and not k.startswith("_")}


def _pickled_or_why_not(returned: Any) -> bytes:
    """A pickle of ``returned``, or one that raises the reason why there is none."""
    try:
        return pickle.dumps(move_data_to_device(returned, torch.device("cpu")), protocol=5)
    except Exception as error:  # an object may refuse to be pickled in any way it likes
        return pickle.dumps(_Unpicklable(f"{type(error).__name__}: {error}"))


class _Unpicklable:
    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, (self._reason,)


def _refuse(reason: str) -> Any:
    raise pickle.PicklingError(reason)


def adopt_results(trainer: Trainer, results: TrainerResults, before: Snapshot) -> None:
    """On a worker: what its driver has collected, but for what this rank has changed itself."""
    trainer.callback_metrics.update(results.callback_metrics)
    trainer.logged_metrics.update(results.logged_metrics)
    trainer.progress_bar_metrics.update(results.progress_bar_metrics)
    own = before.changes(trainer)
    results.adopted.update(results.attributes.keys() - own.keys())
    adopt_attributes(trainer, results)
    trainer.fit_loop.load_state_dict(dict(results.loops))
    set_batch_counts(trainer, results.batches)
    trainer.state = results.state
    trainer.should_stop = results.should_stop
    stand_ins = [None if each is None else LoadersElsewhere(each) for each in results.loaders]
    set_loaders(trainer, stand_ins, partial(_refuse_unless_known, trainer.fit_loop.max_batches))
    trainer.strategy.lr_scheduler_configs = [
        LRSchedulerConfig(**fields) for fields in results.schedulers
    ]
    results.adopt(trainer.lightning_module)


def _refuse_unless_known(batches: float) -> None:
    """On a worker, in place of a train loader: the number of its batches is the driver's.

    Raises:
        HybridError: there was no fit to know it from.
    """
    if batches == math.inf:
        raise HybridError(
            "trainer.estimated_stepping_batches was asked for on a rank that is no driver, before "
            "a fit: drivers alone load data. Ask where trainer.is_global_zero, or after the fit."
        )


def adopt_attributes(trainer: Trainer, results: TrainerResults) -> None:
    """On a worker: the driver's attributes, again after this rank's own ``teardown`` hooks.

    They need what the run has left, and the driver's have been counted already.
    """
    owners = dict(_owners(trainer))
    for owner, name in results.adopted:
        if owner in owners:
            with suppress(Exception):  # a class may refuse to be made again in any way it likes
                _put(owners[owner], name, pickle.loads(results.attributes[owner, name]))


def _put(owner: Any, name: str, value: Any) -> None:
    if not isinstance(owner, type):
        vars(owner)[name] = value
        return
    here = vars(owner).get(name)  # code of the user's may hold the container itself
    if isinstance(here, list) and isinstance(value, list):
        here[:] = value
    elif isinstance(here, dict | set) and type(here) is type(value):
        here.clear()
        here.update(value)
    else:
        setattr(owner, name, value)


def _owners(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """What has attributes of interest: instances, and the user's classes that they are of."""
    classes: dict[type, None] = {}
    for name, owner in _instances(trainer):
        yield name, owner
        classes.update(dict.fromkeys(filter(_is_the_users, type(owner).__mro__)))
    yield from ((f"class {kind.__module__}.{kind.__qualname__}", kind) for kind in classes)


def _is_the_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _FRAMEWORKS


def _instances(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    yield "module", trainer.lightning_module
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if datamodule is not None:
        yield "datamodule", datamodule
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    yield from ((f"callback {i}", callback) for i, callback in enumerate(callbacks))
    yield from ((f"logger {i}", logger) for i, logger in enumerate(trainer.loggers))


def _plain_data(trainer: Trainer) -> Iterator[tuple[_Key, bytes]]:
    for owner, thing in _owners(trainer):
        for name, value in [*vars(thing).items()]:
            if _is_of_interest(thing, name, value):
                data = _pickled(value)
                if data is not None:
                    yield (owner, name), data


def _is_of_interest(owner: Any, name: str, value: Any) -> bool:
    if isinstance(owner, type):
        return isinstance(value, _COUNTS) and not name.startswith("_")
    if isinstance(owner, Callback):
        return True
    if isinstance(owner, Logger):  # versions and paths; a worker's own writers write nothing
        return isinstance(value, str | int | Path)
    # in modules a private name is the framework's, but for the hyper-parameters; flags are set by
    # `train()` and `eval()` for all modules together
    return name == "_hparams" or not (name.startswith("_") or name == "training")


def _pickled(value: Any) -> bytes | None:
    """A pickle of plain data; ``None``: it is not plain data, or too much of it."""
    file = _LimitedFile()
    try:
        _PlainPickler(file, protocol=5).dump(value)
    except Exception:  # an object may refuse to be pickled in any way it likes
        return None
    return file.getvalue()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


class _LimitedFile(BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > LIMIT_BYTES:
            raise OverflowError
        return super().write(data)


class _PlainPickler(pickle.Pickler):
    """Refuses what has an identity; tensors travel by way of the CPU."""

    def persistent_id(self, value: object) -> None:
        if isinstance(value, _NOT_PLAIN):
            raise pickle.PicklingError(type(value).__name__)

    def reducer_override(self, value: Any) -> Any:
        """A tensor as its numbers, on the CPU and without a graph; everything else as usual.

        (As torch pickles it there are addresses in it, so that equal tensors have other digests.)
        """
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            numbers = flat.view(torch.uint8).numpy().tobytes()
            return _tensor, (numbers, value.dtype, tuple(value.shape))
        return NotImplemented


def _tensor(numbers: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not numbers:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(numbers), dtype=dtype).reshape(shape)


# ---------------------------------------------------------------- stand-ins


class StandIn:
    """Knows the plain data of a loader or a scheduler that the driver alone has.

    Later lines of a script may ask any rank for them. Everything but their plain data is refused
    with the place where it is: a rank that does something else than the others would leave these
    waiting.

    Args:
        what: it stands for, as the script asks for it.
        values: plain attributes.
        length: what ``len`` gives; ``None``: it has none.
        state: what ``state_dict()`` gives; ``None``: it has none.
    """

    def __init__(
        self,
        what: str,
        values: Mapping[str, Any],
        length: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._what, self._values, self._length, self._state = what, values, length, state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks, as to pickle it
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        raise self._refusal(f".{name}")

    def __iter__(self) -> Iterator[Any]:
        raise self._refusal(" as an iterable")

    def __getitem__(self, key: object) -> Any:
        raise self._refusal(f"[{key!r}]")

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{self._what} has no length")
        return self._length

    def __bool__(self) -> bool:
        return self._length != 0

    def state_dict(self) -> dict[str, Any]:
        """The state that the driver's scheduler or loader had at the end of the run."""
        if self._state is None:
            raise self._refusal(".state_dict")
        return dict(self._state)

    def get_last_lr(self) -> list[float]:
        """The last learning rates of a scheduler, as the driver had them."""
        return list(self.__getattr__("_last_lr"))

    def _refusal(self, asked: str) -> HybridError:
        return HybridError(
            f"{self._what}{asked} was asked for on a rank that is no driver: drivers alone load "
            "data and step schedulers, and this one knows only their numbers "
            f"({', '.join(sorted(self._values)) or 'none'}). Ask where trainer.is_global_zero; or, "
            "what all ranks need, keep in an attribute of the module."
        )


class LoadersElsewhere:
    """In place of Lightning's combined loader.

    Args:
        iterables: the stand-ins, in the structure of the loaders.
    """

    def __init__(self, iterables: Any) -> None:
        self.iterables = iterables

    def _state_dicts(self) -> list[Any]:
        """Nothing: only drivers write checkpoints, and a worker has no loaders."""
        return []
