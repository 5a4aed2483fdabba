"""3D-ResAttNet for Alzheimer's disease classification: network, LightningModule and 3D Grad-CAM.

The names below are loaded on first use: most commands need no Lightning, which takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.classifier import ResAttNetClassifier
    from models.maps import GradCAM3D
    from models.resattnet import ResAttNet3D

__all__ = ["GradCAM3D", "ResAttNet3D", "ResAttNetClassifier"]


def __getattr__(name: str) -> Any:
    if name == "GradCAM3D":
        from models.maps import GradCAM3D

        return GradCAM3D
    if name == "ResAttNet3D":
        from models.resattnet import ResAttNet3D

        return ResAttNet3D
    if name == "ResAttNetClassifier":
        from models.classifier import ResAttNetClassifier

        return ResAttNetClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
