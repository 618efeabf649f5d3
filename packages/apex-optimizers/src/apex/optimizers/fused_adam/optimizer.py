"""The FusedAdam optimizer class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..stepping.buckets import MASTER, StateLayout
from ..stepping.checks import SEED
from ..stepping.numbers import (
    NormLimits,
    Scaling,
    norm_of_gradients,
    rounding_key,
)
from ..stepping.optimizer import amp_c_function
from .buckets import ADAM, CAPTURABLE, AdamBucket
from .checks import check_legacy
from .compact_states import CompactStates
from .moments import LARGEST, MOMENTS


class FusedAdam(CompactStates):
    r"""Adam and AdamW, updating all parameters of one device and dtype in a single launch.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2

        p_t = p_{t-1} - \eta \left(
              \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t)} + \epsilon}
              + \lambda p_{t-1} \right)

    With ``adam_w_mode=False`` the decay goes into the gradient: ``g += weight_decay * p``. With
    ``amsgrad`` the largest of :math:`v_1, \ldots, v_t` takes the place of :math:`v_t` in the second
    line.

    Args:
        params: parameters, or dicts with parameter groups, as for every ``torch.optim`` optimizer.
            float64, float32, float16, bfloat16, complex64 or complex128, also mixed in a group; any
            shape; dense memory in any format (contiguous, channels_last, transposed). Real and
            imaginary parts are updated as numbers of their own. Of DTensors, such as FSDP2's, every
            process updates its shard.
        lr: learning rate :math:`\eta`, parameter units per step; ``>= 0``. A number, or a tensor of
            one element.
        bias_correction: divide the moments by :math:`1-\beta^t`.
        betas: decay of the two running averages per step, each in ``[0, 1)``.
        eps: added to the root, in gradient units; ``>= 0``.
        adam_w_mode: decoupled decay (AdamW), or L2 regularisation (``False``, Adam).
        weight_decay: :math:`\lambda`, per step; ``>= 0``. ``torch.optim.AdamW`` has 0.01.
        amsgrad: use the largest second moment so far. Needs float32 states (float64 for float64
            parameters) and gradients in ``grad``. May differ between groups.
        set_grad_none: ``zero_grad()`` sets gradients to None by default.
        capturable: keep ``lr`` and ``step`` on the device, so that :meth:`step` can be captured in
            a CUDA graph, and let ``torch.amp.GradScaler.step`` hand over scaled gradients, which
            are unscaled in the same pass.
        master_weights: keep a float32 copy of 16-bit parameters, update it, and round into the
            parameter. The copy is made at the first step and is part of the state.
        maximize: use the negative gradient.
        exp_avg_dtype, exp_avg_sq_dtype: dtypes in which the moments are stored, except those of
            float64 and complex parameters: float32, bfloat16, float16, or float8_e4m3fn (or uint8).
            The last two have a scale per tensor that follows the largest value. Arithmetic is
            float32.
        master_weight_dtype: float32, or float16 with a scale per tensor; the parameter is then the
            master, as it is stored, rounded.
        store_param_remainders: with ``master_weights``: keep only those 16 bits of a bfloat16
            parameter's master that the parameter lacks. The parameter is then the master rounded
            with ties away from zero, instead of to even.
        stochastic_rounding: round bfloat16 parameters up or down by chance, so that updates far
            below their precision add up in the mean, without masters. Random bits depend on
            ``rounding_seed``, the parameter's number, its count of steps and the element's index
            alone: they are the same after a checkpoint, and on all devices.
        rounding_seed: in [0, 2**32); may differ between groups, whose entry it becomes.
        use_decoupled_grad: take gradients from the parameters' attribute ``decoupled_grad``, of any
            16- or 32-bit dtype, instead of ``grad``; ``zero_grad`` then sets that to None.

    State, per parameter, same shape and memory format as the parameter:
        ``exp_avg``, ``exp_avg_sq``: float32, or as chosen, or of the parameter's dtype if that is
        float64 or complex; ``max_exp_avg_sq``: with ``amsgrad``, float32 or that dtype; ``step``:
        the count of steps that the parameter took; ``master_param``: with ``master_weights``,
        float32, float16, or int16 remainders; ``state_scales``: float32 [3], with scaled moments or
        masters. In :meth:`state_dict` all are float32 without scales. Names and meaning are those
        of :class:`torch.optim.AdamW`, so checkpoints load in both directions. ``group["step"]``
        counts the group's steps: an int, or an int32 tensor ``[1]`` when capturable. Bytes per
        parameter: 8; with bfloat16 or float16 moments 4, with float8 2; maxima 4 more, masters 4
        more, those of float16 and remainders 2 more.

    Raises:
        ValueError: a hyper-parameter is out of range, a dtype is not one of those above, or
            ``amsgrad`` with states of other dtypes than float32, or ``stochastic_rounding`` with
            masters or such states.
        TypeError: a parameter has another dtype, or is float16 with ``stochastic_rounding``.
        RuntimeError: ``capturable`` with states of other dtypes than float32; in :meth:`step`: a
            gradient is sparse or does not match its parameter. No parameter and no state is changed
            then.

    Note:
        Differs from ``torch.optim.AdamW`` in that 16-bit parameters are updated in float32 and
        rounded once. A step moves 28 bytes per float32 parameter, 4 more to clip, and 8 more with
        ``amsgrad``. A maximum that is not there yet, because ``amsgrad`` was switched on later,
        starts with the present second moment. ``inf`` and
        ``nan`` gradients reach the parameter; ``step(skip_nonfinite=True)``, :mod:`apex.amp` or a
        ``GradScaler`` skip such steps.

    Source:
        Kingma & Ba, *Adam*, ICLR 2015, algorithm 1; Loshchilov & Hutter, *Decoupled Weight Decay
        Regularization*, ICLR 2019, algorithm 2; Reddi, Kale & Kumar, *On the Convergence of Adam
        and Beyond*, ICLR 2018, algorithm 2 (``amsgrad``); Gupta et al., *Deep Learning with Limited
        Numerical Precision*, ICML 2015, section 3.1 (stochastic rounding).

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    layout = StateLayout("FusedAdam", (*MOMENTS, LARGEST), has_masters=True)
    kept_attributes = (
        "adam_w_mode",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "layout",
        "master_weight_dtype",
        "master_weights",
        "stochastic_rounding",
        "store_param_remainders",
        "use_decoupled_grad",
    )
    bucket_class = AdamBucket
    op = ADAM
    switch = "amsgrad"
    grad_norm: Tensor | None = None  # float64 [1]; see step
    skips: Tensor | None = None  # float32 [1], during a step: not 0 where nothing is changed
    _limits: NormLimits | None = None  # during a step, as the next
    _clip: Tensor | None = None  # float64 [1]: gradients times it are used
    multi_tensor_adam = amp_c_function("multi_tensor_adam")

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
        *,
        maximize: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
    ) -> None:
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        self.master_weights = master_weights
        self.set_storage(
            exp_avg_dtype,
            exp_avg_sq_dtype,
            master_weight_dtype,
            store_param_remainders,
            use_decoupled_grad,
        )
        self.set_rounding(stochastic_rounding)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": bool(amsgrad),
            "maximize": maximize,
            **({SEED: rounding_seed} if stochastic_rounding else {}),
        }
        super().__init__(params, defaults)

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor | None]]]:
        """Per group, the master of each parameter as it is kept, or None where there is none."""
        return [
            {"params": [self.state.get(p, {}).get(MASTER) for p in group["params"]]}
            for group in self.param_groups
        ]

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        self.check_amsgrad("FusedAdam", group)

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        self.check_amsgrad("FusedAdam.step", group)  # it may have been set since
        return super().state_keys(group)

    def check_saved_group(self, saved: dict[str, Any]) -> None:
        self.check_amsgrad("FusedAdam.load_state_dict", saved)
        decoupled = saved.get("decoupled_weight_decay", bool(self.adam_w_mode))
        if decoupled != bool(self.adam_w_mode) and saved.get("weight_decay"):
            names = ("Adam with L2 regularisation", "AdamW")
            raise ValueError(
                f"FusedAdam.load_state_dict: the state comes from {names[decoupled]} with "
                f"weight_decay={saved['weight_decay']}, but this is {names[bool(self.adam_w_mode)]}"
                f": give FusedAdam adam_w_mode={decoupled}."
            )

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *legacy: Any,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
        skip_above: float | None = None,
        **named_legacy: Any,
    ) -> Any:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.
            legacy, named_legacy: ``grads``, ``output_params``, ``scale``, ``grad_norms`` and
                ``grad_scaler``, in this order, which old scripts pass as None. (They are not in the
                signature, because GradScaler would then pass itself, which torch has deprecated.)
            max_norm: clip the gradients to this norm, in gradient units, ``>= 0``. The result is,
                bit by bit, that of multiplying all gradients by ``min(1, max_norm / (norm +
                1e-6))`` before; but they are only read, once more for the norm.
            skip_nonfinite: change nothing, and count no step, where the norm is ``inf`` or ``nan``.
            skip_above: change nothing, and count no step, where the norm is larger than this.

        The norm is the Euclidean one of all gradients of all groups; of sharded parameters that of
        the whole. With ``capturable`` it stays on the device. :attr:`grad_norm` is the norm of the
        last step that had one of these three arguments.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            TypeError: other arguments were given.
            ValueError: ``max_norm`` or ``skip_above`` is no number ``>= 0``.
            RuntimeError: a legacy argument is not None, a gradient cannot be used, a CUDA graph
                is being captured without ``capturable``, or a step of parameters on a GPU is to be
                skipped without ``capturable``; nothing is changed then.
        """
        if legacy or named_legacy:
            check_legacy(legacy, named_legacy)
        limits = None
        if max_norm is not None or skip_nonfinite or skip_above is not None:
            limits = NormLimits.of("FusedAdam", max_norm, skip_nonfinite, skip_above)
            if limits.may_skip:
                self._check_may_skip()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._limits = limits
        try:
            self.update_params()
        finally:
            self._limits = self._clip = self.skips = None
        return loss

    def _check_may_skip(self) -> None:
        on_gpu = any(param.is_cuda for group in self.param_groups for param in group["params"])
        if on_gpu and not self.capturable and self.pipeline is None:
            raise RuntimeError(
                "FusedAdam.step: skip_nonfinite and skip_above need FusedAdam(..., capturable=True)"
                " for parameters on a GPU: without it steps are counted on the host, which would "
                "have to wait for the GPU to know whether this one counts."
            )

    def step_buckets(self, buckets: list[AdamBucket]) -> None:
        if self._limits is None or not buckets or self._may_step(buckets, self._limits):
            super().step_buckets(buckets)

    def _may_step(self, buckets: list[AdamBucket], limits: NormLimits) -> bool:
        """Take the norm, and what it decides; return whether there is a step."""
        norm, inv_scale = norm_of_gradients(buckets, wide=True), Scaling.of(self).inv_scale
        if inv_scale is not None:
            norm = norm * inv_scale.to(norm.device, norm.dtype)
        self.grad_norm, self._clip = norm, limits.clip(norm)
        if not limits.may_skip:
            return True
        skips = limits.skips(norm)
        if self.capturable:
            self.skips = skips
            return True
        return not skips

    def arguments(self, bucket: AdamBucket) -> dict[str, Any]:
        numbers, clip = super().arguments(bucket), self._clip
        numbers["decoupled"] = self.adam_w_mode
        if clip is not None:
            numbers["clip"] = clip.to(bucket.params[0].device)
        if self.stochastic_rounding:
            numbers["rounding_key"] = rounding_key(self, bucket)
        bucket.step = CAPTURABLE if self.capturable else ADAM
        if bucket.may_be_compact:
            bucket.choose_step(numbers)
        return numbers
