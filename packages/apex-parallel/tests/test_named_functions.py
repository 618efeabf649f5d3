"""Every name of this wheel that is an autograd function in Apex: called as one, and in others."""

import pytest
import torch

from apex.parallel import optimized_sync_batchnorm_kernel, sync_batchnorm_kernel
from apex.transformer.functional import fused_rope, fused_softmax
from apex.transformer.tensor_parallel import random
from apex_testkit.named_functions import check_named


def _randn(*shapes):
    return [torch.randn(shape) for shape in shapes]


def _table(*shape):
    return torch.rand(shape)


_SCORES = (2, 3, 4, 4)
_MASK = torch.tensor([[[[False, True, False, False]]]]).expand(1, 1, 4, 4)
_ON_LINE = {
    "FusedRoPEFunc": (
        "t, freqs, transpose_output_memory",
        lambda: (*_randn((5, 2, 3, 8), (5, 1, 1, 8)), False),
        (0,),
    ),
    "FusedRoPECachedFunc": (
        "t, cos_, sin_, transpose_output_memory",
        lambda: (torch.randn(5, 2, 3, 8), _table(5, 1, 1, 8), _table(5, 1, 1, 8), False),
        (0,),
    ),
    "FusedRoPETHDFunc": (
        "t, cu_seqlens, freqs",
        lambda: (
            torch.randn(5, 3, 8),
            torch.tensor([0, 2, 5], dtype=torch.int32),
            torch.randn(5, 1, 1, 8),
        ),
        (0,),
    ),
    "FusedRoPE2DFunc": (
        "t, img_h, img_w, cos_h, sin_h, cos_w, sin_w",
        lambda: (
            torch.randn(2, 6, 3, 8),
            *(2, 3),
            *(_table(1, 2, 1, 4), _table(1, 2, 1, 4), _table(1, 3, 1, 4), _table(1, 3, 1, 4)),
        ),
        (0,),
    ),
}
_NAMES = {
    (fused_rope, name + of): case for name, case in _ON_LINE.items() for of in ("", "Apex", "Aiter")
}
CASES = _NAMES | {
    (fused_softmax, "ScaledUpperTriangMaskedSoftmax"): (
        "inputs, scale",
        lambda: (torch.randn(6, 4, 4), 0.5),
        (0,),
    ),
    (fused_softmax, "ScaledMaskedSoftmax"): (
        "inputs, mask, scale",
        lambda: (torch.randn(_SCORES), _MASK, 0.5),
        (0,),
    ),
    (fused_softmax, "GenericScaledMaskedSoftmax"): (
        "inputs, mask, scale",
        lambda: (torch.randn(_SCORES), _MASK, 0.5),
        (0,),
    ),
    (fused_softmax, "ScaledSoftmax"): (
        "inputs, scale",
        lambda: (torch.randn(_SCORES), 0.5),
        (0,),
    ),
    (random, "CheckpointFunction"): (
        "run_function, distribute_saved_activations, *args",
        lambda: (lambda x, y: x.sin() * y, False, *_randn((3,), (3,))),
        (2, 3),
    ),
    (optimized_sync_batchnorm_kernel, "SyncBatchnormFunction"): (
        "input, z, weight, bias, running_mean, running_variance, eps, track_running_stats, "
        "momentum, process_group, channel_last, fuse_relu",
        lambda: (
            *_randn((2, 4, 3, 3), (2, 4, 3, 3), (4,), (4,)),
            *(torch.zeros(4), torch.ones(4), 1e-5, True, 0.1, None, False, True),
        ),
        (0, 1, 2, 3),
    ),
    (sync_batchnorm_kernel, "SyncBatchnormFunction"): (
        "input, weight, bias, running_mean, running_variance, eps, process_group, world_size",
        lambda: (
            *_randn((2, 4, 3, 3), (4,), (4,)),
            *(torch.randn(4), torch.rand(4), 1e-5, None, 1),
        ),
        (0, 1, 2),
    ),
}
# Kept from torch's compiler: torch.utils.checkpoint with a context of our own, and what waits for
# other processes.
_NOT_COMPILED = {"CheckpointFunction", "SyncBatchnormFunction"}


@pytest.mark.parametrize(("module", "name"), CASES, ids=[name for _, name in CASES])
def test_is_an_autograd_function(module, name):
    torch.manual_seed(0)
    check_named(getattr(module, name), *CASES[module, name], compiles=name not in _NOT_COMPILED)
