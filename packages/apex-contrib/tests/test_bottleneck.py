"""apex.contrib.bottleneck against the block in plain PyTorch, whole and divided over ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import apex.contrib.bottleneck.bottleneck as module
from apex.contrib.bottleneck import (
    Bottleneck,
    HaloExchangerAllGather,
    HaloExchangerNoComm,
    HaloExchangerPeer,
    HaloExchangerSendRecv,
    SpatialBottleneck,
)
from apex.contrib.bottleneck.halo_exchangers import HaloExchanger, HaloPadder
from apex_testkit import FLOATS, assert_as_accurate_as


def fill(block):
    """Statistics as of a trained network."""
    for name, buffer in block.named_buffers():
        low, high = (0.5, 1.5) if name.endswith(("var", "weight")) else (-0.5, 0.5)
        buffer.uniform_(low, high)
    return block


def arguments(block):
    """Weights and batch norms' buffers, as plain tensors."""
    weights = [w.detach().clone() for w in block.w_conv]
    if block.explicit_nhwc:
        weights = [w.movedim(-1, 1) for w in weights]
    norms = [[b.detach().clone() for _, b in bn.named_buffers()] for bn in block.w_bn]
    return weights, norms


def oracle(x, weights, norms, stride):
    """[N, C, H, W]; before the last ReLU."""

    def layer(i, x, **options):
        weight, bias, mean, var = (v.view(-1, 1, 1) for v in norms[i])
        return (F.conv2d(x, weights[i], **options) - mean) / var.sqrt() * weight + bias

    out = layer(0, x, stride=stride).relu()
    out = layer(1, out, padding=1).relu()
    identity = x if len(weights) == 3 else layer(3, x, stride=stride)
    return layer(2, out) + identity


def with_gradients(function, x, weights, dy):
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    y = function(leaves[0], leaves[1:])
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def call(block, x, dy):
    x = x.detach().requires_grad_()
    y = block(x)
    return y.detach(), *torch.autograd.grad(y, (x, *block.w_conv), dy)


@pytest.mark.parametrize("layout", ["nchw", "channels_last", "nhwc"])
@pytest.mark.parametrize("use_cudnn", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(
    ("channels", "stride"), [((8, 4, 8), 1), ((6, 4, 8), 1), ((8, 4, 8), 2)], ids=str
)
def test_float64(channels, stride, use_cudnn, layout, device):
    nhwc = layout == "nhwc"
    if nhwc and not use_cudnn:
        with pytest.raises(RuntimeError, match="explicit_nhwc=True needs use_cudnn=True"):
            Bottleneck(*channels, explicit_nhwc=True)
        return
    torch.manual_seed(0)
    block = Bottleneck(*channels, stride, use_cudnn=use_cudnn, explicit_nhwc=nhwc)
    block = fill(block.double().to(device))
    weights, norms = arguments(block)
    x = torch.randn(2, channels[0], 8, 6, dtype=torch.float64, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x
    run = lambda x, weights: oracle(x, weights, norms, stride).relu()
    dy = torch.randn_like(run(x, weights))
    expected = with_gradients(run, x, weights, dy)
    last = lambda t: t.movedim(1, -1).contiguous() if nhwc else t
    actual = call(block, last(x), last(dy))
    torch.testing.assert_close(actual, tuple(map(last, expected)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("use_cudnn", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_accuracy(dtype, use_cudnn, device):
    torch.manual_seed(0)
    block = fill(Bottleneck(16, 8, 32, use_cudnn=use_cudnn).to(device)).to(dtype)
    weights, norms = arguments(block)
    x = torch.randn(2, 16, 6, 6, device=device).to(dtype)
    reference = lambda x, weights, norms: oracle(x, weights, norms, 1).relu()
    # Each layer is rounded twice, and each rounding goes through the layers that follow.
    assert_as_accurate_as(reference, block(x), x, weights, norms, ulps=12)
    with torch.autocast(device.type, torch.bfloat16):
        y = block(x)
        assert (
            y.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
            or not use_cudnn
        )
    y.sum().backward()
    assert all(w.grad.dtype == dtype for w in block.w_conv)


def test_scales_that_are_kept(device):
    block = fill(Bottleneck(6, 4, 8, use_cudnn=True).to(device))
    x = torch.randn(1, 6, 4, 4, device=device)
    refresh = block.get_scale_bias_callable()
    before = block(x)
    block.bn3.bias.add_(3)
    assert torch.equal(block(x), before)
    refresh()
    after = block(x)
    fresh = copy.deepcopy(block)
    fresh.w_scale = fresh.w_bias = None
    assert torch.equal(after, fresh(x))
    assert not torch.equal(after, before)


def test_a_channel_without_variance(device):
    norm = module.FrozenBatchNorm2d(2).to(device)
    norm.running_var[0], norm.bias[0] = 0, 0.5
    y = norm(torch.randn(1, 2, 3, 3, device=device))
    assert (y[:, 0] == 0.5).all()
    assert y.isfinite().all()
    for nhwc, shape in ((True, (1, 1, 1, 2)), (False, (1, 2, 1, 1))):
        assert [t.shape for t in norm.get_scale_bias(nhwc)] == [shape, shape]


def test_transforms_and_second_derivatives(device):
    """Plain blocks have them; fused ones say that they do not."""
    plain = fill(Bottleneck(3, 2, 4).double().to(device))
    fused = copy.deepcopy(plain)
    fused.use_cudnn = True
    x = torch.randn(1, 3, 3, 3, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(plain, x)
    assert torch.autograd.gradcheck(fused, x)
    loss = lambda x: plain(x).square().sum()
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.autograd.grad(loss(x), x)[0])
    with pytest.raises(RuntimeError, match=r"setup_context|cannot transform"):
        torch.func.grad(lambda x: fused(x).sum())(x)
    torch.compiler.reset()
    for block in (plain, fused):
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        dy = torch.randn_like(block(x))
        torch.testing.assert_close(call(block, x, dy)[0], compiled(x))
        torch.testing.assert_close(
            torch.autograd.grad(compiled(x), x, dy), torch.autograd.grad(block(x), x, dy)
        )


def test_bad_arguments():
    for argument in ({"groups": 2}, {"dilation": 2}, {"norm_func": torch.nn.BatchNorm2d}):
        for cls in (Bottleneck, SpatialBottleneck):
            (name,) = argument
            with pytest.raises(RuntimeError, match=f"{cls.__name__}: {name} must be"):
                cls(4, 2, 4, **argument)
    exchanger = HaloExchangerNoComm([0, 1], 0)
    make = lambda *args: SpatialBottleneck(4, 2, 4, 2, spatial_parallel_args=args)
    with pytest.raises(ValueError, match="spatial_method must be 1, 2 or 3, got 0"):
        make(2, 0, None, exchanger, 0, False)
    with pytest.raises(ValueError, match=r"rank 1 of 2, but its halo_exchanger is rank 0 of 2"):
        make(2, 1, None, exchanger, 1, False)
    with pytest.raises(ValueError, match=r"multiple of stride 2 rows.*got 3"):
        make(2, 0, None, exchanger, 1, False)(torch.ones(1, 4, 3, 4))
    with pytest.raises(ValueError, match="halo_exchanger is None"):
        make(2, 0, None, None, 1, False)(torch.ones(1, 4, 4, 4))
    with pytest.raises(ValueError, match=r"rank_in_group must be in \[0, 2\)"):
        HaloExchangerSendRecv([0, 1], 2)
    with pytest.raises(ValueError, match=r"the halo must have between 1 and 4 rows.* got 5"):
        HaloPadder(exchanger)(torch.ones(1, 1, 4, 9), 5, False, True)
    with pytest.raises(NotImplementedError, match="HaloExchanger is a base class"):
        HaloExchanger([0], 0).left_right_halo_exchange(torch.ones(1), torch.ones(1))


def test_functions_of_apex(device):
    block = fill(Bottleneck(6, 4, 8, 2, use_cudnn=True).to(device))
    x = torch.randn(2, 6, 4, 4, device=device)
    scales, biases = block._scales_and_biases()
    y = module.BottleneckFunction.apply(False, 2, scales, biases, x, *block.w_conv)
    assert torch.equal(y, block(x))
    given = 1, 0, None, None, 0, False, False, 2, scales, biases, None, None, x, *block.w_conv
    assert torch.equal(module.SpatialBottleneckFunction.apply(*given), y)
    grad, s1, s2 = torch.randn_like(y), torch.rand(8, 1, 1), torch.rand(8, 1, 1)
    before = torch.where(y > 0, grad, 0)
    expected = before * s1.to(device), before
    torch.testing.assert_close(module.drelu_dscale1(grad, y, s1.to(device)), expected)
    both = module.drelu_dscale2(grad, y, s1.to(device), s2.to(device))
    torch.testing.assert_close(both, (before * s1.to(device), before * s2.to(device)))


def exchangers(ranks, place, group):
    """One of each kind that gives right values."""
    return {
        "all_gather": HaloExchangerAllGather(ranks, place, group),
        "send_recv": HaloExchangerSendRecv(ranks, place),
        "peer": HaloExchangerPeer(ranks, place, None, False, 0),
    }


# exchanger, spatial_method, stride, use_cudnn, explicit_nhwc
SPATIAL = [
    ("send_recv", 1, 2, False, False),
    ("send_recv", 3, 1, True, True),
    ("all_gather", 2, 2, True, False),
    ("peer", 1, 1, False, False),
]


def check_spatial(rank, world, size):
    """Output, gradient of the input, and sum of the weights' gradients, are the undivided one's."""
    ranks = list(range(size))
    group = dist.new_group(ranks)
    if rank >= size:
        return
    for kind, method, stride, use_cudnn, nhwc in SPATIAL:
        torch.manual_seed(0)
        exchanger = exchangers(ranks, rank, group)[kind]
        options = {"use_cudnn": use_cudnn, "explicit_nhwc": nhwc}
        args = size, rank, group, exchanger, method, False
        block = SpatialBottleneck(6, 4, 8, stride, **options, spatial_parallel_args=args)
        compare_with_whole(fill(block.double()), rank, size, group)


def compare_with_whole(block, rank, size, group):
    stride, nhwc = block.stride, block.explicit_nhwc
    rows = [2] * (size - 1) + [5]  # the last has more, and may have an odd number
    weights, norms = arguments(block)
    x = torch.randn(2, 6, sum(rows), 4, dtype=torch.float64)
    run = lambda x, weights: oracle(x, weights, norms, stride).relu()
    dy = torch.randn_like(run(x, weights))
    y, dx, *dweights = with_gradients(run, x, weights, dy)
    of_output = [-(-r // stride) for r in rows]
    last = lambda t: t.movedim(1, -1).contiguous() if nhwc else t
    close = lambda a, e: torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)
    mine = [last(t.split(rows, 2)[rank]) for t in (x, dx)]
    of_mine = [last(t.split(of_output, 2)[rank]) for t in (y, dy)]
    actual = call(block, mine[0], of_mine[1])
    close(actual[:2], (of_mine[0], mine[1]))
    for gradient, expected in zip(actual[2:], dweights, strict=True):
        total = gradient.clone()
        dist.all_reduce(total, group=group)
        close(total, last(expected))


def test_two_ranks_are_the_undivided_block(two_ranks):
    two_ranks(check_spatial, size=2)


@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_are_the_undivided_block(size, four_ranks):
    four_ranks(check_spatial, size=size)


def check_exchange(rank, world):
    ranks = list(range(world))
    left, right = torch.full((2, 3), float(rank)), torch.full((2, 3), rank + 0.5)
    expected = (
        torch.full((2, 3), rank - 0.5) if rank else torch.zeros(2, 3),
        torch.full((2, 3), rank + 1.0) if rank + 1 < world else torch.zeros(2, 3),
    )
    for exchanger in exchangers(ranks, rank, None).values():
        assert (exchanger.left_rank, exchanger.left_zero) == (rank - 1, rank == 0)
        assert exchanger.wrap_around_left_rank_in_group == (rank - 1) % world
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            given = left.to(dtype), right.to(dtype)
            came = exchanger.left_right_halo_exchange(*given)
            assert all(torch.equal(c, e.to(dtype)) for c, e in zip(came, expected, strict=True))
            filled = torch.ones_like(given[0]), torch.ones_like(given[0])
            assert exchanger.left_right_halo_exchange(*given, *filled) is None
            assert all(map(torch.equal, filled, came))
    swapped = HaloExchangerNoComm(ranks, rank).left_right_halo_exchange(left, right)
    assert torch.equal(swapped[0], right)
    whole = torch.arange(2.0 * 3 * 4 * world).view(1, 2, 3, 4 * world)
    padder = HaloPadder(HaloExchangerSendRecv(ranks, rank))
    mine = whole.split(4, 3)[rank]
    expected = F.pad(whole, (2, 2))[..., 4 * rank : 4 * rank + 8]
    assert torch.equal(padder(mine, 2, False, False), expected)
    last = padder(mine.movedim(1, -1), 2, True, False)
    padder.wait()
    assert torch.equal(last, expected.movedim(1, -1))
    x = mine.double().requires_grad_()
    y = padder(x, 2, False, False)
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * x.square() * times(world, rank))
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x * times(world, rank))


def times(world, rank):
    """How often each of a rank's four columns occurs in all padded tensors."""
    counts = torch.ones(4, dtype=torch.float64)
    counts[:2] += rank > 0
    counts[2:] += rank + 1 < world
    return counts


def test_exchangers(four_ranks):
    four_ranks(check_exchange)
