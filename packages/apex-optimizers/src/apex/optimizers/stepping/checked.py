"""What every optimizer here is: groups that are checked when they are added, and one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .checks import check_duplicates, check_params
from .kernels import require_kernels


class CheckedOptimizer(torch.optim.Optimizer):
    """A base of optimizers, with Apex's attribute ``_dummy_overflow_buf``."""

    kernels: ClassVar[str]  # the folder of its step operator
    _overflow_buffer: Tensor | None = None

    @property
    def _dummy_overflow_buf(self) -> Tensor:
        """int32 [1] on the device of the first parameter, where the functions look for it."""
        device = next((p.device for g in self.param_groups for p in g["params"]), None)
        buffer = self._overflow_buffer
        if buffer is None or device not in (None, buffer.device):
            buffer = self._overflow_buffer = torch.zeros(1, dtype=torch.int32, device=device)
        return buffer

    @_dummy_overflow_buf.setter
    def _dummy_overflow_buf(self, buffer: Tensor) -> None:
        self._overflow_buffer = buffer

    @property
    def _name(self) -> str:
        """Of the class, for messages."""
        raise NotImplementedError

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for the first hyper-parameter of a group that is out of range."""
        raise NotImplementedError

    def update_params(self) -> None:
        """Update all parameters, or change nothing and raise."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: a hyper-parameter of the group is out of range, it has no ``lr``, or a
                parameter is there twice.
            TypeError: a parameter is not real floating point.
            RuntimeError: there are no kernels for the parameters, and none can be built.
        """
        self.check_group({**self.defaults, **param_group})
        before = len(self.param_groups)
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        try:
            check_params(self._name, params)
            check_duplicates(self._name, params)
            require_kernels(self._name, self.kernels, params)
        except (TypeError, ValueError, RuntimeError):
            del self.param_groups[before:]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without gradient are left alone.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            RuntimeError: a gradient cannot be used, or a CUDA graph is being captured of a step
                that is counted on the host; nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_params()
        return loss
