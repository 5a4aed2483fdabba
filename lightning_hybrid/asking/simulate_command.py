"""`lightning-hybrid simulate`: predict the speed-up of a network for each number of devices."""

import argparse

from rich.console import Console

from lightning_hybrid.asking.shapes import Shape, fastest
from lightning_hybrid.asking.study import KINDS, Study, add_study_options, device_counts, make_study
from lightning_hybrid.asking.terminal import short, show_table, terminal
from lightning_hybrid.errors import PlanError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    add_study_options(parser)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--speed-up", type=float, metavar="X", help="wanted, over one device")
    wanted.add_argument("--samples-per-s", type=float, metavar="X", help="wanted throughput")


def run(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        PlanError: the network or the cluster is refused, or the network fits on no number of
            devices.
    """
    wanted = options.speed_up or options.samples_per_s
    if wanted is not None and wanted <= 0:
        raise PlanError(f"{wanted} is wanted: a number of more than 0 is needed")
    study = make_study(options)
    most = len(study.cluster.devices)
    # all numbers if a number of devices is asked for
    counts = device_counts(most) if wanted is None or most > 128 else [*range(1, most + 1)]
    curves = study.curves(counts)
    best = dict(zip(counts, curves["hybrid"]))
    if not any(best.values()):
        fastest(study.shapes(most))  # raises with what is missing
    console = terminal()
    shown = device_counts(most)
    _print_table(console, study, {n: [curves[k][counts.index(n)] for k in KINDS] for n in shown})
    console.print(study.origin)
    fits = next(count for count, shape in best.items() if shape is not None)
    console.print("It fits on one device." if fits == 1 else f"It fits from {fits} devices on.")
    if wanted is not None:
        console.print(_answer(study, best, options))


def _answer(study: Study, best: dict[int, Shape | None], options: argparse.Namespace) -> str:
    """A sentence with the least number of devices that reach the wanted speed."""
    for count, shape in best.items():
        if shape is None:
            continue
        speed_up, rate = study.speed_up(shape), shape.samples_per_s
        if speed_up >= (options.speed_up or 0) and rate >= (options.samples_per_s or 0):
            return (
                f"You need {count} device{'s' * (count > 1)}: {shape}, {short(rate)} samples/s, "
                f"{speed_up:.2f} times one device."
            )
    fitting = [shape for shape in best.values() if shape is not None]
    top = max(fitting, key=lambda shape: shape.samples_per_s)
    return (
        f"No number up to {max(best)} is enough: the most is {short(top.samples_per_s)} samples/s, "
        f"{study.speed_up(top):.2f} times one device ({top}). Describe a larger cluster, or one "
        "with faster links."
    )


def _print_table(console: Console, study: Study, rows: dict[int, list[Shape | None]]) -> None:
    cells = []
    for count, shapes in rows.items():
        best = shapes[-1]
        speed_ups = ["-" if shape is None else f"{study.speed_up(shape):.2f}" for shape in shapes]
        last = ["-", "-", "does not fit"]
        if best is not None:
            last = [short(best.samples_per_s), f"{study.speed_up(best) / count:.0%}", str(best)]
        cells.append([str(count), *speed_ups, *last])
    columns = ("devices", *KINDS, "samples/s", "efficiency", "shape")
    title = "Speed-up over one device, and the fastest shape"
    show_table(console, title, columns, cells, left=["shape"])
