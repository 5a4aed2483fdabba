"""What is relied on of each private name of torch; what a torch that lacks some goes without."""

import ast
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_hybrid._torch import dynamo
from lightning_hybrid._torch.private_names import OPTIONAL, find

ROOT = Path(__file__).parents[2]
FILES = {
    path: ast.parse(path.read_text())
    for path in (ROOT / "lightning_hybrid" / "_torch").glob("*.py")
    if path.name != "private_names.py"
}
CHECKS: dict[str, Callable[..., None]] = {}
X = torch.ones(2, 3)


def relied_on(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A check of what is relied on; it is called with what torch has under these names."""

    def note(check: Callable[..., None]) -> Callable[..., None]:
        CHECKS.update(dict.fromkeys(names, lambda: check(*map(find, names))))
        return check

    return note


def graph_of(function: Callable[..., Any], *args: Any, **options: Any) -> fx.Graph:
    graphs: list[fx.Graph] = []

    def keep(module: fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, **options)(*args)
    assert len(graphs) == 1
    return graphs[0]


# ---------------------------------------------------------------- capture

SETTINGS = {
    "fail_on_recompile_limit_hit": bool,
    "recompile_limit": int,
    "skip_nnmodule_hook_guards": bool,
    "capture_dynamic_output_shape_ops": bool,
    "capture_scalar_outputs": bool,
    "allow_rnn": bool,
    "allow_unspec_int_on_nn_module": bool,
}
for setting, kind in SETTINGS.items():

    @relied_on(f"torch._dynamo.config:{setting}")
    def is_a_setting(value: Any, setting: str = setting, kind: type = kind) -> None:
        assert type(value) is kind
        with torch._dynamo.config.patch({setting: kind(1)}):
            assert getattr(torch._dynamo.config, setting) == kind(1)


@relied_on("torch._dynamo.config:ignore_logging_functions")
def functions_that_log_can_be_left_out(value: Any) -> None:
    with torch._dynamo.config.patch(ignore_logging_functions={print}):
        assert torch._dynamo.config.ignore_logging_functions == {print}
    assert type(value) is set


@relied_on("torch:Tensor._make_wrapper_subclass")
def a_tensor_of_a_subclass_needs_no_memory(make: Any) -> None:
    class Sized(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:  # type: ignore[override]
            raise AssertionError("read")

    found = make(Sized, (3, 2), dtype=torch.float64, device=torch.device("cpu"))
    assert (type(found), found.shape, found.dtype) == (Sized, (3, 2), torch.float64)


@relied_on("torch.utils._pytree:tree_map_only")
def tensors_in_arguments_are_replaced_by_their_class(replaced: Any) -> None:
    given = ([torch.ones(1), 2], {"a": nn.Parameter(torch.ones(1))})
    assert replaced(nn.Parameter, lambda _: 3, given)[1] == {"a": 3}
    assert replaced(nn.Parameter, lambda _: 3, given)[0][0] is given[0][0]


@relied_on("torch.nn.modules.transformer:_detect_is_causal_mask")
def torch_s_transformers_ask_whether_a_mask_is_causal(detects: Any) -> None:
    mask = torch.nn.Transformer.generate_square_subsequent_mask(3)
    assert detects(mask)
    assert not detects(torch.zeros(3, 3))
    assert detects(torch.zeros(3, 3), is_causal=True)


@relied_on("torch.fx.experimental._config:use_duck_shape")
def sizes_that_happen_to_be_equal_are_told_apart(value: bool) -> None:
    import torch.fx.experimental._config as config

    assert value is True
    with config.patch(use_duck_shape=False):
        graph = graph_of(torch.add, torch.ones(4, 1), torch.ones(1, 4), dynamic=True)
    sizes = [n for n in graph.nodes if n.op == "placeholder" and "Sym" in str(n.type)]
    assert len(sizes) == 2


@relied_on("torch._dynamo.decorators:graph_break", "torch._dynamo.exc:TorchDynamoException")
def python_says_why_it_cannot_be_captured(stop: Any, error: Any) -> None:
    def network(x: Tensor) -> Tensor:
        stop(msg="by the values of a mask")
        return x + 1

    with pytest.raises(error, match="by the values of a mask"):
        graph_of(network, X, fullgraph=True)


@relied_on("torch._dynamo.exc:FailOnRecompileLimitHit")
def too_many_captures_are_an_error(error: Any) -> None:
    def network(x: Tensor, scale: str) -> Tensor:
        return x * len(scale)

    torch._dynamo.reset()
    compiled = torch.compile(network, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        compiled(X, "a")
        with pytest.raises(error):
            compiled(X, "ab")


@relied_on("torch._dynamo:maybe_mark_dynamic")
def a_batch_size_is_free_in_the_first_capture(mark: Any) -> None:
    x = torch.ones(4, 3)
    mark(x, 0)
    graph = graph_of(torch.sin, x)
    assert any("Sym" in str(n.type) for n in graph.nodes if n.op == "placeholder")


@relied_on("torch._dynamo:OptimizedModule")
def a_compiled_module_is_one(kind: Any) -> None:
    assert isinstance(torch.compile(nn.Linear(1, 1), backend="eager"), kind)


@relied_on("torch._dynamo.utils:get_compilation_metrics")
def captures_have_reasons(metrics: Any) -> None:
    def network(x: Tensor, scale: str) -> Tensor:
        return x * len(scale)

    torch._dynamo.reset()
    compiled = torch.compile(network, backend="eager")
    compiled(X, "a")
    compiled(X, "ab")
    assert "scale" in metrics()[-1].recompile_reason


@relied_on("torch._dynamo.eval_frame:cached_backends", "torch:_C._dynamo.eval_frame.reset_code")
def what_was_captured_can_be_let_go(backends: Any, reset_code: Any) -> None:
    def network(x: Tensor) -> Tensor:
        return x + 1

    def backend(module: fx.GraphModule, _: Any) -> Any:
        calls.append(module)
        return module.forward

    calls: list[Any] = []
    torch._dynamo.reset()
    compiled = torch.compile(network, backend=backend)
    compiled(X)
    assert isinstance(backends, dict)
    assert backends
    reset_code(network.__code__)
    compiled(X)
    assert len(calls) == 2


@relied_on("torch:_C._select_conv_backend")
def a_convolution_asks_how_it_is_computed(select: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    asked = []
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode() as mode:
        patch.setattr(
            torch._C, "_select_conv_backend", lambda *a, **k: asked.append(a) or select(*a, **k)
        )
        nn.functional.conv2d(mode.from_tensor(torch.ones(2, 1, 4, 4)), torch.ones(1, 1, 3, 3))
    assert asked[0][0].fake_mode is mode
    assert hasattr(torch.fx.experimental.symbolic_shapes.ShapeEnv, "suppress_guards")


@relied_on("torch:_VF")
def recurrent_layers_look_up_their_operations(functions: Any) -> None:
    for layer in (nn.LSTM(3, 3), nn.GRU(3, 3), nn.RNN(3, 3), nn.RNN(3, 3, nonlinearity="relu")):
        name = layer.mode.lower()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vars(functions), name, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                layer(X)
        layer(X)


# ---------------------------------------------------------------- graphs


@relied_on("torch:_C._set_grad_enabled")
def a_region_without_gradients_is_written_down(switch: Any) -> None:
    def network(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.sin()
        return x * y

    assert [n.args for n in graph_of(network, X.requires_grad_()).nodes if n.target is switch] == [
        (False,),
        (True,),
    ]


@relied_on("torch.amp.autocast_mode:_enter_autocast", "torch.amp.autocast_mode:_exit_autocast")
def a_region_under_autocast_is_written_down(enter: Any, leave: Any) -> None:
    def network(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.T

    nodes = [n for n in graph_of(network, X).nodes if n.target in (enter, leave)]
    assert [n.target for n in nodes] == [enter, leave]
    assert nodes[1].args == (nodes[0],)


@relied_on("torch._ops:HigherOrderOperator", "torch._ops:OpOverload", "torch._ops:OpOverloadPacket")
def operators_have_classes_and_names(higher: Any, overload: Any, packet: Any) -> None:
    graph = graph_of(lambda x: checkpoint(torch.sin, x, use_reentrant=False), X)
    [region] = [n.target for n in graph.nodes if isinstance(n.target, higher)]
    assert "checkpoint" in region.name()
    assert isinstance(torch.ops.aten.add.Tensor, overload)
    assert isinstance(torch.ops.aten.add, packet)
    assert str(torch.ops.aten.add.Tensor) == "aten.add.Tensor"


@relied_on("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu")
def attention_on_a_cpu_is_one_operation(kernel: Any) -> None:
    value = torch.ones(1, 2, 3, 4)
    with FlopCounterMode(display=False, custom_mapping={kernel: lambda *_, **__: 7}) as counter:
        torch.nn.functional.scaled_dot_product_attention(value, value, value)
    assert counter.get_total_flops() == 7


@relied_on("torch._library.simple_registry:singleton")
def an_operator_tells_the_file_that_defines_its_shapes(registry: Any) -> None:
    @torch.library.custom_op("names_of_torch::same", mutates_args=())
    def same(x: Tensor) -> Tensor:
        return x.clone()

    same.register_fake(torch.empty_like)
    kernel = registry.find("names_of_torch::same").fake_impl.kernel
    assert kernel.source.rpartition(":")[0] == __file__
    assert registry.find("aten::add").fake_impl.kernel is None


@relied_on("torch.fx.node:_get_qualified_name")
def functions_have_dotted_names(name: Any) -> None:
    assert name(torch.nn.functional.relu) == "torch.nn.functional.relu"


@relied_on(
    "torch._dynamo.utils:numpy_to_tensor_wrapper",
    "torch._dynamo.utils:numpy_method_wrapper",
    "torch._dynamo.utils:numpy_operator_wrapper",
)
def calls_of_numpy_are_written_down(function: Any, method: Any, operator: Any) -> None:
    def network(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.numpy()).reshape(6) * 2)

    made_by = {type(n.target): n.target for n in graph_of(network, torch.ones(2, 3)).nodes}
    assert {function, operator} <= made_by.keys()
    assert callable(made_by[function].f)
    assert callable(made_by[operator].op)
    assert method("reshape").method == "reshape"


# ---------------------------------------------------------------- autograd


class _Asks(torch.autograd.Function):
    seen: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        _Asks.seen(ctx)
        return gradient, gradient


def in_backward(ask: Callable[[Any], Any], **options: Any) -> list[Any]:
    found: list[Any] = []
    _Asks.seen = lambda ctx: found.append(ask(ctx))
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    torch.autograd.grad(_Asks.apply(2 * x, 3 * y).sum(), x, **options)
    return found


@relied_on("torch:_C._will_engine_execute_node")
def a_backward_tells_where_it_goes(will: Any) -> None:
    assert in_backward(lambda ctx: [will(ctx.next_functions[k][0]) for k in (0, 1)]) == [
        [True, False]
    ]


@relied_on("torch:_C._current_graph_task_id")
def a_backward_has_a_number(number: Any) -> None:
    assert number() == -1
    first, second = in_backward(lambda _: number()), in_backward(lambda _: number())
    assert first != second
    assert -1 not in first + second


@relied_on("torch:_C._autograd._get_current_graph_task_keep_graph")
def a_backward_tells_whether_its_graph_is_kept(kept: Any) -> None:
    assert in_backward(lambda _: kept()) == [False]
    assert in_backward(lambda _: kept(), retain_graph=True) == [True]


@relied_on("torch.autograd:_engine_run_backward")
def every_backward_goes_through_one_function(run: Any) -> None:
    calls = []

    def counting(*args: Any, **keywords: Any) -> Any:
        calls.append(args)
        return run(*args, **keywords)

    x = torch.ones(2, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "_engine_run_backward", counting)
        torch.autograd.grad(x.sum(), x)
        x.sum().backward()
    assert len(calls) == 2


@relied_on("torch:_C._autograd._top_saved_tensors_default_hooks")
def hooks_of_a_checkpointed_region_are_known(top: Any) -> None:
    from lightning_hybrid._torch.autograd import is_checkpointed

    found = []

    def part(x: Tensor) -> Tensor:
        found.append(is_checkpointed())
        return x.sin()

    assert top(True) is None
    checkpoint(part, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert found == [True, True]
    with torch.autograd.graph.save_on_cpu():
        assert top(True) is not None
        assert not is_checkpointed()
    with torch.autograd.graph.saved_tensors_hooks(Tensor.bfloat16, Tensor.float):
        assert not is_checkpointed()


@relied_on("torch.autograd.forward_ad:_set_fwd_grad_enabled")
def derivatives_in_forward_mode_have_a_switch(switch: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch compiles its own formulas by TorchScript
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
            with switch(False):
                assert torch.autograd.forward_ad.unpack_dual(dual * 2).tangent is None
                with switch(True):
                    assert torch.autograd.forward_ad.unpack_dual(dual * 2).tangent is not None


@relied_on(
    "torch:_C._functorch.maybe_current_level",
    "torch:_C._functorch.is_functorch_wrapped_tensor",
    "torch:_C._functorch.is_batchedtensor",
    "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
    "torch:_C._functorch.get_unwrapped",
)
def transforms_of_functions_are_told(
    level: Any, wrapped: Any, batched: Any, cleared: Any, inside: Any
) -> None:
    found = []

    def function(x: Tensor) -> Tensor:
        assert inside(x).shape == X.shape
        found.append((level(), wrapped(x), batched(x)))
        with cleared():
            found.append((level(), wrapped(X), batched(X)))
        return x

    assert not level()
    torch.func.vmap(function)(X)
    assert found == [(1, True, True), (None, False, False)]


@relied_on("torch:_C._functorch.is_legacy_batchedtensor")
def batched_gradients_are_told(batched: Any) -> None:
    found = in_backward_of_many(batched)
    assert found == [True]
    assert not batched(X)


def in_backward_of_many(ask: Callable[[Tensor], Any]) -> list[Any]:
    x, found = torch.ones(2, requires_grad=True), list[Any]()
    y = 2 * x
    y.register_hook(lambda gradient: found.append(ask(gradient)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    return [bool(each) for each in found]


# ---------------------------------------------------------------- modes, classes


@relied_on("torch:_C.DisableTorchFunctionSubclass", "torch:_C._EnableTorchFunction")
def functions_of_subclasses_have_a_switch(off: Any, on: Any) -> None:
    heard = []

    class Hears(Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(function)
            return super().__torch_function__(function, types, args, kwargs)

    tensor = X.as_subclass(Hears)
    with off():
        tensor.sin()
        assert heard == []
        with on():
            tensor.sin()
    assert Tensor.sin in heard


@relied_on(
    "torch._subclasses.fake_tensor:FakeTensor", "torch._subclasses.fake_tensor:FakeTensorMode"
)
def tensors_without_memory_have_shapes(fake: Any, mode: Any) -> None:
    with mode(allow_non_fake_inputs=True):
        result = torch.ones(2, 3) @ torch.ones(3, 4)
    assert type(result) is fake
    assert result.shape == (2, 4)


@relied_on("torch._dispatch.python:enable_python_dispatcher")
def a_free_size_stays_free_where_shapes_are_computed_in_python(dispatcher: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    free: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    value = mode.from_tensor(torch.ones(4), symbolic_context=free)
    with mode, env.suppress_guards():
        torch.complex(value, value)
        env.fake_tensor_cache.clear()
        with dispatcher():
            assert isinstance(torch.complex(value, value).shape[0], torch.SymInt)


@relied_on(
    "torch.overrides:_get_current_function_mode",
    "torch.overrides:_get_current_function_mode_stack",
    "torch.overrides:_pop_mode_temporarily",
    "torch.utils._device:DeviceContext",
)
def function_modes_are_on_a_stack(innermost: Any, stack: Any, popped: Any, device: Any) -> None:
    with torch.device("cpu"):
        assert isinstance(innermost(), device)
        assert [type(mode) for mode in stack()] == [device]
        with popped():
            assert innermost() is None
        assert isinstance(innermost(), device)


@relied_on(
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    "torch.utils._python_dispatch:_disable_current_modes",
)
def dispatch_modes_are_on_a_stack(kind: Any, stack: Any, disabled: Any) -> None:
    heard = []

    class Hears(kind):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(function)
            return function(*args, **(kwargs or {}))

    with Hears() as mode:
        assert stack() == [mode]
        assert mode.is_infra_mode() is False
        with disabled():
            X.sin()
            assert heard == []
        X.sin()
    assert heard == [torch.ops.aten.sin.default]


# ---------------------------------------------------------------- modules, memory, others


@relied_on("torch.nn.modules.batchnorm:_BatchNorm")
def batch_normalisations_have_a_class(kind: Any) -> None:
    assert isinstance(nn.BatchNorm3d(1), kind)
    assert isinstance(nn.SyncBatchNorm(1), kind)
    assert not isinstance(nn.LayerNorm(1), kind)


@relied_on("torch.nn.utils.stateless:_functional_call")
def a_functional_call_is_on_the_stack(call: Any) -> None:
    from lightning_hybrid._torch.autograd import in_functional_call

    class Asks(nn.Module):
        def forward(self) -> bool:
            return in_functional_call()

    assert callable(call)
    assert torch.func.functional_call(Asks(), {}, ())
    assert not Asks()()


@relied_on("torch:_C._storage_Use_Count")
def a_storage_counts_its_owners(count: Any) -> None:
    tensor = torch.ones(2)
    before = count(tensor.untyped_storage()._cdata)
    view = tensor[:1]
    assert count(view.untyped_storage()._cdata) == before + 1


@relied_on("torch:_C._swap_tensor_impl")
def tensors_exchange_what_they_hold(swap: Any) -> None:
    one, other = torch.ones(1), torch.zeros(2)
    swap(one, other)
    assert (one.tolist(), other.tolist()) == ([0.0, 0.0], [1.0])


@relied_on("torch:_C._set_throw_on_mutable_data_ptr")
def an_address_can_be_refused(refuse: Any) -> None:
    tensor = torch.ones(2)
    refuse(tensor)
    with pytest.raises(RuntimeError):
        tensor.data_ptr()


@relied_on("torch:_foreach_copy_")
def many_tensors_are_copied_at_once(copy: Any) -> None:
    targets = [torch.zeros(1), torch.zeros(2)]
    copy(targets, [torch.ones(1), torch.ones(2)])
    assert [t.tolist() for t in targets] == [[1.0], [1.0, 1.0]]


@relied_on("torch:_foreach_mul_")
def many_tensors_are_multiplied_at_once(multiply: Any) -> None:
    tensors = [torch.ones(1), torch.full((2,), 2.0)]
    multiply(tensors, torch.tensor(3.0))
    assert [t.tolist() for t in tensors] == [[3.0], [6.0, 6.0]]


@relied_on("torch:_foreach_norm")
def many_norms_are_taken_at_once(norm: Any) -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([2.0], dtype=torch.float64)]
    assert [n.item() for n in norm(tensors, 2.0)] == [5.0, 2.0]


@relied_on("torch:_amp_foreach_non_finite_check_and_unscale_")
def many_gradients_are_unscaled_at_once(unscale: Any) -> None:
    for value, expected in (6.0, 0.0), (torch.inf, 1.0):
        gradients, found = [torch.full((2,), value), torch.ones(1)], torch.zeros(1)
        unscale(gradients, found, torch.tensor(0.5))
        assert found.item() == expected
        assert [g[0].item() for g in gradients] == [value / 2, 0.5]


@relied_on(
    "torch.autograd.profiler:_is_profiler_enabled", "torch:_C._autograd._enable_record_function"
)
def a_profiler_is_told_and_stopped(_: Any, record: Any) -> None:
    assert not torch.autograd.profiler._is_profiler_enabled
    with torch.profiler.profile() as profiler:
        assert torch.autograd.profiler._is_profiler_enabled
        record(False)
        X.sin()
        record(True)
        X.cos()
    names = {event.key for event in profiler.key_averages()}
    assert "aten::cos" in names
    assert "aten::sin" not in names


# ---------------------------------------------------------------- the tests


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_what_is_relied_on(name: str) -> None:
    if find(name, CHECKS) is CHECKS:
        pytest.skip("switched off: " + OPTIONAL[name])
    CHECKS[name]()


ATTRIBUTES: dict[Callable[[], object], set[str]] = {
    lambda: torch.ones(1): {
        *("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_use_count"),
    },
    lambda: torch.ones(1).untyped_storage(): {"_cdata"},
    lambda: torch.storage.TypedStorage: {"_fake_device"},
    lambda: torch.ops.aten.add.Tensor: {"_schema"},
    lambda: torch.autograd.forward_ad: {"_current_level"},
    lambda: torch.autograd.profiler: {"_is_profiler_enabled"},
    lambda: nn.BatchNorm1d(1): {
        *("_parameters", "_buffers", "_modules", "_compiled_call_impl", "_check_input_dim"),
        *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    },
    lambda: torch.optim.SGD([torch.ones(1)]): {
        *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        "_optimizer_state_dict_post_hooks",
    },
    lambda: torch.amp.GradScaler: {"_unscale_grads_"},
    lambda: torch.distributed.ProcessGroupGloo._Options(): {"_timeout"},  # type: ignore[attr-defined]
}
"""Private attributes of torch's objects that are used: what makes an object, and its attributes.

Some are used if they exist: ``_dynamo_source`` on placeholders of a captured graph,
``_step_supports_amp_scaling`` on fused optimizers, ``_torchdynamo_orig_backend`` on what
`torch.compile` has wrapped.
"""


def test_objects_have_the_attributes_that_are_used() -> None:
    for make, names in ATTRIBUTES.items():
        assert [name for name in names if not hasattr(make(), name)] == []
    tensor = torch.ones(2, requires_grad=True)
    before = tensor._version
    with torch.no_grad():
        tensor += 1
    assert tensor._version == before + 1
    assert tensor._use_count() == 1
    kept = tensor * 2  # whose graph goes back to it
    assert tensor._use_count() > 1
    del kept
    assert tensor._backward_hooks is None
    assert torch.ones(1).untyped_storage()._cdata != tensor.untyped_storage()._cdata
    assert [argument.name for argument in torch.ops.aten.relu_.default._schema.arguments] == [
        "self"
    ]
    norm = nn.BatchNorm1d(2)
    assert norm._parameters["weight"] is norm.weight
    assert norm._buffers["running_mean"] is norm.running_mean
    assert nn.Sequential(norm)._modules["0"] is norm
    with pytest.raises(ValueError, match="expected 2D or 3D"):
        norm._check_input_dim(torch.ones(1, 1, 1, 1))
    optimizer = torch.optim.SGD([tensor])
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert [*optimizer._optimizer_step_pre_hooks] == [handle.id]
    assert torch.optim.SGD.step.hooked  # type: ignore[attr-defined]


def looked_up(tree: ast.Module) -> set[str]:
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "find"]
    return {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}


def test_each_name_that_is_looked_up_has_a_check_and_no_other_one() -> None:
    found = set[str]().union(*map(looked_up, FILES.values()))
    for place, settings in (
        ("torch._dynamo.config", dynamo._CAPTURE),
        ("torch.fx.experimental._config", dynamo._SHAPES),
    ):
        found |= {f"{place}:{name}" for name in settings}
    assert found == CHECKS.keys()
    assert OPTIONAL.keys() <= found


def test_a_torch_without_a_required_name_is_refused_by_its_version_and_the_name() -> None:
    with pytest.raises(ImportError, match=r"cannot work with torch .*, which has no torch:_C._x"):
        find("torch:_C._x")


OTHERS = ("self", "sys")


def test_private_names_are_looked_up_and_not_imported() -> None:
    listed = set[str]().union(*ATTRIBUTES.values())
    listed |= {
        "_saved_input",
        "_C",
    }  # of a node of autograd, if it is there; the place of a function
    for path, tree in FILES.items():
        for node in without_types(tree):
            if isinstance(node, ast.ImportFrom):
                words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                bad = [] if words[0] == "lightning_hybrid" else list(filter(is_private, words))
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in OTHERS:
                bad = [node.attr] if is_private(node.attr) and node.attr not in listed else []
            else:
                continue
            assert bad == [], f"{path}:{node.lineno} {bad}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def without_types(tree: ast.Module) -> list[ast.AST]:
    """All nodes but those of ``if TYPE_CHECKING:``, which never run."""
    found: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found += [n for part in node.orelse for n in ast.walk(part)]
        else:
            found += ast.walk(node)
    return found


@pytest.mark.conformance
@pytest.mark.distributed
def test_a_torch_without_the_optional_names_trains_as_one_device_and_says_what_is_lost() -> None:
    script = Path(__file__).parent / "without_names_script.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300
    )
    assert "equal to one device" in done.stdout, done.stderr
    for name, loss in OPTIONAL.items():
        [line] = {one for one in done.stderr.splitlines() if f"{torch.__version__} {loss}" in one}
        assert name in line
