"""Who imports whom, what is public, and what is in the wheel."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_hybrid._lightning_private import MultiProcessingLauncher, SubprocessScriptLauncher

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_hybrid"
FILES = {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text()) for p in PACKAGE.rglob("*.py")}
USE_CASE = {
    p.relative_to(ROOT).as_posix(): ast.parse(p.read_text())
    for folder in ("models", "datamodules")
    for p in (ROOT / folder).rglob("*.py")
}
OUTERMOST = {
    "lightning_hybrid/strategy/strategy.py",
    "lightning_hybrid/strategy/launcher.py",
    "lightning_hybrid/run/building.py",
    "lightning_hybrid/run/checkpoint_io.py",
    "lightning_hybrid/parts/choice.py",
    "lightning_hybrid/parts/coming_batches.py",
    "lightning_hybrid/parts/performance_log.py",
    "lightning_hybrid/parts/reasons_to_refuse.py",
    "lightning_hybrid/parts/run_table.py",
    "lightning_hybrid/parts/unequal_shares.py",
    "lightning_hybrid/_lightning_private.py",
    "lightning_hybrid/strategy/fabric.py",
    "lightning_hybrid/strategy/agreed_sizes.py",
    "lightning_hybrid/strategy/ranks.py",
    "lightning_hybrid/strategy/refusals.py",
    "lightning_hybrid/strategy/replica_ranks.py",
    "lightning_hybrid/run/framework.py",
    "lightning_hybrid/run/replica_world.py",
    "lightning_hybrid/run/rehearsal.py",
    "lightning_hybrid/run/rehearsed_sizes.py",
    "lightning_hybrid/run/run.py",
    "lightning_hybrid/run/session.py",
}
WITH_PRIVATE_NAMES = {
    "lightning_hybrid/_lightning_private.py",
    *(path for path in FILES if path.startswith("lightning_hybrid/_torch/")),
}
SUBCLASSES = [
    f"lightning_hybrid/{name}.py"
    for name in (
        "strategy/strategy",
        "strategy/fabric",
        "strategy/replica_ranks",
        "strategy/launcher",
    )
]
INHERITED = {
    "_backward_sync_control": "what Fabric asks for `no_backward_sync`",
    "_call_children_scripts": "starts the processes of a script; ours watches them afterwards",
    "_checkpoint_io": "what the user has given, before Lightning's default takes its place",
    "_configure_launcher": "where DDPStrategy, too, makes its launcher",
    "_get_process_group_backend": "the backend that the user or the device asks for",
    "_launcher": "what `_configure_launcher` sets",
    "_layer_sync": "set by the Trainer for sync_batchnorm; there is no property",
    "_lightning_optimizers": "the wrappers that the user's code steps",
    "_num_nodes": "number of hosts, which Fabric sets past the property",
    "_optimizers": "what the property `optimizers` returns; its setter is overridden",
    "_process_group_backend": "read by the property of DDPStrategy",
    "_set_world_ranks": "where Fabric's DDPStrategy takes the numbers of the launcher",
    "_setup_distributed": "where it makes its groups",
    "_start_method": "which launcher the name of the strategy has asked for",
    "_timeout": "of the groups, as given to DDPStrategy",
}
"""Protected names of Lightning's strategies and launchers that the package's subclasses use."""
LAUNCHERS = (MultiProcessingLauncher, SubprocessScriptLauncher)
# what each part may import of the others, from the inside out
INNER = {"errors", "_torch", "_trees"}
LAYERS = {
    "errors": set(),
    "_torch": set(),
    "_trees": set(),
    "allocation": {"errors"},
    "schedules": {"errors"},
    "report": {"errors"},
    "planning": {"errors", "allocation", "schedules", "report"},
    "remote": INNER,
    "graph": {*INNER, "remote"},
    "capture": {*INNER, "remote", "graph"},
    "comm": {*INNER, "remote", "graph"},
    "stage": {*INNER, "schedules", "remote", "graph", "comm"},
    "profiling": {"errors", "planning", "graph", "stage"},
    "process": {"errors", "_torch", "comm", "stage", "planning", "profiling"},
    "state": {*INNER, "remote", "comm", "stage", "planning", "profiling"},
    "worker": {
        *INNER,
        *("remote", "graph", "comm", "stage", "planning", "profiling", "state", "process"),
    },
    "driver": {
        *INNER,
        *("schedules", "remote", "graph", "capture", "comm", "stage", "planning", "profiling"),
        *("state",),
    },
    "options": {"errors", "schedules", "planning"},
    "contradicting_options": {"errors", "planning"},
    "config": {"errors", "schedules", "planning", "options", "contradicting_options"},
    "run": {
        *INNER,
        *("remote", "graph", "capture", "comm", "stage", "planning", "profiling", "process"),
        *("state", "driver", "config", "_lightning", "_lightning_private"),
    },
    "parts": {
        *INNER,
        *("schedules", "capture", "comm", "stage", "planning", "process", "worker", "driver"),
        *("run", "_lightning", "_lightning_private"),
    },
    "strategy": {
        *INNER,
        *("comm", "stage", "planning", "profiling", "process", "state", "worker", "driver"),
        *("run", "parts", "config", "options"),
        *("_lightning", "_lightning_private", "_which_lightning"),
    },
    "asking": {
        *INNER,
        *("allocation", "graph", "capture", "report", "comm", "planning", "profiling"),
        *("process", "state"),
    },
    "cli": {"errors"},
}
# folders whose files are imported one by one: by subject, and by command
BY_FILE = {"_torch", "asking"}
ROOMS = sorted({p.parent.name for p in PACKAGE.glob("*/__init__.py")} - BY_FILE)
# the commands from driver to workers, so many that their module is offered as it is
PROTOCOL = "lightning_hybrid.comm.protocol"


@cache
def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """Every module or name that a file imports, dotted, with its line; not what is beside it."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    return found


def importers(files: dict[str, ast.Module], *modules: str) -> set[str]:
    """The files that import one of the modules, or something from it."""
    return {
        path
        for path, tree in files.items()
        for name, _ in imports(tree)
        if any(name == module or name.startswith(f"{module}.") for module in modules)
    }


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; empty for what is more than names."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def inside(folder: str) -> dict[str, ast.Module]:
    return {path: tree for path, tree in FILES.items() if path.startswith(folder)}


def test_lightning_comes_through_one_file() -> None:
    packages = ("lightning", "lightning_fabric", "pytorch_lightning")
    assert importers(FILES, *packages) == {"lightning_hybrid/_lightning.py"}


def test_only_the_outermost_files_use_lightning() -> None:
    assert importers(FILES, "lightning_hybrid._lightning") == OUTERMOST


def test_only_what_talks_to_other_ranks_imports_torch_distributed() -> None:
    rooms = tuple(
        f"lightning_hybrid/{room}/"
        for room in (
            *("comm", "stage", "process", "state", "worker", "driver", "run", "parts"),
            "strategy",
        )
    )
    found = importers(FILES, "torch.distributed", "torch.multiprocessing")
    found -= {"lightning_hybrid/asking/doctor.py"}  # measures links
    assert all(path.startswith(rooms) for path in found)
    for path, tree in FILES.items():
        names = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used = any(name.startswith("torch.distributed") for name in names)
        assert not used or path.startswith(rooms), path


@pytest.mark.parametrize(
    "place",
    [
        "lightning_hybrid/allocation/",
        "lightning_hybrid/schedules/",
        "lightning_hybrid/report/",
        "lightning_hybrid/planning/",
        "lightning_hybrid/errors.py",
    ],
)
def test_pure_data_needs_no_torch(place: str) -> None:
    assert inside(place)
    assert importers(inside(place), "torch") == set()


def test_the_strategy_is_on_top() -> None:
    assert importers(FILES, "lightning_hybrid.strategy") - {
        *inside("lightning_hybrid/strategy/")
    } == {"lightning_hybrid/__init__.py"}


@pytest.mark.parametrize("part", LAYERS)
def test_imports_go_one_way(part: str) -> None:
    allowed = LAYERS[part] | {part}
    files = inside(f"lightning_hybrid/{part}/") or inside(f"lightning_hybrid/{part}.py")
    assert files
    for path, tree in files.items():
        for name, line in imports(tree):
            if name.startswith("lightning_hybrid"):
                assert name.split(".")[1] in allowed, f"{path}:{line} imports {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_what_others_import_of_a_room_is_what_it_offers(room: str) -> None:
    place = f"lightning_hybrid.{room}"
    of_init = imports(FILES[f"lightning_hybrid/{room}/__init__.py"])
    names = getattr(import_module(place), "__all__", [n.rpartition(".")[2] for n, _ in of_init])
    offered = {f"{place}.{name}" for name in names}
    taken = set()
    for path, tree in (FILES | USE_CASE).items():
        if path.startswith(f"lightning_hybrid/{room}/"):
            continue
        for name, line in imports(tree):
            of_this_room = f"{name}.".startswith(f"{place}.")
            if of_this_room and not f"{name}.".startswith(f"{PROTOCOL}."):
                assert name in offered, f"{path}:{line} imports {name}, not in `{place}`"
                taken.add(name)
    assert offered - taken == set(), "offered, but imported by nobody"


def test_one_file_knows_the_parts_of_a_run_and_all_else_their_protocol() -> None:
    """A class of a part is imported where runs get their list of parts, and nowhere else."""
    folder, chooses = "lightning_hybrid/parts/", "lightning_hybrid/parts/choice.py"
    classes = {
        kind.__name__
        for path in inside(folder)
        for kind in vars(import_module(path.removesuffix(".py").replace("/", "."))).values()
        if isinstance(kind, type) and kind.__module__.startswith("lightning_hybrid.parts.")
    }
    parts = {
        name.rpartition(".")[2]
        for name, _ in imports(FILES[chooses])
        if name.startswith("lightning_hybrid.parts.")
    }
    assert {"AsynchronousReplica", "LostReplicas", "UnequalShares"} <= parts <= classes
    for path, tree in FILES.items():
        known = classes if not path.startswith(folder) else parts
        for name, line in imports(tree) if path != chooses else ():
            is_of_a_part = name.startswith("lightning_hybrid.parts.")
            taken = name.rpartition(".")[2]
            assert not is_of_a_part or taken not in known, f"{path}:{line} imports {name}"


def test_files_import_each_other_in_pairs_alone() -> None:
    # by name of the file that imports: what it names in annotations of the one that uses it
    pairs = {
        "graph/row_rules": {"graph/row_proof"},
        "driver/streamed_calls": {"driver/driven_network"},
        "driver/optimizer_link": {"driver/driven_optimizers"},
        "stage/forward_pass": {"stage/engine"},
        "stage/backward_pass": {"stage/engine"},
        "planning/plan": {"planning/plan_page"},
    }
    modules = {path.removeprefix("lightning_hybrid/").removesuffix(".py") for path in FILES}
    before: dict[str, set[str]] = {}
    for module in modules - {name for name in modules if name.endswith("__init__")}:
        named = [name.split(".") for name, _ in imports(FILES[f"lightning_hybrid/{module}.py"])]
        found = {"/".join(names[1:3]) for names in named if names[0] == "lightning_hybrid"}
        before[module] = found & modules - pairs.get(module, set())
    TopologicalSorter(before).prepare()  # raises an error that names the circle


def test_the_use_case_knows_nothing_of_the_plugin() -> None:
    assert USE_CASE
    assert importers(USE_CASE, "lightning_hybrid") == set()


def test_the_plugin_knows_nothing_of_the_use_case() -> None:
    assert importers(FILES, "models", "datamodules", "monai", "nibabel") == set()


def test_private_names_of_torch_and_lightning_have_a_place_of_their_own() -> None:
    for path, tree in FILES.items():
        if path in WITH_PRIVATE_NAMES:
            continue
        names = [*imports(tree)]
        names += [(dotted(n), n.lineno) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        for name, line in names:
            first, *rest = name.split(".")
            theirs = first in ("torch", "lightning", "pytorch", "fabric", "dist", "fx", "nn")
            assert not (theirs and any(map(is_private, rest))), f"{path}:{line} {name}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def their_private_names() -> set[str]:
    """Private attributes of the objects of torch and Lightning that this package handles."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    parameter = torch.nn.Parameter(torch.ones(1))
    objects = [
        *(parameter, parameter.untyped_storage(), torch.nn.BatchNorm1d(1), torch.Generator()),
        *(torch.optim.SGD([parameter]), torch.amp.GradScaler("cpu"), torch.ops.aten.add.Tensor),
        *(torch.fx.Graph(), torch.fx.Graph().placeholder("x"), torch.distributed.ProcessGroup),
        *(trainer, trainer.strategy, trainer.fit_loop, LightningModule(), DDPStrategy()),
        torch.distributed.ProcessGroupGloo._Options,
    ]
    return {name for thing in objects for name in dir(thing) if is_private(name)}


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on unused devices
def test_private_attributes_of_torch_and_lightning_are_used_there_too() -> None:
    theirs = their_private_names()
    assert {"_version", "_cdata", "_schema", "_timeout", "_parameters"} <= theirs
    for path, tree in FILES.items():
        if path in WITH_PRIVATE_NAMES:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                of_ours = ast.unparse(node.value) in ("self", "cls", "super()")
                name = node.attr
            elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr"):
                of_ours, name = False, getattr(node.args[1], "value", "")
            else:
                continue
            assert of_ours or name not in theirs, f"{path}:{node.lineno} {ast.unparse(node)}"


@pytest.mark.filterwarnings("ignore")  # likewise
def test_protected_names_of_base_classes_are_listed_with_their_reason() -> None:
    strategies = (DDPStrategy(), FabricDDPStrategy())
    theirs = {name for strategy in strategies for name in dir(strategy) if is_private(name)}
    theirs |= {name for kind in LAUNCHERS for name in dir(kind) if is_private(name)}
    used = set()
    for path in SUBCLASSES:
        own = {n.name for n in ast.walk(FILES[path]) if isinstance(n, ast.FunctionDef)}
        names = {n.attr for n in ast.walk(FILES[path]) if isinstance(n, ast.Attribute)}
        used |= (names | own) & theirs
    assert used == set(INHERITED)


def test_exported_names() -> None:
    import lightning_hybrid

    strategies = ["HybridGabraStrategy", "HybridGabraFabricStrategy"]
    records = ["Delayed", "Search", "Equal", "BySpeed", "Asynchronous", "Sharded"]
    assert lightning_hybrid.__all__ == [*strategies, "Plan", *records, "register_optimizer"]
    for name in lightning_hybrid.__all__:
        assert getattr(lightning_hybrid, name).__doc__


def test_the_names_of_the_strategy_are_registered() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    import lightning_hybrid

    registered = {name for name in StrategyRegistry if name.startswith("hybrid")}
    assert registered == {
        "hybrid_gabra",
        "hybrid_gabra_spawn",
        "hybrid_gabra_fork",
        "hybrid_gabra_notebook",
    }
    for name in registered:
        assert isinstance(StrategyRegistry.get(name), lightning_hybrid.HybridGabraStrategy)


def test_no_two_classes_have_one_name() -> None:
    """One name stands for one thing; an underscore in front does not tell two apart."""
    named: dict[str, list[str]] = {}
    for path, tree in inside("lightning_hybrid/").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                named.setdefault(node.name.lstrip("_"), []).append(path)
    assert {name: paths for name, paths in named.items() if len(paths) > 1} == {}


def test_every_module_that_does_something_is_tested_in_the_folder_of_its_room() -> None:
    """Of these rooms: by a file of its name there, or by a test there that imports it."""
    untested = []
    for room in ("comm", "stage", "remote", "state", "worker", "driver", "parts"):
        tests = {
            path.stem: ast.parse(path.read_text()) for path in (ROOT / "tests" / room).glob("*.py")
        }
        names = {name for tree in tests.values() for name, _ in imports(tree)}
        modules = [path for path in inside(f"lightning_hybrid/{room}/") if acts(FILES[path])]
        assert modules
        for stem in (Path(path).stem for path in modules):
            own = f"lightning_hybrid.{room}.{stem}"
            if f"test_{stem}" not in tests and not any(
                f"{n}.".startswith(f"{own}.") for n in names
            ):
                untested.append(own)
    assert untested == []


def acts(tree: ast.Module) -> bool:
    """Whether a module has statements of its own, and does not only declare what others hold."""
    bodies = (
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return any(
        not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for body in bodies
        for statement in body
    )


def test_fields_of_dataclasses_are_described_in_the_docstring_of_their_class() -> None:
    """Every public one by name, under `Attributes:` or in its text, and none by a string below."""
    trees = (FILES | USE_CASE).items()
    fields = [(path, *field) for path, tree in trees for field in fields_of_dataclasses(tree)]
    assert fields
    assert [f"{path}:{line} {name}" for path, line, name, is_right in fields if not is_right] == []


def fields_of_dataclasses(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Line and name of each public one, inherited ones left out, and whether it is described so."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or not is_dataclass(node):
            continue
        text = ast.get_docstring(node) or ""
        for field, below in zip(node.body, [*node.body[1:], None]):
            if isinstance(field, ast.AnnAssign) and not dotted(field.target).startswith("_"):
                name = dotted(field.target)
                has_string = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                is_named = re.search(rf"\b{name}\b", text) is not None
                yield field.lineno, name, is_named and not has_string


def is_dataclass(node: ast.ClassDef) -> bool:
    made_by = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(dotted(decorator).split(".")[-1] == "dataclass" for decorator in made_by)


def test_the_wheel_holds_the_typed_plugin_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["lightning_hybrid"]}
    assert (PACKAGE / "py.typed").is_file()
