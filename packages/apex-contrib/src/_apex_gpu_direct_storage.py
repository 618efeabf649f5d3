"""Apex's extension module of GPUDirect Storage: the file that :mod:`apex.contrib` has."""

from apex.contrib.gpu_direct_storage import GDSFile as _GDSFile

__all__ = ["_GDSFile"]
