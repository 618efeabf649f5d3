"""Rotary embeddings against float64 PyTorch, and what torch asks of them."""

import importlib
import sys

import pytest
import torch

from apex.transformer.functional import fused_rope
from apex.transformer.functional import rotary_embedding as ops
from apex.transformer.functional.fused_rope import (
    fused_apply_rotary_pos_emb,
    fused_apply_rotary_pos_emb_2d,
    fused_apply_rotary_pos_emb_cached,
    fused_apply_rotary_pos_emb_thd,
)
from apex_testkit import FLOATS, HALVES, LAYOUTS, assert_as_accurate_as, opcheck_samples
from apex_testkit.devices import runs_gpu_kernels
from apex_testkit.formulas import CHECKS, Case, check_sharded
from apex_testkit.grids import for_gpus

# [sequence, batch, heads, d], and how many channels are rotated; "tall" has over 65,536 rows.
SHAPES = {
    "empty": ((0, 2, 3, 8), 8),
    "one": ((1, 1, 1, 2), 2),
    "odd": ((5, 2, 3, 33), 14),
    "tail": ((3, 1, 2, 300), 206),
    "vector": ((4, 1, 2, 128), 128),
    "tall": ((7283, 1, 9, 6), 4),
    "copied": ((3, 2, 2, 70), 0),
    **for_gpus(block=((2, 1, 2, 776), 776), wide=((2, 1, 1, 1100), 1032)),
}


def rotate(x, cos, sin):
    """The formula, channel by channel: pairs are half of the rotated width apart."""
    half = cos.shape[-1] // 2
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    (c1, c2), (s1, s2) = (
        cos.split(half, -1) if half else (cos, cos),
        (sin.split(half, -1) if half else (sin, sin)),
    )
    return torch.cat((a * c1 - b * s1, b * c2 + a * s2, rest), -1)


def on_a_line(t, cos, sin):
    return rotate(t, cos[: t.shape[0]], sin[: t.shape[0]])


def sequences(t, lengths, cos, sin):
    places = torch.cat([torch.arange(n, device=t.device) for n in lengths])
    return rotate(t, cos[places, 0], sin[places, 0])


def on_a_plane(t, height, width, cos_h, sin_h, cos_w, sin_w):
    image = t.unflatten(1, (height, width))
    first, second = image.chunk(2, -1)
    first = rotate(first, *(x[:, :height, None] for x in (cos_h, sin_h)))
    second = rotate(second, *(x[:, None, :width] for x in (cos_w, sin_w)))
    return torch.cat((first, second), -1).flatten(1, 2)


def tables(rows, width, device, dtype=torch.float32):
    """Both halves differ, which a kernel could confuse."""
    angles = torch.randn(rows, 1, 1, width, device=device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def of_heads(x, cos, sin, positions=None):
    return ops.rotary_embedding(x, cos, sin, positions, True)


def of_heads_plain(x, cos, sin, positions=None):
    places = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
    return rotate(x, cos[places], sin[places])


def heads(dtype, device):
    x = torch.randn(4, 3, 5, 10, device=device).to(dtype)
    cos, sin = (t[:, 0, 0].to(dtype) for t in tables(7, 6, device))
    return x, cos, sin


def wide_heads(dtype, device, columns):
    """All but a few channels are rotated."""
    width = columns // 2 * 2 - 4
    x = torch.randn(4, 2, 3, columns, device=device).to(dtype)
    return x, *(t[:, 0, 0].to(dtype) for t in tables(3, width, device))


def heads_at(dtype, device):
    return *heads(dtype, device), torch.tensor([6, 0, 0, 3, 1], device=device)


def plane(x, *tables):
    return ops.rotary_embedding_2d(x, *tables, 3)


def plane_plain(x, *tables):
    tables = [t[None, :, None] for t in tables]
    return on_a_plane(x.transpose(1, 2), 2, 3, *tables).transpose(1, 2)


def plane_heads(dtype, device):
    x = torch.randn(4, 3, 6, 8, device=device).to(dtype)
    return x, *(t[:, 0, 0].to(dtype) for _ in range(2) for t in tables(3, 4, device))


def case(function, arguments, oracle, name, wide=None):
    return Case(
        function,
        arguments,
        oracle,
        grads=(0,),
        rows=(0,),
        operators=(getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward")),
        decompositions=ops.decompositions,
        ulps=2,
        wide=wide,
    )


CASES = {
    "line": case(of_heads, heads, of_heads_plain, "rotary_embedding", wide_heads),
    "positions": case(of_heads, heads_at, of_heads_plain, "rotary_embedding"),
    "plane": case(plane, plane_heads, plane_plain, "rotary_embedding_2d"),
}


def test_hook_fails_in_cached(device):
    arguments = lambda dtype, device: (torch.randn(4, 2, 3, 10).to(device), *tables(7, 6, device))
    cached = case(fused_apply_rotary_pos_emb_cached, arguments, on_a_line, "rotary_embedding")
    CHECKS["hook_fails"](cached, device)


def with_gradient(function, t, *rest):
    *rest, dy = rest
    t = t.detach().requires_grad_()
    y = function(t, *rest)
    return y.detach(), *torch.autograd.grad(y, t, dy)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(("shape", "width"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, width, layout, transposed, device):
    t, dy = (layout(torch.randn(shape, device=device).to(dtype)) for _ in range(2))
    cos, sin = tables(shape[0] + 2, width, device)
    function = lambda *given: fused_apply_rotary_pos_emb_cached(*given, transposed)
    actual = with_gradient(function, t, cos, sin, dy)
    s, b, h, d = shape
    memory = (h * d, s * h * d, d, 1) if transposed else (b * h * d, h * d, d, 1)
    if min(shape) > 1:
        assert actual[0].stride() == memory
    reference = lambda *given: with_gradient(on_a_line, *given)
    assert_as_accurate_as(reference, actual, t, cos, sin, dy, ulps=2.0)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_formula(case, check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(case, device)


def on_ranks(rank, world_size):
    for case in CASES.values():
        check_sharded(case, rank, world_size)
    heads_of_a_dtensor(world_size)


def heads_of_a_dtensor(world_size):
    """Heads on several processes, as with tensor parallelism; angles are plain tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    t, freqs = torch.randn(5, 2, 4, 6), torch.randn(5, 1, 1, 6)
    placed = distribute_tensor(t, mesh, [Shard(2)])
    y = fused_apply_rotary_pos_emb(placed, freqs)
    assert y.placements == (Shard(2),)
    torch.testing.assert_close(y.full_tensor(), fused_apply_rotary_pos_emb(t, freqs))
    lengths = torch.tensor([0, 5, 10])
    t = t.flatten(0, 1)
    y = fused_apply_rotary_pos_emb_thd(distribute_tensor(t, mesh, [Shard(1)]), lengths, freqs)
    expected = fused_apply_rotary_pos_emb_thd(t, lengths, freqs)
    torch.testing.assert_close(y.full_tensor(), expected)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def test_is_a_good_citizen_of_torch(device):
    x, cos, sin, positions = heads_at(torch.float32, device)
    apart = x.transpose(0, 1).contiguous().transpose(0, 1)
    samples = [
        (x, cos, sin, where, tokens_first)
        for x in (x, apart, x.mT.contiguous().mT)
        for where in (None, positions)
        for tokens_first in (False, True)
    ]
    opcheck_samples(ops.rotary_embedding_forward, samples)
    opcheck_samples(ops.rotary_embedding_backward, samples)
    opcheck_samples(ops.rotary_embedding_2d_forward, [(*plane_heads(torch.float32, device), 3)])
    opcheck_samples(ops.rotary_embedding_2d_backward, [(*plane_heads(torch.float32, device), 3)])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_angles(dtype, device):
    t = torch.randn(6, 2, 3, 10, device=device).to(dtype)
    freqs = 30 * torch.randn(8, 1, 1, 6, device=device)
    wide = freqs.double()
    y = fused_apply_rotary_pos_emb(t, wide if dtype == torch.float64 else freqs.requires_grad_())
    expected = on_a_line(t.double(), wide.cos(), wide.sin())
    torch.testing.assert_close(y, expected.to(dtype))
    assert freqs.grad is None


@pytest.mark.parametrize("table_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_tables_of_either_dtype(dtype, table_dtype, device):
    t = torch.randn(6, 2, 3, 80, device=device).to(dtype)
    cos, sin = tables(6, 80, device, table_dtype or dtype)
    y = fused_apply_rotary_pos_emb_cached(t, cos, sin)
    torch.testing.assert_close(y, on_a_line(t.double(), cos.double(), sin.double()).to(dtype))


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[3], [2, 0, 5, 1], [0, 0, 4, 0], [1] * 9, []])
def test_sequences_behind_each_other(lengths, integer, device):
    """Positions restart in each; empty ones do not count."""
    t = torch.randn(sum(lengths), 3, 12, device=device).requires_grad_()
    freqs = torch.randn(max(lengths, default=0), 1, 1, 8, device=device)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(integer)
    y = fused_apply_rotary_pos_emb_thd(t, starts, freqs)
    assert y.is_contiguous()
    dy = torch.randn_like(y)
    (actual,) = torch.autograd.grad(y, t, dy)
    if lengths:
        plain = sequences(t, lengths, freqs.cos(), freqs.sin())
        torch.testing.assert_close(y, plain)
        torch.testing.assert_close(actual, *torch.autograd.grad(plain, t, dy))


@pytest.mark.parametrize("starts", [[0, 4, 8], [0, 5, 4, 9], [1, 9], [0, 10], [-1, 9], [0]])
def test_sequences_that_do_not_cover_the_tokens(starts, device):
    t, freqs = torch.randn(9, 1, 4, device=device), torch.randn(12, 1, 1, 4, device=device)
    if device.type != "cpu":
        pytest.skip("a GPU would have to be waited for")
    with pytest.raises(ValueError, match=r"thd: cu_seqlens must rise from 0 to 9, the tokens of t"):
        fused_apply_rotary_pos_emb_thd(t, torch.tensor(starts), freqs)


def test_positions_are_not_read_behind_their_storage():
    """Once what lay behind it was read."""
    x, cos, sin, _ = heads_at(torch.float32, "cpu")
    positions = torch.arange(5).repeat(2)[5:]
    positions.untyped_storage().resize_(5 * 8)
    for op in (ops.rotary_embedding_forward, ops.rotary_embedding_backward):
        with pytest.raises(RuntimeError, match=r"positions is .* its data is not allocated"):
            op(x, cos, sin, positions, True)


def test_errors_name_the_arguments_of_the_operator():
    x, cos, sin, _ = heads_at(torch.float32, "cpu")
    with pytest.raises(RuntimeError, match=r"rotary_embedding_backward: dy must be \[batch"):
        ops.rotary_embedding_backward(x[0], cos, sin, None, True)
    x, image = torch.zeros(1, 1, 5, 8), [torch.zeros(5, 4) for _ in range(4)]
    image[3] = image[3].half()
    with pytest.raises(RuntimeError, match="2d_forward: sin_w must be contiguous"):
        ops.rotary_embedding_2d_forward(x, *image, 2)


def test_sequences_longer_than_the_tables(device):
    t, freqs = torch.randn(5, 1, 4, device=device), torch.randn(3, 1, 1, 4, device=device)
    starts = torch.tensor([0, 1, 5], device=device)
    if not runs_gpu_kernels(device):
        with pytest.raises(RuntimeError, match="position 3 of token 4 has no row in a table of 3"):
            fused_apply_rotary_pos_emb_thd(t, starts, freqs)
    else:
        y = fused_apply_rotary_pos_emb_thd(t, starts, freqs)
        assert y[4].isnan().all()
        assert y[:4].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5, 8), (1, 1, 1, 1, 4), (1, 5, 3, 2, 260), (0, 2, 2, 1, 4)]
)
def test_images(shape, dtype, device):
    batch, height, width, count, d = shape
    t, dy = (
        torch.randn(batch, height * width, count, d, device=device).to(dtype) for _ in range(2)
    )
    given = []
    for size in (height, width):
        given += [x.transpose(0, 1) for x in tables(size + 1, d // 2, device)]
    function = lambda t, *given: fused_apply_rotary_pos_emb_2d(t, height, width, *given)
    actual = with_gradient(function, t, *given, dy)
    plain = lambda t, *given: on_a_plane(t, height, width, *given)
    reference = lambda *given: with_gradient(plain, *given)
    assert_as_accurate_as(reference, actual, t, *given, dy, ulps=2.0)


def test_no_copy_of_interleaved_operands(device):
    """Queries of [sequence, batch, heads, 3 * d], say, are read where they are."""
    qkv = torch.randn(6, 2, 3, 24, device=device)
    cos, sin = tables(6, 8, device)
    for t in qkv.split(8, -1):
        expected = fused_apply_rotary_pos_emb_cached(t.contiguous(), cos, sin)
        assert torch.equal(fused_apply_rotary_pos_emb_cached(t, cos, sin), expected)


T, FREQS = torch.ones(4, 2, 3, 8), torch.ones(4, 1, 1, 6)
BAD = {
    "integers": (TypeError, "t must be a float64", (T.int(), FREQS)),
    "three dimensions": (ValueError, r"t must have shape \[sequence, batch", (T[0], FREQS)),
    "odd": (ValueError, "freqs must have shape .*, d2 even", (T, FREQS[..., :3])),
    "wide": (ValueError, ".*at most the 4 channels of t", (T[..., :4], FREQS)),
    "flat": (ValueError, r"freqs must have shape .* got \[4, 6\]", (T, FREQS[:, 0, 0])),
    "short": (ValueError, ".*angles for 3 positions, but t has 4", (T, FREQS[:3])),
    "device": (ValueError, "freqs must be on cpu", (T, FREQS.to("meta"))),
    "integer angles": (TypeError, "freqs must be a float64", (T, FREQS.int())),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"fused_apply_rotary_pos_emb: {text}"):
        fused_apply_rotary_pos_emb(*given)


def test_bad_input_of_the_others():
    cos, sin = FREQS.cos(), FREQS.sin()
    thd, starts = T[0], torch.tensor([0, 2])
    image = [x.transpose(0, 1)[..., :4] for x in (cos, sin, cos, sin)]
    for function, given, error, text in [
        (fused_apply_rotary_pos_emb_cached, (T, cos, sin[:3]), ValueError, "must be alike"),
        (fused_apply_rotary_pos_emb_cached, (T, cos.half(), sin), TypeError, "cos_ must be"),
        (fused_apply_rotary_pos_emb_thd, (T, starts, FREQS), ValueError, "t must have shape"),
        (fused_apply_rotary_pos_emb_thd, (thd, starts.float(), FREQS), TypeError, "int32 or int64"),
        (fused_apply_rotary_pos_emb_thd, (thd, starts[:0], FREQS), ValueError, "cu_seqlens must"),
        (fused_apply_rotary_pos_emb_thd, (thd, [0, 2], FREQS), TypeError, "cu_seqlens .* got list"),
        (fused_apply_rotary_pos_emb_2d, (T, -1, -2, *image), ValueError, "got -1 and -2"),
        (fused_apply_rotary_pos_emb_2d, (T, 2, 2, *image), ValueError, r"2 \* 2 tokens"),
        (fused_apply_rotary_pos_emb_2d, (T, 2, 1, *image[:3], sin), ValueError, "sin_w must have"),
    ]:
        with pytest.raises(error, match=f"{function.__name__}: .*{text}"):
            function(*given)


def test_kernels_check_what_python_did_not():
    x, cos, sin, positions = heads_at(torch.float32, "cpu")
    for given, text in [
        ((x[0], cos, sin, None, True), r"x must be \[batch, heads"),
        ((x.long(), cos, sin, None, True), "must be contiguous|got int64"),
        ((x, cos.half(), sin, None, True), "cos must be contiguous"),
        ((x, cos[:, :4].contiguous(), sin, None, True), "cos and sin must be alike"),
        ((x, cos[:4], sin[:4], None, True), "a table of 4 rows has no angles for a sequence of 5"),
        ((x, cos, sin, positions + 1, True), "position 7 of token 0 has no row"),
        ((x, cos, sin, positions - 1, True), "position -1 of token 1"),
        ((x, cos, sin, positions[:3], True), "positions must be contiguous, with 5 elements"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.rotary_embedding_forward(*given)


def test_classes_of_apex(device):
    t = torch.randn(4, 2, 3, 8, device=device)
    freqs = torch.randn(4, 1, 1, 6, device=device)
    cos, sin = freqs.cos(), freqs.sin()
    starts = torch.tensor([0, 1, 4], device=device)
    image = [x.transpose(0, 1)[..., :4] for x in (cos, sin, cos, sin)]
    for name, function, given in [
        ("FusedRoPE", fused_apply_rotary_pos_emb, (t, freqs, True)),
        ("FusedRoPECached", fused_apply_rotary_pos_emb_cached, (t, cos, sin)),
        ("FusedRoPETHD", fused_apply_rotary_pos_emb_thd, (t[:, 0], starts, freqs)),
        ("FusedRoPE2D", fused_apply_rotary_pos_emb_2d, (t[:, :, :, :], 1, 2, *image)),
    ]:
        for variant in ("Func", "FuncApex", "FuncAiter"):
            actual = getattr(fused_rope, name + variant).apply(*given)
            assert torch.equal(actual, function(*given))
    assert not fused_rope.USE_ROCM_AITER_ROPE_BACKEND


def test_module_of_apex(device):
    module = importlib.import_module("fused_rotary_positional_embedding")
    t = torch.randn(4, 2, 3, 8, device=device).bfloat16().requires_grad_()
    freqs = torch.randn(4, 1, 1, 6, device=device)
    cos, sin = freqs.cos(), freqs.sin()
    starts = torch.tensor([0, 1, 4], device=device, dtype=torch.int32)
    image = [x.transpose(0, 1)[..., :4] for x in (cos, sin, cos, sin)]
    plane = lambda t, *given: fused_apply_rotary_pos_emb_2d(t.flatten(1, 2), 1, 2, *given).view(
        t.shape
    )
    for suffix, function, x, given in [
        ("", fused_apply_rotary_pos_emb, t, (freqs, True)),
        ("_cached", fused_apply_rotary_pos_emb_cached, t, (cos, sin, False)),
        ("_thd", fused_apply_rotary_pos_emb_thd, t[:, 0], (starts, freqs)),
        ("_2d", plane, t[:, None], image),
    ]:
        y = function(x, *given)
        dy = torch.randn_like(y)
        (expected,) = torch.autograd.grad(y, x, dy)
        forward = getattr(module, f"forward{suffix}")(x, *given)
        assert torch.equal(forward, y)
        assert not forward.requires_grad
        assert torch.equal(getattr(module, f"backward{suffix}")(dy, *given), expected)
    with pytest.raises(ValueError, match=r"forward_2d: t must have shape \[batch, img_h"):
        module.forward_2d(t, *image)


def test_import_error_where_kernels_cannot_run(monkeypatch):
    """So that `try: import ...; except ImportError:` of other projects finds its fallback."""
    from apex.parallel._ops import library

    monkeypatch.setattr(library, "manifest", dict)
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.setenv("APEX_JIT", "0")
    monkeypatch.delitem(sys.modules, "fused_rotary_positional_embedding", raising=False)
    with pytest.raises(ImportError, match=r"neither prebuilt .* APEX_JIT=0"):
        importlib.import_module("fused_rotary_positional_embedding")
