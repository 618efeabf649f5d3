"""One kernel launch over lists of tensors, and the callable that applies such operators.

Operators and the modules that define them have the same names. Modules of this wheel import them
from the latter: from here they would get the module, while this file is being executed.
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
