"""The public names of Lightning that this package uses; no other module of it imports Lightning.

They come from ``lightning`` or ``pytorch_lightning``: :mod:`lightning_hybrid._which_lightning`
decides.
Private names are in :mod:`lightning_hybrid._lightning_private`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_hybrid._which_lightning import MODULES, VARIABLE, Package, chosen

CHOSEN = chosen()
OTHER: Package = "lightning" if CHOSEN == "pytorch_lightning" else "pytorch_lightning"
CHOSEN_MODULE, OTHER_MODULE = MODULES[CHOSEN][0], MODULES[OTHER][0]

OTHER_PACKAGE = (
    f"This Trainer is of `{OTHER_MODULE}`, which takes no strategy made for `{CHOSEN_MODULE}`; "
    f"lightning_hybrid's are, in this process. Use one package everywhere (Trainer, "
    f"LightningModule, callbacks, loggers). If it is to be `{OTHER_MODULE}`: import it before "
    f"lightning_hybrid, and `{CHOSEN}` after both or not at all; or set the environment "
    f"variable {VARIABLE}={OTHER}."
)
"""Text of the error for a Trainer of the package of Lightning that this process does not use."""

if TYPE_CHECKING:  # the types of both packages are the same
    from lightning import fabric as fabric
    from lightning import pytorch as pytorch
else:
    pytorch, fabric = map(import_module, MODULES[CHOSEN])

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
Precision = pytorch.plugins.Precision
STEP_OUTPUT = pytorch.utilities.types.STEP_OUTPUT
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
rank_zero_info = pytorch.utilities.rank_zero.rank_zero_info
reset_seed = fabric.utilities.seed.reset_seed
