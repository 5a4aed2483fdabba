"""After a run each rank finds all weights, and changes its own; files need not be readable."""

import gc
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet, ref

import pytest
import torch
from driven import Replica, batches, let_go, loss_of, model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel

from lightning_hybrid.comm.protocol import Answer, GiveFailure
from lightning_hybrid.driver import bring_here
from lightning_hybrid.driver import weights as files
from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote import is_deferred, is_unread, is_vacant
from lightning_hybrid.state import tensor_file
from lightning_hybrid.state.whole_checkpoint import save_checkpoint

DEVICES = [(1, 0), (1, 2, 0)]


@pytest.fixture(params=[True, False], ids=["one host", "several hosts"])
def _hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(files, "read_files", lambda _: None)


class Trained:
    """One step of a replica and of one device, and the end of the run."""

    def __init__(self, replicas: Any, devices: tuple[int, ...], *, average: bool = False) -> None:
        self.module, self.reference = model(), model()
        for module in (self.module, self.reference) if average else ():
            module.average = AveragedModel(module.net)
        self.replica: Replica = replicas(self.module, devices, trains=True)
        self.mine = AdamW(self.module.parameters(), lr=0.1)
        self.theirs = AdamW(self.reference.parameters(), lr=0.1)
        self.replica.driver.optimizers.connect([self.mine])
        [value] = batches(1)
        loss_of(self.module, self.replica(value)).backward()
        self.replica.driver.gradients.after_backward()
        loss_of(self.reference, self.reference.net(value)).backward()
        self.mine.step()
        self.theirs.step()
        for module in (self.module, self.reference) if average else ():
            module.average.update_parameters(module.net)

    def end(self) -> None:
        self.replica.driver.bring_all()
        self.replica.driver.close()
        self.replica.driver.end()
        self.states = self.mine.state_dict()
        self.replica.close()

    @property
    def modules(self) -> list[nn.Module]:
        """Of all ranks."""
        return [self.module, *self.replica.modules.values()]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("devices", DEVICES)
def test_in_training_a_rank_has_memory_for_what_it_owns_alone(
    replicas: Any, devices: tuple[int, ...]
) -> None:
    trained = Trained(replicas, devices)
    trained.replica.driver.commands.ask(GiveFailure())  # the workers have come as far
    with trained.replica.driver.remote.suspended():
        held = [
            {name for name, p in module.named_parameters() if not is_vacant(p)}
            for module in trained.modules
        ]
    owned = [
        {n for n, p in m.named_parameters() if p.grad is not None} for m in trained.modules[1:]
    ]
    for mine, theirs in zip(held[1:], owned, strict=True):
        assert mine == theirs
    everything = {name for name, _ in trained.module.named_parameters()}
    assert held[0] == everything - set().union(*owned)


def test_a_parameter_of_another_rank_has_memory_while_it_is_read(replicas: Any) -> None:
    trained = Trained(replicas, (1, 0))
    found = [parameter.norm().item() for parameter in trained.module.parameters()]
    assert_same(found, [parameter.norm().item() for parameter in trained.reference.parameters()])
    remote = trained.replica.driver.remote
    assert remote.absent_bytes("net.") == 0
    trained.mine.step()  # now it is another one
    assert remote.absent_bytes("net.") == 2 * (9 + 3) * 8
    trained.theirs.step()
    assert_same(dict(trained.module.state_dict()), dict(trained.reference.state_dict()))


@pytest.mark.usefixtures("_hosts")
@pytest.mark.parametrize("devices", DEVICES)
def test_the_driver_finds_weights_gradients_and_states(
    replicas: Any, devices: tuple[int, ...]
) -> None:
    trained = Trained(replicas, devices)
    trained.end()
    assert_same(dict(trained.module.state_dict()), dict(trained.reference.state_dict()))
    gradients = [[p.grad for p in m.parameters()] for m in (trained.module, trained.reference)]
    assert_same(*gradients)
    assert_same(trained.states, trained.theirs.state_dict())


@pytest.mark.usefixtures("_hosts")
@pytest.mark.parametrize("layer", [0, -2])
def test_a_change_by_a_hook_at_the_end_stays(replicas: Any, layer: int) -> None:
    trained = Trained(replicas, (1, 0))
    trained.replica.driver.bring_all()
    trained.replica.driver.close()
    with torch.no_grad():
        for module in (trained.module, trained.reference):
            module.net[layer].weight.fill_(7)
    trained.replica.driver.end()
    trained.replica.close()
    assert_same(dict(trained.module.state_dict()), dict(trained.reference.state_dict()))


def _replace_parameter(module: Any) -> None:
    module.net[0].weight = nn.Parameter(module.net[0].weight.detach() * 2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "replaced": lambda module: setattr(module, "net", module.average),
    "replaced by a part": lambda module: setattr(module, "net", module.average.module),
    "compiled": lambda module: setattr(module, "net", torch.compile(module.net, backend="eager")),
    "wrapped": lambda module: setattr(module, "net", nn.Sequential(module.net, nn.Tanh())),
    "deleted": lambda module: delattr(module, "net"),
    "moved": lambda module: module.cpu(),
    "copied": lambda module: setattr(module, "best", deepcopy(module.net)),
    "a layer replaced": lambda module: module.net.__setitem__(0, nn.Linear(3, 3).double()),
    "a layer deleted": lambda module: module.net.__delitem__(0),
    "a weight replaced": _replace_parameter,
}


@pytest.mark.usefixtures("_hosts")
@pytest.mark.parametrize("late", [False, True], ids=["on_train_end", "on_fit_end"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_run_ends_whatever_hooks_have_made_of_its_networks(
    replicas: Any, change: Callable[[Any], object], late: bool
) -> None:
    trained = Trained(replicas, (1, 0), average=True)
    driver = trained.replica.driver
    changed = trained.module, trained.reference

    def change_both() -> None:
        for module in changed:
            torch.manual_seed(7)
            change(module)

    if not late:
        change_both()
        with driver.weights.gathered():  # as for a checkpoint
            saved = {name: t.clone() for name, t in trained.module.state_dict().items()}
        assert_same(saved, dict(trained.reference.state_dict()))
        assert_same(trained.mine.state_dict(), trained.theirs.state_dict())
    driver.bring_all()
    driver.close()
    if late:
        change_both()
    driver.end()
    trained.replica.close()
    assert_same(dict(trained.module.state_dict()), dict(trained.reference.state_dict()))
    assert_same(trained.mine.state_dict(), trained.theirs.state_dict())


def test_code_without_a_backward_has_memory_for_the_weights_of_one_operation(
    replicas: Any,
) -> None:
    trained = Trained(replicas, (1, 0))
    [value] = batches(1)
    remote = trained.replica.driver.remote
    absent = remote.absent_bytes("net.")
    assert absent == 2 * (9 + 3) * 8
    output, held = value, []
    # (nothing is saved for a backward; the graph refers to the weights all the same)
    unsaved = saved_tensors_hooks(lambda _: None, lambda _: value)
    with remote.suspended(), remote.one_by_one(), unsaved:
        for layer in trained.module.net:
            output = layer(output)
            held.append(absent - remote.absent_bytes("net."))
    assert output.requires_grad
    assert held == [0] * len(held)
    assert_same(output, trained.reference.net(value))
    trained.mine.step()
    trained.theirs.step()
    trained.end()
    assert_same(dict(trained.module.state_dict()), dict(trained.reference.state_dict()))


def test_what_refers_to_an_ended_run_keeps_no_optimizer_alive(replicas: Any) -> None:
    trained = Trained(replicas, (1, 0))
    trained.end()
    optimizer, states = ref(trained.mine), [*trained.mine.state.values()]
    living = [ref(value) for state in states for value in state.values()]
    assert optimizer() is not None
    assert living
    gc.collect()
    gc.disable()  # what only it would free is alive until it comes, beside another fit's states
    try:
        del trained.mine, trained.states, states
        assert optimizer() is None
        assert [each() for each in living] == [None] * len(living)
    finally:
        gc.enable()


@pytest.mark.parametrize("steps", [False, True])
def test_an_evaluation_sends_states_only_if_it_takes_a_step(replicas: Any, steps: bool) -> None:
    module, reference = model(), model()
    mine, theirs = (AdamW(each.parameters(), lr=0.1) for each in (module, reference))
    [value] = batches(1)
    for each, optimizer in ((module, mine), (reference, theirs)):
        loss_of(each, each.net(value)).backward()
        optimizer.step()

    class Evaluated(Replica):
        """The optimizers of an earlier fit are there when the network is cut."""

        def cut(self, *arguments: Any, **keywords: Any) -> None:
            self.driver.optimizers.connect([mine])
            super().cut(*arguments, **keywords)

    replica = Evaluated(module, value, (1, 0))
    [worker] = replica.workers.values()
    try:
        output = replica(value)
        assert_same(output, reference.net(value))
        assert_same(mine.state_dict(), theirs.state_dict())
        assert worker._optimizers.all == []
        if steps:
            for each, optimizer, given in (
                (module, mine, output), (reference, theirs, reference.net(value))
            ):  # fmt: skip
                optimizer.zero_grad()
                loss_of(each, given).backward()
            replica.driver.gradients.after_backward()
            mine.step()
            theirs.step()
            replica.driver.commands.ask(GiveFailure())
            assert len(worker._optimizers.all[0].state) == 4
        replica.driver.bring_all()
        replica.driver.close()
        replica.driver.end()
    finally:
        let_go(replica)
    replica.close()
    assert_same(dict(module.state_dict()), dict(reference.state_dict()))
    assert_same(mine.state_dict(), theirs.state_dict())


@pytest.fixture
def no_room_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file all cannot be mapped, and a part can."""
    monkeypatch.setattr(tensor_file, "free_addresses", lambda: 0)


@pytest.mark.usefixtures("no_room_for_files")
@pytest.mark.parametrize("devices", DEVICES)
def test_where_no_file_may_be_mapped_each_tensor_arrives_when_it_is_read(
    replicas: Any, devices: tuple[int, ...]
) -> None:
    trained = Trained(replicas, devices)
    trained.end()
    here = [is_unread(parameter) for parameter in trained.module.parameters()]
    assert any(here)
    assert not all(here)
    assert_same(
        {name: t.clone() for name, t in trained.module.state_dict().items()},
        dict(trained.reference.state_dict()),
    )
    assert [is_unread(parameter) for parameter in trained.module.parameters()] == here
    for mine, theirs in zip(trained.module.parameters(), trained.reference.parameters()):
        assert mine.grad is not None
        assert_same(mine.grad.clone(), theirs.grad)
        for key, value in trained.theirs.state[theirs].items():
            assert_same(trained.mine.state[mine][key].clone(), value)


@pytest.mark.usefixtures("no_room_for_files")
def test_what_has_no_memory_is_trained_on_by_the_script(replicas: Any) -> None:
    trained = Trained(replicas, (1, 0))
    trained.end()
    [value] = batches(1)
    for module, optimizer in ((trained.module, trained.mine), (trained.reference, trained.theirs)):
        loss_of(module, module.net(value)).backward()  # on top of the gradients that are left
        optimizer.step()
    assert_same(dict(trained.module.state_dict()), dict(trained.reference.state_dict()))
    assert not any(map(is_unread, trained.module.parameters()))


@pytest.mark.usefixtures("no_room_for_files")
def test_another_run_begins_with_memory_for_all(replicas: Any) -> None:
    trained = Trained(replicas, (1, 0))
    trained.end()
    bring_here(trained.module)
    assert not any(map(is_unread, trained.module.parameters()))
    assert_same(dict(trained.module.state_dict()), dict(trained.reference.state_dict()))


@pytest.mark.usefixtures("no_room_for_files")
@pytest.mark.parametrize("layer", [0, -2])
def test_a_change_at_the_end_of_what_has_no_memory_stays(replicas: Any, layer: int) -> None:
    trained = Trained(replicas, (1, 0))
    trained.replica.driver.bring_all()
    trained.replica.driver.close()
    with torch.no_grad():
        for module in (trained.module, trained.reference):
            module.net[layer].weight.fill_(7)
    trained.replica.driver.end()
    trained.replica.close()
    found = {name: t.clone() for name, t in trained.module.state_dict().items()}
    assert_same(found, dict(trained.reference.state_dict()))


@pytest.mark.usefixtures("no_room_for_files")
def test_a_checkpoint_reads_each_tensor_when_it_writes_it(
    replicas: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(replicas, (1, 2, 0))
    living: WeakSet[Any] = WeakSet()
    most = 0

    def counted(*arguments: Any) -> Any:
        nonlocal most
        living.add(found := map_part(*arguments))
        most = max(most, len(living))
        return found

    map_part = tensor_file._map
    monkeypatch.setattr(tensor_file, "_map", counted)
    with trained.replica.driver.weights.gathered():
        state = trained.module.state_dict()
    checkpoint = {"state_dict": state, "optimizer_states": [trained.mine.state_dict()]}
    assert any(is_unread(value) for value in state.values())
    save_checkpoint(checkpoint, tmp_path / "saved.ckpt")
    assert most == 1
    found = torch.load(tmp_path / "saved.ckpt")
    assert_same(found["state_dict"], dict(trained.reference.state_dict()))
    assert_same(found["optimizer_states"], [trained.theirs.state_dict()])
    trained.mine.step()  # the run goes on
    trained.theirs.step()
    trained.end()
    assert_same(
        {n: t.clone() for n, t in trained.module.state_dict().items()},
        dict(trained.reference.state_dict()),
    )


@pytest.mark.usefixtures("_hosts")
def test_what_was_taken_of_a_weight_shows_it_afterwards_too(replicas: Any) -> None:
    taken: list[Tensor] = []

    def take(module: nn.Module) -> None:
        taken.extend(parameter.detach() for parameter in module.parameters())

    module = model()
    take(module)
    replica: Replica = replicas(module, (1, 0), trains=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(3)
    replica.driver.bring_all()
    replica.driver.close()
    replica.driver.end()
    replica.close()
    assert_same(taken, [torch.full_like(t, 3) for t in taken])


@pytest.fixture
def several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of another rank can be read."""
    monkeypatch.setattr(files, "read_files", lambda _: None)


@pytest.mark.usefixtures("several_hosts")
@pytest.mark.parametrize("devices", DEVICES)
def test_where_there_is_no_room_for_files_the_driver_keeps_what_it_owns(
    replicas: Any, monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...]
) -> None:
    trained = Trained(replicas, devices)
    monkeypatch.setattr(tensor_file, "free_on", lambda _: 100)
    monkeypatch.setattr(tensor_file, "TemporaryFile", no_disk)
    said: list[str] = []
    driver = trained.replica.driver
    monkeypatch.setattr(driver, "_options", replace(driver._options, say=said.append))
    trained.end()
    [line] = said
    assert "no room for" in line
    assert "checkpoints of the run have all of them" in line
    away = set()
    for name, expected in trained.reference.named_parameters():
        found = trained.module.get_parameter(name)
        if is_deferred(found):
            away.add(name)
            with pytest.raises(DeferredError, match=name):
                found.sum().item()
        else:
            assert_same(found.detach(), expected.detach())
    assert away == set(trained.replica.driver.weights.owned_elsewhere()) & away != set()
    with pytest.raises(DeferredError, match="not here"):
        bring_here(trained.module)


def test_another_error_is_not_taken_for_a_lack_of_room(
    replicas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(replicas, (1, 0))

    def failing(**_: Any) -> None:
        raise FileNotFoundError("a file that a stage reads")

    monkeypatch.setattr(trained.replica.driver._files, "tensors", failing)
    with pytest.raises(FileNotFoundError, match="a stage reads"):
        trained.replica.driver.bring_all()
    monkeypatch.undo()
    trained.end()
    assert_same(dict(trained.module.state_dict()), dict(trained.reference.state_dict()))


def no_disk(*_: Any, **__: Any) -> None:
    raise FileNotFoundError("no usable temporary directory")


@pytest.mark.parametrize("hosts", [1, 2])
def test_without_a_disk_files_are_in_memory(
    replicas: Any, monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    monkeypatch.setattr(tensor_file, "TemporaryFile", no_disk)
    if hosts > 1:
        monkeypatch.setattr(files, "read_files", lambda _: None)
    trained = Trained(replicas, (1, 0))
    trained.end()
    assert_same(dict(trained.module.state_dict()), dict(trained.reference.state_dict()))


@pytest.mark.usefixtures("several_hosts")
def test_numbers_that_are_sent_take_memory_for_one_tensor_at_a_time(
    replicas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(replicas, (1, 2, 0))
    come, kept = WeakSet[Tensor](), list[int]()

    def counted(answer: Answer) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in answer.tensors:
            come.add(tensor)
            kept.append(len(come))
            yield name, tensor

    def receive(answer: Answer, folder: str) -> Any:
        return tensor_file.received(replace(answer, tensors=counted(answer)), folder)

    monkeypatch.setattr(files, "received", receive)
    with trained.replica.driver.weights.gathered():
        found = {name: t.clone() for name, t in trained.module.state_dict().items()}
    assert_same(found, dict(trained.reference.state_dict()))
    assert len(kept) > 4
    assert max(kept) <= 2  # (the one before is dropped when the next one has come)


def test_an_unread_state_dict_is_read_before_the_next_step(replicas: Any, tmp_path: Path) -> None:
    trained = Trained(replicas, (1, 2, 0))
    driver = trained.replica.driver
    with driver.weights.gathered(unread=True), driver.optimizers.unread():
        saved = {"state_dict": trained.module.state_dict(), "states": trained.mine.state_dict()}
    assert any(map(is_unread, saved["state_dict"].values()))
    save_checkpoint(saved, tmp_path / "saved.ckpt")
    found = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert_same(dict(found["state_dict"]), dict(trained.reference.state_dict()))
    assert_same(found["states"], trained.theirs.state_dict())
    trained.mine.step()
    with pytest.raises(DeferredError, match="not read before the next step"):
        saved["state_dict"]["net.0.weight"].sum().item()
