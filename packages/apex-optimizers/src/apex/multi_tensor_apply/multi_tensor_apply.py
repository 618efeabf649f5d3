"""MultiTensorApply: calls a legacy multi-tensor function; the chunk size no longer matters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def _import_error() -> ImportError | None:
    """Why the module amp_C cannot be imported, or None."""
    try:
        import amp_C  # noqa: F401
    except ImportError as error:
        return error
    return None


class _Computed:
    """An attribute computed when it is read, on the class as well as on an instance."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self._compute()


class MultiTensorApply:
    """Applies functions of the module ``amp_C`` to lists of tensors.

    Args:
        chunk_size: passed on to the functions, which ignore it: the engine divides the work.

    Attributes:
        available: whether ``amp_C`` can be imported, that is, its kernels can run here. Readable on
            the class and on instances.
        import_err: the ``ImportError`` with the reason, or None.

    Example:
        >>> flag = torch.zeros(1, dtype=torch.int32)
        >>> multi_tensor_applier(amp_C.multi_tensor_scale, flag, [inputs, outputs], 0.5)
    """

    available: bool = _Computed(lambda: _import_error() is None)  # type: ignore[assignment]
    import_err: ImportError | None = _Computed(_import_error)  # type: ignore[assignment]
    warned: bool = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Raise ``RuntimeError`` with the reason and the remedy if ``amp_C`` cannot be imported."""
        error = _import_error()
        if error is not None:
            raise RuntimeError(f"MultiTensorApply: amp_C is not available. {error}") from error

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        """``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

        Raises:
            RuntimeError: ``amp_C`` is not available, or ``op`` refuses its arguments.
        """
        self.check_avail()
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
"""Calls an operator of ``amp_C`` with Apex's chunk size, 65,536 elements."""
multi_tensor_applier_l2norm = MultiTensorApply(2048 * 32)
"""The same under the name that scripts use for norms."""
