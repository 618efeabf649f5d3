"""Every op of the wheels under O1 and O4: its results have the dtype of the guide's table."""

import functools
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from apex import amp
from apex_testkit.fresh_amp import fresh_amp  # noqa: F401  (fixture)

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "moving-amp.md"
LEVELS = {"O1": torch.float16, "O4": torch.bfloat16}
# What the table's words say of the result, given the input's dtype and the level's.
RESULTS = {
    "float32": lambda given, level: torch.float32,
    "16 bits": lambda given, level: level,
    "the input's": lambda given, level: given,
}
WIDTH = 16


def table():
    """Name of an op -> what its results are, as the guide says."""
    section = GUIDE.read_text().partition("## Ops of these packages under O1 and O4\n")[2]
    section = section.partition("\n## ")[0]
    rows = {}
    for names, result in re.findall(r"^\| (`.*`) \| ([^|]*) \|", section, re.M):
        rows |= dict.fromkeys(re.findall(r"`([^`]*)`", names), result)
    return rows


def named(place):
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(f"apex.{module}"), name)


def ones(*shape):
    return torch.ones(shape)


def module(place, *args, **kwargs):
    """How to call a module, made with these arguments, on rows."""
    return lambda x: named(place)(*args, **kwargs)(x(3, WIDTH))


def norm(place, *args, **kwargs):
    return lambda x: named(f"normalization.{place}")(x(3, WIDTH), *args, **kwargs)


def images(place, *args, **kwargs):
    """The same on images, ``[N, C, H, W]``, whose channels are last in memory."""
    return lambda x: named(place)(*args, **kwargs)(
        x(2, WIDTH, 4, 4).to(memory_format=torch.channels_last)
    )


def rope(name, *others):
    return lambda x: named(f"transformer.functional.{name}")(x(4, 2, 3, 8), *others)


def softmax(name, *others):
    return lambda x: named(f"transformer.functional.fused_softmax.{name}")(
        x(2, 2, 4, 4), *others, 1.0
    )


def attention(name, **kwargs):
    def call(x):
        layer, queries = named(f"contrib.multihead_attn.{name}")(WIDTH, 2, **kwargs), x(4, 2, WIDTH)
        return layer(queries, queries, queries)[0]

    return call


def transducer_loss(x):
    lengths = torch.tensor([5, 5]), torch.tensor([2, 2])
    labels = torch.ones(2, 2, dtype=torch.long)
    return named("contrib.transducer.TransducerLoss")()(x(2, 5, 3, 4), labels, *lengths, 0)


def transducer_joint(x):
    lengths = torch.tensor([5, 5]), torch.tensor([3, 3])
    return named("contrib.transducer.TransducerJoint")()(x(2, 5, 4), x(2, 3, 4), *lengths)


def convolution(name, *others):
    return lambda x: named(f"contrib.conv_bias_relu.{name}")(
        x(2, 4, 5, 5), ones(4, 4, 1, 1), *others, 0, 1
    )


def scale_mask_softmax(x):
    enums = importlib.import_module("apex.transformer.enums")
    softmax = named("transformer.functional.FusedScaleMaskSoftmax")(
        *(False, False, enums.AttnMaskType.padding, True, lambda scores, mask: scores, True, None)
    )
    return softmax(x(2, 2, 4, 4), torch.zeros(2, 1, 4, 4).bool())


def group_batch_norm(x):
    return named("contrib.groupbn.batch_norm.BatchNorm2d_NHWC")(WIDTH)(x(2, 4, 4, WIDTH))


def focal_loss(x):
    targets = torch.zeros(2, 5, dtype=torch.long)
    return named("contrib.focal_loss.focal_loss.focal_loss")(
        x(2, 5, 8), targets, ones(1), 8, 0.25, 2.0
    )


def cross_entropy(x):
    labels = torch.zeros(3, dtype=torch.long)
    return named("contrib.xentropy.SoftmaxCrossEntropyLoss").apply(x(3, WIDTH), labels, 0.1)


def fmha(x):
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    return named("contrib.fmha.FMHAFun").apply(x(8, 3, 2, 64), starts, 0.0, 5, True)


def triangular_attention(x):
    tensors = [x(1, 2, 2, 4, 8) for _ in range(3)]
    return named("contrib.openfold_triton.AttnTri")(*tensors, ones(1, 2, 1, 1, 4), x(1, 1, 2, 4, 4))


def small_norm(x):
    apply = named("contrib.openfold_triton.LayerNormSmallShapeOptImpl").apply
    return apply(x(3, WIDTH), (WIDTH,), ones(WIDTH), ones(WIDTH))


def recurrent(x):
    return named("RNN.LSTM")(WIDTH, WIDTH, 1)(x(2, 3, WIDTH))[0]


def column_linear(x):
    name = "linear_with_grad_accumulation_and_async_allreduce"
    linear = named(f"transformer.tensor_parallel.layers.{name}")
    return linear(x(3, WIDTH), ones(4, WIDTH), ones(4), False, False, False)


ONES = torch.ones(WIDTH)
ANGLES = torch.zeros(4, 1, 1, 8)
ENDS = torch.tensor([0, 2, 4], dtype=torch.int32)
CASES = {
    **{
        f"{name}": module(f"normalization.{name}", WIDTH)
        for name in ("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm")
    },
    "fused_layer_norm": norm("fused_layer_norm.fused_layer_norm", (WIDTH,)),
    "fused_layer_norm_affine": norm(
        "fused_layer_norm.fused_layer_norm_affine", ONES, ONES, (WIDTH,)
    ),
    "mixed_dtype_fused_layer_norm_affine": norm(
        "fused_layer_norm.mixed_dtype_fused_layer_norm_affine", ONES, ONES, (WIDTH,)
    ),
    "fused_rms_norm": norm("fused_layer_norm.fused_rms_norm", (WIDTH,)),
    "fused_rms_norm_affine": norm("fused_layer_norm.fused_rms_norm_affine", ONES, (WIDTH,)),
    "mixed_dtype_fused_rms_norm_affine": norm(
        "fused_layer_norm.mixed_dtype_fused_rms_norm_affine", ONES, (WIDTH,)
    ),
    "fused_add_layer_norm": lambda x: norm("fused_add_layer_norm", x(3, WIDTH), ONES, ONES)(x),
    "fused_add_rms_norm": lambda x: norm("fused_add_rms_norm", x(3, WIDTH), ONES)(x),
    "FastLayerNorm": module("contrib.layer_norm.FastLayerNorm", WIDTH),
    "GroupNorm": images("contrib.group_norm.GroupNorm", 4, WIDTH),
    "LayerNormSmallShapeOptImpl": small_norm,
    "SyncBatchNorm": images("parallel.SyncBatchNorm", WIDTH),
    "BatchNorm2d_NHWC": group_batch_norm,
    "GroupBatchNorm2d": images("contrib.cudnn_gbn.GroupBatchNorm2d", WIDTH, 1),
    "MLP": module("mlp.MLP", [WIDTH, 8]),
    "FusedDense": module("fused_dense.FusedDense", WIDTH, 8),
    "dense_no_bias_function": lambda x: named("fused_dense.dense_no_bias_function")(
        x(3, WIDTH), ones(8, WIDTH)
    ),
    "FusedDenseGeluDense": module("fused_dense.FusedDenseGeluDense", WIDTH, 32, WIDTH),
    "linear_with_grad_accumulation_and_async_allreduce": column_linear,
    "SelfMultiheadAttn": attention("SelfMultiheadAttn"),
    "EncdecMultiheadAttn": attention("EncdecMultiheadAttn"),
    "fast_mask_softmax_dropout_func": lambda x: named(
        "contrib.multihead_attn.fast_mask_softmax_dropout_func"
    )(False, 2, x(4, 3, 3), None, False, 0.0),
    "FMHAFun": fmha,
    "AttnTri": triangular_attention,
    "ConvBias": convolution("ConvBias", torch.ones(4)),
    "ConvBiasReLU": convolution("ConvBiasReLU", torch.ones(4)),
    "ConvBiasMaskReLU": convolution("ConvBiasMaskReLU", torch.ones(4), torch.ones(2, 4, 5, 5)),
    "ConvFrozenScaleBiasReLU": convolution(
        "ConvFrozenScaleBiasReLU", *[torch.ones(1, 4, 1, 1)] * 2
    ),
    "Bottleneck": images("contrib.bottleneck.Bottleneck", WIDTH, 4, WIDTH, use_cudnn=True),
    "FusedScaleMaskSoftmax": scale_mask_softmax,
    "scaled_masked_softmax": softmax("scaled_masked_softmax", torch.zeros(2, 1, 4, 4).bool()),
    "generic_scaled_masked_softmax": softmax(
        "generic_scaled_masked_softmax", torch.zeros(2, 1, 4, 4).bool()
    ),
    "scaled_upper_triang_masked_softmax": softmax("scaled_upper_triang_masked_softmax", None),
    "fused_bias_swiglu": lambda x: named("fused_bias_swiglu.fused_bias_swiglu")(
        x(3, WIDTH), ones(WIDTH)
    ),
    "fused_apply_rotary_pos_emb": rope("fused_apply_rotary_pos_emb", ANGLES),
    "fused_apply_rotary_pos_emb_cached": rope(
        "fused_apply_rotary_pos_emb_cached", ANGLES.cos(), ANGLES.sin()
    ),
    "fused_apply_rotary_pos_emb_thd": lambda x: named(
        "transformer.functional.fused_apply_rotary_pos_emb_thd"
    )(x(4, 2, 8), ENDS, ANGLES),
    "fused_apply_rotary_pos_emb_2d": lambda x: named(
        "transformer.functional.fused_apply_rotary_pos_emb_2d"
    )(x(2, 4, 2, 8), 2, 2, *[torch.zeros(1, 2, 1, 4)] * 4),
    "SoftmaxCrossEntropyLoss": cross_entropy,
    "focal_loss": focal_loss,
    "TransducerJoint": transducer_joint,
    "TransducerLoss": transducer_loss,
    "index_mul_2d": lambda x: named("contrib.index_mul_2d.index_mul_2d")(
        x(5, 8), x(3, 8), torch.tensor([0, 4, 4])
    ),
    "RNN.LSTM": recurrent,
}


def test_the_table_has_every_op():
    assert sorted(table()) == sorted(CASES)
    assert set(table().values()) <= set(RESULTS)


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "16 bits"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", CASES)
def test_results_have_the_dtype_of_the_table(op, level, is_half):
    given = LEVELS[level] if is_half else torch.float32
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    x = functools.partial(torch.randn, dtype=given, requires_grad=True)
    y = CASES[op](lambda *shape: x(shape))
    assert y.dtype is RESULTS[table()[op]](given, LEVELS[level])


@pytest.mark.parametrize("compiled", [False, True])
def test_norms_tell_amp_from_an_autocast_of_the_script(compiled):
    norm, x = named("normalization.FusedLayerNorm")(WIDTH), torch.randn(3, WIDTH)
    call = torch.compile(norm, backend="aot_eager", fullgraph=True) if compiled else norm
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x).dtype is torch.bfloat16
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert call(x).dtype is torch.float32
    with amp.disable_casts(), torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype is torch.bfloat16
    amp._amp_state.handle._deactivate()
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x).dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["FusedLayerNorm", "FusedRMSNorm"])
def test_gradients_of_norms_are_those_without_amp(name):
    torch.manual_seed(0)
    norm, x = named(f"normalization.{name}")(WIDTH), torch.randn(3, WIDTH)
    expected = torch.autograd.grad(norm(x).square().sum(), norm.weight)
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    actual = torch.autograd.grad(norm(x).square().sum(), norm.weight)
    torch.testing.assert_close(actual, expected)
