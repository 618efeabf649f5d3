"""One kernel launch over lists of tensors, and the callable that applies such operators.

Each operator has the name of the module that defines it. Modules of this wheel import an operator
from its module: while this file is being executed, an import from here would give the module.
"""

from .multi_tensor_apply import MultiTensorApply, multi_tensor_applier, multi_tensor_applier_l2norm
from .multi_tensor_axpby import multi_tensor_axpby
from .multi_tensor_l2norm import multi_tensor_l2norm
from .multi_tensor_l2norm_scale import multi_tensor_l2norm_scale
from .multi_tensor_scale import multi_tensor_scale

__all__ = [
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_applier_l2norm",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_scale",
    "multi_tensor_scale",
]
