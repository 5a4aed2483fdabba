"""What notes in which process it happens: an operation of a stage, a gradient that has arisen.

Hooks of modules run where the network's Python runs, on the driver. What a stage computes on
another rank is seen by an operation alone: the networks of tests call one in their stages. On a
worker, where no code of a test runs, it leaves word by itself, and fails where ``config.json`` of
the folder says so.
"""

import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_hybrid.graph.row_rules import CUSTOM_RULES, pointwise

_AT_START = os.environ.get("LOCAL_RANK")
LISTENERS: list[Callable[[str, bool], None]] = []
"""Called with the name that a run of the operation was given, and whether it is trained."""
RUNS: Counter[str] = Counter()
"""On a worker: how often each name was noted, in forwards and (with a dash) in backwards."""


def rank() -> int:
    """Among all processes; inside of a run the variable counts replicas.

    (A process that is spawned has it when all is imported.)
    """
    return int(_AT_START or os.environ.get("LOCAL_RANK", "0"))


class OnPurpose(Exception):
    """Python cannot pickle it by itself."""

    def __init__(self, step: int, where: str) -> None:
        super().__init__(f"on purpose in {where} of step {step}")
        self.step = step


def fault(config: dict[str, Any], where: str, step: int) -> None:
    """Fail on purpose, where the configuration says so."""
    wanted = config.get("fault")
    if wanted == {"where": where, "step": step, "rank": rank()}:
        Path("fault").write_text(str(time.monotonic()))
        raise ValueError("this error is on purpose")
    if wanted == {"where": where, "step": step, "rank": rank(), "busy": True}:
        Path("busy").touch()
        time.sleep(600)


def is_at_work() -> None:
    """Leave word that this process trains."""
    here = Path(f"pid.{rank()}")
    if not here.exists():
        Path(f"writing{os.getpid()}").write_text(str(os.getpid()))
        Path(f"writing{os.getpid()}").rename(here)


def _on_a_worker(name: str, where: str) -> None:
    RUNS.update([name if where == "forward" else f"-{name}"])
    with suppress(FileNotFoundError):
        Path("fails_in_stage").unlink()
        raise OnPurpose(0, "stage")
    file = Path("config.json")
    config = json.loads(file.read_text()) if file.exists() else {}
    if config.get("weighs") and RUNS[name] == 3:
        Path(f"held{rank()}.json").write_text(json.dumps(_held()))
    if "network" in config and RUNS[name] == 10:
        is_at_work()
        fault(config, where, 3)
    ran = Path(f"ran{rank()}.json")
    if "network" in config:
        ran.write_text(json.dumps(RUNS))


def _held() -> int:
    """Bytes of all parameters of this process."""
    weights = [each for each in gc.get_objects() if issubclass(type(each), nn.Parameter)]
    return sum(w.untyped_storage().nbytes() for w in weights if not w.is_meta)


def _is_worker() -> bool:
    """Whether nobody listens here: a server, or a process that has become one."""
    return not LISTENERS and rank() > 0


_NODES: list[Any] = []  # torch forgets the hooks of a node that nobody keeps


def hear_of_gradients(parameter: nn.Parameter, note: Callable[[], object]) -> None:
    """Have ``note`` called in the process in which a gradient is added to ``parameter.grad``.

    Hooks on a parameter are the user's, which the strategy calls once for all pieces of a gradient;
    the node that adds the pieces is nobody's.
    """

    def heard(*_: Any) -> None:
        note()

    if type(parameter) is not nn.Parameter:  # it has no numbers yet, and will be another tensor
        parameter.register_post_accumulate_grad_hook(heard)
        return
    node: Any = get_gradient_edge(parameter).node
    node.register_hook(heard)
    _NODES.append(node)


@torch.library.custom_op("ran_here::note", mutates_args=())
def note(value: Tensor, name: str, trained: bool) -> Tensor:
    """``value`` itself, as a copy."""
    for listener in LISTENERS:
        listener(name, trained)
    if trained and _is_worker():
        _on_a_worker(name, "forward")
    return value.clone()


@note.register_fake
def _(value: Tensor, name: str, trained: bool) -> Tensor:
    return torch.empty_like(value)


@torch.library.custom_op("ran_here::tick", mutates_args=())
def tick(value: Tensor) -> Tensor:
    """A copy, which has no backward; delayed schedules refuse that of :func:`note`."""
    if _is_worker():
        _on_a_worker("tick", "forward")
    return value.clone()


tick.register_fake(torch.empty_like)
# (else batches would not be split where one of these is)
CUSTOM_RULES.update({"ran_here.note": pointwise, "ran_here.tick": pointwise})


def _name(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.name = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    if _is_worker():
        _on_a_worker(ctx.name, "backward")
    return gradient, None, None


note.register_autograd(_backward, setup_context=_name)


def noting(name: str, *hooked: Any) -> Any:
    """A forward hook (with ``name`` bound) that has the module's output noted."""
    output = hooked[-1]
    if not isinstance(output, Tensor):
        return None
    return note(output, name, torch.is_grad_enabled())
