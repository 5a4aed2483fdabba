"""Which package of Lightning this process uses.

Lightning exists twice: as ``lightning``, and as ``pytorch_lightning`` with ``lightning_fabric``.
Both have the same names for different classes: a Trainer of one takes no strategy, callback or
LightningModule of the other. So one is chosen, once.
"""

import os
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Literal

from lightning_hybrid.errors import HybridError

Package = Literal["lightning", "pytorch_lightning"]

VARIABLE = "LIGHTNING_HYBRID_PACKAGE"
"""The environment variable that says which package, where imports do not or say the wrong one."""

MODULES: dict[Package, tuple[str, str]] = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
"""Of each package the modules with the Trainer and with Fabric."""


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
        if wanted not in MODULES:
            raise HybridError(
                f"The environment variable {VARIABLE}={wanted!r} names no package of Lightning: "
                f"unset it, or set it to one of {', '.join(MODULES)}."
            )
        return wanted
    for package, modules in MODULES.items():
        if any(module in imported for module in modules):
            return package
    return "lightning" if lightning_installed else "pytorch_lightning"


@cache
def chosen() -> Package:
    """The package of this process: what is imported at the first call of this function."""
    installed = find_spec("lightning") is not None
    return choose(os.environ.get(VARIABLE), sys.modules, lightning_installed=installed)


@contextmanager
def chosen_in_children() -> Iterator[None]:
    """Processes started inside choose the same package, whatever they import first.

    Unpickling imports this package, maybe before any Lightning.
    """
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = chosen()
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
