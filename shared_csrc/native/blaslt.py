"""Whether operators of cuBLASLt and hipBLASLt (apex/torch/blaslt.h) may be asked for a product.

Each of these operators returns an outcome. Unless that is 0, there is no product, and its caller
composes the same from torch's operators.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_dynamo_compiling

__all__ = ["log_refusal", "may_serve", "rules_out"]

logger = logging.getLogger("apex")

# float32 is left to torch, which knows whether TF32 is allowed.
DTYPES = (torch.float16, torch.bfloat16)
# Why there was no product, by outcome. The numbers are those of blaslt.h.
_REASONS = {
    1: "torch has loaded no library of that kind, and none was found",
    2: "the library has no handle for this device",
    3: "the library has no algorithm for these sizes and this device",
}
_Plain = (Tensor, torch.nn.Parameter)
_IS_ROCM = torch.version.hip is not None


def may_serve(*tensors: Tensor | None, plain: bool = False) -> bool:
    """Whether 16-bit factors are those of a GPU whose library the user has not ruled out.

    Compiled code composes: what a library serves is known only when it is asked. ``plain`` is
    whether no compiler can see the call.
    """
    x = tensors[0]
    # Compilers are told first. Those without Dynamo are seen by their fake tensors.
    if x.dtype not in DTYPES or (not plain and is_dynamo_compiling()):
        return False
    if peek_interpreter_stack() is not None:
        return False
    if x.numel() == 0 or not (x.is_cuda or (x.is_cpu and _is_emulating())):
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _Plain or not tensor.is_contiguous()):
            return False
    preferred = torch.backends.cuda.preferred_blas_library() if _IS_ROCM and x.is_cuda else None
    return not _is_ruled_out(preferred)


def rules_out(is_rocm: bool, preferred: object, environment: Mapping[str, str]) -> bool:
    """Whether the user keeps matrix products from cuBLASLt or hipBLASLt.

    ``DISABLE_ADDMM_CUDA_LT=1`` does, as for torch's own epilogues. On ROCm so does a
    ``torch.backends.cuda.preferred_blas_library`` that is not hipBLASLt, which is torch's default
    on the GPUs that it serves. CUDA's default, cuBLAS, does not: torch itself takes epilogues from
    cuBLASLt then, and a default cannot be told from a wish.

    Args:
        is_rocm: whether torch is built for AMD's GPUs.
        preferred: what ``preferred_blas_library()`` returns; None on the emulated GPU.
        environment: the environment.
    """
    if environment.get("DISABLE_ADDMM_CUDA_LT") == "1":
        return True
    return is_rocm and preferred is not None and preferred != torch._C._BlasBackend.Cublaslt


@functools.cache
def log_refusal(product: str, outcome: int) -> None:
    """Log once, for debugging, why an operator's outcome is no product."""
    library = "hipBLASLt" if torch.version.hip else "cuBLASLt"
    reason = _REASONS[outcome]
    logger.debug(
        "%s: not by %s, but composed from torch's operators: %s.", product, library, reason
    )


@functools.cache
def _is_ruled_out(preferred: object) -> bool:
    """What the environment says at the first product, when torch reads it, too."""
    return rules_out(_IS_ROCM, preferred, os.environ)


@functools.cache
def _is_emulating() -> bool:
    from .targets import is_emulating

    return is_emulating()
