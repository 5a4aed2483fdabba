"""A shell has the names, shapes and ties of a module, and neither its classes nor its numbers."""

import pickle

import torch
from torch import nn

from lightning_hybrid.remote import is_vacant
from lightning_hybrid.stage import ModuleOutline, state_buffers, tensors_of, write_tensors
from lightning_hybrid.stage.engine import weights_with_sparse_gradients


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.tied = nn.Linear(3, 4, dtype=torch.float64)
        self.tied.weight = self.first[0].weight
        self.tied.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(2, 3).T)
        self.register_buffer("sparse", torch.eye(2).to_sparse())


def shell_of(module: nn.Module) -> nn.Module:
    data = pickle.dumps(ModuleOutline.of(module))
    assert b"test_module_outline" not in data, "it needs classes of the module"
    return pickle.loads(data).shell()


def test_a_shell_has_the_tensors_of_its_module_without_memory() -> None:
    module = Net()
    shell = shell_of(module)
    assert [name for name, _ in shell.named_modules()] == [n for n, _ in module.named_modules()]
    found, expected = tensors_of(shell), tensors_of(module)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        like = expected[name]
        form = tensor.shape, tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter)
        assert form == (like.shape, like.dtype, like.requires_grad, isinstance(like, nn.Parameter))
        if tensor.layout is torch.strided:
            assert tensor.stride() == like.stride()
            assert is_vacant(tensor) or not tensor.is_contiguous()
    assert shell.get_parameter("tied.weight") is shell.get_parameter("first.0.weight")
    torch.testing.assert_close(found["sparse"], expected["sparse"])


def test_numbers_that_are_sent_to_a_shell_make_it_the_modules_equal() -> None:
    module = Net()
    shell = shell_of(module)
    write_tensors(shell, tensors_of(module).items())
    for name, tensor in tensors_of(shell).items():
        assert torch.equal(tensor.to_dense(), tensors_of(module)[name].to_dense()), name


def test_layers_that_the_engine_treats_in_a_way_of_its_own_are_known_by_a_shell() -> None:
    module = nn.Sequential(
        nn.BatchNorm2d(3, momentum=None), nn.BatchNorm1d(3, momentum=0.3, affine=False),
        nn.Embedding(4, 3, sparse=True), nn.EmbeddingBag(4, 3, sparse=True), nn.Embedding(4, 3),
    )  # fmt: skip
    shell = shell_of(module)
    assert [shell.get_submodule(name).momentum for name in "01"] == [None, 0.3]
    assert state_buffers(shell) == []
    found = {id(weight) for weight in weights_with_sparse_gradients(shell)}
    assert found == {id(shell.get_parameter(f"{number}.weight")) for number in (2, 3)}
    assert tensors_of(shell).keys() == tensors_of(module).keys()
