"""What `transformers` does in the first call of a model, done before it.

A model that can return the hidden states or the router's logits of its layers installs hooks for
that in its first call, once, behind a lock, which TorchDynamo does not enter.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_LOCK = "_hook_installation_lock"


def installs_hooks(reason: str, network: nn.Module) -> bool:
    """Install what models of `transformers` in a network would install in this call.

    Args:
        reason: why a call could not be captured.
        network: what was called.

    Returns:
        Whether that was the reason, and has been done now.
    """
    library: Any = sys.modules.get("transformers")
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    if _LOCK not in reason or library is None or install is None:
        return False
    models = [m for m in network.modules() if isinstance(m, library.PreTrainedModel)]
    done = "_output_capturing_hooks_installed"
    missing = [model for model in models if not getattr(model, done, False)]
    for model in missing:
        install(model)
    return bool(missing)
