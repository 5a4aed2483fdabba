"""Give workers the results of the driver's run, for later lines of the script.

A worker has run neither the loops nor the callbacks. It gets what the driver's run has returned
and logged, and the plain data (numbers, texts, lists, tensors) that the run has changed in the
LightningModule, the data module, the callbacks and the loggers: ``checkpoint.best_model_path``,
``timer.time_elapsed()``, ``model.batch_size`` after a search for it, ``model.history``.
"""

import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
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
    Strategy,
    Trainer,
    move_data_to_device,
)
from lightning_hybrid._lightning_private import (
    batch_counts,
    random_states,
    set_batch_counts,
    set_random_states,
)
from lightning_hybrid._torch.modules import children_of
from lightning_hybrid.errors import HybridError
from lightning_hybrid.planning import Plan

LIMIT_BYTES = 16 * 2**20
"""Largest attribute, pickled, that is sent: a larger one is a data set or the like."""

# objects with an identity: on another rank there must be no copy of them
_NOT_PLAIN = (nn.Module, nn.Parameter, Optimizer, DataLoader, Trainer, Strategy, Callback, Logger)
_AttributeKey = tuple[str, str]  # owner ("module", "callback 0"), attribute


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a driver's run that a Trainer and Fabric have in common.

    Attributes:
        returned: what the run returns, pickled; see :meth:`value`.
        why_not: why it could not be pickled; empty: it could.
        random: states of the random generators, so that later draws are the same on all ranks.
        trained: by name, whether a parameter requires gradients.
        modes: by name, whether a module is in training mode.
        plans: the plans of the networks, by name; filled in by the strategy.
    """

    returned: bytes
    why_not: str
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
        pickled, why_not = b"", ""
        try:
            pickled = pickle.dumps(move_data_to_device(returned, torch.device("cpu")), protocol=5)
        except Exception as error:  # objects may raise anything when they are pickled
            why_not = f"{type(error).__name__}: {error}"
        return cls(
            returned=pickled,
            why_not=why_not,
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
        why_not = self.why_not
        if not why_not:
            try:
                return pickle.loads(self.returned)
            except Exception as error:  # a class may raise anything when it is unpickled
                why_not = f"{type(error).__name__}: {error}"
        warnings.warn(
            "What this run returns cannot be copied to other ranks, and is None on this one, "
            f"which is no driver ({why_not}). Return tensors, numbers and texts, or use the values "
            "where is_global_zero is true.",
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
        children: see :meth:`Snapshot.changed_children`.
        loops: state of the fit loop (epoch, step).
        batches: numbers of batches of each loop.
        state: the Trainer's state.
        should_stop: the Trainer's attribute of this name.
    """

    callback_metrics: Mapping[str, Tensor]
    logged_metrics: Mapping[str, Tensor]
    progress_bar_metrics: Mapping[str, float]
    attributes: dict[_AttributeKey, bytes]
    children: Mapping[str, Mapping[str, str | None]]
    loops: Mapping[str, Any]
    batches: list[Any]
    state: Any
    should_stop: bool


class Snapshot:
    """A Trainer before a run: hashes of the plain data of module, callbacks and loggers, and parts.

    (The parts are those of the module.)
    """

    def __init__(self, trainer: Trainer) -> None:
        self._hashes = {key: hash(data) for key, data in _plain_data(trainer)}
        self._parts = dict(trainer.lightning_module.named_modules())
        self._children = {name: dict(children_of(part)) for name, part in self._parts.items()}

    def changes(self, trainer: Trainer) -> dict[_AttributeKey, bytes]:
        """The attributes that are new or have changed since, each pickled."""
        return {
            key: data for key, data in _plain_data(trainer) if self._hashes.get(key) != hash(data)
        }

    def changed_children(self) -> dict[str, dict[str, str | None]]:
        """By name of a part with other children now: what the names of these were before.

        That is empty for a child that the run has made.
        """
        names = {id(part): name for name, part in self._parts.items()} | {id(None): None}
        return {
            name: {key: names.get(id(child), "") for key, child in children_of(part).items()}
            for name, part in self._parts.items()
            if dict(children_of(part)) != self._children[name]  # (a class of TorchScript's own)
        }

    def set_children(self, changed: Mapping[str, Mapping[str, str | None]]) -> None:
        """Put parts of this rank's module where the driver's are; made ones are not here."""
        for owner, children in changed.items():
            table = children_of(self._parts[owner])
            mine = dict(table)
            table.clear()
            for key, name in children.items():
                if name != "":
                    table[key] = None if name is None else self._parts[name]
                elif key in mine:
                    table[key] = mine[key]


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
        children=before.changed_children(),
        loops=trainer.fit_loop.state_dict(),
        batches=batch_counts(trainer),
        state=trainer.state,
        should_stop=trainer.should_stop,
    )


def adopt_results(trainer: Trainer, results: TrainerResults, before: Snapshot) -> None:
    """On a worker, take the driver's results, but for attributes that this rank has changed itself.

    Args:
        trainer: the worker's Trainer.
        results: the driver's results; the attributes that are not taken are removed.
        before: the worker's own data before the run.
    """
    for key in before.changes(trainer):  # such as what its stages' hooks have noted
        results.attributes.pop(key, None)
    trainer.callback_metrics.update(results.callback_metrics)
    trainer.logged_metrics.update(results.logged_metrics)
    trainer.progress_bar_metrics.update(results.progress_bar_metrics)
    adopt_attributes(trainer, results)
    before.set_children(results.children)
    trainer.fit_loop.load_state_dict(dict(results.loops))
    load = partial(_refuse_unless_known, results.batches[0])
    set_batch_counts(trainer, results.batches, load)
    trainer.state = results.state
    trainer.should_stop = results.should_stop
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
    """On a worker, set attributes to the driver's values.

    Called before and after this rank's own ``teardown`` hooks: these may read what the run has
    left, and the driver's values have the effects of its own hooks already.
    """
    owners = dict(_owners(trainer))
    for (owner, name), data in results.attributes.items():
        if owner in owners:
            with suppress(Exception):  # a class may raise anything when it is unpickled
                vars(owners[owner])[name] = pickle.loads(data)


def _owners(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Objects whose attributes are sent, by name."""
    yield "module", trainer.lightning_module
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if datamodule is not None:
        yield "datamodule", datamodule
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    yield from ((f"callback {i}", callback) for i, callback in enumerate(callbacks))
    yield from ((f"logger {i}", logger) for i, logger in enumerate(trainer.loggers))


def _plain_data(trainer: Trainer) -> Iterator[tuple[_AttributeKey, bytes]]:
    for owner, thing in _owners(trainer):
        for name, value in [*vars(thing).items()]:
            if _is_of_interest(thing, name, value):
                data = _pickled(value)
                if data is not None:
                    yield (owner, name), data


def _is_of_interest(owner: Any, name: str, value: Any) -> bool:
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

        (Torch's own pickle contains addresses, so that equal tensors have different pickles.)
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
