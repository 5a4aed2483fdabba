"""Captures the Python of a module as a graph, through TorchDynamo."""

from lightning_hybrid.capture.capture import Capture, NotCaptured, kind_of
from lightning_hybrid.capture.dynamo_reasons import FAILS
from lightning_hybrid.capture.own_classes import plain
from lightning_hybrid.capture.watched_calls import (
    candidates,
    is_watched,
    own_forward,
    unwatch,
    watch,
)
