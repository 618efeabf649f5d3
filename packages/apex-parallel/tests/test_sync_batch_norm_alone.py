"""SyncBatchNorm in one process: gradients, eval mode, options, errors, torch.compile."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from apex.parallel import SyncBatchNorm, sync_batchnorm
from apex.parallel.optimized_sync_batchnorm_kernel import SyncBatchnormFunction
from apex.parallel.sync_batchnorm_kernel import SyncBatchnormFunction as GivenStatistics
from apex.parallel.syncbn.over_ranks import apply_plain
from apex_testkit.opcheck import assert_compiles

CASES = [
    ((3, 2, 2, 2), {}),
    ((3, 2, 2, 2), {"memory_format": torch.channels_last}),
    ((3, 2, 2), {}),
    ((4, 2), {}),
]


def make(shape, dtype=torch.float64, **layout):
    x = torch.randn(shape, dtype=dtype)
    return (x.contiguous(**layout) if layout else x).requires_grad_()


def test_import_paths():
    assert sync_batchnorm.SyncBatchNorm is SyncBatchNorm
    assert SyncBatchNorm.syncbn_import_error is None
    path = "apex.parallel.optimized_sync_batchnorm"
    assert sys.modules[path].SyncBatchNorm is SyncBatchNorm
    assert sys.modules[f"{path}_kernel"].SyncBatchnormFunction is SyncBatchnormFunction
    assert path.encode() in pickle.dumps(SyncBatchNorm(1))  # a whole model may be saved


@pytest.mark.parametrize("from_batch", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(("shape", "layout"), CASES, ids=["NCHW", "channels_last", "NCL", "NC"])
def test_gradcheck(shape, layout, last, relu, from_batch, device):
    x, z = make(shape, **layout).to(device), make(shape, **layout).to(device)
    channels = shape[-1] if last else shape[1]
    vectors = [torch.rand(channels, dtype=torch.float64, device=device) for _ in range(4)]
    weight, bias, *running = vectors
    running = [None, None] if from_batch else running
    options = (from_batch, 0.1, None, last, relu)

    def function(x, z, weight, bias):
        return SyncBatchnormFunction.apply(x, z, weight, bias, *running, 1e-2, *options)

    affine = (weight.requires_grad_(), bias.requires_grad_())
    assert torch.autograd.gradcheck(function, (x, z, *affine))
    assert torch.autograd.gradcheck(lambda x: function(x, None, None, None), (x,))


@pytest.mark.parametrize("kernel", [SyncBatchnormFunction, GivenStatistics])
@pytest.mark.parametrize(("shape", "layout"), [*CASES, ((4, 2, 1, 1), {})], ids=str)
def test_change_of_the_output_in_place(shape, layout, kernel, device):
    """ResNets apply nn.ReLU(inplace=True) to it."""
    x = torch.randn(shape, dtype=torch.float64).contiguous(**layout).to(device).requires_grad_()
    one = torch.ones(2, dtype=torch.float64, device=device)
    options = (True, 0.1) if kernel is SyncBatchnormFunction else (None, 1)
    own = (None,) if kernel is SyncBatchnormFunction else ()
    grads = []
    for relu in (torch.relu, torch.relu_):
        y = relu(kernel.apply(x, *own, one, 0.5 * one, 0.5 * one, 2 * one, 1e-5, *options))
        grads.append(torch.autograd.grad(y.square().sum(), x)[0])
    assert grads[0].abs().sum() > 0
    assert torch.equal(*grads)


@pytest.mark.parametrize("kernel", [SyncBatchnormFunction, GivenStatistics])
@pytest.mark.parametrize(("shape", "layout"), [*CASES, ((4, 2, 1, 1), {})], ids=str)
@pytest.mark.parametrize("contiguous", [True, False], ids=["", "strided"])
def test_second_derivative_is_refused(contiguous, shape, layout, kernel, device):
    """Also where the output's gradient is a constant, as in a gradient penalty."""
    x = torch.randn(shape, dtype=torch.float64).contiguous(**layout).to(device)
    x = x if contiguous else x.repeat_interleave(2, 0)[::2]
    x.requires_grad_()
    weight, bias = (torch.ones(2, dtype=torch.float64, device=device) for _ in range(2))
    running = 0.5 * bias, 2 * bias
    weight.requires_grad_()
    options = (True, 0.1) if kernel is SyncBatchnormFunction else (None, 1)
    own = (None,) if kernel is SyncBatchnormFunction else ()
    factors = torch.randn(shape, dtype=torch.float64, device=device)

    def loss():
        return (kernel.apply(x, *own, weight, bias, *running, 1e-5, *options) * factors).sum()

    for wanted in (x, weight):
        # Asked for an input that only the saved tensors lead to.
        for source in (x, weight):
            (first,) = torch.autograd.grad(loss(), wanted, create_graph=True)
            with pytest.raises(RuntimeError, match="cannot be differentiated again"):
                torch.autograd.grad(first.square().sum(), source)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(factors, factors)  # whose tangent would be lost
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(loss(), x, dual.sum())


@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(("shape", "layout"), CASES, ids=["NCHW", "channels_last", "NCL", "NC"])
def test_gradient_of_zeros(shape, layout, last, relu, device):
    """torch.sgn hands one on that has no memory."""
    x, one = make(shape, **layout).to(device), torch.ones(2, dtype=torch.float64, device=device)
    weight, bias = one.clone().requires_grad_(), one.clone().requires_grad_()
    leaves = x, weight, bias
    calls = (
        lambda: apply_plain(
            x, None, weight, bias, None, None, 1e-5, True, 0.1, None, last, relu, None
        ),
        lambda: SyncBatchnormFunction.apply(
            x, None, weight, bias, None, None, 1e-5, True, 0.1, None, last, relu
        ),
        lambda: GivenStatistics.apply(x, weight, bias, one, one, 1e-5, None, 1),
    )
    for call in calls:
        y, zeros = call(), []
        y.register_hook(lambda dy, zeros=zeros: zeros.append(dy._is_zerotensor()))
        gradients = torch.autograd.grad(y.sgn().sum(), leaves)
        assert zeros == [True]
        assert all(
            torch.equal(g, torch.zeros_like(t)) for g, t in zip(gradients, leaves, strict=True)
        )


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_that_nobody_differentiates(device):
    """Gradients are those without it, and may be changed in place."""
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64, device=device)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    z = torch.randn_like(x).requires_grad_()
    norm = SyncBatchNorm(3, fuse_relu=True).double().to(device)
    inputs = (x, z, norm.weight, norm.bias)
    loss = lambda: norm(x, z).square().sum()
    plain = torch.autograd.grad(loss(), inputs)
    first = torch.autograd.grad(loss(), inputs, create_graph=True)
    for mine, wanted in zip(first, plain, strict=True):
        assert torch.equal(mine, wanted)
        mine.mul_(2)
    loss().backward(create_graph=True)
    for tensor, wanted in zip(inputs, plain, strict=True):
        assert torch.equal(tensor.grad, wanted)
        tensor.grad = None


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_eval_mode(dtype, last, device):
    shape = (3, 2, 4, 5) if last else (3, 5, 2, 4)
    plain = nn.BatchNorm2d(5, device=device).eval()
    for vector in (plain.weight, plain.bias, plain.running_mean, plain.running_var):
        vector.data.copy_(torch.rand(5) + 0.5)
    plain = plain.double() if dtype == torch.float64 else plain
    x, z = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    for added, relu in ((None, False), (None, True), (z, False), (z, True)):
        norm = SyncBatchNorm(5, channel_last=last, fuse_relu=relu).to(device, plain.weight.dtype)
        norm.load_state_dict(plain.state_dict())
        norm.eval()
        a, b = (x.to(d, copy=True).requires_grad_() for d in (dtype, torch.float64))
        wanted = copy.deepcopy(plain).double()(b.movedim(-1, 1) if last else b)
        wanted = wanted.movedim(1, -1) if last else wanted
        wanted = wanted if added is None else wanted + added
        wanted = wanted.relu() if relu else wanted
        out = norm(a, added)
        out.sum().backward()
        wanted.sum().backward()
        for mine, true in ((out, wanted), (a.grad, b.grad)):
            # torch.testing's default tolerance for the dtype, which stands for its rounding.
            torch.testing.assert_close(mine, true.to(dtype))
        assert torch.equal(norm.running_mean, plain.running_mean)
        assert norm.num_batches_tracked == 0


def test_running_statistics(device):
    """Momentum None averages over all batches; buffers stay the tensors they are."""
    mine, plain = SyncBatchNorm(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    for norm in (mine.double().to(device), plain.double().to(device)):
        alias = norm.running_mean
        torch.manual_seed(0)
        for _ in range(3):
            norm(torch.randn(5, 3, dtype=torch.float64, device=device))
        assert norm.running_mean is alias
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[key], value, rtol=1e-12, atol=1e-14)
    mine.half()
    mine(torch.randn(5, 3, device=device).half())
    assert mine.running_var.dtype == torch.float16


def test_without_tracking_or_parameters(device):
    x = torch.randn(6, 3, 4, dtype=torch.float64, device=device)
    norm = SyncBatchNorm(3, affine=False, track_running_stats=False)
    assert norm.state_dict() == {}
    wanted = F.batch_norm(x, None, None, training=True)
    for mode in (True, False):
        torch.testing.assert_close(norm.train(mode)(x), wanted, rtol=1e-12, atol=1e-14)
    norm = SyncBatchNorm(3).double().to(device)
    norm.track_running_stats = False
    norm(x)
    assert norm.num_batches_tracked == 0
    assert norm.running_mean.tolist() == [0.0] * 3


def test_state_dict_exchange():
    torch.manual_seed(0)
    plain, mine = nn.BatchNorm2d(4), SyncBatchNorm(4)
    plain(torch.randn(2, 4, 3, 3))
    assert list(plain.state_dict()) == list(mine.state_dict())
    mine.load_state_dict(plain.state_dict())
    nn.BatchNorm2d(4).load_state_dict(mine.state_dict())
    other = pickle.loads(pickle.dumps(mine))
    assert all(torch.equal(a, b) for a, b in zip(mine.buffers(), other.buffers(), strict=True))
    mine._specify_channel_last(True)
    assert mine.channel_last
    assert "channel_last=True" in repr(mine)


def test_strided_and_expanded_memory(device):
    base = torch.randn(4, 6, 5, 3, dtype=torch.float64, device=device)
    for x in (base[:, ::2], base.transpose(1, 2), base[:1, :, :, :1].expand(4, 6, 5, 3)):
        norm = SyncBatchNorm(x.shape[1]).double().to(device)
        a = x.clone().requires_grad_()
        grad = torch.randn_like(x).expand_as(x)
        F.batch_norm(a, None, None, norm.weight, norm.bias, True).backward(grad)
        b = x.detach().requires_grad_()
        norm(b).backward(grad)
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-10, atol=1e-12)


def test_errors(device):
    norm = SyncBatchNorm(3).to(device)
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(2, 3, 4, device=device)
    for shape in ((1, 3), (1, 3, 1, 1)):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            norm(torch.randn(shape, device=device))
    with pytest.raises(ValueError, match=r"weight has shape \[3\], but input has 4 channels"):
        norm(torch.randn(2, 4, device=device))
    with pytest.raises(ValueError, match="batch and a channel dimension"):
        norm(torch.randn(3, device=device))
    with pytest.raises(TypeError, match=r"weight is torch.float32, but input is torch.float64"):
        norm(x.double())
    with pytest.raises(TypeError, match="input must be a float64"):
        norm(x.int())
    with pytest.raises(ValueError, match=r"z is \[1, 3, 4\] torch.float32"):
        norm(x, x[:1])
    with pytest.raises(TypeError, match=r"z is .*torch.float16"):
        norm(x, x.half())
    with pytest.raises(ValueError, match="running_mean and running_variance are None"):
        SyncBatchnormFunction.apply(x, None, None, None, None, None, 1e-5, False)
    assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_compiles(last, device):
    shape = (2, 4, 5, 3) if last else (2, 3, 4, 5)
    x = torch.randn(shape, device=device, requires_grad=True)
    norm = SyncBatchNorm(3, channel_last=last, fuse_relu=last).to(device).eval()
    # Channel first is torch's own batch norm in eval mode, which the compiler rounds differently.
    assert_compiles(norm, x, ulps=0 if last else 2)


VECTORS = [torch.rand(4) + 0.5 for _ in range(4)]  # weight, bias, mean and variance
FUNCTIONS = {
    "batch": lambda x: SyncBatchnormFunction.apply(x, None, *VECTORS[:2], None, None, 1e-5),
    "running": lambda x: SyncBatchnormFunction.apply(x, None, *VECTORS, 1e-5, False),
    "given": lambda x: GivenStatistics.apply(x, *VECTORS, 1e-5, None, 1),
}
TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda x: (f(x) ** 3).sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f: lambda x: torch.vmap(f)(torch.stack([x, x])),
    "hessian": lambda f: torch.func.hessian(lambda x: (f(x) ** 3).sum()),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_transforms_are_refused(function, transform, compiled):
    """In compiled code torch gave gradients of zero instead of its error."""
    transformed = transform(function)
    if compiled:
        torch.compiler.reset()
        transformed = torch.compile(transformed, backend="eager")
    with pytest.raises(RuntimeError, match=r"setup_context|cannot transform"):
        transformed(torch.randn(8, 4, 3))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_forward_mode_is_refused(function, compiled):
    """In compiled code torch dropped the tangent instead of raising its error."""
    if compiled:
        torch.compiler.reset()
        function = torch.compile(function, backend="eager")
    x = torch.randn(8, 4, 3)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        function(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_forward_mode_through_the_gradient_is_refused(function, device):
    """The kernels would drop the tangent of the gradient that they are given."""
    x = torch.randn(8, 4, 3).requires_grad_()
    y = function(x)
    with forward_ad.dual_level():
        torch.autograd.grad(y, x, y.detach(), retain_graph=True)  # no tangent: computed
        dual = forward_ad.make_dual(y.detach(), y.detach())
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(y, x, dual)


def test_running_statistics_tell_autograd_that_they_are_written():
    """A plain call leaves out the Python that does it for all operators."""
    norm = SyncBatchNorm(3)
    before = [buffer._version for buffer in norm.buffers()]
    norm(torch.randn(4, 3, 2))
    after = [buffer._version for buffer in norm.buffers()]
    assert all(new > old for new, old in zip(after, before, strict=True))
    assert len(after) == 3


COUNTS = [torch.tensor(4), torch.tensor([4]), torch.tensor(4.0), None]


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("count", COUNTS, ids=str)
def test_counter(count, momentum, device):
    """Whether the kernel can add to it or not; a plain call and one under autocast."""
    mine, plain = SyncBatchNorm(3, momentum=0.3).to(device), nn.BatchNorm1d(3, momentum=0.3)
    plain.to(device).momentum = mine.momentum = momentum if count is not None else 0.3
    for norm in (mine, plain):
        norm.num_batches_tracked = None if count is None else count.clone().to(device)
    torch.manual_seed(0)
    for is_plain in (True, False):
        x = torch.randn(5, 3, device=device)
        plain(x)
        with torch.autocast(device.type, torch.bfloat16, enabled=not is_plain):
            mine(x)
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(mine, key), getattr(plain, key))


def test_python_calls():
    """Of forward and backward, our own: a step takes as long as they do, on a small input."""
    norm, x = SyncBatchNorm(2), torch.randn(4, 2, 3, requires_grad=True)
    seed, calls = torch.ones(4, 2, 3), 0

    def note(frame, event, arg):
        nonlocal calls
        calls += event == "call" and "/apex/parallel/" in frame.f_code.co_filename

    norm(x).backward(seed)
    sys.setprofile(note)
    norm(x).backward(seed)
    sys.setprofile(None)
    assert calls <= 25
