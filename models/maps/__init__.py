"""Maps of where in a volume a class score comes from, all with the same call and the same form.

A map is (B, 1, D, H, W) float32 on the grid of the volume, never negative, divided by its maximum
sample by sample; one that is zero everywhere stays zero (`is_empty`). High means evidence for the
class. The networks run in evaluation mode and are left as they were found: modes, gradients, hooks.
"""

from models.maps.attention import AttentionMap3D
from models.maps.common import is_empty
from models.maps.gradcam import GradCAM3D, GradCAMPlusPlus3D, HiResCAM3D
from models.maps.gradient import InputGradient3D, IntegratedGradients3D, SmoothGrad3D
from models.maps.occlusion import Occlusion3D

__all__ = [
    "AttentionMap3D",
    "GradCAM3D",
    "GradCAMPlusPlus3D",
    "HiResCAM3D",
    "InputGradient3D",
    "IntegratedGradients3D",
    "Occlusion3D",
    "SmoothGrad3D",
    "is_empty",
]
