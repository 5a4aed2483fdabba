"""The links of one rank to its two neighbours on the ring of its replica."""

import torch

from lightning_hybrid.runtime.mesh import Mesh
from lightning_hybrid.runtime.transport import Control, Link


class Links:
    """Four links, one per direction and side, and the control link.

    Args:
        mesh: the groups.
        device: where received tensors live.

    Attributes:
        previous: position of the rank that this one's activations come from.
        next: position of the rank that they go to.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        place = mesh.place
        names = [str(place.at(position)) for position in range(place.stages)]
        self.previous = (place.position - 1) % place.stages
        self.next = (place.position + 1) % place.stages
        self.control = Control(mesh.control, names)
        before, after = names[self.previous], names[self.next]
        # in each pair the sender of the activations has index 0
        self.activations_in = Link(mesh.activations_in, 1, before, device)
        self.activations_out = Link(mesh.activations_out, 0, after, device)
        self.gradients_in = Link(mesh.gradients_in, 0, after, device)
        self.gradients_out = Link(mesh.gradients_out, 1, before, device)
