"""Attention with pair bias and a mask of keys, as OpenFold calls it, and its layer norm.

The peers of attention compute the same: "torch" is the formula, "compiled" the formula compiled (as
Apex's AttnBiasJIT), "torch_sdpa" is ``scaled_dot_product_attention`` with mask and bias added.
Products take most of the time, so no bandwidth is given.
"""

import torch
from torch.nn import functional as F

from apex.contrib.openfold_triton import AttnTri, LayerNormSmallShapeOptImpl
from apex_testkit.bench import chosen_device, compare

DEVICE, INF = chosen_device(), 1e9
# rows, heads, residues, features of a head
SHAPES = [(32, 4, 64, 32), (64, 4, 128, 32), (128, 8, 128, 16), (64, 4, 256, 32), (16, 8, 384, 32)]


def formula(q, k, v, mask, bias):
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2)) + (mask - 1.0) * INF
    return torch.matmul(torch.softmax(scores if bias is None else scores + bias, -1), v)


def sdpa(q, k, v, mask, bias):
    added = (mask - 1.0) * INF
    added = (added if bias is None else added + bias).expand(*q.shape[:-1], k.shape[-2])
    q, k, v, added = (t.flatten(0, 1) for t in (q, k, v, added))
    return F.scaled_dot_product_attention(q, k, v, added)[None]


def run(shape, dtype, has_bias):
    """Measure one shape and dtype, with a backward and without."""
    z, heads, n, d = shape
    q, k, v = (torch.randn(1, z, n, heads, d, device=DEVICE).to(dtype) for _ in "qkv")
    q, k, v = (t.transpose(2, 3).requires_grad_() for t in (q, k, v))
    mask = (torch.rand(1, z, 1, 1, n, device=DEVICE) > 0.1).to(dtype)
    bias = torch.randn(1, 1, heads, n, n, device=DEVICE).to(dtype).requires_grad_()
    dy, bias = torch.randn_like(q), bias if has_bias else None
    compiled = torch.compile(formula, dynamic=False)
    peers = {"apex": AttnTri, "torch": formula, "compiled": compiled, "torch_sdpa": sdpa}
    case = f"{str(dtype).removeprefix('torch.')} {z}x{heads}x{n}x{d}"
    name = "openfold attention" if has_bias else "openfold attention without bias"

    def both(function):
        wanted = [q, k, v] + ([bias] if has_bias else [])
        return lambda: torch.autograd.grad(function(q, k, v, mask, bias), wanted, dy)

    def alone(function):
        given = [t if t is None else t.detach() for t in (q, k, v, mask, bias)]
        return torch.no_grad()(lambda: function(*given))

    calls = {peer: both(function) for peer, function in peers.items()}
    compare(f"{name} fwd+bwd", case, device=DEVICE, **calls)
    calls = {peer: alone(function) for peer, function in peers.items()}
    compare(f"{name} fwd", case, device=DEVICE, **calls)


def run_layer_norm(rows, columns, dtype):
    """Measure the layer norm, forward and backward: 5 bytes of x per byte of it are moved."""
    x = torch.randn(1, *rows, columns, device=DEVICE).to(dtype).requires_grad_()
    weight, bias = torch.randn(2, columns, device=DEVICE).to(dtype)
    wanted, dy = [x, weight.requires_grad_(), bias.requires_grad_()], torch.randn_like(x)
    norm = LayerNormSmallShapeOptImpl.apply
    calls = {
        "apex": lambda: norm(x, (columns,), weight, bias),
        "torch": lambda: F.layer_norm(x, (columns,), weight, bias),
    }
    compare(
        "openfold layer norm fwd+bwd",
        f"{str(dtype).removeprefix('torch.')} {rows[0]}x{rows[1]}x{columns}",
        bytes_moved=5 * x.numel() * x.element_size(),
        device=DEVICE,
        **{peer: lambda f=f: torch.autograd.grad(f(), wanted, dy) for peer, f in calls.items()},
    )


for dtype in (torch.float32, torch.bfloat16):
    for shape in SHAPES:
        run(shape, dtype, has_bias=True)
    run(SHAPES[3], dtype, has_bias=False)
    run_layer_norm((256, 256), 128, dtype)
