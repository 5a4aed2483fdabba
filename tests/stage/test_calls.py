"""What a rank keeps of a forward is what its backward needs, and no more."""

from weakref import ref

import torch

from lightning_hybrid.stage.calls import SavedForward


def test_a_saved_forward_goes_backward_and_keeps_no_output_alive() -> None:
    x = torch.ones(3, requires_grad=True)
    output = 2 * x
    saved, alive = SavedForward.of([x], [output, x.detach(), 3]), ref(output)
    del output
    assert alive() is None
    edge, *none = saved.roots
    assert none == [None, None]
    torch.autograd.backward([edge], [torch.full((3,), 5.0)])
    assert torch.equal(x.grad, torch.full((3,), 10.0))
