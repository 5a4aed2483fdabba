"""Which gradients are not final yet, between a backward pass and their averaging."""


class Unsettled:
    """What backward passes, and penalties on remote parameters, have added to.

    Attributes:
        networks: numbers of the networks whose gradients are not averaged over the replicas yet.
        borrowed: whether borrowers may have gradients that the owners of tied parameters lack.
    """

    def __init__(self) -> None:
        self.networks: set[int] = set()
        self.borrowed = False

    def note(self, network: int, *, averaged: bool) -> None:
        """Note that a backward pass has added to the gradients of a network.

        Args:
            network: its number.
            averaged: the pass itself averages them.
        """
        self.borrowed = True
        if not averaged:
            self.networks.add(network)
