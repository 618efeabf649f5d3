"""Apex's kernel module under its old name: multi-tensor functions with positional arguments.

Every function is called ``op(chunk_size, noop_flag, tensor_lists, *args)``, usually through
:data:`apex.multi_tensor_apply.multi_tensor_applier`. ``chunk_size`` has no effect. ``noop_flag`` is
int32 with one element; functions set it, never clear it. Lists may be empty: nothing is done then.

Importing this module raises ImportError where its kernels cannot run.
"""

from __future__ import annotations

import torch

from apex.optimizers._amp_c.adagrad import multi_tensor_adagrad
from apex.optimizers._amp_c.adam import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
)
from apex.optimizers._amp_c.elementwise import multi_tensor_axpby, multi_tensor_scale
from apex.optimizers._amp_c.lamb import (
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
)
from apex.optimizers._amp_c.lars import multi_tensor_lars
from apex.optimizers._amp_c.norms import (
    multi_tensor_l2norm,
    multi_tensor_l2norm_mp,
    multi_tensor_l2norm_scale,
    multi_tensor_unscale_l2norm,
)
from apex.optimizers._amp_c.novograd import multi_tensor_novograd
from apex.optimizers._amp_c.scaling import update_scale_hysteresis
from apex.optimizers._amp_c.sgd import multi_tensor_sgd
from apex.optimizers._ops import library as _library

# The folders of the operators that the functions call.
_KERNELS = (
    *("fused_lars", "fused_lamb", "fused_novograd", "fused_adagrad", "fused_adam"),
    *("multi_tensor_scale", "multi_tensor_axpby", "multi_tensor_l2norm"),
    *("multi_tensor_l2norm_scale", "update_scale_hysteresis", "fused_sgd"),
)
_device_type = "cuda" if torch.cuda.is_available() else "cpu"
_library.require_for_import(__name__, *_KERNELS, device_type=_device_type)

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_lars",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]
