"""Devices `cuda:0` to `cuda:3` for a torch without CUDA; see `emulated_cuda.cpp`.

What is seen on them: tensors that meet on two devices, what waits for a device (copies to the host,
`.item()`), which device holds how many bytes. What is not: streams, which here are always done,
kernels of CUDA and their numbers, and everything of NCCL but its rules.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

DEVICES = 4
BYTES = 4 * 2**30
"""Memory of a device, as far as anybody asks for it."""
SOURCE = Path(__file__).with_suffix(".cpp")
BUILT = Path(__file__).parents[2] / "build" / "as_gpu"


class CannotEmulate(Exception):
    """There are no emulated devices here; the message says why."""


class Events:
    """What the host has asked of devices since the beginning, by the line of Python that asked.

    ``"device to host"``, ``"host to device"``, ``"device to device"``: copies; ``"item"``; and
    ``"blocks"``: results whose size or value the host waits for.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, kind: str, operator: str) -> None:
        frames = traceback.extract_stack()
        mine = [f for f in frames if "/site-packages/" not in f.filename and f.filename != __file__]
        place = f"{Path(mine[-1].filename).name}:{mine[-1].lineno}" if mine else "no Python"
        with self._lock:
            self.counts[kind, f"{operator} at {place}"] += 1

    @contextmanager
    def during(self) -> Iterator[Counter[tuple[str, str]]]:
        """Inside, count; afterwards what is given has the events of this time."""
        found: Counter[tuple[str, str]] = Counter()
        with self._lock:
            before = self.counts.copy()
        yield found
        with self._lock:
            found.update(self.counts - before)


WAITS = ("device to host", "item", "blocks")
"""The kinds of events for which the host waits until a device has done all that it was given."""


EVENTS = Events()


def build() -> Path:
    """The library for this torch, built if it is not there yet (half a minute at most).

    Raises:
        CannotEmulate: there is no compiler, or it fails.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise CannotEmulate(f"torch {torch.__version__} is built for GPUs: see the tests `gpu`")
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = BUILT / f"emulated_cuda-{torch.__version__}-{key}.so"
    if library.is_file():
        return library
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotEmulate("there is no C++ compiler (CXX, g++, clang++)")
    BUILT.mkdir(parents=True, exist_ok=True)
    place = Path(torch.__file__).parent
    part = library.with_suffix(f".{os.getpid()}")  # two builds at once do not meet
    command = [compiler, "-shared", "-fPIC", "-O1", "-std=c++20", "-w", SOURCE, "-o", part]
    command += ["-I", place / "include", "-L", place / "lib", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise CannotEmulate(f"with torch {torch.__version__}, {compiler} fails: {first}")
    part.replace(library)
    return library


@cache
def emulate() -> None:
    """Give this process the devices, for as long as it runs.

    Raises:
        CannotEmulate: see :func:`build`.
    """
    library = ctypes.CDLL(str(build()))
    for name in ("held_bytes", "peak_bytes"):
        getattr(library, name).restype = ctypes.c_int64
    _keep.append(listener := _LISTENER(lambda *words: EVENTS.add(*(w.decode() for w in words))))
    _keep.append(library)
    library.start(DEVICES, listener)
    _fill_in(library)
    _operators()


_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
_keep: list[Any] = []


class _Event:
    """Passes when it is recorded, since kernels are over when their calls return."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.passed_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.passed_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        EVENTS.add("blocks", "Event.synchronize")

    def wait(self, stream: Any = None) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return (other.passed_s - self.passed_s) * 1e3


class _Stream:
    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        EVENTS.add("blocks", "Stream.synchronize")

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or torch.cuda.Event()


def _fill_in(library: Any) -> None:  # noqa: C901 (a list of names)
    """What a build with CUDA has in `torch._C`, and `torch.cuda` asks for."""
    cuda, stream = torch.cuda, lambda device=None: torch.cuda.Stream()

    # (Python's own functions: TorchDynamo wants all of them to have a hash)
    def current() -> int:
        return library.current_device()

    def exchange(device: int) -> int:
        return library.exchange_device(device)

    def index(device: Any) -> int:
        return cuda._utils._get_device_index(device, optional=True)

    def memory(device: int) -> dict[str, Any]:
        now, peak = library.held_bytes(device), library.peak_bytes(device)
        return {"allocated_bytes": {"all": {"current": now, "peak": peak}}}

    for name, value in {
        "init": lambda: None,
        "getDeviceCount": lambda: DEVICES,
        "getDevice": current,
        "setDevice": exchange,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": lambda device: exchange(device) if device >= 0 else current(),
        "synchronize": lambda: EVENTS.add("blocks", "synchronize"),
        "emptyCache": lambda: None,
        "memoryStats": memory,
        "resetPeakMemoryStats": lambda device: library.reset_peak(device),
        "getArchFlags": lambda: "sm_90",
        "getCurrentRawStream": lambda device: 0,
        "isCurrentStreamCapturing": lambda: False,
        "hasPrimaryContext": lambda device: True,
        "canDeviceAccessPeer": lambda one, other: True,
    }.items():
        setattr(torch._C, f"_cuda_{name}", value)
    for kind, emulated in ((cuda.Event, _Event), (cuda.Stream, _Stream)):
        for name, value in vars(emulated).items():
            if callable(value) or isinstance(value, staticmethod):
                setattr(kind, name, value)
    properties = SimpleNamespace(
        name="emulated GPU", major=9, minor=0, total_memory=BYTES, multi_processor_count=1
    )
    for name, value in {
        "_exchange_device": torch._C._cuda_exchangeDevice,
        "_maybe_exchange_device": torch._C._cuda_maybeExchangeDevice,
        "_cudart": "emulated",
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_stream": stream,
        "default_stream": stream,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "mem_get_info": lambda device=None: (BYTES - library.held_bytes(index(device)), BYTES),
        "default_generators": tuple(torch.Generator(f"cuda:{n}") for n in range(DEVICES)),
        "_initialized": True,
    }.items():
        setattr(cuda, name, value)
    cloned = torch.UntypedStorage.clone

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return cloned(storage)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return source.clone().untyped_storage()

    resized = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resized(storage, size)
        library.resize_storage(ctypes.c_void_p(storage._cdata), ctypes.c_size_t(size))
        return storage

    create: Any = torch.UntypedStorage.__new__

    def made(kind: type, *arguments: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return create(kind, *arguments, device=device, **options)
        return torch.empty(*arguments, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.clone, torch.UntypedStorage.resize_ = clone, resize
    torch.UntypedStorage.__new__ = staticmethod(made)
    torch.accelerator.empty_cache = lambda: None
    torch.version.cuda = "0.0"
    torch.backends.cudnn.is_acceptable = lambda tensor: False


def _operators() -> None:
    """Those of which the CPU's kernel is another one than a GPU's, or there is none."""
    library = torch.library.Library("aten", "IMPL")
    _keep.append(library)

    def dropout(value: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False:
            return value.clone(), torch.ones_like(value, dtype=torch.bool)
        mask = torch.empty_like(value).bernoulli_(1 - p)  # as the CPU draws it
        return value * (mask / (1 - p)), mask.bool()

    def lstm_cell(
        of_input: Tensor,
        of_hidden: Tensor,
        cell: Tensor,
        input_bias: Tensor | None = None,
        hidden_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gates = of_input + of_hidden
        if input_bias is not None and hidden_bias is not None:
            gates = gates + input_bias + hidden_bias
        i, f, g, o = gates.chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        after = f * cell + i * g
        return o * after.tanh(), after, torch.cat([i, f, g, o], 1)

    def lstm_cell_backward(
        of_hidden: Tensor | None,
        of_cell: Tensor | None,
        cell: Tensor,
        after: Tensor,
        gates: Tensor,
        has_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        i, f, g, o = gates.chunk(4, 1)
        of_hidden = torch.zeros_like(cell) if of_hidden is None else of_hidden
        into = of_hidden * o * (1 - after.tanh() ** 2)
        into = into if of_cell is None else into + of_cell
        parts = [into * g * i * (1 - i), into * cell * f * (1 - f), into * i * (1 - g**2)]
        found = torch.cat([*parts, of_hidden * after.tanh() * o * (1 - o)], 1)
        return found, into * f, found.sum(0) if has_bias else None

    library.impl("native_dropout", dropout, "CUDA")
    library.impl("_fused_sdp_choice", lambda *_, **__: 0, "CUDA")  # plain attention
    library.impl("_thnn_fused_lstm_cell", lstm_cell, "CUDA")
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward, "CUDA")
