"""Plans from plain lists."""

from dataclasses import fields
from typing import Any

from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.search import plan_stages


def planned(**arguments: Any) -> Plan:
    """`plan_stages`, with the columns of the table among its arguments."""
    columns = {f.name: arguments.pop(f.name) for f in fields(PartitionTable) if f.name in arguments}
    return plan_stages(PartitionTable(**columns), **arguments)
