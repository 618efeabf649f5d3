"""The extension module of bottlenecks: the block, its layers, and its rows on two ranks."""

import fast_bottleneck as legacy
import pytest
import torch
from torch.nn import functional as F

from apex_testkit import FLOATS


def operands(has_identity, nhwc, stride, dtype, device):
    torch.manual_seed(0)
    c = 8 if has_identity else 6
    shapes = [(2, 6, 8, 5), (4, 6, 1, 1), (4, 4, 3, 3), (c, 4, 1, 1)]
    tensors = [torch.randn(s, device=device) / s[1] for s in shapes]
    vectors = [torch.rand(n, device=device) for n in (4, 4, c, 4, 4, c)]
    if has_identity:
        tensors.append(torch.randn(c, 6, 1, 1, device=device))
        vectors += [torch.rand(c, device=device) for _ in range(2)]
    given = [t.to(dtype) for t in (*tensors, *vectors)]
    dy = torch.randn(2, c, -(-8 // stride), -(-5 // stride), device=device).to(dtype)
    return given, dy


def plain(given, stride, count, outs=None):
    """out1, out2 and out3, of tensors in the order of `operands`.

    With ``outs``, ReLUs are open where these are positive: near 0 that is a matter of rounding.
    """
    x, *weights = given[:count]
    s, b = given[count : count + 3], given[count + 3 : count + 6]
    wide = lambda v: v.view(-1, 1, 1)
    relu = lambda i, y: y.relu() if outs is None else y * (outs[i] > 0)
    out1 = relu(0, F.conv2d(x, weights[0], stride=stride) * wide(s[0]) + wide(b[0]))
    out2 = relu(1, F.conv2d(out1, weights[1], padding=1) * wide(s[1]) + wide(b[1]))
    y = F.conv2d(out2, weights[2]) * wide(s[2]) + wide(b[2])
    if count == 4:
        return out1, out2, relu(2, y + x)
    scale, bias = given[count + 6 :]
    identity = F.conv2d(x, weights[3], stride=stride) * wide(scale) + wide(bias)
    return out1, out2, relu(2, y + identity)


def inputs_of(given, count, nhwc):
    last = lambda t: t.movedim(1, -1).contiguous() if nhwc else t
    images, vectors = [last(t) for t in given[:count]], given[count:]
    return [*images[:4], *vectors[:6], *images[4:], *vectors[6:]]


@pytest.mark.parametrize("nhwc", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize(("has_identity", "stride"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_block(dtype, has_identity, stride, nhwc, device):
    given, dy = operands(has_identity, nhwc, stride, dtype, device)
    count = 5 if has_identity else 4
    last = lambda t: t.movedim(1, -1).contiguous() if nhwc else t
    inputs = inputs_of(given, count, nhwc)
    with torch.autocast(device.type, torch.bfloat16):
        outs = legacy.forward(nhwc, stride, inputs)
        gradients = legacy.backward(nhwc, stride, [*inputs, last(dy), *outs])
    wide = [t.double().requires_grad_(i < count) for i, t in enumerate(given)]
    expected = plain(wide, stride, count)
    images = [t.movedim(-1, 1) if nhwc else t for t in outs]
    of_oracle = torch.autograd.grad(
        plain(wide, stride, count, images)[2], wide[:count], dy.double()
    )
    unit = 64 * torch.finfo(dtype).eps
    for a, e in zip((*outs, *gradients), (*expected, *of_oracle), strict=True):
        assert a.dtype == dtype
        e = last(e.detach())
        torch.testing.assert_close(a.double(), e, rtol=0, atol=unit * max(e.abs().max().item(), 1))


def test_rows_of_two_ranks(device):
    """Three ways to get the second layer of half an image."""
    given, _ = operands(False, False, 1, torch.float64, device)
    inputs = inputs_of(given, 4, False)
    out1, out2, out3 = legacy.forward(False, 1, inputs)
    close = torch.testing.assert_close
    top = [inputs[0][:, :, :4], *inputs[1:]]  # the upper rank's rows; the lower has the other four
    outputs = legacy.forward_init(False, 1, top)
    legacy.forward_out1(False, 1, top, outputs)
    close(outputs[0], out1[:, :, :4])
    legacy.forward_out2_pad(False, 1, top, outputs, F.pad(out1, (0, 0, 1, 0))[:, :, :6])
    close(outputs[1], out2[:, :, :4])
    close(legacy.forward_out2_halo(False, out1[:, :, 2:5], top), out2[:, :, 3:4])
    first, end = torch.tensor([0], device=device), torch.tensor([3], device=device)
    legacy.forward_out2_mask(False, 1, top, outputs, first, end)
    close(outputs[1][:, :, :3], out2[:, :, :3])
    w1by3 = inputs[2][:, :, 2:]
    part = outputs[1][:, :, 3:]
    row = legacy.forward_out2_halo_corr(False, out1[:, :, 4:5], top, w1by3, part)
    close(row, out2[:, :, 3:4])
    outputs[1][:, :, 3:] = row
    legacy.forward_rest(False, 1, top, outputs)
    close(outputs[2], out3[:, :, :4])


def test_gradients_of_rows_of_two_ranks(device):
    """The same of the gradients."""
    given, dy = operands(False, False, 1, torch.float64, device)
    inputs = inputs_of(given, 4, False)
    out1, out2, out3 = legacy.forward(False, 1, inputs)
    close = torch.testing.assert_close
    top = [inputs[0][:, :, :4], *inputs[1:]]
    first, end = torch.tensor([0], device=device), torch.tensor([3], device=device)
    whole = [*inputs, dy, out1, out2, out3]
    of_whole = legacy.backward_init(False, 1, whole)
    grad2 = legacy.backward_grad_out2(False, 1, whole, of_whole)
    grad1 = legacy.backward_grad_out1(False, 1, whole, of_whole, grad2)
    upper = [*top, *(t[:, :, :4] for t in whole[10:])]
    of_upper = legacy.backward_init(False, 1, upper)
    mine = legacy.backward_grad_out2(False, 1, upper, of_upper)
    close(mine, grad2[:, :, :4])
    part = legacy.backward_grad_out1_mask(False, 1, upper, of_upper, mine, first, end)
    close(part[:, :, :3], grad1[:, :, :3])
    common = grad2[:, :, 4:5], out1[:, :, 3:4], part[:, :, 3:]
    row = legacy.backward_grad_out1_halo_corr(
        False, 1, upper, inputs[2][:, :, :1], of_upper, *common
    )
    close(row, grad1[:, :, 3:4])
    row = legacy.backward_grad_out1_halo(
        False, 1, upper, of_upper, grad2[:, :, 2:5], out1[:, :, 3:4]
    )
    close(row, grad1[:, :, 3:4])
    legacy.backward_wgrad2_pad(False, 1, upper, of_upper, F.pad(out1, (0, 0, 1, 0))[:, :, :6], mine)
    padded = of_upper[2].clone()
    rows = F.pad(out1, (0, 0, 1, 0))
    parts = [
        legacy.backward_wgrad2_halo(
            False, 1, upper, of_upper, rows[:, :, r : r + 3], mine[:, :, r : r + 1]
        )
        for r in range(4)
    ]
    close(sum(parts), padded)
    legacy.backward_wgrad2(False, 1, whole, of_whole, grad2)
    expected = torch.nn.grad.conv2d_weight(out1, inputs[2].shape, grad2, 1, 1)
    close(of_whole[2], expected)


def test_wrong_lists():
    with pytest.raises(ValueError, match=r"forward_init: inputs must be x, w1, .*; got 2 tensors"):
        legacy.forward(False, 1, [torch.ones(1)] * 2)
    with pytest.raises(ValueError, match="then grad_o, out1, out2, out3; got 13 tensors"):
        legacy.backward(False, 1, [torch.ones(1, 1, 1, 1)] * 13)
