"""The driver of a replica: network calls, weights, gradients and optimizers of the user's code."""

from lightning_hybrid.driver.discovery import Discovery
from lightning_hybrid.driver.driver import Driver
from lightning_hybrid.driver.foreseen_calls import ForeseenCalls
from lightning_hybrid.driver.gradient_clipping import GradientClipping
from lightning_hybrid.driver.network_options import DriverOptions, Planner
from lightning_hybrid.driver.optimizer_kinds import register_optimizer
from lightning_hybrid.driver.optimizer_state_dicts import OptimizerStateDicts
from lightning_hybrid.driver.progress import StartProgress
from lightning_hybrid.driver.streamed_calls import Batches
from lightning_hybrid.driver.weights import bring_here, present_bytes
