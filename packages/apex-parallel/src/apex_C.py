"""The functions of Apex's compiled module ``apex_C``: join tensors into one, and split it again.

It has no kernel: torch's own functions do this as fast as memory allows. New code uses
:func:`apex.parallel.distributed.flatten` and :func:`~apex.parallel.distributed.unflatten`.
"""

from apex.parallel.ddp.flat_tensors import join as flatten
from apex.parallel.ddp.flat_tensors import unflatten

__all__ = ["flatten", "unflatten"]
