"""The FusedNovoGrad optimizer class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..stepping.buckets import StateLayout, call_with_repair
from ..stepping.checkpoints import load_between_hooks, matching_params
from ..stepping.optimizer import FusedOptimizer, amp_c_function
from ..stepping.sharding import norms_of, reduce_over_shards
from ..stepping.step import Step
from .norms import NORMS, GroupNorms, NovoGradBucket, conform
from .ops import novograd_step


class FusedNovoGrad(FusedOptimizer):
    r"""NovoGrad: Adam with a second moment per parameter tensor instead of per element.

    .. math::
        N_t = \sqrt{\beta_2 N_{t-1}^2 + (1-\beta_2) \lVert g_t \rVert_2^2}, \qquad
        D_t = \frac{N_t}{\sqrt{1-\beta_2^t}} + \epsilon

        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t, \qquad
        p_t = p_{t-1} - \eta \left( \frac{m_t}{(1-\beta_1^t) D_t} + \lambda p_{t-1} \right)

    :math:`N` is one number per tensor; :math:`N_1` is the norm of the tensor's first gradient. With
    ``norm_type=0`` it is :math:`N_t = \beta_2 N_{t-1} + (1-\beta_2) \max_i |g_{t,i}|`. With
    ``reg_inside_moment=True``, :math:`m_t = \beta_1 m_{t-1} + (1-\beta_1) (g_t / D_t + \lambda
    p_{t-1})` and :math:`p_t = p_{t-1} - \eta m_t / (1-\beta_1^t)`.

    Args:
        params: parameters, or dicts with parameter groups, as for every ``torch.optim`` optimizer.
            float64, float32, float16, bfloat16, complex64 or complex128, also mixed in a group; any
            shape; dense memory in any format (contiguous, channels_last, transposed). Real and
            imaginary parts are updated as numbers of their own; norms are those of the complex
            numbers.
        lr: learning rate :math:`\eta`, parameter units per step; ``>= 0``. A number, or a tensor of
            one element.
        bias_correction: divide by :math:`1-\beta_1^t` and :math:`\sqrt{1-\beta_2^t}`.
        betas: decay of the moment and of the norm per step, each in ``[0, 1)``.
        eps: added to the norm, in gradient units; ``>= 0``.
        weight_decay: :math:`\lambda`, per step; ``>= 0``.
        amsgrad: not supported; ``True`` raises.
        reg_inside_moment: see above.
        grad_averaging: ``False`` leaves out the factor :math:`1-\beta_1` of the new gradient.
        norm_type: 2, Euclidean, or 0, maximum.
        init_zero: :math:`N_0 = 0` instead of :math:`N_1 = \lVert g_1 \rVert`.
        set_grad_none: ``zero_grad()`` sets gradients to None by default.
        maximize: maximize instead of minimizing.
        capturable: keep ``lr`` and ``step`` on the device; see :class:`FusedAdam`.

    State, per parameter:
        ``exp_avg``: :math:`m`, same shape and memory format as the parameter, float32, or of the
        parameter's dtype if that is float64 or complex; ``step``: the count of steps that the
        parameter took. 4 bytes per parameter, 8 for float64.

    State, per group:
        ``exp_avg_sq``: :math:`N`, a list of two vectors in the order of the group's parameters, the
        first of 16-bit, the second of float32 parameters, both float32; and a third, float64, where
        there are float64 parameters. complex64 counts as float32, complex128 as float64. 0 for a
        parameter that never had a gradient. ``step``: int.

    Raises:
        ValueError: a hyper-parameter is out of range; in :meth:`load_state_dict`: a state does not
            fit.
        TypeError: a parameter has another dtype.
        RuntimeError: ``amsgrad``, or another ``norm_type``; in :meth:`step`: a gradient is sparse
            or does not match its parameter. No parameter and no state is changed then.

    Note:
        Differs from Apex in that parameters may have no gradient at times or be added later: a
        parameter's first gradient starts its norm, and bias correction uses its own step count.
        Moments of 16-bit parameters are float32. Norms stay on the device: a step waits for
        nothing. It moves 24 bytes per float32 parameter. A ``nan`` gradient reaches all of its
        tensor. An ``inf`` gradient makes the norm infinite for good: its own element becomes
        ``nan``, and the gradients of the others count as 0 from then on. Use :mod:`apex.amp` or a
        ``GradScaler`` to skip such steps.

    Source:
        Ginsburg et al., *Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training
        of Deep Networks*, 2019, algorithm 1, with bias correction.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = FusedNovoGrad(model.parameters(), lr=1e-2, betas=(0.95, 0.98))
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    layout = StateLayout("FusedNovoGrad", ("exp_avg",))
    kept_attributes = ("moment_mode",)
    bucket_class = NovoGradBucket
    op = Step(novograd_step, __file__)
    multi_tensor_novograd = amp_c_function("multi_tensor_novograd")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad: amsgrad=True is not supported.")
        self.capturable = capturable
        self.moment_mode = 0 if reg_inside_moment else 1
        self.set_grad_none = set_grad_none
        self._norms = GroupNorms()
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["norm_type"] not in (0, 2):
            raise RuntimeError(
                "FusedNovoGrad: norm_type must be 2 (Euclidean) or 0 (maximum), got "
                f"{group['norm_type']}."
            )

    def __getstate__(self) -> dict[str, Any]:
        self._norms.align(self.param_groups)
        return super().__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """The state; norms are in the order of the parameters, by their present dtypes."""
        self._norms.align(self.param_groups)
        return super().state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._norms = GroupNorms()
        self._norms.adopt(self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of Apex's, also one from before the first step.

        Moments keep their precision; norms go to the parameters' device.

        Raises:
            ValueError: groups, norms, or shapes of the state, do not fit. Nothing is changed then.
        """

        def check(hooked: dict[str, Any]) -> Callable[[], None]:
            matching_params(self, hooked)
            pairs = zip(self.param_groups, hooked["param_groups"], strict=True)
            norms = [conform(group, saved, hooked["state"]) for group, saved in pairs]
            return lambda: self._set_norms(norms)

        load_between_hooks(self, state_dict, super().load_state_dict, check)

    def _set_norms(self, norms: list[list[Tensor] | None]) -> None:
        for group, vectors in zip(self.param_groups, norms, strict=True):
            group.pop(NORMS, None)
            if vectors is not None:
                group[NORMS] = vectors
        self._norms.adopt(self.param_groups)

    def step_buckets(self, buckets: list[NovoGradBucket]) -> None:
        self._norms.forget_others(self.param_groups)
        without_norms = [bucket.group for bucket in buckets if NORMS not in bucket.group]
        try:
            for bucket in buckets:
                if bucket.kind < 0:
                    self._norms.place(bucket.group, bucket)
            super().step_buckets(buckets)
        except BaseException:
            if not any(bucket.has_run for bucket in buckets):
                for group in without_norms:
                    group.pop(NORMS, None)
            raise

    def arguments(self, bucket: NovoGradBucket) -> dict[str, Any]:
        numbers, group, slots = super().arguments(bucket), bucket.group, bucket.slots
        norms = group[NORMS][bucket.kind]
        if slots is not None:
            norms = norms.index_select(0, slots).to(bucket.params[0].device)
        numbers["norms"] = _zero_at_first_step(norms, numbers) if group["init_zero"] else norms
        is_first = self.capturable or numbers["step"] == 1
        numbers["first_run"] = is_first and not group["init_zero"]
        numbers["reg_inside_moment"] = self.moment_mode == 0
        numbers["is_max_norm"] = group["norm_type"] == 0
        if _has_given_norms(bucket):
            numbers["grad_norms"] = call_with_repair([bucket], _given_norms, bucket)
        return numbers


def _zero_at_first_step(norms: Tensor, numbers: dict[str, Any]) -> Tensor:
    """Other norms where the first step begins: of a launch that fails nothing may be left."""
    if numbers["device_step"] is not None:
        is_first = numbers["device_step"] == 1
        if numbers["found_inf"] is not None:  # a skipped step has the number of the one before
            is_first = is_first & (numbers["found_inf"] == 0)
        return norms.masked_fill(is_first, 0.0)
    return torch.zeros_like(norms) if numbers["step"] == 1 else norms


def _has_given_norms(bucket: NovoGradBucket) -> bool:
    """Whether norms are not those that the operator would take of the gradients it is given."""
    return bucket.is_sharded or (bucket.is_complex and bucket.group["norm_type"] == 0)


def _given_norms(bucket: NovoGradBucket) -> Tensor:
    """The norms of gradients of which this process has shards, or real views; float64 [n]."""
    grads, whole = bucket.used, bucket.params[0]
    if bucket.group["norm_type"] == 2:
        return norms_of(grads, whole).double()
    if bucket.is_complex:
        bucket.check_new_gradients()
        grads = [torch.hypot(*grad.unbind(-1)) for grad in grads]
    peaks = [grad.abs().amax() if grad.numel() else grad.new_zeros(()) for grad in grads]
    return reduce_over_shards(torch.stack(peaks).double(), whole, maximum=True)
