"""What the driver does with the user's code: network calls, weights, gradients, optimizers."""

from lightning_hybrid.driver.after_run import bring_here
from lightning_hybrid.driver.discovery import Discovery
from lightning_hybrid.driver.driver import Driver
from lightning_hybrid.driver.foreseen_calls import LookAhead
from lightning_hybrid.driver.network_options import DriverOptions, NetworkOptions, Planner
from lightning_hybrid.driver.streamed_calls import Batches
from lightning_hybrid.driver.weights import present_bytes

__all__ = [
    "Batches",
    "Discovery",
    "Driver",
    "DriverOptions",
    "LookAhead",
    "NetworkOptions",
    "Planner",
    "bring_here",
    "present_bytes",
]
