"""Raw bytes of tensors in files: by ``torch.cuda.gds`` where it works, else by the host."""

from __future__ import annotations

import ctypes
import io
import os
import warnings
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

_FLAGS = {"r": os.O_RDONLY, "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC, "r+": os.O_RDWR}


class GDSFile:
    """A file of raw bytes, to be used as a context manager; deprecated.

    A tensor's bytes are those of its elements in row-major order, whatever its strides, and nothing
    else: no shape, no dtype. New code uses ``torch.cuda.gds.GdsFile`` or ``torch.save``.

    CUDA tensors go to the disk and back without the host's memory where NVIDIA's GPUDirect Storage
    works: there is cuFile, the file system allows direct access, and the tensor is all of its
    storage. Everything else goes through ordinary reads and writes; the file holds the same bytes.

    Args:
        filename: path of the file.
        mode: ``"r"`` reads, ``"w"`` makes an empty file and writes, ``"r+"`` does both in a file
            that is there. Files that are open for writing can be read, too.

    Attributes:
        gds_error: why the last transfer of a CUDA tensor went through the host's memory; None if it
            did not.

    Raises:
        TypeError: ``filename`` or ``mode`` is no string.
        ValueError: another mode.
        OSError: the file cannot be opened.

    Example:
        >>> x = torch.arange(6.0).view(2, 3)
        >>> with GDSFile("x.bin", "w") as file:
        ...     file.save_data(x)
        >>> y = torch.empty(2, 3)
        >>> with GDSFile("x.bin", "r") as file:
        ...     file.load_data(y)
        >>> torch.equal(x, y)
        True
    """

    gds_error: str | None = None
    _fd: int | None = None  # of the class, because __del__ also follows a call that fails
    _gds: Any = None

    def __init__(self, filename: str, mode: str) -> None:
        for name, value in (("filename", filename), ("mode", mode)):
            if not isinstance(value, str):
                raise TypeError(f"GDSFile: {name} must be a str, got {type(value).__name__}.")
        if mode not in _FLAGS:
            raise ValueError(f"GDSFile: mode must be one of {', '.join(_FLAGS)}, got {mode!r}.")
        warnings.warn(
            "apex.contrib.gpu_direct_storage is deprecated; use torch.cuda.gds.GdsFile.",
            FutureWarning,
            stacklevel=2,
        )
        self.filename, self.mode = filename, mode
        self._fd = os.open(filename, _FLAGS[mode] | os.O_CLOEXEC, 0o666)

    def load_data(self, tensor: Tensor, offset: int = 0) -> None:
        """Overwrite a tensor with the file's bytes.

        Args:
            tensor: of any dtype, strides and device.
            offset: of the first byte in the file.

        Raises:
            EOFError: the file has fewer bytes there than the tensor. The tensor is unchanged.
            TypeError: it is no strided tensor that has memory, or ``offset`` is no int.
            ValueError: ``offset`` is negative, or the file is closed.
        """
        self._transfer("load_data", tensor, offset, True)

    def save_data(self, tensor: Tensor, offset: int = 0) -> None:
        """Write a tensor's bytes to the file.

        Arguments are those of :meth:`load_data`. What the file has elsewhere stays.

        Raises:
            io.UnsupportedOperation: the file was opened with mode ``"r"``.
            TypeError: it is no strided tensor that has memory, or ``offset`` is no int.
            ValueError: ``offset`` is negative, or the file is closed.
        """
        self._transfer("save_data", tensor, offset, True)

    def load_data_no_gds(self, tensor: Tensor, offset: int = 0) -> None:
        """:meth:`load_data` through the host's memory."""
        self._transfer("load_data_no_gds", tensor, offset, False)

    def save_data_no_gds(self, tensor: Tensor, offset: int = 0) -> None:
        """:meth:`save_data` through the host's memory."""
        self._transfer("save_data_no_gds", tensor, offset, False)

    def close(self) -> None:
        """Close the file. Closing it again does nothing."""
        self._gds = None  # deregisters and closes its own descriptor
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> GDSFile:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @torch.no_grad()
    def _transfer(self, name: str, tensor: Tensor, offset: int, may_be_direct: bool) -> None:
        fd, loads = self._check(name, tensor, offset), name.startswith("load")
        if tensor.numel() == 0:
            return
        if may_be_direct and tensor.is_cuda and self._is_direct(tensor):
            torch.cuda.current_stream(tensor.device).synchronize()  # cuFile waits for no stream
            storage = tensor.untyped_storage()
            (self._gds.load_storage if loads else self._gds.save_storage)(storage, offset)
        elif not loads:
            _write(fd, _on_host(tensor), offset)
            return
        elif _is_plain(tensor):
            _read(fd, tensor, offset)
        else:
            bytes_of = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            _read(fd, bytes_of, offset)
            tensor.copy_(bytes_of)
            return
        if loads and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)

    def _check(self, name: str, tensor: Tensor, offset: int) -> int:
        if self._fd is None:
            raise ValueError(f"GDSFile.{name}: the file {self.filename!r} is closed.")
        is_tensor = isinstance(tensor, Tensor)
        if not is_tensor or tensor.layout != torch.strided or tensor.device.type == "meta":
            got = f"{tensor.layout} on {tensor.device}" if is_tensor else type(tensor).__name__
            raise TypeError(
                f"GDSFile.{name}: tensor must be a strided tensor that has memory, got {got}."
            )
        if not isinstance(offset, Integral):
            raise TypeError(
                f"GDSFile.{name}: offset must be an int, in bytes, got {type(offset).__name__}."
            )
        if offset < 0:
            raise ValueError(f"GDSFile.{name}: offset must be at least 0, got {offset}.")
        if name.startswith("save"):
            if self.mode == "r":
                raise io.UnsupportedOperation(
                    f"GDSFile.{name}: the file {self.filename!r} is open for reading; open it with "
                    "mode 'w' or 'r+'."
                )
            return self._fd
        there = max(os.fstat(self._fd).st_size - offset, 0)
        if there < tensor.nbytes:
            raise EOFError(
                f"GDSFile.{name}: the file {self.filename!r} has {there} bytes from byte {offset} "
                f"on, but the tensor {list(tensor.shape)} of {tensor.dtype} needs {tensor.nbytes}."
            )
        return self._fd

    def _is_direct(self, tensor: Tensor) -> bool:
        """Whether GPUDirect Storage can transfer a CUDA tensor; it is opened the first time."""
        self.gds_error = None
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            self.gds_error = "the tensor is not all of its storage"
        elif tensor.is_conj() or tensor.is_neg():
            self.gds_error = "the tensor's conjugate or negative is in memory"
        elif self._gds is None:
            flags = _FLAGS[self.mode] & ~os.O_TRUNC
            try:
                # GdsFile cannot be cleaned up where this fails, so it is tried apart.
                os.close(os.open(self.filename, flags | os.O_DIRECT))
                self._gds = torch.cuda.gds.GdsFile(self.filename, flags)
            except (OSError, RuntimeError) as error:
                self.gds_error = str(error)
        return self.gds_error is None


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory holds its elements in row-major order, on the host."""
    is_itself = not (tensor.is_conj() or tensor.is_neg())
    return tensor.device.type == "cpu" and tensor.is_contiguous() and is_itself


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _read(fd: int, tensor: Tensor, offset: int) -> None:
    left = _bytes_of(tensor)
    while left:
        count = os.preadv(fd, [left], offset)
        if count == 0:
            raise EOFError(
                f"GDSFile: the file became shorter than {offset} bytes while it was read."
            )
        left, offset = left[count:], offset + count


def _write(fd: int, tensor: Tensor, offset: int) -> None:
    left = _bytes_of(tensor)
    while left:
        count = os.pwrite(fd, left, offset)
        left, offset = left[count:], offset + count
