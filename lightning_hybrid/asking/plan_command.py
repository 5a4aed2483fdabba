"""`lightning-hybrid plan`: find the fastest shape for a network on a cluster, and its plan.

A shape is the numbers of replicas, devices, stages and micro-batches of a run.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from operator import truediv

from lightning_hybrid.asking.study import Study, add_study_options, make_study
from lightning_hybrid.asking.terminal import short, show_table, terminal, write
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import (
    ClusterDescription,
    Plan,
    Shape,
    plan_page,
    plans_of,
    recommended,
    spell,
)
from lightning_hybrid.report import table

_SHAPES = "Shapes, the best first"
_REPLICAS = "Replicas, each with its own share"
_SHOWN = 8
"""Largest number of shapes in the table."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lightning-hybrid plan` to a parser."""
    add_study_options(parser)
    parser.add_argument("--devices", type=int, help="how many of the cluster's; default: all")
    parser.add_argument("--json", metavar="FILE", help="write the plan, for HybridGabraStrategy")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures")


def run(options: argparse.Namespace) -> None:
    """Run `lightning-hybrid plan`: find the fastest plan for a network on a cluster, and print it.

    Args:
        options: what the parser has made of the command line, with the options of `add_options`.

    Raises:
        PlanError: the network, the cluster or the number of devices is refused, or nothing fits.
    """
    study = make_study(options)
    count = _count(options.devices, study)
    shapes = study.shapes(count)
    best = recommended(shapes)
    plans = plans_of(best, study.costs_of, study.cluster.take(count), study.batch)
    used = best.arrangement.used
    cluster = study.cluster.pick(used)
    plan, unlike = with_limits(plans, cluster), _replicas(plans, cluster)
    samples = f"{study.batch} sample{'s' * (study.batch > 1)}"
    facts = (
        f"{study.target.name} on {count} of {study.cluster.name} "
        f"({study.cluster.devices[0].name}); each replica takes {samples} a step.",
        f"{short(best.samples_per_s)} samples/s, {study.speed_up(best):.2f} times one device; "
        f"bubble {best.bubble:.1%}.",
        *_alone(study, best),
        *_left_out(study, used, count),
        *_by_itself(shapes, best),
        *(
            ["Stages are those of the replica that ends last, memory of the fullest rank."]
            if unlike
            else []
        ),
        study.origin,
    )
    console = terminal()
    console.print(plan.describe().rstrip(), soft_wrap=True)
    for fact in facts:
        console.print(fact)
    rows = _rows(study, shapes)
    for heading, lines in ((_REPLICAS, unlike), (_SHAPES, rows)):
        if lines:
            show_table(console, heading, list(lines[0]), (line.values() for line in lines))
    if options.json:
        write(options.json, plan.to_json(), "plan")
    if options.html:
        title = f"{study.target.name} on {count} of {study.cluster.name}"
        more = [(_REPLICAS, table(unlike)), (_SHAPES, table(rows))]
        page = plan_page(
            plan, title=title, notes=facts, more=more, replicas=plans if unlike else ()
        )
        write(options.html, page, "page")


def _alone(study: Study, best: Shape) -> list[str]:
    """Return a line for the user if a single device is faster than the best shape; else no line.

    Args:
        study: the study.
        best: the best shape.

    Returns:
        A list of one line, or an empty list.
    """
    if study.speed_up(best) > 1 or len(best.arrangement.used) == 1:
        return []
    alone = next((shape for shape in study.shapes(1) if shape.fits), None)
    return [] if alone is None else ["One of these devices alone is faster than all of them."]


def _by_itself(shapes: Sequence[Shape], best: Shape) -> list[str]:
    """Return a line on the shape that the Trainer takes if the user gives no sizes.

    Args:
        shapes: all shapes, the best first.
        best: the best shape.

    Returns:
        A list of one line; empty if the Trainer takes the best shape, or if no shape that it may
        take fits.
    """
    plain = [shape for shape in shapes if shape.plain and shape.fits]
    if best.plain or not plain:
        return []
    taken = recommended(plain)
    return [
        f"With sizes left open the Trainer takes {taken}, {short(taken.samples_per_s)} samples/s: "
        "what is shown here it takes as HybridGabraStrategy(plan=...)."
    ]


def _left_out(study: Study, used: Sequence[int], count: int) -> list[str]:
    """Return a line for the user if the best shape leaves out devices that are too slow.

    Args:
        study: the study.
        used: indices of the cluster's devices that the best shape uses.
        count: number of devices that it was allowed to use, the first devices of the cluster.

    Returns:
        A list of one line, or an empty list.
    """
    left = [k for k in range(count) if k not in used]
    if not left:
        return []
    names = ", ".join(f"{k} ({study.cluster.devices[k].name})" for k in left)
    # if the first devices are used, their number is enough
    devices = len(used) if min(left) == len(used) else sorted(used)
    return [
        f"Without device {names} it is fastest: in no shape that was tried would all {count} be as "
        f"fast. Use Trainer(devices={devices})."
    ]


def _count(asked: int | None, study: Study) -> int:
    """Return the number of devices to plan for.

    Args:
        asked: value of the option ``--devices``; ``None``: the number that the Trainer has in the
            user's configuration (on all nodes), or if it has none, all devices of the cluster.
        study: the study.

    Raises:
        PlanError: ``asked`` is less than 1.
    """
    if asked is not None and asked < 1:
        raise PlanError(f"--devices {asked}: at least 1 is needed")
    configured = study.target.trainer.get("devices")
    # the number of devices of the run that the configuration is for
    if asked is None and isinstance(configured, int) and configured > 0:
        nodes = study.target.trainer.get("num_nodes") or 1
        return configured * int(nodes)
    return len(study.cluster.devices) if asked is None else asked


def _rows(study: Study, shapes: Sequence[Shape]) -> list[dict[str, str]]:
    """Make the rows of the table of shapes: the fastest shape of each kind.

    Shapes are of one kind if they have equal numbers of replicas, of stages, and of stages per
    device, and if in both or in neither the replicas take equal numbers of samples. Unequal numbers
    of samples stand beside the number of replicas.

    Args:
        study: the study.
        shapes: shapes, the fastest first.

    Returns:
        For each row its cells, by name of the column; at most `_SHOWN` rows.
    """
    seen: dict[tuple[object, ...], Shape] = {}
    for shape in shapes:
        at = shape.arrangement
        seen.setdefault((at.replicas, shape.stages, at.turns, not shape.shares), shape)
    return [
        {
            "replicas": f"{shape.arrangement.replicas}{': ' * bool(shape.shares)}"
            + ", ".join(map(str, shape.shares)),
            "stages": shape.stages,
            "a device": str(shape.arrangement.turns),
            "micro-batches": str(shape.arrangement.microbatches),
            "step": spell("latency", float(f"{shape.step_s:.4g}")),
            "samples/s": short(shape.samples_per_s),
            "speed-up": f"{study.speed_up(shape):.2f}",
            "bubble": f"{shape.bubble:.1%}",
            "memory": _memory(shape),
        }
        for shape in [*seen.values()][:_SHOWN]
    ]


def _memory(shape: Shape) -> str:
    if not shape.fits:
        return f"lacks {shape.lacking_bytes / 1e9:.2f} GB"
    return "fits, computed again" if shape.arrangement.recompute else "fits"


def _replicas(plans: Sequence[Plan], cluster: ClusterDescription) -> list[dict[str, str]]:
    """Make the rows of the table of replicas, for replicas that take unequal shares.

    A row says how many samples a replica takes, how long its step is, and what memory its stages
    need.

    Args:
        plans: for each replica the plan as it runs it.
        cluster: the devices that are used, replica by replica.

    Returns:
        For each replica its cells, by name of the column; empty if all take equal shares.
    """
    size = plans[0].devices_per_replica
    lines = []
    for replica, (share, plan) in enumerate(zip(plans[0].shares, plans)):
        own = cluster.pick(range(replica * size, (replica + 1) * size))
        line = {"replica": str(replica), "samples": str(share)}
        line["step"] = spell("latency", float(f"{plan.step_s:.4g}"))
        held = (str(row.get("memory", "")) for row in with_limits([plan], own).table())
        lines.append(line | {"memory, by stage": ", ".join(held)})
    return lines


def with_limits(plans: Sequence[Plan], cluster: ClusterDescription) -> Plan:
    """Return the plan as its slowest replica runs it, with the memory of each stage's fullest rank.

    Args:
        plans: for each replica the plan as it runs it.
        cluster: the devices that are used, replica by replica.

    Returns:
        The plan, with `peak_bytes` and `limit_bytes` in its rows; if memory is not known, as it is.
    """
    plan, limits = max(plans, key=lambda plan: plan.step_s), cluster.memory_limits
    if limits is None or any(row.memory_bytes is None for row in plan.rows):
        return plan
    # bytes that a rank holds, of how many, by its device within the replica
    ranks: dict[int, list[tuple[int, int]]] = {}
    for number, limit in enumerate(limits):
        replica, device = divmod(number, plan.devices_per_replica)
        mine = zip(plan.owners, plans[replica].rows)
        held = sum(row.memory_bytes or 0 for owners, row in mine if device in owners)
        ranks.setdefault(device, []).append((held, round(limit)))
    fullest = [
        max((rank for device in owners for rank in ranks[device]), key=lambda rank: truediv(*rank))
        for owners in plan.owners
    ]
    pairs = zip(plan.rows, fullest)
    return replace(
        plan,
        rows=tuple(replace(row, peak_bytes=held, limit_bytes=of) for row, (held, of) in pairs),
    )
