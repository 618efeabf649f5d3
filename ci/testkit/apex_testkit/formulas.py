"""What every function that is a Formula must answer: ``CHECKS``, one test each, of one ``Case``."""

from __future__ import annotations

import functools
import io
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from .accuracy import assert_as_accurate_as
from .batch_invariance import assert_batch_invariant
from .devices import runs_gpu_kernels
from .grids import FLOATS

BATCH_INVARIANCE = "batch invariance"
# An end of a pack; whole packs, and aligned rows on a GPU; rows that are aligned by fours alone; a
# block per row on a GPU.
WIDE_COLUMNS = (33, 256, 300, 1027)
INVARIANT_DTYPES = (torch.float32, torch.bfloat16)  # on an emulated GPU, which takes its time


@dataclass(frozen=True)
class Case:
    """A function and how to call it.

    Args:
        function: what users call; all its arguments are positional.
        arguments: ``(dtype, device) -> arguments``, a few rows.
        oracle: the function in plain PyTorch.
        grads: positions of the arguments that have gradients.
        rows: positions of the arguments that are made of rows; the first dimension counts rows.
        operators: the raw forward and backward operator.
        decompositions: the function that gives their table.
        ulps: how often float64 results are rounded, see ``assert_as_accurate_as``.
        wide: ``(dtype, device, columns) -> arguments``, a few rows of about so many columns: more
            rows for the check of batch invariance, on each path of an engine.
        by_place: whether a row's numbers depend on its place, as random ones do.
        without: what cannot hold, and why: ``{"batch invariance": reason}``.
        keeps_output: why the gradient needs the output; "" where it does not.
    """

    function: Callable[..., torch.Tensor]
    arguments: Callable[[torch.dtype, Any], tuple]
    oracle: Callable[..., torch.Tensor]
    grads: tuple[int, ...]
    rows: tuple[int, ...]
    operators: tuple[Any, Any]
    decompositions: Callable[[], dict]
    ulps: float = 1.0
    wide: Callable[[torch.dtype, Any, int], tuple] | None = None
    by_place: bool = False
    without: Mapping[str, str] = field(default_factory=dict)
    keeps_output: str = ""

    def of_grads(self, arguments: tuple, function: Callable | None = None) -> tuple:
        """A function of the differentiable arguments alone, and these."""
        positions, other = self.grads, list(arguments)
        call = function or self.function

        def of(*values):
            given = list(other)
            for i, value in zip(positions, values, strict=True):
                given[i] = value
            return call(*given)

        return of, tuple(arguments[i] for i in positions)


def _with_gradients(function, values, seed):
    values = [v.detach().requires_grad_() for v in values]
    y = function(*values)
    return y.detach(), *torch.autograd.grad(y, values, seed)


def _summed(function):
    return lambda *values: function(*values).sin().sum()


def check_accuracy(case, device):
    """Of results and gradients, from the kernels and with ``create_graph=True``."""
    for dtype in FLOATS:
        arguments = case.arguments(dtype, device)
        fused, values = case.of_grads(arguments)
        plain, _ = case.of_grads(arguments, case.oracle)
        seed = torch.randn_like(fused(*values))
        actual = _with_gradients(fused, values, seed)
        leaves = [v.detach().requires_grad_() for v in values]
        again = torch.autograd.grad(fused(*leaves), leaves, seed, create_graph=True)
        of = functools.partial(_of_oracle, plain)
        ulps = case.ulps if dtype == torch.float64 else 1.0
        assert_as_accurate_as(of, actual, *values, seed, ulps=ulps)
        assert_as_accurate_as(of, (actual[0], *again), *values, seed, ulps=ulps)
        assert [a.dtype for a in actual[1:]] == [v.dtype for v in values]


def _of_oracle(plain, *given):
    return _with_gradients(plain, given[:-1], given[-1])


def check_compiled(case, device):
    """In one graph, which has our operators in both directions."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    targets = []

    def remember(graph, _):
        targets.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    fused, values = case.of_grads(case.arguments(torch.float32, device))
    seed = torch.randn_like(fused(*values))
    torch.compiler.reset()
    compiled = torch.compile(
        fused, backend=aot_autograd(fw_compiler=remember, bw_compiler=remember), fullgraph=True
    )
    torch.testing.assert_close(
        _with_gradients(compiled, values, seed), _with_gradients(fused, values, seed)
    )
    assert set(case.operators) <= set(targets)


def check_derivatives(case, device):
    fused, values = case.of_grads(case.arguments(torch.float64, device))
    values = tuple(v.requires_grad_() for v in values)
    assert torch.autograd.gradcheck(fused, values, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(fused, values)


def check_func(case, device):
    """torch.func: gradients, eager and compiled, of gradients, forward and both."""
    arguments = case.arguments(torch.float64, device)
    fused, values = case.of_grads(arguments)
    plain, _ = case.of_grads(arguments, case.oracle)
    positions = tuple(range(len(values)))
    transforms = {
        "grad": lambda f: func.grad(_summed(f), positions),
        "jacrev": lambda f: func.jacrev(f, positions),
        "jacfwd": lambda f: func.jacfwd(f, positions),
        "hessian": lambda f: func.hessian(_summed(f), positions),
    }
    for transform in transforms.values():
        torch.testing.assert_close(transform(fused)(*values), transform(plain)(*values))
    torch.compiler.reset()
    compiled = torch.compile(transforms["grad"](fused), backend="eager", fullgraph=True)
    expected = transforms["grad"](plain)(*values)
    assert all(e.abs().max() > 0 for e in expected)
    torch.testing.assert_close(compiled(*values), expected)


def check_forward_mode(case, device):
    arguments = case.arguments(torch.float64, device)
    fused, values = case.of_grads(arguments)
    plain, _ = case.of_grads(arguments, case.oracle)
    tangents = tuple(v.cos() for v in values)
    actual, expected = (func.jvp(f, values, tangents) for f in (fused, plain))
    torch.testing.assert_close(actual, expected)
    for grad_enabled in (False, True):
        with torch.set_grad_enabled(grad_enabled), forward_ad.dual_level():
            duals = [forward_ad.make_dual(v, t) for v, t in zip(values, tangents, strict=True)]
            tangent = forward_ad.unpack_dual(fused(*duals)).tangent
        torch.testing.assert_close(tangent, expected[1])
    torch.compiler.reset()
    compiled = torch.compile(lambda *v: func.jvp(fused, v, tangents)[1], backend="eager")
    torch.testing.assert_close(compiled(*values), expected[1])


def check_vmap(case, device):
    """Without gradients, more rows for the kernels, in the same bits; with them, of each sample."""
    samples = [case.arguments(torch.float32, device) for _ in range(3)]
    dims = tuple(1 if i in case.rows else None for i in range(len(samples[0])))
    batch = tuple(
        torch.stack([s[i] for s in samples], 1) if i in case.rows else samples[0][i]
        for i in range(len(dims))
    )
    each = [tuple(s[i] if i in case.rows else batch[i] for i in range(len(dims))) for s in samples]
    for grad_enabled in (False, True):
        with torch.set_grad_enabled(grad_enabled):
            actual = func.vmap(case.function, dims)(*batch)
            expected = torch.stack([case.function(*arguments) for arguments in each])
        if grad_enabled or BATCH_INVARIANCE in case.without:
            torch.testing.assert_close(actual, expected)
        else:
            assert torch.equal(actual, expected)
    gradients = func.vmap(func.grad(_summed(case.function), case.grads), dims)(*batch)
    expected = [func.grad(_summed(case.oracle), case.grads)(*arguments) for arguments in each]
    for actual, *of_samples in zip(gradients, *expected, strict=True):
        torch.testing.assert_close(actual, torch.stack(of_samples))


def _model(case, device):
    """The function as a module of tensors, these, and what comes out."""
    arguments = case.arguments(torch.float32, device)
    tensors = tuple(a for a in arguments if isinstance(a, torch.Tensor))
    options = arguments[len(tensors) :]

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return case.function(*tensors, *options)

    return Model(), tensors, case.function(*arguments)


def check_export(case, device):
    """An exported program has our operator, and ATen's alone once it is decomposed."""
    model, tensors, expected = _model(case, device)
    program = torch.export.export(model, tensors)
    assert case.operators[0] in [node.target for node in program.graph.nodes]
    torch.testing.assert_close(program.module()(*tensors), expected)
    program = program.run_decompositions(case.decompositions())
    called = [n.target for n in program.graph.nodes if n.op == "call_function"]
    namespaces = {target.namespace for target in called if target is not operator.getitem}
    assert namespaces <= {"aten", "prims"}
    torch.testing.assert_close(program.module()(*tensors), expected)


def check_decompositions(case, device):
    """Both operators' decompositions give what the operators give."""
    table = case.decompositions()
    forward, backward = case.operators
    for dtype in (torch.float32, torch.bfloat16):
        fused, values = case.of_grads(case.arguments(dtype, device))
        with _Calls(forward, backward) as calls:
            y = fused(*[v.requires_grad_() for v in values])
            torch.autograd.grad(y, values, torch.randn_like(y))
        assert [called for called, _, _ in calls.seen] == [forward, backward]
        for called, given, expected in calls.seen:
            _assert_alike(table[called](*given), expected, dtype)


class _Calls(TorchDispatchMode):
    """Remembers calls of operators: which, with what arguments and results."""

    def __init__(self, *operators):
        super().__init__()
        self.operators, self.seen = operators, []

    def __torch_dispatch__(self, target, types, args=(), kwargs=None):
        result = target(*args, **(kwargs or {}))
        if target in self.operators:
            self.seen.append((target, args, result))
        return result


def _assert_alike(actual, expected, dtype):
    actual, expected = ((t,) if isinstance(t, torch.Tensor) else t for t in (actual, expected))
    unit = 2 * torch.finfo(dtype).eps
    for a, e in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        torch.testing.assert_close(a, e, rtol=unit, atol=4 * unit)


def check_onnx(case, device):
    """A model in ONNX, whose runtime has no operator of ours, computes the same."""
    pytest.importorskip("onnxscript", reason="no onnxscript, which torch.onnx exports with")
    onnxruntime = pytest.importorskip("onnxruntime", reason="no onnxruntime to run the model")
    model, tensors, expected = _model(case, "cpu")
    file = io.BytesIO()
    torch.onnx.export(model, tensors, dynamo=True, verbose=False).save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [i.name for i in session.get_inputs()]
    given = {n: t.numpy() for n, t in zip(names, tensors, strict=True)}
    torch.testing.assert_close(torch.from_numpy(session.run(None, given)[0]), expected)


def check_traced(case, device):
    """torch.jit.trace records plain PyTorch, which any runtime has."""
    model, tensors, expected = _model(case, device)
    traced = torch.jit.trace(model, tensors)
    assert not any("apex" in node.kind() for node in traced.graph.nodes())
    torch.testing.assert_close(traced(*tensors), expected)


def check_autocast(case, device):
    """Changes nothing but dtypes: results are those of the dtype that comes out."""
    arguments = case.arguments(torch.float32, device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        y = case.function(*arguments)
    unit = 4 * torch.finfo(y.dtype).eps
    torch.testing.assert_close(y, case.function(*arguments).to(y.dtype), rtol=unit, atol=unit)


def check_batch_invariance(case, device):
    """A row's bits are the same in every batch, wherever it lies, with any number of threads."""
    if BATCH_INVARIANCE in case.without:
        return
    for dtype in INVARIANT_DTYPES if runs_gpu_kernels(torch.device(device)) else FLOATS:
        assert_batch_invariant(case, case.arguments(dtype, device))
        for columns in WIDE_COLUMNS if case.wide is not None else ():
            assert_batch_invariant(case, case.wide(dtype, device, columns))


def check_some_gradients(case, device):
    """Arguments that want no gradient get none, and the others the same."""
    fused, values = case.of_grads(case.arguments(torch.float32, device))
    seed = torch.randn_like(fused(*values))
    expected = _with_gradients(fused, values, seed)[1:]
    for wanted in range(len(values)):
        given = [v.detach().requires_grad_(i == wanted) for i, v in enumerate(values)]
        fused(*given).backward(seed)
        assert [v.grad is None for v in given] == [i != wanted for i in range(len(values))]
        torch.testing.assert_close(given[wanted].grad, expected[wanted])


def check_in_place(case, device):
    """An operation in place behind the output stops only a gradient that needs the output."""
    fused, values = case.of_grads(case.arguments(torch.float32, device))
    seed = torch.randn_like(fused(*values))
    expected = _with_gradients(lambda *v: fused(*v).mul(2), values, seed)
    if case.keeps_output:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            _with_gradients(lambda *v: fused(*v).mul_(2), values, seed)
    else:
        actual = _with_gradients(lambda *v: fused(*v).mul_(2), values, seed)
        torch.testing.assert_close(actual, expected)


def check_zero_gradient(case, device):
    """A gradient of zeros, which autograd hands on without memory, as that of torch.sgn is."""
    fused, values = case.of_grads(case.arguments(torch.float32, device))
    y = fused(*[v.requires_grad_() for v in values])
    y.register_hook(lambda gradient: zeros.append(gradient._is_zerotensor()))
    zeros = []
    for gradient in torch.autograd.grad(y.sgn().sum(), values):
        assert torch.count_nonzero(gradient) == 0
    assert zeros == [True]


def check_hook_fails(case, device):
    """An error of a hook on saved tensors reaches the user, and nothing runs a second time."""
    for kind in (RuntimeError, AttributeError):
        fused, values = case.of_grads(case.arguments(torch.float32, device))
        leaves, error, packed = [v.requires_grad_() for v in values], kind("of a hook"), []

        def pack(tensor, error=error, packed=packed):
            packed.append(tensor)
            if len(packed) == 1:
                raise error
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, pytest.raises(kind) as raised:
            fused(*leaves)
        assert raised.value is error
        assert len(packed) == 1


CHECKS = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_accuracy,
        check_compiled,
        check_derivatives,
        check_func,
        check_forward_mode,
        check_vmap,
        check_export,
        check_decompositions,
        check_onnx,
        check_traced,
        check_autocast,
        check_some_gradients,
        check_batch_invariance,
        check_in_place,
        check_zero_gradient,
        check_hook_fails,
    )
}


def check_sharded(case: Case, rank: int, world_size: int) -> None:
    """DTensors: rows stay where they are; gradients of what rows share are summed.

    For a test with processes, which calls it on each.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    arguments = case.arguments(torch.float32, "cpu")
    fused, values = case.of_grads(arguments)
    seed = torch.randn_like(fused(*values))
    expected = _with_gradients(fused, values, seed)
    within_rows = Shard(arguments[case.rows[0]].dim() - 1)
    for placement in (Shard(0), Replicate(), within_rows):
        placed = []
        for i, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                is_row = i in case.rows and (
                    placement.is_replicate() or placement.dim < argument.dim()
                )
                where = placement if is_row else Replicate()
                argument = distribute_tensor(argument, mesh, [where])
                if i in case.grads:
                    argument.requires_grad_()
            placed.append(argument)
        with CommDebugMode() as communication:
            y = case.function(*placed)
        assert isinstance(y, DTensor)
        assert bool(communication.get_total_counts()) == (placement == within_rows)
        torch.testing.assert_close(y.full_tensor(), expected[0])
        y.backward(distribute_tensor(seed, mesh, y.placements))
        for i, gradient in zip(case.grads, expected[1:], strict=True):
            torch.testing.assert_close(placed[i].grad.full_tensor(), gradient)
