"""megatron-core on the CPU: it writes ``device='cuda'``, and here that means the CPU.

Of megatron-core itself only ``fork`` is replaced, which switches a GPU's random states for dropout.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, patch

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CudaNamesMeanCpu(TorchFunctionMode):
    """``device='cuda'`` makes CPU tensors, and ``type()`` answers as for CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        is_type_name = func is Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if is_type_name else result


@contextlib.contextmanager
def cuda_means_cpu() -> Iterator[None]:
    with (
        CudaNamesMeanCpu(),
        patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        patch("torch.cuda.current_stream", Mock()),
        patch.object(random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()),
    ):
        yield
