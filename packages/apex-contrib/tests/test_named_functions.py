"""Every name of this wheel that is an autograd function in Apex: called as one, and in others."""

import pytest
import torch

from apex.contrib.bottleneck.bottleneck import BottleneckFunction, SpatialBottleneckFunction
from apex.contrib.conv_bias_relu.conv_bias_relu import (
    ConvBias_,
    ConvBiasMaskReLU_,
    ConvBiasReLU_,
    ConvFrozenScaleBiasReLU_,
)
from apex.contrib.cudnn_gbn.batch_norm import _GroupBatchNorm2d
from apex.contrib.fmha.fmha import FMHAFun
from apex.contrib.focal_loss.focal_loss import FocalLoss
from apex.contrib.groupbn.batch_norm import bn_addrelu_NHWC_impl, bn_NHWC_impl
from apex.contrib.index_mul_2d.index_mul_2d import IndexMul2d_, IndexMul2dBackward_
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from apex.contrib.multihead_attn import (
    encdec_multihead_attn_func,
    fast_encdec_multihead_attn_func,
    fast_encdec_multihead_attn_norm_add_func,
    fast_self_multihead_attn_func,
    fast_self_multihead_attn_norm_add_func,
    mask_softmax_dropout_func,
    self_multihead_attn_func,
)
from apex.contrib.openfold_triton.layer_norm import LayerNormSmallShapeOptImpl
from apex.contrib.openfold_triton.mha import FusedAttenionCoreFunc
from apex.contrib.transducer.transducer import TransducerJointFunc, TransducerLossFunc
from apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss
from apex.fused_dense.fused_dense import DenseNoBiasFunc, FusedDenseFunc, FusedDenseGeluDenseFunc
from apex.mlp import MlpFunction
from apex_testkit.named_functions import check_named, wrapped


def _lengths(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def _randn(*shapes):
    return [torch.randn(shape) for shape in shapes]


def _norm_add(count):
    return [torch.rand(8), torch.randn(8), *_randn(*[(8, 8)] * count)]


CONV = "x, weight, bias, padding, stride"
_X, _W = (2, 3, 5, 5), (4, 3, 3, 3)
BOTTLENECK = "scale, bias, x, *conv"
_SCALES = [torch.rand(4), torch.rand(4), torch.rand(8)]
_CONVS = (4, 8, 1, 1), (4, 4, 3, 3), (8, 4, 1, 1)
NORM = "x, s, b, rm, riv, mini_m, mini_riv, ret_cta, mom, epsilon, fuse_relu, is_train"
NORM_ADD = "x, z, s, b, rm, riv, mini_m, mini_riv, grid_dim_y, ret_cta, mom, epsilon, is_train"


def _statistics():
    return torch.zeros(4), torch.ones(4), torch.zeros(4), torch.zeros(4)


CASES = {
    BottleneckFunction: (
        f"nhwc, stride_1x1, {BOTTLENECK}",
        lambda: (False, 1, _SCALES, _SCALES, *_randn((2, 8, 5, 5), *_CONVS)),
        (4, 5, 6, 7),
    ),
    SpatialBottleneckFunction: (
        "spatial_group_size, spatial_group_rank, spatial_communicator, spatial_halo_exchanger, "
        "spatial_method, use_delay_kernel, explicit_nhwc, stride_1x1, scale, bias, thresholdTop, "
        "thresholdBottom, x, *conv",
        lambda: (
            *(1, 0, None, None, 1, False, False, 1, _SCALES, _SCALES, None, None),
            *_randn((2, 8, 5, 5), *_CONVS),
        ),
        (12, 13, 14, 15),
    ),
    ConvBiasReLU_: (CONV, lambda: (*_randn(_X, _W, (4,)), 1, 1), (0, 1, 2)),
    ConvBias_: (CONV, lambda: (*_randn(_X, _W, (4,)), 1, 1), (0, 1, 2)),
    ConvBiasMaskReLU_: (
        "x, weight, bias, mask, padding, stride",
        lambda: (*_randn(_X, _W, (4,)), torch.rand(2, 4, 5, 5), 1, 1),
        (0, 1, 2),
    ),
    ConvFrozenScaleBiasReLU_: (
        "x, weight, scale, bias, padding, stride",
        lambda: (*_randn(_X, _W, (4,), (4,)), 1, 1),
        (0, 1),
    ),
    _GroupBatchNorm2d: (
        "input, weight, bias, running_mean, running_variance, minibatch_mean, minibatch_inv_var, "
        "momentum, eps, group_size, group_rank, fwd_buffers, bwd_buffers",
        lambda: (*_randn((2, 4, 3, 3), (4,), (4,)), *_statistics(), 0.1, 1e-5, 1, 0, [], []),
        (0, 1, 2),
    ),
    FMHAFun: (
        "qkv, cu_seqlens, p_dropout, max_s, is_training, zero_tensors",
        lambda: (torch.randn(7, 3, 2, 8), _lengths(0, 3, 7), 0.25, 4, True, False),
        (0,),
    ),
    FocalLoss: (
        "cls_output, cls_targets_at_level, num_positives_sum, num_real_classes, alpha, gamma, "
        "label_smoothing",
        lambda: (torch.randn(3, 8), torch.tensor([1, -1, 5]), torch.tensor(2.0), 8, 0.2, 2.0, 0.1),
        (0,),
    ),
    bn_NHWC_impl: (
        NORM,
        lambda: (
            *_randn((2, 3, 3, 4), (4,), (4,)),
            *_statistics(),
            *(None, 0.1, 1e-5, True, True, 1),
        ),
        (0, 1, 2),
    ),
    bn_addrelu_NHWC_impl: (
        NORM_ADD,
        lambda: (
            *_randn((2, 3, 3, 4), (2, 3, 3, 4), (4,), (4,)),
            *_statistics(),
            *(None, None, 0.1, 1e-5, True, 1),
        ),
        (0, 1, 2, 3),
    ),
    IndexMul2d_: (
        "in1, in2, idx1",
        lambda: (*_randn((5, 8), (3, 8)), torch.tensor([4, 0, 4])),
        (0, 1),
    ),
    IndexMul2dBackward_: (
        "in1, in2, idx1, grad_out",
        lambda: (*_randn((5, 8), (3, 8)), torch.tensor([4, 0, 4]), torch.randn(3, 8)),
        (0, 1, 3),
    ),
    FastLayerNormFN: (
        "x, gamma, beta, epsilon, memory_efficient",
        lambda: (*_randn((3, 8), (8,), (8,)), 1e-5, False),
        (0, 1, 2),
    ),
    LayerNormSmallShapeOptImpl: (
        "inputs, normalized_shape, weight, bias, eps",
        lambda: (torch.randn(3, 8), (8,), *_randn((8,), (8,)), 1e-5),
        (0, 2, 3),
    ),
    FusedAttenionCoreFunc: (
        "q, k, v, mask, bias, inf, is_training",
        lambda: (
            *_randn(*[(1, 3, 2, 4, 8)] * 3),
            torch.ones(1, 3, 1, 1, 4),
            torch.randn(1, 1, 2, 4, 4),
            1e9,
            True,
        ),
        (0, 1, 2, 4),
    ),
    self_multihead_attn_func.SelfAttnFunc: (
        "use_time_mask, is_training, heads, scale, inputs, input_weights, output_weights, "
        "input_biases, output_biases, mask, is_additive_mask, dropout_prob",
        lambda: (
            *(False, True, 2, 0.5),
            *_randn((5, 2, 8), (24, 8), (8, 8), (24,), (8,), (2, 5)),
            *(True, 0.25),
        ),
        (4, 5, 6, 7, 8),
    ),
    encdec_multihead_attn_func.EncdecAttnFunc: (
        "use_time_mask, is_training, heads, scale, inputs_q, inputs_kv, input_weights_q, "
        "input_weights_kv, output_weights, input_biases_q, input_biases_kv, output_biases, mask, "
        "dropout_prob",
        lambda: (
            *(False, True, 2, 0.5),
            *_randn((5, 2, 8), (4, 2, 8), (8, 8), (16, 8), (8, 8), (8,), (16,), (8,)),
            *(None, 0.25),
        ),
        tuple(range(4, 12)),
    ),
    fast_self_multihead_attn_func.FastSelfAttnFunc: (
        "use_time_mask, is_training, heads, inputs, input_weights, output_weights, input_biases, "
        "output_biases, pad_mask, mask_additive, dropout_prob",
        lambda: (
            *(False, True, 2),
            *_randn((5, 2, 8), (24, 8), (8, 8), (24,), (8,), (2, 5)),
            *(True, 0.25),
        ),
        (3, 4, 5, 6, 7),
    ),
    fast_self_multihead_attn_norm_add_func.FastSelfAttnNormAddFunc: (
        "use_time_mask, is_training, heads, inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights, "
        "input_weights, output_weights, pad_mask, dropout_prob",
        lambda: (
            *(False, True, 2),
            *_randn((5, 2, 8), (8,), (8,), (24, 8), (8, 8)),
            *(None, 0.25),
        ),
        (3, 4, 5, 6, 7),
    ),
    fast_encdec_multihead_attn_func.FastEncdecAttnFunc: (
        "use_time_mask, is_training, heads, inputs_q, inputs_kv, input_weights_q, "
        "input_weights_kv, output_weights, pad_mask, dropout_prob",
        lambda: (
            *(False, True, 2),
            *_randn((5, 2, 8), (4, 2, 8), (8, 8), (16, 8), (8, 8)),
            *(None, 0.25),
        ),
        (3, 4, 5, 6, 7),
    ),
    fast_encdec_multihead_attn_norm_add_func.FastEncdecAttnNormAddFunc: (
        "use_time_mask, is_training, heads, inputs_q, inputs_kv, lyr_nrm_gamma_weights, "
        "lyr_nrm_beta_weights, input_weights_q, input_weights_kv, output_weights, pad_mask, "
        "dropout_prob",
        lambda: (
            *(False, True, 2),
            *_randn((5, 2, 8), (4, 2, 8), (8,), (8,), (8, 8), (16, 8), (8, 8)),
            *(None, 0.25),
        ),
        tuple(range(3, 10)),
    ),
    mask_softmax_dropout_func.MaskSoftmaxDropout: (
        "is_training, heads, inputs, pad_mask, mask_additive, dropout_prob",
        lambda: (True, 2, *_randn((4, 5, 5), (2, 5)), True, 0.25),
        (2,),
    ),
    TransducerJointFunc: (
        "f, g, f_len, g_len, pack_output, relu, dropout, batch_offset, packed_batch, opt, "
        "fwd_tile_size, dropout_prob, mask_probe",
        lambda: (
            *_randn((2, 3, 8), (2, 2, 8)),
            *(_lengths(3, 2), _lengths(2, 1), False, True, True, None, 0, 1, 4, 0.25, None),
        ),
        (0, 1),
    ),
    TransducerLossFunc: (
        "x, label, f_len, y_len, batch_offset, max_f_len, blank_idx, fuse_softmax_backward, "
        "debug_list, opt, packed_input",
        lambda: (
            torch.randn(2, 3, 3, 6),
            torch.tensor([[1, 2], [3, 4]]),
            *(_lengths(3, 2), _lengths(2, 1), None, None, 0, True, None, 1, False),
        ),
        (0,),
    ),
    SoftmaxCrossEntropyLoss: (
        "logits, labels, smoothing, padding_idx, half_to_float",
        lambda: (torch.randn(3, 7), torch.tensor([1, 0, 6]), 0.1, 0, False),
        (0,),
    ),
    FusedDenseFunc: (
        "input, weight, bias",
        lambda: tuple(_randn((3, 8), (4, 8), (4,))),
        (0, 1, 2),
    ),
    DenseNoBiasFunc: ("input, weight", lambda: tuple(_randn((3, 8), (4, 8))), (0, 1)),
    FusedDenseGeluDenseFunc: (
        "input, weight1, bias1, weight2, bias2",
        lambda: tuple(_randn((3, 8), (6, 8), (6,), (4, 6), (4,))),
        (0, 1, 2, 3, 4),
    ),
    MlpFunction: (
        "bias, activation, *args",
        lambda: (1, 1, *_randn((3, 8), (6, 8), (4, 6), (6,), (4,))),
        (2, 3, 4, 5, 6),
    ),
}
# Draw from a generator, or wait for other processes, which torch's compiler does not trace.
_NOT_COMPILED = {_GroupBatchNorm2d, bn_NHWC_impl, bn_addrelu_NHWC_impl}


@pytest.mark.parametrize("named", CASES, ids=lambda named: named.__name__)
def test_is_an_autograd_function(named):
    torch.manual_seed(0)
    check_named(named, *CASES[named], compiles=named not in _NOT_COMPILED)


def test_the_gradient_can_be_differentiated_within_another_function():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5).double(), torch.randn(4, 5).double()
    values = x.requires_grad_(), weight.requires_grad_()
    function = wrapped(DenseNoBiasFunc).apply
    assert torch.autograd.gradcheck(function, values)
    assert torch.autograd.gradgradcheck(function, values)


def test_a_hook_on_an_argument_runs_once():
    x, weight = torch.ones(1, 2, requires_grad=True), torch.ones(1, 2)
    x.register_hook(lambda gradient: 10 * gradient)
    wrapped(DenseNoBiasFunc).apply(x, weight).sum().backward()
    assert x.grad.tolist() == [[10.0, 10.0]]


def test_a_derived_class_runs_its_own_methods():
    class Doubled(FusedDenseFunc):
        @staticmethod
        def forward(ctx, x, weight, bias):
            return FusedDenseFunc.forward(ctx, 2 * x, weight, bias)

        @staticmethod
        def backward(ctx, dy):
            dx, dweight, dbias = FusedDenseFunc.backward(ctx, dy)
            return 2 * dx, dweight, dbias

    torch.manual_seed(0)
    values = [t.double().requires_grad_() for t in _randn((3, 5), (4, 5), (4,))]
    assert torch.autograd.gradcheck(Doubled.apply, values)


def test_a_wrapped_function_compiles_in_parts():
    torch.manual_seed(0)
    values = [t.requires_grad_() for t in _randn((3, 5), (4, 5), (4,))]
    function = wrapped(FusedDenseFunc).apply
    torch.compiler.reset()
    compiled = torch.compile(lambda *a: function(*a), backend="aot_eager")
    gradients = (torch.autograd.grad(f(*values).sum(), values) for f in (compiled, function))
    torch.testing.assert_close(*gradients)
