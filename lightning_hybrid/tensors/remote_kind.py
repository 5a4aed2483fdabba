"""What a tensor of another rank is."""

from enum import Enum


class Kind(Enum):
    """What a tensor of another rank is to the LightningModule."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
