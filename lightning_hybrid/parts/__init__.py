"""Parts of a run: each does something that a run does only where a user has asked for it."""

from lightning_hybrid.parts.choice import parts_of
from lightning_hybrid.parts.coming_batches import refuse_streaming
from lightning_hybrid.parts.lost_replicas import survives_losses
