"""LARC: layer-wise adaptive rate control around an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LARC(Optimizer):
    r"""Scales each parameter's gradient so that updates stay in proportion to the parameter.

    .. math:: \lambda = \frac{\eta \lVert p \rVert}
              {\lVert g \rVert + w \lVert p \rVert + \epsilon}, \qquad
              g \leftarrow \lambda' (g + w p)

    with weight decay :math:`w` and trust :math:`\eta`. With ``clip`` the factor :math:`\lambda' =
    \min(\lambda / \mathrm{lr}, 1)` makes :math:`\lambda` an upper bound of the learning rate;
    without, :math:`\lambda' = \lambda` scales the learning rate. Where either norm is zero, or the
    parameter's infinite, :math:`\lambda' = 1`. The wrapped optimizer then takes its step without
    weight decay.

    Args:
        optimizer: the wrapped optimizer, whose ``param_groups`` and ``state`` are this one's.
        trust_coefficient: :math:`\eta`; ``> 0``.
        clip: see above.
        eps: :math:`\epsilon`, in units of a gradient's norm; ``>= 0``.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, or is LBFGS.
        ValueError: a number is out of range.
        NotImplementedError: in :meth:`step`, for a sparse gradient. Nothing is changed then.

    Note:
        Learning-rate schedulers accept it as a :class:`torch.optim.Optimizer`. Norms are taken in
        float32 or wider. Gradients are changed in place; no step waits for the device.

    Source:
        You, Gitman & Ginsburg, *Large Batch Training of Convolutional Networks*, 2017
        (https://arxiv.org/abs/1708.03888).

    Example:
        >>> optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4))
        >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"LARC: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "LARC: optimizer must take a step from the gradients it finds, got LBFGS, which "
                "evaluates a closure several times a step. Use LBFGS without LARC."
            )
        if not trust_coefficient > 0:
            raise ValueError(f"LARC: trust_coefficient must be > 0, got {trust_coefficient}.")
        if not eps >= 0:
            raise ValueError(f"LARC: eps must be >= 0, got {eps}.")
        # Of the base class only hooks and profiling; parameters and state are the wrapped one's.
        super().__setstate__(
            {"optim": optimizer, "trust_coefficient": trust_coefficient, "clip": clip, "eps": eps}
        )

    def __getstate__(self) -> dict[str, Any]:
        """The wrapped optimizer and the three numbers."""
        names = ("optim", "trust_coefficient", "clip", "eps")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`__getstate__` gave."""
        super().__setstate__(state)

    def __repr__(self) -> str:
        return (
            f"LARC(trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps}, "
            f"optimizer={self.optim!r})"
        )

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optim.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optim.defaults

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, by default in the way the wrapped optimizer does."""
        if set_to_none is None:
            self.optim.zero_grad()
        else:
            self.optim.zero_grad(set_to_none=set_to_none)

    def register_state_dict_pre_hook(self, hook: Callable, prepend: bool = False) -> Any:
        """Register on the wrapped optimizer, which is what the hook gets."""
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Callable, prepend: bool = False) -> Any:
        """Register on the wrapped optimizer, which is what the hook gets."""
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Callable, prepend: bool = False) -> Any:
        """Register on the wrapped optimizer, which is what the hook gets."""
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Callable, prepend: bool = False) -> Any:
        """Register on the wrapped optimizer, which is what the hook gets."""
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients and let the wrapped optimizer take its step.

        Args:
            closure: evaluates the model and returns the loss; called once, before the scaling.

        Returns:
            The closure's loss, or what the wrapped optimizer's step returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay", 0) for group in self.param_groups]
        self._refuse_sparse()
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = 0 * decay  # a tensor stays a tensor
                for param in group["params"]:
                    if param.grad is not None:
                        self._scale(param, param.grad, decay, group["lr"])
            result = self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        return result if closure is None else loss

    def _scale(self, param: Tensor, grad: Tensor, decay: Any, lr: Any) -> None:
        dtype = torch.promote_types(param.dtype, torch.float32)
        param_norm = torch.linalg.vector_norm(param, dtype=dtype)
        grad_norm = torch.linalg.vector_norm(grad, dtype=dtype)
        # Where a decay of 0 meets an infinite parameter, the product would be NaN.
        has_decay = isinstance(decay, Tensor) or decay != 0
        divisor = grad_norm + _decay_of(param_norm, decay) if has_decay else grad_norm
        factor = self.trust_coefficient * param_norm / (divisor + self.eps)
        if self.clip:
            factor = (factor / lr).clamp_(max=1.0)
        factor.nan_to_num_(nan=1.0, posinf=1.0)  # of an infinite parameter
        factor = torch.where((param_norm > 0) & (grad_norm > 0), factor, 1.0)
        if has_decay:
            grad.add_(_decay_of(param, decay))
        # Without dimensions it would, on a GPU, be rounded to the gradient's 16 bits first.
        torch.mul(grad, factor.reshape([1] * grad.dim()), out=grad)

    def _refuse_sparse(self) -> None:
        for number, group in enumerate(self.param_groups):
            for position, param in enumerate(group["params"]):
                if param.grad is not None and param.grad.layout != torch.strided:
                    raise NotImplementedError(
                        f"LARC: the gradient of parameter {position} of group {number} is sparse. "
                        "Keep such parameters in an optimizer without LARC."
                    )


def _decay_of(value: Tensor, decay: Any) -> Tensor:
    """``value * decay``; a decay of 0 in a tensor is not read, which would wait for the device."""
    return (
        torch.where(decay != 0, value * decay, 0.0) if isinstance(decay, Tensor) else value * decay
    )
