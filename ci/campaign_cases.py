"""What a campaign measures: calls of representative ops, each with its answer in float64."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from apex_testkit import assert_as_accurate_as
from apex_testkit.bench_models import RESNET50
from apex_testkit.optimizers import adam_reference

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EPS = 1e-5
# A variant that is wrong errs by far more. How many roundings an op needs is its tests' matter,
# which run on a card, too.
ULPS = 4


@dataclass(frozen=True)
class Made:
    """A case with its tensors: what is timed, and what raises an AssertionError if it is wrong."""

    call: Callable[[], object]
    check: Callable[[], None]


@dataclass(frozen=True)
class Kind:
    """Calls of one kind, in sizes by class, the most telling first."""

    name: str
    make: Callable[[tuple, torch.dtype, str], Made]
    sizes: dict[str, tuple]
    rehearsed: dict[str, tuple]  # small enough to be emulated


@dataclass(frozen=True)
class Case:
    """One row of the table of winners."""

    op: str
    kind: str
    dtype: str
    size: str

    def name(self) -> str:
        return f"{self.kind}, {self.dtype}, {self.size}"


def cases_of(op: str, device: str) -> Iterator[Case]:
    """Yield an op's cases: all dtypes and kinds of the first size, then those of the others."""
    kinds = KINDS[op]
    sizes = {kind.name: list(sizes_of(kind, device)) for kind in kinds}
    for turn in range(max(map(len, sizes.values()))):
        for dtype, kind in itertools.product(DTYPES, kinds):
            if turn < len(sizes[kind.name]):
                yield Case(op, kind.name, dtype, sizes[kind.name][turn])


def make(case: Case, device: str) -> Made:
    """Make a case's tensors, the same ones in every process."""
    (kind,) = (kind for kind in KINDS[case.op] if kind.name == case.kind)
    torch.manual_seed(0)
    return kind.make(sizes_of(kind, device)[case.size], DTYPES[case.dtype], device)


def sizes_of(kind: Kind, device: str) -> dict[str, tuple]:
    return kind.rehearsed if device == "cpu" else kind.sizes


def made(call: Callable, reference: Callable, arguments: tuple) -> Made:
    def check() -> None:
        assert_as_accurate_as(reference, call(*arguments), *arguments, ulps=ULPS)

    return Made(lambda: call(*arguments), check)


def layer_norm(size: tuple, dtype: torch.dtype, device: str) -> Made:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    def apex(x, weight, bias):
        return fused_layer_norm_affine(x, weight, bias, x.shape[-1:], EPS)

    def plain(x, weight, bias):
        return functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    return made(apex, plain, tuple(t.detach() for t in rows_and_weights(size, dtype, device)))


def layer_norm_gradients(size: tuple, dtype: torch.dtype, device: str) -> Made:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    def apex(x, weight, bias, dy):
        y = fused_layer_norm_affine(x, weight, bias, x.shape[-1:], EPS)
        return torch.autograd.grad(y, (x, weight, bias), dy)

    def plain(x, weight, bias, dy):
        y = functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)
        return torch.autograd.grad(y, (x, weight, bias), dy)

    x, weight, bias = rows_and_weights(size, dtype, device)
    return made(apex, plain, (x, weight, bias, torch.randn_like(x)))


def rows_and_weights(size: tuple, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    shapes = (size, size[1:], size[1:])
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def rotary_embedding(size: tuple, dtype: torch.dtype, device: str) -> Made:
    from apex.transformer.functional import fused_apply_rotary_pos_emb_cached

    def plain(t, cos, sin):
        rotated, rest = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
        a, b = rotated.chunk(2, -1)
        return torch.cat((rotated * cos + torch.cat((-b, a), -1) * sin, rest), -1)

    *shape, width = size
    tokens = torch.randn(shape, device=device).to(dtype)
    angles = torch.randn(shape[0], 1, 1, width, device=device)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    return made(fused_apply_rotary_pos_emb_cached, plain, (tokens, *tables))


def batch_norm(size: tuple, dtype: torch.dtype, device: str) -> Made:
    """Synchronized batch norm and its gradients, in one process."""
    from apex.parallel import SyncBatchNorm

    *shape, memory_format = size
    norm = SyncBatchNorm(shape[1], EPS).to(device)

    def apex(x, weight, bias, dy):
        y = norm(x)
        return y, *torch.autograd.grad(y, (x, weight, bias), dy)

    def plain(x, weight, bias, dy):
        # A weight of another dtype than x is widened, here as in torch's own kernels.
        y = functional.batch_norm(x, None, None, weight, bias, True, eps=EPS)
        return y, *torch.autograd.grad(y, (x, weight, bias), dy)

    x, dy = (
        torch.randn(shape, device=device, dtype=dtype).to(memory_format=memory_format)
        for _ in range(2)
    )
    return made(apex, plain, (x.requires_grad_(), norm.weight, norm.bias, dy))


def index_mul(size: tuple, dtype: torch.dtype, device: str) -> Made:
    """Rows of one matrix times rows of another that repeat, and the gradients."""
    from apex.contrib.index_mul_2d import index_mul_2d

    picked, rows, columns = size
    index = torch.randint(0, rows, (picked,), device=device)

    def apex(in1, in2, dy):
        y = index_mul_2d(in1, in2, index)
        return y, *torch.autograd.grad(y, (in1, in2), dy)

    def plain(in1, in2, dy):
        y = in1[index] * in2
        return y, *torch.autograd.grad(y, (in1, in2), dy)

    in1, in2, dy = (
        torch.randn(n, columns, device=device, dtype=dtype) for n in (rows, picked, picked)
    )
    return made(apex, plain, (in1.requires_grad_(), in2.requires_grad_(), dy))


def adam(size: tuple, dtype: torch.dtype, device: str) -> Made:
    """A step of AdamW over a list, with moments of float32."""
    from apex.optimizers.fused_adam.ops import adam_step

    hyper = {"lr": 1e-2, "weight_decay": 0.1}
    params, grads = ([torch.randn(n, device=device).to(dtype) for n in size] for _ in range(2))
    moments = [[torch.zeros(n, device=device) for n in size] for _ in range(2)]

    def step(params, moments):
        adam_step(params, grads, *moments, [], [], 1e-2, 0.9, 0.999, 1e-8, 0.1, 1, True, True)

    def check():
        after = [p.clone() for p in params]
        step(after, [[m.clone() for m in each] for each in moments])
        before, own_grads = torch.cat(params), torch.cat(grads)
        assert_as_accurate_as(
            lambda p, g: adam_reference(p, g, **hyper),
            torch.cat(after),
            before,
            own_grads,
            ulps=ULPS,
        )

    return Made(lambda: step(params, moments), check)


def l2norm(size: tuple, dtype: torch.dtype, device: str) -> Made:
    from apex.multi_tensor_apply import multi_tensor_l2norm

    def apex(*tensors):
        return multi_tensor_l2norm(list(tensors))[0]

    def plain(*tensors):
        return torch.cat(tensors).square().sum().sqrt().reshape(1)

    tensors = tuple(torch.randn(n, device=device).to(dtype) for n in size)
    return made(apex, plain, tensors)


ROWS = {
    "4096x4096": (4096, 4096),
    "65536x256": (65_536, 256),
    "2048x16384": (2048, 16_384),
    "64x1024": (64, 1024),
}
FEW_ROWS = {"6x530": (6, 530), "9x40": (9, 40)}
TOKENS = {
    "4096x1x32x128": (4096, 1, 32, 128, 128),
    "1024x2x16x128 of 64": (1024, 2, 16, 128, 64),
}
LAST = torch.channels_last
IMAGES = {
    "32x256x14x14 channels_last": (32, 256, 14, 14, LAST),
    "32x64x56x56 channels_last": (32, 64, 56, 56, LAST),
    "32x64x56x56": (32, 64, 56, 56, torch.contiguous_format),
    "32x512x7x7 channels_last": (32, 512, 7, 7, LAST),
}
PICKS = {  # rows that are picked, of how many, and columns
    "262144x16 of 1024": (262_144, 1024, 16),
    "65536x256 of 16384": (65_536, 16_384, 256),
    "4096x512 of 4096": (4096, 4096, 512),
}
LISTS = {"resnet50": (*RESNET50,), "2 x 10M": (10_000_000,) * 2, "400 x 1k": (1000,) * 400}
SHORT_LISTS = {"3 tensors": (1030, 1, 64)}

# By the op whose library has the kernels.
KINDS = {
    "fused_layer_norm": [
        Kind("layer norm", layer_norm, ROWS, FEW_ROWS),
        Kind("layer norm and gradients", layer_norm_gradients, ROWS, FEW_ROWS),
    ],
    "rotary_embedding": [
        Kind("rotary embedding", rotary_embedding, TOKENS, {"3x1x2x16": (3, 1, 2, 16, 8)}),
    ],
    "syncbn": [
        Kind("batch norm and gradients", batch_norm, IMAGES, {"2x5x3x3": (2, 5, 3, 3, LAST)}),
    ],
    "index_mul_2d": [
        Kind("picked rows and gradients", index_mul, PICKS, {"9 of 4": (9, 4, 8)}),
    ],
    "fused_adam": [Kind("AdamW step", adam, LISTS, SHORT_LISTS)],
    "multi_tensor_l2norm": [Kind("norm of a list", l2norm, LISTS, SHORT_LISTS)],
}
