"""Which kernels a device's tensors are served by."""

import os

import torch


def runs_gpu_kernels(device: torch.device) -> bool:
    """Whether kernels on this device are those of GPUs: on a GPU, or emulated for CPU tensors.

    The two differ where a kernel would have to wait for the GPU to raise an error.
    """
    return device.type != "cpu" or bool(os.environ.get("APEX_EMULATE"))
