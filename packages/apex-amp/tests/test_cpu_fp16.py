"""float16 products and convolutions on the CPU: through float32 while amp needs it, no longer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _amp_state
from apex.amp.casting import cpu_float16
from apex.amp.casting.cpu_float16 import float16_through_float32
from apex_testkit import assert_as_accurate_as, assert_compiles

half = torch.float16


def randn(*shape):
    return torch.randn(shape).to(half)


CONVOLUTIONS = {
    "1d": (F.conv1d, (2, 4, 9), (6, 4, 3), {"padding": 1}),
    "2d": (F.conv2d, (2, 4, 7, 7), (6, 4, 3, 3), {"stride": 2, "padding": 1}),
    "3d": (F.conv3d, (2, 4, 5, 5, 5), (6, 4, 3, 3, 3), {"dilation": 2}),
    "groups": (F.conv2d, (2, 4, 7, 7), (6, 2, 3, 3), {"groups": 2}),
    "depthwise": (F.conv2d, (2, 4, 7, 7), (4, 1, 3, 3), {"groups": 4, "padding": "same"}),
    "transposed 1d": (F.conv_transpose1d, (2, 4, 9), (4, 6, 3), {"stride": 2}),
    "transposed 2d": (F.conv_transpose2d, (2, 4, 5, 5), (4, 6, 3, 3), {"output_padding": 0}),
    "transposed 3d": (F.conv_transpose3d, (1, 4, 3, 3, 3), (4, 2, 3, 3, 3), {"groups": 2}),
}
PRODUCTS = {
    "mm": (torch.mm, (5, 7), (7, 3)),
    "bmm": (torch.bmm, (2, 5, 7), (2, 7, 3)),
    "linear": (F.linear, (2, 5, 7), (3, 7)),
    "linear with bias": (F.linear, (5, 7), (3, 7), (3,)),
    "addmm": (lambda *a: torch.addmm(*a, beta=0.5, alpha=2.0), (5, 3), (5, 7), (7, 3)),
    "baddbmm": (torch.baddbmm, (2, 5, 3), (2, 5, 7), (2, 7, 3)),
    "addbmm": (torch.addbmm, (5, 3), (2, 5, 7), (2, 7, 3)),
    "mv": (torch.mv, (5, 7), (7,)),
    "dot": (torch.dot, (7,), (7,)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->ik", a, b), (2, 5, 7), (2, 7, 3)),
    "attention": (F.scaled_dot_product_attention, *[(1, 2, 5, 8)] * 3),
}


def outputs_and_gradients(function, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = function(*inputs)
    cotangent = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output.dtype)
    return (output, *torch.autograd.grad(output, inputs, cotangent))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_against_float64(case, bias):
    function, x_shape, w_shape, options = CONVOLUTIONS[case]
    inputs = [randn(*x_shape), randn(*w_shape)]
    if bias:
        inputs.append(randn(w_shape[1] * options.get("groups", 1) if "tr" in case else w_shape[0]))
    run = lambda *inputs: outputs_and_gradients(
        lambda x, w, b=None: function(x, w, b, **options), *inputs
    )
    with float16_through_float32():
        actual = run(*inputs)
    assert {t.dtype for t in actual} == {half}
    assert_as_accurate_as(run, actual, *inputs)


@pytest.mark.parametrize("few", [cpu_float16._FEW, 0], ids=["torch's loops", "through float32"])
@pytest.mark.parametrize("case", PRODUCTS)
def test_products_against_float64(case, few, monkeypatch):
    monkeypatch.setattr(cpu_float16, "_FEW", few)
    function, *shapes = PRODUCTS[case]
    inputs = [randn(*shape) for shape in shapes]
    run = lambda *inputs: outputs_and_gradients(function, *inputs)
    with float16_through_float32():
        actual = run(*inputs)
    assert {t.dtype for t in actual} == {half}
    # Composites round intermediate results: einsum's sum, addbmm's and attention's inner products.
    assert_as_accurate_as(run, actual, *inputs, ulps=2)


@pytest.mark.parametrize("channels_last", [True, False])
def test_frozen_inputs_and_memory_formats(channels_last):
    conv = nn.Conv2d(4, 6, 3).to(half)
    conv.weight.requires_grad_(False)
    x = randn(2, 4, 7, 7).requires_grad_()
    if channels_last:
        conv, x = conv.to(memory_format=torch.channels_last), x.detach()
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    with float16_through_float32():
        conv(x).sum().backward()
    assert conv.weight.grad is None
    assert x.grad.shape == x.shape
    assert conv.bias.grad.dtype is half


def test_double_backward():
    x, w = randn(1, 2, 5, 5).requires_grad_(), randn(2, 2, 3, 3).requires_grad_()
    with float16_through_float32():
        (grad,) = torch.autograd.grad(F.conv2d(x, w).pow(2).sum(), x, create_graph=True)
        grad.float().pow(2).sum().backward()
    assert w.grad.isfinite().all()
    assert w.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_are_bitwise_unchanged(dtype):
    x, w = torch.randn(2, 4, 7, 7).to(dtype), torch.randn(6, 4, 3, 3).to(dtype)
    a, b = torch.randn(33, 65).to(dtype), torch.randn(65, 17).to(dtype)
    run = lambda: (*outputs_and_gradients(F.conv2d, x, w), *outputs_and_gradients(torch.mm, a, b))
    plain = run()
    with float16_through_float32():
        for expected, actual in zip(plain, run(), strict=True):
            assert torch.equal(expected, actual)


def test_out_variants_and_resizing():
    a, b = randn(5, 7), randn(7, 3)
    with float16_through_float32():
        expected = torch.mm(a, b)
        out = torch.empty(5, 3, dtype=half)
        assert torch.mm(a, b, out=out) is out
        assert torch.equal(out, expected)
        empty = torch.empty(0, dtype=half)
        assert torch.equal(torch.mm(a, b, out=empty), expected)
        wide = torch.mm(a.float(), b.float(), out=torch.empty(5, 3))
        assert wide.dtype is torch.float32


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("freed", [0, 1])
@pytest.mark.parametrize(
    "multiply", [torch.mm, lambda a, b: torch.addmm(torch.ones(1).half(), a, b), F.linear]
)
def test_memory_that_was_freed_is_not_read(multiply, freed, size):
    """As FSDP leaves a parameter; torch refuses it, and so do products under amp."""
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    matrices = randn(size, size), randn(size, size)
    matrices[freed].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"is not allocated|storage of size 0"):
        multiply(*matrices)


MIXED = {
    "linear": (F.linear, (2, 4), (3, 4), (3,)),
    "linear without bias": (F.linear, (2, 4), (3, 4)),
    "addmm": (torch.addmm, (2, 3), (2, 4), (4, 3)),
    "bmm": (torch.bmm, (2, 2, 4), (2, 4, 3)),
    "baddbmm": (torch.baddbmm, (2, 2, 3), (2, 2, 4), (2, 4, 3)),
    "mv": (torch.mv, (2, 4), (4,)),
    "dot": (torch.dot, (4,), (4,)),
    "conv2d": (F.conv2d, (1, 2, 5, 5), (2, 2, 3, 3), (2,)),
    "attention": (F.scaled_dot_product_attention, *[(1, 2, 5, 8)] * 3),
}


@pytest.mark.parametrize("case", MIXED)
def test_mixtures_are_refused_as_by_torch(case):
    """As on a GPU: nothing says in which of the dtypes the result is meant."""
    function, *shapes = MIXED[case]
    for wide in range(len(shapes)):
        inputs = [randn(*shape) for shape in shapes]
        inputs[wide] = inputs[wide].float()
        with float16_through_float32(), pytest.raises(RuntimeError, match=r"dtype|type"):
            function(*inputs)


def test_outputs_of_another_dtype_are_refused_as_by_torch():
    with float16_through_float32(), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(randn(5, 7), randn(7, 3), out=torch.empty(5, 3))


def kernel_dtypes(monkeypatch, run):
    """The dtypes with which torch's own convolution kernels are called."""
    seen = []
    get_kernel = torch.library.get_kernel

    class Spy:
        def __init__(self, name):
            self.name, self.kernel = name, get_kernel(name, "CPU")

        def call_boxed(self, keys, *args, **kwargs):
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            seen.append((self.name.removeprefix("aten::"), {t.dtype for t in tensors}))
            return self.kernel.call_boxed(keys, *args, **kwargs)

    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: Spy(name))
    run()
    return seen


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_levels_never_reach_the_reference_kernels(level, monkeypatch):
    monkeypatch.setattr(cpu_float16, "_FEW", 0)

    def train():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
        model = amp.initialize(model, opt_level=level, verbosity=0)
        model(torch.randn(2, 3, 6, 6)).float().sum().backward()

    seen = kernel_dtypes(monkeypatch, train)
    expected = {"convolution", "convolution_backward", "addmm", "mm"} & set(cpu_float16._slow_ops())
    assert expected <= {name for name, _ in seen}
    assert all(half not in dtypes for _, dtypes in seen)


@pytest.mark.parametrize(
    ("level", "routes"), [("O1", True), ("O2", True), ("O3", True), ("O4", False), ("O0", False)]
)
def test_kernels_are_torchs_own_after_deactivation(level, routes, monkeypatch):
    inputs = randn(2, 3, 6, 6), randn(4, 3, 3, 3)
    calls = []
    monkeypatch.setattr(cpu_float16, "_is_float16", lambda args: calls.append(args) or True)

    def is_routed():
        calls.clear()
        outputs_and_gradients(F.conv2d, *inputs)
        return bool(calls)

    for _ in range(2):
        amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
        assert is_routed() == routes
    _amp_state.handle._deactivate()
    assert not is_routed()


def test_compiles():
    conv, linear = nn.Conv2d(3, 4, 3).to(half), nn.Linear(64, 8).to(half)
    with float16_through_float32():
        run = lambda x: linear(F.relu(conv(x)).flatten(1))
        # Inductor rounds ReLU's input and gradient as eager does, but may fuse the flatten.
        assert_compiles(run, randn(2, 3, 6, 6).requires_grad_(), ulps=1)
