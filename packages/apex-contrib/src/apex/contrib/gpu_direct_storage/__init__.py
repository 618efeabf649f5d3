"""Tensors to files and back as raw bytes, past the host's memory where GPUDirect Storage works."""

from .gds_file import GDSFile

__all__ = ["GDSFile"]
