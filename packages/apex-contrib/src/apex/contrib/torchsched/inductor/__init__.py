"""Streams for compiled graphs. Of Inductor itself nothing is replaced."""

from ._utils import CUDAStreamPool, get_cuda_stream_pool, get_stream_name

__all__ = ["CUDAStreamPool", "get_cuda_stream_pool", "get_stream_name"]
