"""Which functions O1 and O4 cast, as data: one module for each namespace of torch.

A name's list says what happens to the floating-point arguments: ``FP16_FUNCS`` (O1) and
``BFLOAT16_FUNCS`` (O4) are run in 16 bits, ``FP32_FUNCS`` in float32, ``CASTS`` and
``SEQUENCE_CASTS`` in the widest dtype among the arguments; ``BANNED_FUNCS`` refuse 16-bit values.
Functions in no list run in the dtype that comes in.

The lists are read at ``amp.initialize`` and ``amp.init``: what a script has added, removed or moved
by then holds for that call.
"""

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
