"""Read and write quantities with their unit: `16 GB`, `100 Gbit/s`, `5 us`."""

import re
from typing import Any

from lightning_hybrid.errors import PlanError

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

UNITS: dict[str, dict[str, float]] = {
    "memory": {f"{p}B": f for p, f in {**_PREFIXES, **_BINARY}.items()},
    "compute": {f"{p}FLOP/s": f for p, f in _PREFIXES.items()},
    "bandwidth": {f"{p}B/s": f for p, f in {**_PREFIXES, **_BINARY}.items()}
    | {f"{p}bit/s": f / 8 for p, f in _PREFIXES.items()},
    "latency": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
}
"""By quantity, its units with their size in bytes, FLOP/s, bytes per second or seconds."""
_EXAMPLES = {
    "memory": "'16 GB'",
    "compute": "'15.7 TFLOP/s'",
    "bandwidth": "'25 GB/s' or '100 Gbit/s'",
    "latency": "'5 us'",
}
_NUMBER = re.compile(r"\s*([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(.*?)\s*")


def parse(quantity: str, value: Any, where: str) -> float:
    """Read a quantity, which is a number with its unit.

    Args:
        quantity: A key of `UNITS`.
        value: What a file has there: a text such as `"16 GB"`. All else is refused, also a number.
        where: Name of the place that it is from, for the text of an error.

    Returns:
        The value in bytes, FLOP/s, bytes per second or seconds.

    Raises:
        PlanError: there is no number, no unit or an unknown one, or the number is negative (or 0,
            except for a latency).
    """
    units, match = UNITS[quantity], _NUMBER.fullmatch(str(value))
    if match is None or match[2] not in units:
        raise PlanError(
            f"{where} is {value!r}, which is no {quantity}: write a number and its unit, such as "
            f"{_EXAMPLES[quantity]} (known: {', '.join(units)})"
        )
    number = float(match[1])
    if number < 0 or (number == 0 and quantity != "latency"):
        raise PlanError(f"{where} is {value!r}: a {quantity} of more than 0 is needed")
    return number * units[match[2]]


def spell(quantity: str, value: float) -> str:
    """Write a quantity with the largest decimal unit that leaves a number of at least 1.

    Args:
        quantity: A key of `UNITS`.
        value: Bytes, FLOP/s, bytes per second or seconds.
    """
    # decimal units only, as in data sheets of memory and links
    units = {u: f for u, f in UNITS[quantity].items() if "i" not in u and u != "µs"}
    fitting = [unit for unit, factor in units.items() if value >= factor * (1 - 1e-12)]
    unit = max(fitting, key=units.__getitem__) if fitting else min(units, key=units.__getitem__)
    return f"{value / units[unit]:.12g} {unit}"
