"""Choose which package of Lightning this process uses.

Lightning exists twice: as ``lightning``, and as ``pytorch_lightning`` with ``lightning_fabric``.
Both have the same names for different classes: a Trainer of one package takes no strategy, callback
or LightningModule of the other. So each process chooses one of them, once.
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
"""Environment variable with the name of the package of Lightning to use, whatever is imported."""

MODULES: dict[Package, tuple[str, str]] = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
"""For each package the name of its module with the Trainer, and of its module with Fabric."""


def choose(wanted: str | None, imported: Container[str], *, lightning_installed: bool) -> Package:
    """Return which package of Lightning to use, from what is asked for, imported and installed.

    Args:
        wanted: the value of the environment variable :data:`VARIABLE`, which decides; ``None`` or
            empty: it is not set, and imports decide.
        imported: names of the modules that this process has imported. If one package is among
            them, that is used; if both are, ``lightning``.
        lightning_installed: whether ``lightning`` is installed. If neither package is imported, it
            is used where it is installed, and ``pytorch_lightning`` elsewhere.

    Raises:
        HybridError: ``wanted`` names neither package.
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
    """Return the package of Lightning that this process uses; see :func:`choose`.

    The first call decides, by what is imported then; later calls return the same.
    """
    installed = find_spec("lightning") is not None
    return choose(os.environ.get(VARIABLE), sys.modules, lightning_installed=installed)


@contextmanager
def chosen_in_children() -> Iterator[None]:
    """Inside, set the environment variable so that started processes use the same package.

    They might choose the other one: unpickling imports `lightning_hybrid`, possibly before any
    package of Lightning.
    """
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = chosen()
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
