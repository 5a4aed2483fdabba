"""Every error that this package raises by itself.

::

    HybridError                     something this package noticed
    ├── NetworkError                about the network of the LightningModule
    │   ├── DeferredError           weights made in configure_model are not here, or cannot be made
    │   ├── NetworkNotFoundError    no call of a module that owns parameters was seen
    │   └── StitchError             the stages do not compute what the network computes
    ├── AllocationError             no valid placement of the partitions on the devices
    ├── PlanError                   a plan that contradicts itself, the network or the machine
    └── RemoteError                 another rank failed; its traceback is in the text. Also the
                                    cause of exceptions that came from another rank as what they are
"""


class HybridError(RuntimeError):
    """Base class of all errors that this package raises by itself."""


class NetworkError(HybridError):
    """The network cannot be captured, cut or called as asked."""


class DeferredError(NetworkError):
    """Weights of a module from ``configure_model`` are not on this rank, or cannot be made."""


class NetworkNotFoundError(NetworkError):
    """No call of a module that owns parameters was seen, so there is no network to cut."""


class StitchError(NetworkError):
    """The stages, run one after the other, do not give the output of the network."""


class AllocationError(HybridError, ValueError):
    """The partitions cannot be placed on the devices."""


class PlanError(HybridError, ValueError):
    """A plan contradicts itself, the network or the machine."""


class RemoteError(HybridError):
    """Another rank failed first; the text holds its rank, its stage and its traceback."""
