"""How a plan was made, kept so that it can be made again for other speeds of the same devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.optim import Optimizer

from lightning_hybrid.planning.partition_table import CalledNetwork
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.planner import Site, make_plan
from lightning_hybrid.planning.search import PlanSettings


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What the plan of a network was made from.

    Attributes:
        network: with its profile, and without the tensors of its call.
        settings: what the user has asked for; not the cuts.
        site: the devices, as they were found at the start of the run.
        optimizers: that train the network.
    """

    network: CalledNetwork
    settings: PlanSettings
    site: Site
    optimizers: Sequence[Optimizer]

    def again(self, plan: Plan, capacities: Sequence[float]) -> tuple[Plan, Plan]:
        """The plan in force as it would be with other speeds, and the best one with them.

        What cuts do not decide stays: the schedule, and whether forwards run again.

        Args:
            plan: in force.
            capacities: speed of each device of a replica.

        Raises:
            PlanError: no placement fits.
        """
        cluster = self.site.cluster
        assert cluster is not None, "devices that nobody has looked at have no speeds"
        site = replace(self.site, cluster=cluster.with_capacities(capacities))
        fixed = replace(self.settings, schedule=plan.schedule, recompute=plan.recompute)

        def made(settings: PlanSettings) -> Plan:
            found = make_plan(
                self.network,
                plan.microbatches,
                settings=settings,
                site=site,
                optimizers=self.optimizers,
            )
            return replace(found, split_by=plan.split_by, tried=plan.tried)

        prefix = f"{self.network.name}." if self.network.name else ""
        cuts = tuple(prefix + name for name in plan.cuts)
        return made(replace(fixed, allocation=cuts)), made(fixed)
