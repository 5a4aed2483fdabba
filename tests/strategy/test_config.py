"""The strategy's arguments as one record: what they mean for the devices that there are."""

from dataclasses import FrozenInstanceError, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from lightning_hybrid import (
    Asynchronous,
    BySpeed,
    Delayed,
    Equal,
    HybridGabraFabricStrategy,
    HybridGabraStrategy,
    Plan,
    Search,
    Sharded,
)
from lightning_hybrid._lightning import DDPStrategy, FabricDDPStrategy
from lightning_hybrid.config import Config
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.shapes import Sizes

ALONE = Plan(replicas=1, stages=1, microbatches=1, schedule="gpipe", cuts=())
CHAIN = Plan(replicas=2, stages=2, microbatches=2, schedule="gpipe", cuts=("b",))
LOOP = Plan(
    replicas=1, stages=3, microbatches=2, schedule="gpipe", cuts=("b", "c"), devices=(0, 1, 0)
)


DEALT = Plan(replicas=2, stages=1, microbatches=1, schedule="gpipe", cuts=(), shares=(3, 1))
FREE, ANEW, BESIDE = Search(contiguous=False), Search(replan="epoch"), Sharded(asynchronous=True)


@pytest.mark.parametrize(
    ("arguments", "devices", "shape"),
    [
        ({}, 4, (1, 4)),
        ({"data_parallel_size": 2}, 6, (2, 3)),
        ({"pipeline_parallel_size": 2}, 6, (3, 2)),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 3}, 6, (2, 3)),
        ({"plan": CHAIN}, 4, (2, 2)),
        ({"plan": LOOP}, 2, (1, 2)),
    ],
)
def test_all_devices_are_used(
    arguments: dict[str, Any], devices: int, shape: tuple[int, int]
) -> None:
    assert Config(**arguments).shape(1, devices) == shape


def test_a_plan_may_be_cut_points_and_nothing_else() -> None:
    assert HybridGabraStrategy(plan=["b"])._config.settings.allocation == ("b",)
    number: Any = 3
    with pytest.raises(PlanError, match="plan=3 must be a Plan, the path of one, or a list of cut"):
        HybridGabraStrategy(plan=number)


def test_devices_of_all_nodes_count() -> None:
    config = Config(pipeline_parallel_size=4)
    assert config.shape(nodes=3, devices_per_node=4) == (3, 4)
    with pytest.raises(PlanError, match=r"!= 6 devices \(3 nodes\).*multiple of 4"):
        config.shape(nodes=3, devices_per_node=2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"pipeline_parallel_size": (3, 1)}, r"pipeline_parallel_size=\(3, 1\)"),
        ({"plan": CHAIN}, "pipeline_parallel_size=2"),
        ({"plan": replace(CHAIN, shares=(3, 1))}, "pipeline_parallel_size=2"),
        ({"plan": DEALT}, "a plan with shares"),
        ({"checkpoint": Sharded()}, r"checkpoint=Sharded\(\)"),
        ({"schedule": Delayed("fdg")}, r"schedule=Delayed\('fdg'\)"),
    ],
)
def test_asynchronous_replicas_have_one_stage_and_share_nothing(
    arguments: dict[str, Any], named: str
) -> None:
    usual: dict[str, Any] = {"replicas": Asynchronous(staleness=2)}
    assert Config(**usual).shape(1, 4) == (4, 1)
    with pytest.raises(PlanError, match=named):
        Config(**{**usual, **arguments})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pipeline_parallel_size": 1}, "pipeline_parallel_size=1"),
        ({"pipeline_parallel_size": (2, 1)}, r"pipeline_parallel_size=\(2, 1\)"),
        ({"plan": CHAIN, "pipeline_parallel_size": "auto"}, r"plan=\.\.\."),
        ({"cuts": ("b",)}, r"plan=\['b'\]"),
        ({"schedule": "1f1b_stream"}, "schedule='1f1b_stream'"),
        ({"compile_stages": True}, "compile_stages=True"),
        ({"replicas": Equal(shard_states=True)}, r"replicas=Equal\(shard_states=True\)"),
        ({"replicas": BySpeed()}, r"replicas=BySpeed\(\)"),
    ],
)
def test_what_keeps_the_cuts_is_refused_beside_new_ones(
    arguments: dict[str, Any], named: str
) -> None:
    usual: dict[str, Any] = {"search": Search(replan="epoch"), "pipeline_parallel_size": 2}
    assert Config(**usual).replans_cuts
    with pytest.raises(PlanError, match=named):
        Config(**{**usual, **arguments})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pipeline_parallel_size": (2, 1)}, r"pipeline_parallel_size=\(2, 1\)"),
        ({"checkpoint": Sharded()}, r"checkpoint=Sharded\(\)"),
        ({"schedule": "1f1b_stream"}, "schedule='1f1b_stream'"),
    ],
)
def test_replicas_that_go_on_without_a_lost_one_share_gradients_alone(
    arguments: dict[str, Any], named: str
) -> None:
    usual: dict[str, Any] = {"replicas": BySpeed(on_loss="continue")}
    assert Config(**usual).goes_on
    with pytest.raises(PlanError, match=named):
        Config(**{**usual, **arguments})


@pytest.mark.parametrize("verify", [True, 0, -1, "never", 1.5])
def test_what_is_no_choice_of_calls_to_verify_is_refused(verify: Any) -> None:
    with pytest.raises(PlanError, match=r"verify=.* 'auto' \(calls 1, 2, 4, 8, ...\), False"):
        Config(verify=verify)
    assert [Config(verify=v).verify for v in ("auto", False, 3)] == ["auto", False, 3]


def test_one_device_s_random_numbers_are_not_for_schedules_that_begin_early() -> None:
    with pytest.raises(
        PlanError, match=r"rng='device' draws in the order .* schedule='1f1b_stream'"
    ):
        Config(rng="device", schedule="1f1b_stream")
    with pytest.raises(PlanError, match=r"rng='cpu' is none of 'microbatch', 'device'"):
        Config(rng="cpu")  # type: ignore[arg-type]


def test_divided_states_are_not_saved_beside_training() -> None:
    with pytest.raises(PlanError, match=r"Sharded\(asyn.* makes copies on replica 0, .*shard_"):
        Config(checkpoint=Sharded(asynchronous=True), replicas=Equal(shard_states=True))
    config = Config(checkpoint=Sharded(), replicas=Equal(shard_states=True))
    assert config.shards_states
    assert config.settings.shards_states


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cuts": ("b",), "search": FREE}, "or give plan=Plan"),
        ({"schedule": "zero_bubble", "search": FREE}, "each device one stage, and does"),
        ({"pipeline_parallel_size": 1, "recompute": True}, "call torch.utils.checkpoint in the"),
        ({"plan": ALONE, "recompute": True}, "^pipeline_parallel_size=1 makes no stages"),
        ({"schedule": Delayed("fdg"), "recompute": True}, "have .*weights='recompute'"),
        ({"checkpoint": BESIDE, "replicas": Equal(shard_states=True)}, r"Use .*=Sharded\(\) or"),
        ({"search": ANEW, "compile_stages": True}, r"or use replicas=BySpeed\(replan='epoch'\)"),
        ({"plan": ALONE, "search": ANEW}, "go together with pipeline_parallel_size=1"),
        ({"pipeline_parallel_size": (1, 2), "compile_stages": True}, "or use .*_size=3"),
    ],
)
def test_a_contradiction_is_named_with_a_way_out(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Config(**arguments)


@pytest.mark.parametrize("capacity", [(1.0, 2.0, 3.0), (1.0, -1.0)])
def test_capacities_are_one_positive_number_per_device(capacity: tuple[float, ...]) -> None:
    config = Config(search=Search(capacity=capacity))
    with pytest.raises(PlanError, match="capacity"):
        config.check_devices(1, 2)


@pytest.mark.parametrize(
    ("arguments", "several"),
    [
        ({}, False),
        ({"search": FREE}, True),
        ({"plan": CHAIN}, False),
        ({"plan": CHAIN, "search": FREE}, False),  # a plan says it all
        ({"plan": LOOP}, True),
    ],
)
def test_whether_a_device_may_have_several_stages(arguments: dict[str, Any], several: bool) -> None:
    assert Config(**arguments).several_stages_per_device is several


@pytest.mark.parametrize(
    ("arguments", "shape", "needed"),
    [
        ({}, (1, 2), True),
        ({}, (2, 1), False),
        ({"replicas": BySpeed()}, (2, 1), True),
        ({"replicas": BySpeed()}, (1, 1), False),
        ({"cuts": ("b",)}, (1, 2), False),
        ({"plan": CHAIN}, (1, 2), False),
        ({"plan": CHAIN, "search": Search(capacity=(1.0, 2.0))}, (1, 2), True),  # who sits where
    ],
)
def test_devices_are_looked_at_where_it_decides_something(
    arguments: dict[str, Any], shape: tuple[int, int], needed: bool
) -> None:
    assert Config(**arguments).needs_survey(*shape) is needed


@pytest.mark.parametrize(
    ("arguments", "devices", "left_open"),
    [
        ({}, 2, True),
        ({}, 1, False),
        ({"num_microbatches": 3, "search": FREE}, 4, True),
        ({"data_parallel_size": 1}, 2, False),
        ({"pipeline_parallel_size": 2}, 2, False),
        ({"cuts": ("b",)}, 2, False),
        ({"plan": CHAIN}, 4, False),
    ],
)
def test_sizes_are_open_where_the_user_says_nothing_of_them(
    arguments: dict[str, Any], devices: int, left_open: bool
) -> None:
    assert Config(**arguments).leaves_sizes_open(devices) is left_open


def test_chosen_sizes_are_as_good_as_given_ones() -> None:
    config = Config(sizes=Sizes(replicas=2, stages=3, microbatches=4))
    assert (config.shape(1, 6), config.microbatches) == ((2, 3), 4)
    assert not config.leaves_sizes_open(6)
    # but a network that does not suit them is no error
    assert config.may_keep_whole
    assert not Config(pipeline_parallel_size=3).may_keep_whole


def test_micro_batches_that_were_asked_for_stay() -> None:
    chosen = Sizes(replicas=1, stages=2, microbatches=4)
    assert Config(num_microbatches=3, sizes=chosen).microbatches == 3
    whole = Sizes(replicas=2, stages=1, microbatches=1)
    assert Config(sizes=whole).microbatches is None


def test_a_plan_comes_from_a_file(tmp_path: Path) -> None:
    CHAIN.save(tmp_path / "plan.json")
    config = HybridGabraStrategy(plan=str(tmp_path / "plan.json"))._config
    assert config.plan == CHAIN
    assert (config.replica_count, config.stages) == (2, 2)


def test_what_is_automatic_is_none() -> None:
    config = Config()
    assert (config.replica_count, config.stages, config.microbatches) == (None, None, None)
    assert (config.names, config.capacity, config.plan) == (None, None, None)
    assert config.settings.schedule == "auto"
    assert not config.several_stages_per_device
    assert Config(network="net").names == ("net",)
    assert Config(cuts=("b", "c")).settings.allocation == ("b", "c")


def test_it_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(FrozenInstanceError):
        config.stages = 2


def test_recomputation_that_is_said_goes_before_the_plans() -> None:
    given = Plan(replicas=1, stages=2, microbatches=2, schedule="gpipe", cuts=("b",))
    for said, expected in (("auto", False), (False, False), (True, True)):
        kept = Config(plan=given, recompute=said).plan
        assert kept is not None
        assert kept.recompute is expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel_size": 1}, "pipeline_parallel_size=1"),
        ({"schedule": "1f1b_stream"}, "'1f1b_stream'"),
        ({"schedule": Delayed("fdg")}, "weights='recompute'"),
    ],
)
def test_recomputation_is_refused_where_it_does_nothing(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Config(recompute=True, **arguments)


def test_recomputation_is_refused_before_a_plan_is_asked_to_take_it() -> None:
    with pytest.raises(PlanError, match="weights='recompute'"):
        Config(recompute=True, plan=replace(CHAIN, schedule="pipedream"))


def test_every_argument_that_is_not_lightnings_is_kept() -> None:
    own = {field.name for field in fields(Config)} - {"sizes", "cuts"}
    theirs = set(signature(DDPStrategy).parameters)
    for strategy in (HybridGabraStrategy, HybridGabraFabricStrategy):
        arguments = set(signature(strategy).parameters)
        assert arguments - own <= theirs | set(signature(FabricDDPStrategy).parameters)
    assert own <= set(signature(HybridGabraStrategy).parameters)
