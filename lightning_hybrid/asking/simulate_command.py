"""`lightning-hybrid simulate`: predict the speed-up of a network for each number of devices."""

import argparse
from collections.abc import Callable, Mapping

from lightning_hybrid.asking.study import Study, add_study_options, make_study
from lightning_hybrid.asking.terminal import short, show_table, terminal
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import Shape, recommended

_KINDS: dict[str, Callable[[Shape], bool]] = {
    "data parallel": lambda shape: shape.arrangement.size == 1,
    "pipeline": lambda shape: shape.arrangement.replicas == 1,
    "hybrid": lambda shape: True,
}
_MOST_TRIED = 128
"""For a wanted speed-up every number of devices is tried if the cluster has at most so many."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lightning-hybrid simulate` to a parser."""
    add_study_options(parser)
    parser.add_argument("--speed-up", type=float, metavar="X", help="wanted, over one device")


def run(options: argparse.Namespace) -> None:
    """Run `lightning-hybrid simulate`: print the predicted speed-up for each number of devices.

    Args:
        options: what the parser has made of the command line, with the options of `add_options`.

    Raises:
        PlanError: the network or the cluster is refused, or the network fits on no number of
            devices.
    """
    wanted: float | None = options.speed_up
    if wanted is not None and wanted <= 0:
        raise PlanError(f"--speed-up {wanted}: a number of more than 0 is needed")
    study = make_study(options)
    most = len(study.cluster.devices)
    shown = _device_counts(most)
    counts = shown if wanted is None or most > _MOST_TRIED else [*range(1, most + 1)]
    fitting = {n: [shape for shape in study.shapes(n) if shape.fits] for n in counts}
    best = {number: shapes[0] for number, shapes in fitting.items() if shapes}
    if not best:
        recommended(study.shapes(most))  # raises with what is missing
    rows = [_row(study, number, fitting[number]) for number in shown]
    columns = ("devices", *_KINDS, "samples/s", "efficiency", "shape")
    title = "Speed-up over one device, and the fastest shape"
    console = terminal()
    show_table(console, title, columns, rows, left=["shape"])
    console.print(study.origin)
    least = min(best)
    console.print("It fits on one device." if least == 1 else f"It fits from {least} devices on.")
    if wanted is not None:
        console.print(_answer(study, best, wanted))


def _row(study: Study, number: int, shapes: list[Shape]) -> list[str]:
    """Make the cells of the table's row for a number of devices.

    Args:
        study: the study.
        number: number of devices.
        shapes: the shapes that fit on so many devices, the fastest first; empty: none fits.

    Returns:
        The cells in the order of the columns: the number of devices; the speed-up of the fastest
        shape of each of `_KINDS`; samples per second, efficiency and text of the fastest shape.
    """
    firsts = [next(filter(is_of, shapes), None) for is_of in _KINDS.values()]
    cells = [str(number), *("-" if s is None else f"{study.speed_up(s):.2f}" for s in firsts)]
    if not shapes:
        return [*cells, "-", "-", "does not fit"]
    efficiency = f"{study.speed_up(shapes[0]) / number:.0%}"
    return [*cells, short(shapes[0].samples_per_s), efficiency, str(shapes[0])]


def _answer(study: Study, best: Mapping[int, Shape], wanted: float) -> str:
    """Return a sentence for the user with the least number of devices for a wanted speed-up.

    Args:
        study: the study.
        best: by number of devices, in ascending order, the fastest shape that fits.
        wanted: the speed-up over one device.
    """
    for count, shape in best.items():
        if study.speed_up(shape) >= wanted:
            return (
                f"You need {count} device{'s' * (count > 1)}: {shape}, "
                f"{short(shape.samples_per_s)} samples/s, "
                f"{study.speed_up(shape):.2f} times one device."
            )
    top = max(best.values(), key=lambda shape: shape.samples_per_s)
    return (
        f"No number up to {max(best)} is enough: the most is {short(top.samples_per_s)} samples/s, "
        f"{study.speed_up(top):.2f} times one device ({top}). Describe a larger cluster, or one "
        "with faster links."
    )


def _device_counts(most: int) -> list[int]:
    """Return the numbers of devices to show: all up to 8, then powers of two, and ``most``."""
    counts = list(range(1, min(most, 8) + 1))
    while counts[-1] * 2 <= most and counts[-1] >= 8:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]
