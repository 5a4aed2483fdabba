"""Give workers the results of the driver's run, for later lines of the script.

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
"""Largest attribute, pickled, that is sent: a larger one is a data set or the like."""

# objects with an identity: on another rank there must be no copy of them
_NOT_PLAIN = (nn.Module, nn.Parameter, Optimizer, DataLoader, Trainer, Strategy, Callback, Logger)
# types of class attributes that a run may change, such as counters; not methods
_COUNTS = (int, float, str, list, dict, set, deque, Tensor)
_FRAMEWORKS = (
    *("lightning", "pytorch_lightning", "lightning_fabric", "torch", "lightning_hybrid"),
    *("builtins", "abc", "typing", "collections"),
)
_Key = tuple[str, str]  # owner ("module", "callback 0"), attribute


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a driver's run that a Trainer and Fabric have in common.

    Attributes:
        returned: what the run returns, pickled; see :meth:`value`.
        random: states of the random generators, so that later draws are the same on all ranks.
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
        """Collect the results of a run that has ended without an error.

        Args:
            module: the module of the run.
            returned: what the run returns.
            more: values for the attributes of a subclass.
        """
        return cls(
            returned=_pickled_or_why_not(returned),
            random=random_states(),
            trained={name: p.requires_grad for name, p in module.named_parameters()},
            modes={name: part.training for name, part in module.named_modules()},
            **more,
        )

    def adopt(self, module: nn.Module) -> None:
        """On a worker, set random generators, ``requires_grad`` and modes as on the driver."""
        set_random_states(dict(self.random))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.trained.get(name, parameter.requires_grad))
        for name, part in module.named_modules():
            part.training = self.modes.get(name, part.training)

    def value(self) -> Any:
        """A copy of what the run returns on the driver, for a worker to return.

        ``None`` with a warning if it cannot be pickled: an open file, an instance of a class that
        was made in a function.
        """
        try:
            return pickle.loads(self.returned)
        except Exception as error:  # also raised by the pickle of something that has none
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
        callback_metrics: the Trainer's attribute of this name.
        logged_metrics: the Trainer's attribute of this name.
        progress_bar_metrics: the Trainer's attribute of this name.
        attributes: attributes with plain data that the run has changed, by owner and name, each
            pickled.
        loops: state of the fit loop (epoch, step).
        batches: numbers of batches of each loop.
        state: the Trainer's state.
        should_stop: the Trainer's attribute of this name.
        loaders: for each loop stand-ins of its loaders, or ``None``; see :func:`loaders_of`.
        schedulers: fields of each learning-rate scheduler's configuration, with a stand-in for the
            scheduler.
        adopted: on a worker, which of ``attributes`` it has taken.
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
    """Digests of the plain data of a Trainer's module, callbacks and loggers before a run."""

    def __init__(self, trainer: Trainer) -> None:
        self._digests = {key: _digest(data) for key, data in _plain_data(trainer)}

    def changes(self, trainer: Trainer) -> dict[_Key, bytes]:
        """The attributes that are new or have changed since, each pickled."""
        return {
            key: data
            for key, data in _plain_data(trainer)
            if self._digests.get(key) != _digest(data)
        }


def collect_results(trainer: Trainer, returned: Any, before: Snapshot) -> TrainerResults:
    """On a driver, collect the results of a run that has ended without an error."""
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
    """Make stand-ins of loaders, in the same structure of dictionaries and lists."""
    if isinstance(loaders, Mapping):
        return {key: _described(value, f"{what}[{key!r}]") for key, value in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [_described(value, f"{what}[{i}]") for i, value in enumerate(loaders)]
    length = None
    with suppress(Exception):  # an iterable without a length may raise anything
        length = len(loaders)
    return StandIn(what, _numbers(loaders), length)


def _scheduler(config: LRSchedulerConfig, index: int) -> dict[str, Any]:
    """The fields of a scheduler's configuration, with a stand-in in place of the scheduler."""
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
    """Pickle ``returned``; if that fails, a pickle whose loading raises the reason."""
    try:
        return pickle.dumps(move_data_to_device(returned, torch.device("cpu")), protocol=5)
    except Exception as error:  # objects may raise anything when they are pickled
        return pickle.dumps(_Unpicklable(f"{type(error).__name__}: {error}"))


class _Unpicklable:
    """An object whose pickle raises a ``PicklingError`` with the reason when it is loaded."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, (self._reason,)


def _refuse(reason: str) -> Any:
    raise pickle.PicklingError(reason)


def adopt_results(trainer: Trainer, results: TrainerResults, before: Snapshot) -> None:
    """On a worker, take the driver's results, but for attributes that this rank has changed itself.

    Args:
        trainer: the worker's Trainer.
        results: the driver's results.
        before: the worker's own data before the run.
    """
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
    """On a worker, called in place of loading training data to count its batches.

    Args:
        batches: number of training batches of the driver's last fit; infinite: there was none.

    Raises:
        HybridError: the number is not known, since there was no fit.
    """
    if batches == math.inf:
        raise HybridError(
            "trainer.estimated_stepping_batches was asked for on a rank that is no driver, before "
            "a fit: drivers alone load data. Ask where trainer.is_global_zero, or after the fit."
        )


def adopt_attributes(trainer: Trainer, results: TrainerResults) -> None:
    """On a worker, set the attributes of ``results.adopted`` to the driver's values.

    Called before and after this rank's own ``teardown`` hooks: these may read what the run has
    left, and the driver's values have the effects of its own hooks already.
    """
    owners = dict(_owners(trainer))
    for owner, name in results.adopted:
        if owner in owners:
            with suppress(Exception):  # a class may raise anything when it is unpickled
                _put(owners[owner], name, pickle.loads(results.attributes[owner, name]))


def _put(owner: Any, name: str, value: Any) -> None:
    if not isinstance(owner, type):
        vars(owner)[name] = value
        return
    here = vars(owner).get(name)  # changed in place, since the user's code may refer to it
    if isinstance(here, list) and isinstance(value, list):
        here[:] = value
    elif isinstance(here, dict | set) and type(here) is type(value):
        here.clear()
        here.update(value)
    else:
        setattr(owner, name, value)


def _owners(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Objects whose attributes are sent, by name: :func:`_instances`, and their user classes."""
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
    if isinstance(owner, Logger):  # versions and paths
        return isinstance(value, str | int | Path)
    # in modules private names are the framework's, but for the hyper-parameters; `training` is
    # set for all modules by `Results.adopt`
    return name == "_hparams" or not (name.startswith("_") or name == "training")


def _pickled(value: Any) -> bytes | None:
    """Pickle plain data; ``None`` if it is not plain, or larger than the limit."""
    file = _LimitedFile()
    try:
        _PlainPickler(file, protocol=5).dump(value)
    except Exception:  # objects may raise anything when they are pickled
        return None
    return file.getvalue()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


class _LimitedFile(BytesIO):
    """A file in memory that raises when more than ``LIMIT_BYTES`` are written."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > LIMIT_BYTES:
            raise OverflowError
        return super().write(data)


class _PlainPickler(pickle.Pickler):
    """Pickles plain data: refuses modules, optimizers and the like; tensors become bytes."""

    def persistent_id(self, value: object) -> None:
        if isinstance(value, _NOT_PLAIN):
            raise pickle.PicklingError(type(value).__name__)

    def reducer_override(self, value: Any) -> Any:
        """Pickle a tensor as its numbers, on the CPU and without a graph; all else as usual.

        (Torch's own pickle contains addresses, so that equal tensors have different digests.)
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
    """Stands on a worker for a loader or a scheduler that only the driver has.

    It has their plain data, which later lines of a script may read on any rank; all other use is
    refused by an error that says where the object is.

    Args:
        what: expression by which the script gets the object, for the error.
        values: attributes with numbers and texts.
        length: the object's length; ``None``: it has none.
        state: the object's ``state_dict()``; ``None``: it has none.
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
        if name.startswith("__"):  # asked for by Python itself, for instance to pickle it
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
    """Stands on a worker for Lightning's combined loader.

    Args:
        iterables: stand-ins of the loaders, in their structure of dictionaries and lists.
    """

    def __init__(self, iterables: Any) -> None:
        self.iterables = iterables

    def _state_dicts(self) -> list[Any]:
        """No states for a checkpoint: a worker has no loaders, and writes none."""
        return []
