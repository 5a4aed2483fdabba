"""What `transformers` does in the first call of a model, done before it.

A model that can return the hidden states or the router's logits of its layers installs hooks for
that in its first call, once, behind a lock, which TorchDynamo does not enter.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def install_hooks(network: nn.Module) -> None:
    """Install what models of `transformers` in a network install at their first call."""
    library: Any = sys.modules.get("transformers")
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    if library is None or install is None:
        return
    for module in network.modules():
        if isinstance(module, library.PreTrainedModel):
            install(module)
