"""3D-ResAttNet for Alzheimer's disease classification: network, LightningModule and 3D Grad-CAM."""

from models.classifier import ResAttNetClassifier
from models.maps import GradCAM3D
from models.resattnet import ResAttNet3D

__all__ = ["GradCAM3D", "ResAttNet3D", "ResAttNetClassifier"]
