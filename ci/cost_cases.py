"""Public calls whose costs are counted: of each op one row, a small size, and a large one.

What is large here takes the emulated GPU about half a second. A case is a call that can be
repeated, and the tensors for which its backward computes gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from ci import cost_peers

BF16, F32 = torch.bfloat16, torch.float32
# Rows and columns: one row, short rows in blocks of several, and rows as wide as models have them.
ROWS = ((1, 64, F32), (264, 128, F32), (16, 4096, BF16))
PLANES = (
    ((2, 1, 1, 2), F32, torch.contiguous_format),
    ((8, 32, 14, 14), F32, torch.contiguous_format),
    ((8, 32, 14, 14), F32, torch.channels_last),
    ((8, 64, 14, 14), BF16, torch.channels_last),
)


@dataclass
class Case:
    """A call with a name such as "layer_norm float32 1x64"."""

    name: str
    call: Callable[[], object]
    inputs: list[torch.Tensor] = field(default_factory=list)
    is_smallest: bool = False  # Python is counted here, where kernels take no time
    has_state: bool = False  # of an optimizer, with a counter of steps; the first call makes it
    peer: Callable[[], object] | None = None  # the same of torch alone

    @property
    def is_warmed(self) -> bool:
        return self.is_smallest or self.has_state

    @property
    def has_backward(self) -> bool:
        return bool(self.inputs)


CASES: dict[str, Callable[[], Iterator[Case]]] = {}


def of(op: str):
    """Note a function that yields the cases of an op."""

    def note(function):
        CASES[op] = function
        return function

    return note


def randn(*shape: int, dtype: torch.dtype = F32, layout=torch.contiguous_format) -> torch.Tensor:
    """Return numbers that want a gradient."""
    return torch.randn(shape).to(dtype, memory_format=layout).requires_grad_()


def vectors(count: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [randn(columns, dtype=dtype) for _ in range(count)]


def planes(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format) -> str:
    order = "nhwc" if layout == torch.channels_last else "nchw"
    return f"{short(dtype)} {'x'.join(map(str, shape))} {order}"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows_of(name: str, make: Callable, sizes=ROWS) -> Iterator[Case]:
    """Yield a case for each size.

    ``make(rows, columns, dtype)`` gives the call, its inputs, and what torch has for it.
    """
    for number, (rows, columns, dtype) in enumerate(sizes):
        call, inputs, *peers = make(rows, columns, dtype)
        peer = peers[0] if peers else None
        label = f"{name} {short(dtype)} {rows}x{columns}"
        yield Case(label, call, inputs, is_smallest=number == 0, peer=peer)


# Programs over rows.


@of("fused_layer_norm")
def _layer_norm():
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

    def layer_norm(rows, columns, dtype):
        given = [randn(rows, columns, dtype=dtype), *vectors(2, columns, dtype)]
        peer = lambda: F.layer_norm(given[0], (columns,), *given[1:])
        return lambda: fused_layer_norm_affine(*given, (columns,), 1e-5), given, peer

    def rms_norm(rows, columns, dtype):
        given = [randn(rows, columns, dtype=dtype), *vectors(1, columns, dtype)]
        # On a GPU torch's rms_norm is one kernel, as its layer norm without a bias.
        peer = lambda: F.layer_norm(given[0], (columns,), given[1])
        return lambda: fused_rms_norm_affine(*given, (columns,), 1e-5), given, peer

    yield from rows_of("layer_norm", layer_norm)
    yield from rows_of("rms_norm", rms_norm)


@of("fast_layer_norm")
def _fast_layer_norm():
    from apex.contrib.layer_norm import FastLayerNorm

    def make(rows, columns, dtype):
        norm, x = FastLayerNorm(columns).to(dtype), randn(rows, columns, dtype=dtype)
        given = [x, *norm.parameters()]
        return lambda: norm(x), given, lambda: F.layer_norm(x, (columns,), *given[1:])

    yield from rows_of("fast_layer_norm", make)


@of("fused_add_norm")
def _add_norm():
    from apex.normalization import fused_add_layer_norm, fused_add_rms_norm

    def layer_norm(rows, columns, dtype):
        given = [randn(rows, columns, dtype=dtype) for _ in range(2)] + vectors(2, columns, dtype)
        peer = cost_peers.adds_first(lambda x: F.layer_norm(x, (columns,), *given[2:]), *given[:2])
        return lambda: fused_add_layer_norm(*given, 1e-5, prenorm=True), given, peer

    def rms_norm(rows, columns, dtype):
        given = [randn(rows, columns, dtype=dtype) for _ in range(2)] + vectors(1, columns, dtype)
        peer = cost_peers.adds_first(lambda x: F.layer_norm(x, (columns,), given[2]), *given[:2])
        return lambda: fused_add_rms_norm(*given, 1e-5, prenorm=True), given, peer

    yield from rows_of("add_layer_norm", layer_norm)
    yield from rows_of("add_rms_norm", rms_norm)


@of("fused_bias_swiglu")
def _swiglu():
    from apex.fused_bias_swiglu import fused_bias_swiglu

    def make(rows, columns, dtype):
        given = [randn(rows, 2 * columns, dtype=dtype), *vectors(1, 2 * columns, dtype)]
        return lambda: fused_bias_swiglu(*given), given, lambda: cost_peers.swiglu(*given)

    yield from rows_of("fused_bias_swiglu", make)


@of("focal_loss")
def _focal_loss():
    from apex.contrib.focal_loss.focal_loss import focal_loss

    def make(rows, columns, dtype):
        x, targets = randn(rows, columns, dtype=dtype), torch.arange(rows) % columns
        peer = lambda: cost_peers.focal_loss(x, targets)
        return lambda: focal_loss(x, targets, torch.tensor(1.0), columns, 0.25, 2.0), [x], peer

    yield from rows_of("focal_loss", make, ((1, 64, F32), (512, 80, F32), (512, 80, BF16)))


@of("xentropy")
def _xentropy():
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

    def make(rows, classes, dtype):
        x, labels = randn(rows, classes, dtype=dtype), torch.arange(rows) % classes
        peer = lambda: F.cross_entropy(x, labels, label_smoothing=0.1, reduction="none")
        return lambda: SoftmaxCrossEntropyLoss.apply(x, labels, 0.1, -100), [x], peer

    yield from rows_of("xentropy", make, (*ROWS, (4, 8191, BF16)))


@of("linear_cross_entropy")
def _linear_cross_entropy():
    from apex.contrib.xentropy import linear_cross_entropy

    def make(rows, classes, dtype):
        x, weight = randn(rows, 64, dtype=dtype), randn(classes, 64, dtype=dtype)
        labels = torch.arange(rows) % classes
        peer = lambda: F.cross_entropy(F.linear(x, weight).float(), labels)
        return lambda: linear_cross_entropy(x, weight, labels), [x, weight], peer

    yield from rows_of("linear_cross_entropy", make, (*ROWS, (4, 8191, BF16)))


@of("scaled_softmax")
def _scaled_softmax():
    from apex.transformer.functional import fused_softmax

    def causal(heads, sequence, dtype):
        x = randn(1, heads, sequence, sequence, dtype=dtype)
        softmax = fused_softmax.scaled_upper_triang_masked_softmax
        mask = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        return lambda: softmax(x, None, 0.125), [x], lambda: cost_peers.masked_softmax(x, mask)

    def masked(heads, sequence, dtype):
        x = randn(1, heads, sequence, sequence, dtype=dtype)
        mask = torch.ones(1, 1, sequence, sequence, dtype=torch.bool).triu(1)
        peer = lambda: cost_peers.masked_softmax(x, mask)
        return lambda: fused_softmax.scaled_masked_softmax(x, mask, 0.125), [x], peer

    sizes = ((1, 1, F32), (4, 128, F32), (1, 256, BF16))
    yield from rows_of("scaled_softmax causal", causal, sizes)
    yield from rows_of("scaled_softmax masked", masked, sizes)


@of("mask_softmax_dropout")
def _self_attention():
    from apex.contrib.multihead_attn import SelfMultiheadAttn

    def make(time, features, dtype):
        module = SelfMultiheadAttn(features, 4, dropout=0.1, bias=True).to(dtype)
        x = randn(time, 1, features, dtype=dtype)
        given = [x, *module.parameters()]
        peer = lambda: cost_peers.self_attention(x, module)
        return lambda: module(x, x, x, is_training=True)[0], given, peer

    yield from rows_of("self_attention", make, ((1, 16, F32), (128, 16, F32), (128, 32, BF16)))


@of("rotary_embedding")
def _rope():
    from apex.transformer.functional import fused_apply_rotary_pos_emb_cached

    def make(sequence, channels, dtype):
        t = randn(sequence, 1, 4, channels, dtype=dtype)
        angles = torch.randn(sequence, 1, 1, channels)
        given = (t, angles.cos().to(dtype), angles.sin().to(dtype))
        peer = lambda: cost_peers.rotate(*given)
        return lambda: fused_apply_rotary_pos_emb_cached(*given), [t], peer

    yield from rows_of("rotary_embedding", make, ((1, 64, F32), (64, 128, F32), (128, 128, BF16)))


@of("dense_epilogue")
def _mlp():
    from apex.mlp import MLP

    def make(rows, columns, dtype):
        mlp, x = MLP([columns] * 3).to(dtype), randn(rows, columns, dtype=dtype)
        layers = list(zip(mlp.weights, mlp.biases, strict=True))
        return lambda: mlp(x), [x, *mlp.parameters()], lambda: cost_peers.mlp(x, layers)

    yield from rows_of("mlp", make, ((1, 16, F32), (256, 128, F32), (256, 128, BF16)))


@of("dense_blaslt")
def _dense_gelu_dense():
    from apex.fused_dense import FusedDenseGeluDense

    def make(rows, columns, dtype):
        dense = FusedDenseGeluDense(columns, columns, columns).to(dtype)
        x = randn(rows, columns, dtype=dtype)
        given = [x, dense.weight1, dense.bias1, dense.weight2, dense.bias2]
        return lambda: dense(x), given, lambda: cost_peers.dense_gelu_dense(*given)

    yield from rows_of("dense_gelu_dense", make, ((1, 16, BF16), (128, 64, BF16)))


@of("weight_gradient")
def _weight_gradient():
    from apex.transformer.weight_gradient import add_weight_gradient

    def make(rows, columns, dtype):
        x, dy = (torch.randn(rows, columns).to(dtype) for _ in range(2))
        main_grad = torch.zeros(columns, columns)
        peer = lambda: main_grad.add_(dy.T @ x)
        return lambda: add_weight_gradient(x, dy, main_grad), [], peer

    yield from rows_of("weight_gradient", make, ((1, 16, BF16), (128, 64, BF16)))


# Programs over columns, samples and segments.


@of("syncbn")
def _sync_batch_norm():
    from apex.parallel import SyncBatchNorm

    for shape, dtype, layout in PLANES:
        norm, x = SyncBatchNorm(shape[1]), randn(*shape, dtype=dtype, layout=layout)
        name = f"sync_batch_norm {planes(shape, dtype, layout)}"
        given = [x, norm.weight, norm.bias]
        peer = lambda x=x, n=norm: cost_peers.batch_norm(x, n)
        yield Case(name, lambda n=norm, x=x: n(x), given, shape[1] == 1, peer=peer)


@of("group_batch_norm")
def _groupbn():
    from apex.contrib.groupbn import BatchNorm2d_NHWC

    for shape, dtype in (((2, 1, 2, 4), F32), ((8, 14, 14, 32), F32), ((8, 14, 14, 64), BF16)):
        norm = BatchNorm2d_NHWC(shape[-1], fuse_relu=True)
        x, z = (randn(*shape, dtype=dtype) for _ in range(2))
        name = f"groupbn {short(dtype)} {'x'.join(map(str, shape))}"
        given = [x, z, norm.weight, norm.bias]
        peer = lambda n=norm, x=x, z=z: F.relu(
            cost_peers.batch_norm(x.permute(0, 3, 1, 2), n) + z.permute(0, 3, 1, 2)
        )
        yield Case(name, lambda n=norm, x=x, z=z: n(x, z), given, shape[1] == 1, peer=peer)


@of("group_norm_nhwc")
def _group_norm():
    from apex.contrib.group_norm import GroupNorm

    shapes = ((2, 320, 8, 8), BF16), ((2, 1280, 16, 16), BF16)
    for shape, dtype in (((1, 2, 1, 2), F32), ((4, 64, 8, 8), F32), *shapes):
        norm = GroupNorm(2 if shape[1] == 2 else 32, shape[1], dtype=dtype, act="silu")
        x = randn(*shape, dtype=dtype, layout=torch.channels_last)
        name = f"group_norm silu {short(dtype)} {'x'.join(map(str, shape))}"
        given = [x, *norm.parameters()]
        peer = lambda x=x, n=norm: F.silu(F.group_norm(x, n.num_groups, n.weight, n.bias))
        yield Case(name, lambda n=norm, x=x: n(x), given, shape[1] == 2, peer=peer)


@of("index_mul_2d")
def _index_mul_2d():
    from apex.contrib.index_mul_2d import index_mul_2d

    def make(rows, columns, dtype):
        in1, in2 = (randn(rows, columns, dtype=dtype) for _ in range(2))
        index = torch.randint(rows, (rows,))
        return lambda: index_mul_2d(in1, in2, index), [in1, in2], lambda: in1[index] * in2

    sizes = ((1, 64, F32), (512, 64, F32), (512, 64, BF16), (8192, 16, F32))
    yield from rows_of("index_mul_2d", make, sizes)


@of("transducer_joint")
def _joint():
    from apex.contrib.transducer import TransducerJoint

    for frames, labels, columns, dtype in ((1, 1, 64, F32), (16, 8, 256, F32), (16, 8, 256, BF16)):
        f, g = (randn(1, n, columns, dtype=dtype) for n in (frames, labels))
        lengths, joint = [torch.tensor([n]) for n in (frames, labels)], TransducerJoint(relu=True)
        name = f"transducer_joint {short(dtype)} {frames}x{labels}x{columns}"
        call = lambda f=f, g=g, lengths=lengths, joint=joint: joint(f, g, *lengths)
        peer = lambda f=f, g=g: (f[:, :, None] + g[:, None]).relu()
        yield Case(name, call, [f, g], frames == 1, peer=peer)


@of("transducer_loss")
def _transducer_loss():
    from apex.contrib.transducer import TransducerLoss

    for frames, labels, classes, dtype in ((1, 1, 8, F32), (32, 15, 64, F32), (32, 15, 64, BF16)):
        x, label = randn(1, frames, labels + 1, classes, dtype=dtype), torch.ones(1, labels).long()
        given = (label, torch.tensor([frames]), torch.tensor([labels]), 0)
        name = f"transducer_loss {short(dtype)} {frames}x{labels + 1}x{classes}"
        call = lambda x=x, given=given, loss=TransducerLoss(): loss(x, *given)  # noqa: B008
        yield Case(name, call, [x], frames == 1)


@of("retained_magnitude")
def _retained_magnitude():
    from apex.contrib.sparsity.retained_magnitude import retained_magnitude

    def make(rows, columns, dtype):
        magnitudes, fours = torch.randn(columns, rows).abs().to(dtype), torch.arange(columns)
        return lambda: retained_magnitude(magnitudes, fours.view(-1, 4)), []

    yield from rows_of("retained_magnitude", make, ((1, 4, F32), (128, 256, F32)))
