"""Every public name of Lightning in this package, from the package that the user has imported.

Lightning exists twice: as ``lightning``, and as ``pytorch_lightning`` with ``lightning_fabric``.
Both have the same names for different classes: a Trainer of one takes no strategy, callback or
LightningModule of the other. So one is chosen, once, when this package is imported. Private names
are in :mod:`lightning_hybrid._lightning_private`.
"""

import os
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from lightning_hybrid.errors import HybridError

Package = Literal["lightning", "pytorch_lightning"]

VARIABLE = "LIGHTNING_HYBRID_PACKAGE"
"""The environment variable that says which package, where imports do not or say the wrong one."""

_MODULES: dict[Package, tuple[str, str]] = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}


def choose(wanted: str | None, imported: Container[str], *, lightning_installed: bool) -> Package:
    """Which package this process uses.

    Args:
        wanted: the value of the environment variable, if it is set; it decides.
        imported: names of the modules that are imported. One package among them is the one; of
            both, ``lightning`` is.
        lightning_installed: whether ``lightning`` can be imported, should neither be yet.

    Raises:
        HybridError: ``wanted`` is neither of the two.
    """
    if wanted:
        if wanted not in _MODULES:
            raise HybridError(
                f"The environment variable {VARIABLE}={wanted!r} names no package of Lightning: "
                f"unset it, or set it to one of {', '.join(_MODULES)}."
            )
        return wanted
    if "lightning.pytorch" in imported:
        return "lightning"
    if "pytorch_lightning" in imported or not lightning_installed:
        return "pytorch_lightning"
    return "lightning"


CHOSEN = choose(
    os.environ.get(VARIABLE),
    sys.modules,
    lightning_installed=find_spec("lightning") is not None,
)
OTHER: Package = "lightning" if CHOSEN == "pytorch_lightning" else "pytorch_lightning"
CHOSEN_MODULE, OTHER_MODULE = _MODULES[CHOSEN][0], _MODULES[OTHER][0]


@contextmanager
def chosen_in_children() -> Iterator[None]:
    """Processes started inside choose the same package, whatever they import first.

    Unpickling imports this package, maybe before any Lightning.
    """
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = CHOSEN
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


if TYPE_CHECKING:  # the types of both packages are the same
    from lightning import fabric as fabric
    from lightning import pytorch as pytorch
else:
    pytorch, fabric = map(import_module, _MODULES[CHOSEN])

Accelerator = pytorch.accelerators.Accelerator
BatchSizeFinder = pytorch.callbacks.BatchSizeFinder
Callback = pytorch.Callback
CheckpointIO = pytorch.plugins.CheckpointIO
GradientAccumulationScheduler = pytorch.callbacks.GradientAccumulationScheduler
ClusterEnvironment = fabric.plugins.environments.ClusterEnvironment
DDPStrategy = pytorch.strategies.DDPStrategy
CombinedLoader = pytorch.utilities.CombinedLoader
DummyLogger = pytorch.loggers.logger.DummyLogger
FabricDDPStrategy = fabric.strategies.DDPStrategy
FabricMixedPrecision = fabric.plugins.MixedPrecision
FabricStrategyRegistry = fabric.strategies.STRATEGY_REGISTRY
LayerSync = pytorch.plugins.LayerSync
LightningDataModule = pytorch.LightningDataModule
LightningModule = pytorch.LightningModule
LightningOptimizer = pytorch.core.optimizer.LightningOptimizer
Logger = pytorch.loggers.Logger
MixedPrecision = pytorch.plugins.MixedPrecision
ModelPruning = pytorch.callbacks.ModelPruning
ParallelStrategy = pytorch.strategies.ParallelStrategy
PassThroughProfiler = pytorch.profilers.PassThroughProfiler
Precision = pytorch.plugins.Precision
STEP_OUTPUT = pytorch.utilities.types.STEP_OUTPUT
Strategy = pytorch.strategies.Strategy
StrategyRegistry = pytorch.strategies.StrategyRegistry
TensorBoardLogger = pytorch.loggers.TensorBoardLogger
TorchCheckpointIO = fabric.plugins.TorchCheckpointIO
TorchElasticEnvironment = fabric.plugins.environments.TorchElasticEnvironment
TorchSyncBatchNorm = pytorch.plugins.layer_sync.TorchSyncBatchNorm
Trainer = pytorch.Trainer
TrainerFn = pytorch.trainer.states.TrainerFn
TrainerStatus = pytorch.trainer.states.TrainerStatus
WeightAveraging = pytorch.callbacks.WeightAveraging
is_param_in_hook_signature = pytorch.utilities.signature_utils.is_param_in_hook_signature
is_overridden = pytorch.utilities.model_helpers.is_overridden
isolate_rng = pytorch.utilities.seed.isolate_rng
move_data_to_device = fabric.utilities.move_data_to_device
rank_zero_info = pytorch.utilities.rank_zero.rank_zero_info
reset_seed = fabric.utilities.seed.reset_seed
