"""Refuse the strategy's names, with advice, in the package of Lightning that is not used.

Lightning exists as ``lightning`` and as ``pytorch_lightning``. If both are imported, the Trainer of
the other one would only say that it does not know the name of the strategy.
"""

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from lightning_hybrid._lightning import CHOSEN, CHOSEN_MODULE, OTHER, OTHER_MODULE, VARIABLE
from lightning_hybrid.errors import HybridError

OTHER_PACKAGE = (
    f"This Trainer is of `{OTHER_MODULE}`, which takes no strategy made for `{CHOSEN_MODULE}`; "
    f"lightning_hybrid's are, in this process. Use one package everywhere (Trainer, "
    f"LightningModule, callbacks, loggers). If it is to be `{OTHER_MODULE}`: import it before "
    f"lightning_hybrid, and `{CHOSEN}` after both or not at all; or set the environment "
    f"variable {VARIABLE}={OTHER}."
)
"""Text of the error for a Trainer of the package that is not used."""


def refuse_in_other_package(names: Iterable[str]) -> None:
    """Register ``names`` with the package that is not used, if it is imported, to refuse them."""
    strategies = sys.modules.get(f"{OTHER_MODULE}.strategies")
    if strategies is not None:
        for name in names:
            strategies.StrategyRegistry.register(name, _refuse, "refused", override=True)


def _refuse(**_: Any) -> NoReturn:
    raise HybridError(OTHER_PACKAGE)
