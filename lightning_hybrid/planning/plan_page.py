"""Make the HTML page of a plan: table, timeline of a step, loads, memory, network with its cuts.

Sections with more than the plan itself has (alternatives, speed-ups for other numbers of devices)
are added by the caller.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from lightning_hybrid.planning.plan import Plan, StagePlan, cells
from lightning_hybrid.planning.simulate import DealtCosts, simulate, simulate_dealt
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.planning.traced_step import Work, measured_step
from lightning_hybrid.planning.units import spell
from lightning_hybrid.report import (
    Bar,
    Piece,
    Span,
    draw_bars,
    draw_strip,
    draw_timeline,
    page,
    paragraph,
    table,
)
from lightning_hybrid.schedules import (
    SCHEDULES,
    STREAMED,
    Kind,
    collected,
    deal,
    make_schedule,
)

_MOST_LANES = 32
_KINDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.WEIGHT: "weight",
    Kind.REDUCE: "reduce",
}
Section = tuple[str, str]
"""Heading, and content in HTML."""


def plan_page(
    plan: Plan,
    trace: str | Path | None = None,
    *,
    title: str = "Plan",
    notes: Sequence[str] = (),
    limits: Sequence[float] | None = None,
    more: Sequence[Section] = (),
) -> str:
    """Make the page as HTML, in one file.

    Args:
        plan: The plan.
        trace: Folder of the trace of a run of the plan; None: that of ``LIGHTNING_HYBRID_TRACE``,
            if there is one.
        title: Title of the page.
        notes: Sentences below the title.
        limits: Bytes that each device of a replica can hold.
        more: Further sections, at the end.

    Raises:
        PlanError: the trace is not of this plan.
    """
    head = plan.describe().splitlines()[:2]
    summary = "".join(paragraph(text) for text in (*head, *notes))
    summary += table(cells(plan), left=["partitions"])
    return page(
        title,
        [
            ("The plan", summary),
            ("One step", _timelines(plan, measured_step(plan, trace))),
            ("Load", _loads(plan)),
            ("Memory", _memory(plan, limits)),
            ("The network and its cuts", _network(plan)),
            *more,
        ],
    )


def predicted_lanes(plan: Plan) -> dict[str, list[Span]]:
    """The predicted step of each device of a replica, as spans of time by name of the device.

    Empty if no times are known, or for streamed schedules, whose steps overlap.
    """
    rows = plan.rows
    times = [(row.forward_s, row.backward_s) for row in rows]
    if not times or any(None in pair for pair in times) or plan.schedule not in SCHEDULES:
        return {}
    # under a streamed schedule steps overlap, so that there is no picture of a single one
    if plan.schedule in STREAMED:
        return {}
    spans: dict[int, list[Span]] = {device: [] for device in _devices(plan)}
    copies = collected(plan.copies)
    schedule = make_schedule(plan.schedule, len(copies), plan.microbatches, split=plan.split)
    costs = _costs(plan)
    if max(copies) > 1:
        timeline = simulate_dealt(deal(schedule, copies), DealtCosts.alike(costs, plan.copies))
    else:
        timeline = simulate(schedule, costs)
    for event in timeline.events:
        kind = _KINDS.get(event.instruction.kind)
        if kind is not None and event.end_s > event.start_s:
            number = event.instruction.microbatch
            span = _span(plan, event.stage, kind, number, event.start_s, event.end_s)
            spans[plan.owners[event.stage][event.copy]].append(span)
    # a device steps all of its stages, one after the other, when the last one has its gradients
    for device, found in spans.items():
        step_s = sum(row.step_s or 0.0 for row in _rows(plan, device))
        start_s = max((span.end_s for span in found), default=0.0)
        if step_s:
            hint = f"optimizer step, {step_s:.3g} s"
            found.append(Span(start_s=start_s, end_s=start_s + step_s, kind="step", hint=hint))
    return {_name(plan, device): found for device, found in spans.items()}


def _costs(plan: Plan) -> StepCosts:
    """The times of the stages of a plan."""

    def times(name: str, rows: Sequence[StagePlan] = plan.rows) -> list[float]:
        return [getattr(row, name) or 0.0 for row in rows]

    names = ("forward_s", "backward_s", "reduce_s", "step_s", "weight_s")
    return StepCosts(
        devices=plan.first_devices,
        send_s=times("send_s", plan.rows[:-1]),
        latency_s=times("latency_s", plan.rows[:-1]),
        **{name: times(name) for name in names},
    )


def _span(plan: Plan, stage: int, kind: str, number: int, start_s: float, end_s: float) -> Span:
    what = "all-reduce" if kind == "reduce" else f"{kind} of {number}"
    label = f"{stage}.{number}" if _shares(plan) else str(number)
    return Span(
        start_s=start_s,
        end_s=end_s,
        kind=kind,
        label="" if kind == "reduce" else label,
        hint=f"stage {stage}: {what}, {end_s - start_s:.3g} s",
    )


def _timelines(plan: Plan, measured: Sequence[Work]) -> str:
    predicted = predicted_lanes(plan)
    lanes: dict[str, list[Span]] = {_name(plan, device): [] for device in _devices(plan)}
    for work in measured:
        hint = f"{work.kind} of {work.number}, {work.end_s - work.start_s:.3g} s"
        _, kind, number, start_s, end_s = work
        span = Span(start_s=start_s, end_s=end_s, kind=kind, label=str(number), hint=hint)
        lanes[_name(plan, work.device)].append(span)
    # prediction and measurement have one scale, so that they can be compared by eye
    both = [span for found in (predicted, lanes) for spans in found.values() for span in spans]
    length_s = max([plan.predicted_step_s or 0.0, *(span.end_s for span in both)])
    text = ""
    if plan.schedule in STREAMED:
        text += paragraph("No step is drawn: each device is at another batch, one after the other.")
    if predicted:
        numbers = "stage.micro-batch" if _shares(plan) else "micro-batches"
        text += paragraph(f"Predicted. Numbers are {numbers}; gaps are waiting.")
        text += draw_timeline(_first(predicted), "one step, predicted", length_s)
        if len(predicted) > _MOST_LANES:
            text += paragraph(f"The first {_MOST_LANES} of {len(predicted)} devices of a replica.")
    if measured:
        took_s = max(work.end_s for work in measured)
        text += paragraph(
            f"Measured: from the first forward to the last backward of a step of median length of "
            f"the first replica, {took_s:.4g} s."
        )
        text += draw_timeline(_first(lanes), "one step, measured", length_s)
    return text


def _first(lanes: Mapping[str, Sequence[Span]]) -> dict[str, Sequence[Span]]:
    return dict(list(lanes.items())[:_MOST_LANES])


def _loads(plan: Plan) -> str:
    bars = []
    for device in _devices(plan)[:_MOST_LANES]:
        mine = [row.load for row in _rows(plan, device)]
        if mine:
            parts = [(f"c{device % 8}", load) for load in mine]
            bars.append(
                Bar(name=_name(plan, device), parts=parts, text=f"{sum(mine):.1%} of the network")
            )
    return draw_bars(bars, "share of the computation of each device") if bars else ""


def _memory(plan: Plan, limits: Sequence[float] | None) -> str:
    if not plan.rows or any(row.memory_bytes is None for row in plan.rows):
        return ""
    bars = []
    for device in _devices(plan)[:_MOST_LANES]:
        held = sum(row.memory_bytes or 0 for row in _rows(plan, device))
        limit = None if limits is None else limits[device]
        text = _bytes(held) + ("" if limit is None else f" of {_bytes(limit)}")
        parts = [(f"c{device % 8}", float(held))]
        bars.append(Bar(name=_name(plan, device), parts=parts, text=text, limit=limit))
    what = "Parameters, gradients, optimizer state, and the activations of all micro-batches"
    if plan.recompute:
        what = (
            "Parameters, gradients, optimizer state, and the activations of one micro-batch; beside"
            " them stages keep the inputs of all"
        )
    line = "." if limits is None else "; the red line is what the device has."
    return paragraph(what + line) + draw_bars(bars, "memory of each device")


def _network(plan: Plan) -> str:
    if not plan.rows:
        return ""
    pieces = []
    for stage, (row, following) in enumerate(pairwise([*plan.rows, None])):
        if row is None:
            continue
        # a plan has no loads of single partitions: those of a stage are drawn equal
        each = row.load / max(1, len(row.partitions))
        cut = ""
        if following is not None and row.cut_bytes is not None:
            cut = _bytes(row.cut_bytes)
        pieces.append(
            Piece(
                name=f"stage {stage}",
                load=row.load,
                device=row.device,
                partitions=[(name, each) for name in row.partitions],
                cut=cut,
            )
        )
    text = paragraph(
        "Stages in the order of the network, as wide as their load, in the colours of their "
        "devices; below each cut what crosses it for a micro-batch, in either direction."
    )
    return text + draw_strip(pieces, "the network and its cuts")


def _devices(plan: Plan) -> list[int]:
    """Devices of a replica in the order of their first stages."""
    return list(dict.fromkeys(device for devices in plan.owners for device in devices))


def _rows(plan: Plan, device: int) -> list[StagePlan]:
    """The rows of the stages that a device has."""
    return [row for row, devices in zip(plan.rows, plan.owners) if device in devices]


def _shares(plan: Plan) -> bool:
    """Whether a device has several stages."""
    return plan.devices_per_replica < plan.stages


def _name(plan: Plan, device: int) -> str:
    return f"device {device}" + (" (driver)" if device == 0 and plan.stages > 1 else "")


def _bytes(size: float) -> str:
    return spell("memory", float(f"{size:.3g}"))
