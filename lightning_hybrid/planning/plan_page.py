"""Make the HTML page of a plan: its table, and the timeline of a step.

A caller that knows more than the plan says (alternatives, for instance) adds sections of its own.
"""

from collections.abc import Sequence

from lightning_hybrid.planning.plan import Plan, StagePlan, cells
from lightning_hybrid.planning.simulate import DealtCosts, simulate, simulate_dealt
from lightning_hybrid.planning.step_time import TIMES, StepCosts
from lightning_hybrid.report import Span, page, paragraph, table, timeline
from lightning_hybrid.schedules import (
    INSIDE,
    STREAMED,
    InstructionKind,
    collected,
    deal,
    make_schedule,
)

_MOST_LANES = 32
_MEMORY = (
    "Memory: parameters, gradients, optimizer state, and the activations of all micro-batches."
)
_MEMORY_INSIDE = (
    "Memory: parameters, two sets of gradients, optimizer state, and the activations of the"
    " micro-batches that are under way."
)
_MEMORY_AGAIN = (
    "Memory: parameters, gradients, optimizer state, and the activations of one micro-batch; beside"
    " them stages keep the inputs of all."
)
_KINDS = {
    InstructionKind.FORWARD: "forward",
    InstructionKind.BACKWARD: "backward",
    InstructionKind.WEIGHT: "weight",
    InstructionKind.REDUCE: "reduce",
}


def plan_page(
    plan: Plan,
    *,
    title: str = "Plan",
    notes: Sequence[str] = (),
    more: Sequence[tuple[str, str]] = (),
    replicas: Sequence[Plan] = (),
) -> str:
    """Make the HTML page of a plan: text of one file, with its table and the timeline of a step.

    Args:
        plan: The plan.
        title: Title of the page.
        notes: Sentences below the title.
        more: Further sections, at the end: for each its heading and its content in HTML.
        replicas: The plan of each replica, if they differ: the steps of all are drawn. Empty: one
            step, that of `plan`.
    """
    head = plan.describe().splitlines()[:2]
    summary = "".join(paragraph(text) for text in (*head, *notes))
    summary += table(cells(plan), left=["partitions"])
    if any(row.peak_bytes for row in plan.rows):
        summary += paragraph("Memory: the peak of each rank, with all of its stages.")
    elif any(row.memory_bytes for row in plan.rows):
        known = _MEMORY_INSIDE if plan.schedule == INSIDE else _MEMORY
        summary += paragraph(_MEMORY_AGAIN if plan.recompute else known)
    return page(title, [("The plan", summary), ("One step", _timeline(plan, replicas)), *more])


def predicted_lanes(plan: Plan) -> dict[str, list[Span]]:
    """Predict what each device of a replica does in a step, for `report.timeline`.

    Returns:
        By name of the device (``device 1``), its spans of time. Empty if times are not known, and
        for streamed schedules, whose steps overlap.
    """
    times = [(row.forward_s, row.backward_s) for row in plan.rows]
    if not times or any(None in pair for pair in times) or plan.schedule in STREAMED:
        return {}
    spans: dict[int, list[Span]] = {device: [] for device in _devices(plan)}
    copies = collected(plan.copies)
    schedule = make_schedule(plan.schedule, len(copies), plan.microbatches, split=plan.split)
    costs = _costs(plan)
    if max(copies) > 1:
        simulated = simulate_dealt(deal(schedule, copies), DealtCosts.alike(costs, plan.copies))
    else:
        simulated = simulate(schedule, costs)
    for event in simulated.events:
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
    """Collect the predicted times of a plan's stages; times that are not known become 0."""
    times = {name: [getattr(row, name) or 0.0 for row in plan.rows] for name in TIMES}
    # the last stage has no next one to send to
    between = {name: times[name][:-1] for name in ("send_s", "latency_s")}
    return StepCosts(devices=plan.first_devices, **(times | between))


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


def _timeline(plan: Plan, replicas: Sequence[Plan]) -> str:
    if plan.schedule in STREAMED:
        return paragraph("No step is drawn: each device is at another batch, one after the other.")
    lanes = predicted_lanes(plan)
    if not lanes:
        return ""
    if replicas:
        drawn = [predicted_lanes(each).items() for each in replicas]
        lanes = {f"replica {r}, {n}": spans for r, its in enumerate(drawn) for n, spans in its}
    numbers = "stage.micro-batch" if _shares(plan) else "micro-batches"
    text = paragraph(f"Predicted. Numbers are {numbers}; gaps are waiting.")
    if plan.copies and plan.copies[-1] > 1:
        text += paragraph("Outputs and weights that the driver receives are not drawn.")
    text += timeline(dict([*lanes.items()][:_MOST_LANES]))
    if len(lanes) > _MOST_LANES:
        text += paragraph(f"The first {_MOST_LANES} of {len(lanes)} devices.")
    return text


def _devices(plan: Plan) -> list[int]:
    """List the devices of a replica in the order of their first stages."""
    return list(dict.fromkeys(device for devices in plan.owners for device in devices))


def _rows(plan: Plan, device: int) -> list[StagePlan]:
    """List the rows of the stages that a device has."""
    return [row for row, devices in zip(plan.rows, plan.owners) if device in devices]


def _shares(plan: Plan) -> bool:
    """Whether some device of a replica has several stages."""
    return plan.devices_per_replica < plan.stages


def _name(plan: Plan, device: int) -> str:
    return f"device {device}" + (" (driver)" if device == 0 and plan.stages > 1 else "")
