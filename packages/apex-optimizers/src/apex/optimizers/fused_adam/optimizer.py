"""The FusedAdam optimizer class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .buckets import Bucket, BucketCache
from .checks import check_hyper, check_legacy, check_params
from .ops import adam_step, adam_step_capturable
from .state import complete_groups, load_adam_state, separate_steps


class FusedAdam(torch.optim.Optimizer):
    r"""Adam and AdamW, updating all parameters of one device and dtype in a single launch.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2

        p_t = p_{t-1} - \eta \left(
              \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t)} + \epsilon}
              + \lambda p_{t-1} \right)

    With ``adam_w_mode=False`` the decay goes into the gradient: ``g += weight_decay * p``.

    Args:
        params: parameters, or dicts with parameter groups, as for every ``torch.optim`` optimizer.
            float64, float32, float16 or bfloat16, also mixed in a group; any shape; dense memory in
            any format (contiguous, channels_last, transposed).
        lr: learning rate :math:`\eta`, parameter units per step; ``>= 0``. A number, or a tensor of
            one element.
        bias_correction: divide the moments by :math:`1-\beta^t`.
        betas: decay of the two running averages per step, each in ``[0, 1)``.
        eps: added to the root, in gradient units; ``>= 0``.
        adam_w_mode: decoupled decay (AdamW), or L2 regularisation (``False``, Adam).
        weight_decay: :math:`\lambda`, per step; ``>= 0``.
        amsgrad: not supported; ``True`` raises.
        set_grad_none: ``zero_grad()`` sets gradients to None by default.
        capturable: keep ``lr`` and ``step`` on the device, so that :meth:`step` can be captured in
            a CUDA graph, and let ``torch.amp.GradScaler.step`` hand over scaled gradients, which
            are unscaled in the same pass.
        master_weights: keep a float32 copy of 16-bit parameters, update it, and round into the
            parameter. The copy is made at the first step and is part of the state.

    State, per parameter, same shape and memory format as the parameter:
        ``exp_avg``, ``exp_avg_sq``: float32, or float64 for float64 parameters; ``step``: the count
        of steps that the parameter took; ``master_param``: float32, with ``master_weights``. Names
        and meaning are those of :class:`torch.optim.AdamW`. ``group["step"]`` counts the group's
        steps: an int, or an int32 tensor ``[1]`` when capturable.

    Raises:
        ValueError: a hyper-parameter is out of range.
        TypeError: a parameter is not real floating point.
        RuntimeError: ``amsgrad``; in :meth:`step`: a gradient is sparse or does not match its
            parameter. No parameter and no state is changed then.

    Note:
        Differs from ``torch.optim.AdamW`` in that 16-bit parameters are updated in float32 and
        rounded once. A step moves 28 bytes per float32 parameter. ``inf`` and ``nan`` gradients
        reach the parameter; use :mod:`apex.amp` or a ``GradScaler`` to skip such steps.

    Source:
        Kingma & Ba, *Adam*, ICLR 2015, algorithm 1; Loshchilov & Hutter, *Decoupled Weight Decay
        Regularization*, ICLR 2019, algorithm 2.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam: amsgrad=True is not supported; use torch.optim.AdamW.")
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        self.master_weights = master_weights
        # torch.amp.GradScaler.step() then sets grad_scale and found_inf instead of unscaling.
        self._step_supports_amp_scaling = capturable
        self._buckets = BucketCache()
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @property
    def multi_tensor_adam(self) -> Callable[..., None]:
        """``amp_C.multi_tensor_adam``, which subclasses written for Apex call."""
        import amp_C

        return amp_C.multi_tensor_adam

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor | None]]]:
        """Per group, the float32 master of each parameter, or None where there is none."""
        return [
            {"params": [self.state.get(p, {}).get("master_param") for p in group["params"]]}
            for group in self.param_groups
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: a hyper-parameter of the group is out of range.
            TypeError: a parameter is not real floating point.
        """
        check_hyper({**self.defaults, **param_group})
        before = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_params(group["params"])
        except TypeError:
            del self.param_groups[before:]
            raise
        if self.capturable and not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients: set them to None, or to zero.

        Args:
            set_to_none: defaults to the constructor's ``set_grad_none``.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buckets = BucketCache()
        complete_groups(self.param_groups, self.defaults)

    def __getstate__(self) -> dict[str, Any]:
        # torch's own keeps only three entries, which would lose the mode of the formula.
        return {
            **super().__getstate__(),
            "adam_w_mode": self.adam_w_mode,
            "set_grad_none": self.set_grad_none,
            "capturable": self.capturable,
            "master_weights": self.master_weights,
            "_step_supports_amp_scaling": self._step_supports_amp_scaling,
            "_dummy_overflow_buf": self._dummy_overflow_buf,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state, loadable by this class and by ``torch.optim.AdamW`` and ``Adam``."""
        return separate_steps(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, of ``torch.optim.Adam`` or ``AdamW``, or of Apex's FusedAdam.

        Moments keep their precision: they are not cast to the dtype of 16-bit parameters.

        Raises:
            ValueError: groups, or shapes of the state, do not fit. Nothing is changed then.
        """
        load_adam_state(self, state_dict, super().load_state_dict)
        self._buckets = BucketCache()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **legacy: Any) -> Any:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.
            legacy: ``grads``, ``output_params``, ``scale``, ``grad_norms`` and ``grad_scaler``,
                which old scripts pass as None.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            RuntimeError: a legacy argument is not None, or a gradient cannot be used; nothing is
                changed then.
        """
        check_legacy(legacy)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buckets = self._buckets.collect(self)
        if len(buckets) > 1:
            # With a single bucket the kernel itself checks everything before it writes.
            for bucket in buckets:
                bucket.check()
        for bucket in buckets:
            if self.capturable:
                self._step_capturable(bucket)
            else:
                self._step_eager(bucket)
        self._advance_groups(buckets)
        return loss

    def _step_eager(self, bucket: Bucket) -> None:
        group = bucket.group
        beta1, beta2 = group["betas"]
        step = bucket.step_number + 1
        bucket.run(
            adam_step,
            float(group["lr"]),
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            step,
            bool(group["bias_correction"]),
            bool(self.adam_w_mode),
        )
        bucket.set_step(step)

    def _step_capturable(self, bucket: Bucket) -> None:
        group = bucket.group
        beta1, beta2 = group["betas"]
        device = bucket.params[0].device
        if group["lr"].device != device or group["lr"].dtype != torch.float32:
            group["lr"] = group["lr"].to(device, torch.float32)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        inv_scale = None if scale is None else scale.to(device, torch.double).reciprocal().float()
        found_inf = None if found_inf is None else found_inf.to(device, torch.float32)
        step = bucket.step_tensor
        bucket.check()
        # This call's flag decides: a skipped step does not count.
        step += 1 if found_inf is None else (found_inf == 0).to(step.dtype)
        bucket.run(
            adam_step_capturable,
            group["lr"],
            step,
            inv_scale,
            found_inf,
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            bool(group["bias_correction"]),
            bool(self.adam_w_mode),
        )

    def _advance_groups(self, buckets: list[Bucket]) -> None:
        for group in {id(bucket.group): bucket.group for bucket in buckets}.values():
            own = [bucket for bucket in buckets if bucket.group is group]
            if self.capturable:
                group["step"] = own[0].step_tensor
            else:
                group["step"] = max(group.get("step", 0) + 1, *(b.step_number for b in own))
