"""apex.contrib.groupbn and cudnn_gbn against PyTorch's batch norm of all batches, in float64."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.contrib.groupbn.batch_norm import (
    IS_ROCM_PYTORCH,
    bn_addrelu_NHWC_impl,
    bn_NHWC_impl,
    check_if_rocm_pytorch,
)
from apex_testkit import FLOATS, assert_as_accurate_as, assert_compiles

EPS, MOMENTUM = 1e-5, 0.1


def to_nchw(x):
    return None if x is None else x.movedim(-1, 1)


def trained(x, z, weight, bias, mean, var, relu, dy, positive=None):
    """Output, gradients and new running statistics, of torch's batch norm; x is [N, H, W, C].

    With ``positive``, the ReLU's gradient is passed there: near 0 that is a matter of rounding.
    """
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias, *([] if z is None else [z]))]
    mean, var = mean.clone(), var.clone()
    y = F.batch_norm(to_nchw(leaves[0]), mean, var, *leaves[1:3], True, MOMENTUM, EPS)
    y = y.movedim(1, -1)
    y = y if z is None else y + leaves[3]
    gradients = torch.autograd.grad(y, leaves, dy if positive is None else dy * positive)
    return y.relu() if relu else y, *gradients, mean, var


def norm_of(c, dtype, device, **options):
    norm = BatchNorm2d_NHWC(c, **options).to(device)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-1, 1)
        norm.running_mean.uniform_(-1, 1)
    return norm.to(dtype if dtype == torch.float64 else torch.float32)


def call(norm, x, z, dy):
    leaves = [x.detach().requires_grad_(), norm.weight, norm.bias]
    given = [leaves[0]]
    if z is not None:
        leaves.append(z.detach().requires_grad_())
        given.append(leaves[3])
    y = norm(*given)
    gradients = torch.autograd.grad(y, leaves, dy)
    return y.detach(), *gradients, norm.running_mean.clone(), norm.running_var.clone()


@pytest.mark.parametrize("kind", ["plain", "relu", "residual"])
@pytest.mark.parametrize("shape", [(2, 4, 5, 3), (3, 7, 7, 64), (2, 1, 1, 130)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_trains_as_torch(dtype, shape, kind, device):
    norm = norm_of(shape[-1], dtype, device, fuse_relu=kind != "plain")
    x, z, dy = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    z = z if kind == "residual" else None
    given = [t.detach().clone() for t in (norm.weight, norm.bias)]
    before = norm.running_mean.clone(), norm.running_var.clone()
    actual = call(norm, x, z, dy)
    positive = None if kind == "plain" else actual[0] > 0

    def reference(x, z, weight, bias, mean, var, dy):
        return trained(x, z, weight, bias, mean, var, norm.fuse_relu, dy, positive)

    # Sums for the gradients are rounded on the way, and the output's sign decides.
    assert_as_accurate_as(reference, actual, x, z, *given, *before, dy, ulps=4)
    assert norm.num_batches_tracked == 1
    assert actual[1].dtype == dtype
    mean = x.double().mean((0, 1, 2))
    inverse = (x.double().var((0, 1, 2), unbiased=False) + EPS).rsqrt()
    for name, value in (("minibatch_mean", mean), ("minibatch_riv", inverse)):
        torch.testing.assert_close(getattr(norm, name).double(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_z", [False, True], ids=["", "z"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_eval(with_z, dtype, device):
    norm = norm_of(6, dtype, device, fuse_relu=True).eval()
    x, z = (torch.randn(2, 3, 4, 6, device=device).to(dtype) for _ in range(2))
    norm.running_var.uniform_(0.5, 2)
    before = copy.deepcopy(norm.state_dict())

    def reference(x, z, mean, var, weight, bias):
        y = F.batch_norm(to_nchw(x), mean, var, weight, bias, False, 0, EPS).movedim(1, -1)
        return (y + z if with_z else y).relu()

    vectors = norm.running_mean, norm.running_var, norm.weight.detach(), norm.bias.detach()
    y = norm(x, z) if with_z else norm(x)
    assert_as_accurate_as(reference, y, x, z, *vectors)
    assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())
    leaf = x.double().requires_grad_()
    double = copy.deepcopy(norm).double()
    assert torch.autograd.gradcheck(lambda x: double(x, z.double()), leaf)


def test_channels_last(device):
    """ROCm's argument, and NVIDIA's order, in which an int stands in its place."""
    norm = norm_of(8, torch.float32, device, fuse_relu=True)
    last = BatchNorm2d_NHWC(8, True, 1, True).to(device)
    last.load_state_dict(norm.state_dict())
    x, z = (torch.randn(2, 3, 4, 8, device=device) for _ in range(2))
    y = last(to_nchw(x), to_nchw(z))
    assert torch.equal(y.movedim(1, -1), norm(x, z))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last(to_nchw(x).contiguous(), to_nchw(z).contiguous()), y)
    assert not BatchNorm2d_NHWC(8, True, 1, 2, 12, False).torch_channels_last


def test_state_of_torch(device):
    norm, plain = norm_of(5, torch.float32, device), nn.BatchNorm2d(5, device=device)
    plain.load_state_dict(norm.state_dict())
    x = torch.randn(4, 3, 3, 5, device=device)
    torch.testing.assert_close(plain(to_nchw(x)).movedim(1, -1), norm(x))
    norm.load_state_dict(plain.state_dict())
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_in_float64(compiled, device):
    norm = norm_of(3, torch.float64, device, fuse_relu=True)
    x, z = (torch.randn(2, 2, 2, 3, dtype=torch.float64, device=device) for _ in range(2))
    function = torch.compile(norm, backend="aot_eager") if compiled else norm
    check = lambda x, z: function(x, z + 0.5)
    assert torch.autograd.gradcheck(check, (x.requires_grad_(), z.requires_grad_()))
    (first,) = torch.autograd.grad(norm(x, z).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(first.sum(), x)
    with pytest.raises(RuntimeError, match=r"setup_context|cannot transform"):
        torch.func.grad(lambda x: norm(x, z).sum())(x)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
def test_gradient_of_zeros(relu, training, device):
    """torch.sgn hands one on that has no memory; autocast takes the other way of a call."""
    norm = norm_of(3, torch.float32, device, fuse_relu=relu).train(training)
    x = torch.randn(2, 2, 2, 3, device=device, requires_grad=True)
    leaves = x, norm.weight, norm.bias
    for is_plain in (True, False):
        with torch.autocast(device.type, torch.bfloat16, enabled=not is_plain):
            y, zeros = norm(x), []
        y.register_hook(lambda dy, zeros=zeros: zeros.append(dy._is_zerotensor()))
        gradients = torch.autograd.grad(y.sgn().sum(), leaves)
        assert zeros == [True]
        assert all(
            torch.equal(g, torch.zeros_like(t)) for g, t in zip(gradients, leaves, strict=True)
        )


def test_compiles(device):
    norm = norm_of(4, torch.float32, device, fuse_relu=True).eval()
    x = torch.randn(2, 3, 3, 4, device=device, requires_grad=True)
    assert_compiles(norm, x)


def test_bad_input(device):
    norm = norm_of(4, torch.float32, device)
    x = torch.ones(2, 3, 3, 4, device=device)
    before = copy.deepcopy(norm.state_dict())
    for error, text, given in [
        (ValueError, "pass fuse_relu=True", (x, x)),
        (ValueError, "x must have 4 dimensions", (x[0],)),
        (ValueError, "weight must be one number for each of the 3 channels", (x[..., :3],)),
        (TypeError, "x must be a float64", (x.int(),)),
        (ValueError, "more than 1 value per channel", (x[:1, :1, :1],)),
    ]:
        with pytest.raises(error, match=f"BatchNorm2d_NHWC: .*{text}"):
            norm(*given)
    norm.fuse_relu = True
    for error, z in ((ValueError, x[:1]), (TypeError, x.half())):
        with pytest.raises(error, match=r"BatchNorm2d_NHWC: z is .* they are added"):
            norm(x, z)
    assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())
    for made in (lambda: BatchNorm2d_NHWC(4, bn_group=2), lambda: GroupBatchNorm2d(4, 2)):
        with pytest.raises(RuntimeError, match=r"is 2, but torch\.distributed is not initialized"):
            made()
    with pytest.raises(ValueError, match=r"input must have shape \[N, 4, H, W\]"):
        GroupBatchNorm2d(4, 1).to(device)(x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_group_batch_norm_2d(layout, dtype, device):
    norm = GroupBatchNorm2d(6, 1, eps=1e-3, momentum=0.3).to(device)
    norm = norm.to(dtype if dtype == torch.float64 else torch.float32)
    x, dy = (torch.randn(3, 6, 4, 4, device=device).to(dtype) for _ in range(2))
    x = x.contiguous(memory_format=layout).requires_grad_()
    y = norm(x)
    actual = y, *torch.autograd.grad(y, (x, norm.weight, norm.bias), dy), norm.running_var

    def reference(x, weight, bias, dy):
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        mean, var = torch.zeros_like(weight), torch.ones_like(weight)
        y = F.batch_norm(leaves[0], mean, var, *leaves[1:], True, 0.3, 1e-3)
        return y, *torch.autograd.grad(y, leaves, dy), var

    given = x.detach(), norm.weight.detach(), norm.bias.detach(), dy
    assert_as_accurate_as(reference, actual, *given, ulps=4)
    assert y.is_contiguous(memory_format=torch.channels_last)
    plain = nn.BatchNorm2d(6, 1e-3).to(device, norm.weight.dtype).eval()
    plain.load_state_dict(norm.state_dict())
    assert torch.equal(norm.eval()(x), plain(x))
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("affine", [False, True])
def test_group_batch_norm_2d_without_parts(affine, device):
    options = {"affine": affine, "track_running_stats": affine, "momentum": None}
    norm = GroupBatchNorm2d(3, 1, **options).to(device)
    plain = nn.BatchNorm2d(3, **options).to(device)
    for _ in range(3):
        x = torch.randn(4, 3, 2, 2, device=device)
        torch.testing.assert_close(norm(x), plain(x))
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[key], value)
    torch.testing.assert_close(norm.eval()(x), plain.eval()(x))


def all_batches(rank, world, shape):
    generator = torch.Generator().manual_seed(1)
    # The last rank's batch is larger: ranks count by their elements.
    sizes = [shape[0] + (r == world - 1) for r in range(world)]
    make = lambda: torch.randn(sum(sizes), *shape[1:], generator=generator, dtype=torch.float64)
    return [t.split(sizes) for t in (make(), make(), make())]


def check_groups(rank, world, bn_group):
    """A group's output, gradients and running statistics are those of its batches as one."""
    xs, zs, dys = all_batches(rank, world, (2, 3, 3, 5))
    first = rank // bn_group * bn_group
    group = range(first, first + bn_group)
    norm = norm_of(5, torch.float64, "cpu", fuse_relu=True, bn_group=bn_group)
    with torch.no_grad():  # parameters of a model are equal on all ranks
        for tensor in norm.state_dict().values():
            dist.broadcast(tensor, 0)
    given = [t.detach().clone() for t in (norm.weight, norm.bias)]
    before = norm.running_mean.clone(), norm.running_var.clone()
    y, dx, dweight, dbias, dz, mean, var = call(norm, xs[rank], zs[rank], dys[rank])
    whole = [torch.cat([t[r] for r in group]) for t in (xs, zs, dys)]
    expected = trained(*whole[:2], *given, *before, True, whole[2] * 1.0)
    positive = expected[0] > 0
    expected = trained(*whole[:2], *given, *before, True, whole[2], positive)
    sizes = [len(xs[r]) for r in group]
    mine = lambda t: t.split(sizes)[rank - first]
    close = lambda a, e: torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)
    close(y, mine(expected[0]))
    close(dx, mine(expected[1]))
    close(dz, mine(expected[4]))
    close((mean, var), expected[5:])
    sums = torch.stack([dweight, dbias])
    gathered = [torch.empty_like(sums) for _ in range(world)]
    dist.all_gather(gathered, sums)
    close(torch.stack(gathered)[first : first + bn_group].sum(0), torch.stack(expected[2:4]))


def check_names(rank, world, bn_group):
    """Of Apex's functions and modules, which do what BatchNorm2d_NHWC does."""
    import bnp

    xs, zs, dys = all_batches(rank, world, (2, 3, 3, 5))
    x, z, dy = xs[rank], zs[rank], dys[rank]
    norm = BatchNorm2d_NHWC(5, True, bn_group).double()
    given = norm.weight.detach(), norm.bias.detach()
    fresh = lambda: (torch.zeros(5).double(), torch.ones(5).double())
    saved = fresh()
    close = lambda a, e: torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)
    y = bn_addrelu_NHWC_impl.apply(
        *(x, z, *given, *fresh(), *saved, 0, None, MOMENTUM, EPS, True, bn_group),
        *(None, None, 0, None, None, 2, 2, 2, 2, False),
    )
    close(y, norm(x, z))
    close(saved, (norm.minibatch_mean, norm.minibatch_riv))
    norm.fuse_relu = False
    expected = call(norm, x, None, dy)
    rest = None, None, None, None, bn_group, 0, 2, 2, False
    common = *given, *fresh(), *saved
    close(bnp.bn_fwd_nhwc(x, *common, None, MOMENTUM, EPS, False, *rest), expected[0])
    gradients = bnp.bn_bwd_nhwc(x, dy, *common, None, MOMENTUM, EPS, False, *rest)
    close(gradients, list(expected[1:4]))
    gbn = GroupBatchNorm2d(5, bn_group).double()
    close(gbn(to_nchw(x)).movedim(1, -1), expected[0])
    close(gbn.minibatch_mean, norm.minibatch_mean)


def test_two_ranks(two_ranks):
    two_ranks(check_groups, bn_group=2)
    two_ranks(check_names, bn_group=2)


@pytest.mark.parametrize("bn_group", [1, 2, 4])
def test_four_ranks(bn_group, four_ranks):
    four_ranks(check_groups, bn_group=bn_group)
    four_ranks(check_names, bn_group=bn_group)


def check_errors(rank, world):
    for size in (3, 0, -1):
        with pytest.raises(ValueError, match="bn_group must divide the number of ranks, 2"):
            BatchNorm2d_NHWC(4, bn_group=size)
    norm = BatchNorm2d_NHWC(4, bn_group=2)
    with pytest.raises(ValueError, match="1 values on all 2 ranks"):
        norm(torch.ones(rank, 1, 1, 4))
    assert norm.num_batches_tracked == 0
    norm(torch.ones(1, 1, 1, 4))  # one on each rank is enough


def test_errors_of_ranks(two_ranks):
    two_ranks(check_errors)


def assert_near(actual, expected, dtype):
    unit = 4 * torch.finfo(dtype).eps
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=unit, atol=unit)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bnp(dtype, device):
    """The old functions do what the module does."""
    import bnp

    norm = norm_of(6, dtype, device, fuse_relu=True)
    x, z, dy = (torch.randn(2, 4, 5, 6, device=device).to(dtype) for _ in range(3))
    vectors = [v.detach().clone() for v in (norm.weight, norm.bias)]
    running = [norm.running_mean.clone(), norm.running_var.clone()]
    saved = [torch.empty_like(v) for v in vectors]
    common = *vectors, *running, *saved
    bits = torch.zeros(2 * 4 * 5 * 6 // 32 + 1, dtype=torch.int32, device=device)
    rest = None, None, None, None, 1, 0, 2, 2, False
    y = bnp.bn_addrelu_fwd_nhwc(x, z, *common, bits, None, MOMENTUM, EPS, *rest)
    dx, dz, dw, db = bnp.bn_addrelu_bwd_nhwc(x, dy, *common, bits, None, MOMENTUM, EPS, *rest)
    assert_near((y, dx, dw, db, dz, *running), call(norm, x, z, dy), dtype)
    assert_near(saved, (norm.minibatch_mean, norm.minibatch_riv), dtype)
    y = bnp.bn_fwd_nhwc(x, *common, None, MOMENTUM, EPS, True, *rest)
    gradients = bnp.bn_bwd_nhwc(x, dy, *common, None, MOMENTUM, EPS, True, *rest)
    assert_near((y, *gradients), call(norm, x, None, dy)[:4], dtype)
    norm.eval()
    state = *vectors, norm.running_mean, norm.running_var
    y = bnp.bn_fwd_eval_nhwc(x, *state, None, 1, MOMENTUM, EPS, True)
    with_z = bnp.bn_addrelu_fwd_eval_nhwc(x, z, *state, None, 1, MOMENTUM, EPS)
    assert_near((y, with_z), (norm(x), norm(x, z)), dtype)
    with pytest.raises(ValueError, match="bitmask must be contiguous int32 of at least 8"):
        bnp.bn_addrelu_fwd_nhwc(x, z, *common, bits[:1], None, MOMENTUM, EPS, *rest)


def test_bnp_of_launches():
    import bnp

    data = torch.zeros(4)
    assert bnp.bn_fwd_nhwc_occupancy() == bnp.bn_addrelu_bwd_nhwc_occupancy() == 2
    assert bnp.get_buffer_size(2) > 0
    assert bnp.get_data_ptr(data) == data.data_ptr()
    with pytest.raises(NotImplementedError, match=r"through torch\.distributed"):
        bnp.get_remote_data_ptr(data, 0)
    bnp.close_remote_data(data)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cudnn_gbn_lib(dtype, device):
    import cudnn_gbn_lib

    norm = GroupBatchNorm2d(6, 1).to(device, dtype if dtype == torch.float64 else torch.float32)
    x, dy = (torch.randn(2, 6, 4, 5, device=device).to(dtype) for _ in range(2))
    leaf = x.detach().requires_grad_()
    y = norm(leaf)
    expected = torch.autograd.grad(y, (leaf, norm.weight, norm.bias), dy)
    weight, bias = norm.weight.detach(), norm.bias.detach()
    running = [torch.zeros_like(bias), torch.ones_like(bias)]
    saved = [torch.zeros_like(bias) for _ in range(2)]
    given = x, weight, bias, *running, *saved, MOMENTUM, EPS, 1, 0, []
    actual = cudnn_gbn_lib.forward(*given), *running
    assert_near(actual, (y.detach(), norm.running_mean, norm.running_var), dtype)
    assert_near(cudnn_gbn_lib.backward(x, dy, weight, *saved, EPS, 1, 0, []), expected, dtype)


def test_names_of_apex(device):
    norm = norm_of(4, torch.float32, device, fuse_relu=True)
    x = torch.randn(2, 3, 3, 4, device=device)
    state = norm.weight, norm.bias, norm.running_mean.clone(), norm.running_var.clone()
    mini = torch.zeros(4, device=device), torch.zeros(4, device=device)
    y = bn_NHWC_impl.apply(x, *state, *mini, None, MOMENTUM, EPS, True, True, 1, None)
    torch.testing.assert_close(y, norm(x))
    torch.testing.assert_close(mini, (norm.minibatch_mean, norm.minibatch_riv))
    names = inspect.getfullargspec(bn_NHWC_impl.forward).args
    assert names[:9] == ["ctx", "x", "s", "b", "rm", "riv", "mini_m", "mini_riv", "ret_cta"]


def test_names_of_the_gpu():
    assert check_if_rocm_pytorch() is IS_ROCM_PYTORCH
    assert IS_ROCM_PYTORCH is (torch.version.hip is not None)
