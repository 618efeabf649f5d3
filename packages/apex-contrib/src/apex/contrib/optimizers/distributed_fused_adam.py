"""DistributedFusedAdam: Adam whose state and gradients are divided over ranks (ZeRO, stage 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .distributed import (
    arguments,
    buffers,
    checkpoints,
    gradients,
    layout,
    norms,
    parameters,
    plans,
    scaling,
    setup,
)
from .distributed.apex_names import *  # noqa: F403  (NeMo imports private names from here)
from .distributed.arguments import NAME
from .distributed.checkpoints import for_torch
from .given_lists import loss_of

__all__ = ["DistributedFusedAdam", "for_torch"]


class DistributedFusedAdam(torch.optim.Optimizer):
    r"""Adam and AdamW whose state and reduced gradients are divided over ranks.

    Every rank keeps a share of the state. Gradients are summed during backward, and each rank
    receives the sum of its share only. :meth:`step` updates the share in one launch per bucket,
    and sends the new parameters to all. The module is not wrapped: hooks of its parameters do this.
    Formulas are those of :class:`apex.optimizers.FusedAdam`, and results too, bit for bit, where
    the reduced gradients are.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2

        p_t = p_{t-1} - \eta \left(
              \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t)} + \epsilon}
              + \lambda p_{t-1} \right)

    Args:
        params: parameters, or dicts with parameter groups. Floating point, dense in any format, on
            one device. Those of rank 0 are sent to all.
        lr: learning rate :math:`\eta`; ``>= 0``.
        bias_correction: divide the moments by :math:`1-\beta^t`.
        betas: decay of the two running averages per step, each in ``[0, 1)``.
        eps: added to the root; ``>= 0``.
        adam_w_mode: decoupled decay (AdamW), or L2 regularisation (``False``, Adam).
        weight_decay: :math:`\lambda`, per step; ``>= 0``.
        amsgrad: not supported; ``True`` raises.
        dtype: of the state: float32, float16 or bfloat16.
        grad_sync_dtype: in which gradients are added up; by default ``dtype``.
        param_sync_dtype: in which new parameters are sent: ``dtype``, another of these, float64, or
            an integer dtype: the most significant bytes are sent, others become zero.
        device: ``"cuda"``, the default, means the parameters' device; another must be theirs.
        process_group: ranks with the same parameters; by default all.
        distributed_process_group: ranks that divide the state; by default ``process_group``.
        redundant_process_group: ranks that hold the same share. The sizes of both multiply to that
            of ``process_group``.
        average_grad_sync: average gradients over ``process_group``, or sum them.
        overlap_grad_sync: reduce a bucket during backward, as soon as it is full.
        overlap_param_sync: return from :meth:`step` while parameters are under way. Each arrives at
            the latest when the forward of its submodule of ``module`` begins; without ``module``,
            :meth:`step` waits for all.
        bucket_cap_mb: size of a bucket, in MiB of ``grad_sync_dtype``; less than 70 % full: warns.
        pipeline_size: how many buckets are under way at once.
        contiguous_param_buffer: make parameters, of ``param_sync_dtype`` or as wide as that integer
            dtype (int32 for float32), views of the buffers, one per dtypes, that receive them.
        contiguous_grad_buffer: add gradients up in one buffer; :meth:`grad_buffer_view` shows it.
        store_params: keep this rank's share of the parameters in ``dtype``.
        store_param_remainders: keep those 16 bits of a float32 value that its bfloat16 parameter
            lacks; with ``store_params=False``. The parameter is then the value rounded with ties
            away from zero.
        with_scaled_states: keep float16 or bfloat16 states with a scale per part of a parameter.
        nccl_ub: take gradient buffers from memory that NCCL registers, see
            :mod:`apex.contrib.nccl_allocator`; needs ``contiguous_grad_buffer``, GPUs and NCCL.
        capturable: keep ``lr``, ``step`` and the overflow flag on the device.
        module: the model, for ``overlap_param_sync``.

    State: ``state["step"]`` counts steps, ``state["buckets"]`` holds this rank's shares. Bytes per
    parameter and rank, with N ranks: ``12 / N``; without ``store_params`` 8, with remainders 10,
    with float16 states 6, each divided by N. Gradients take ``4 / N`` after backward.

    Raises:
        RuntimeError: arguments exclude each other, the process groups' sizes do not multiply, the
            ranks' parameters differ, another rank has failed, or parameters belong to another
            sharded optimizer that holds gradients which no step has used.
        ValueError: a dtype or a hyper-parameter is out of range.
        TypeError: a parameter is not floating point.

    Note:
        A parameter without a gradient on any rank is stepped with zeros, if it requires gradients:
        its moments and its weight decay. ``requires_grad=False`` leaves it alone. The first
        backward is not overlapped: it shows in which order gradients arrive, and rank 0's order
        then holds for all. All ranks must call backward, :meth:`step`, :meth:`grad_norm` and
        :meth:`state_dict` equally often and in the same order. The newest sharded optimizer over a
        parameter owns it. An older one raises RuntimeError when used; only its :meth:`state_dict`
        still works, without ``store_param_remainders``.

    Source:
        Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
        SC 2020, stage 2; Kingma & Ba, *Adam*, ICLR 2015, algorithm 1; Loshchilov & Hutter,
        *Decoupled Weight Decay Regularization*, ICLR 2019, algorithm 2.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = DistributedFusedAdam(model.parameters(), lr=1e-3)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    # What GradScaler-like objects ask.
    _step_supports_amp_scaling = True
    _custom_amp_unscale_grads = True

    ParameterFragment = layout.ParameterFragment
    StateBucket = layout.StateBucket
    GradientStatus = layout.GradientStatus
    GradientBucket = layout.GradientBucket
    ParameterStatus = layout.ParameterStatus
    ParameterBucket = layout.ParameterBucket

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        dtype: torch.dtype = torch.float32,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
        process_group: dist.ProcessGroup | None = None,
        distributed_process_group: dist.ProcessGroup | None = None,
        redundant_process_group: dist.ProcessGroup | None = None,
        average_grad_sync: bool = True,
        overlap_grad_sync: bool = True,
        overlap_param_sync: bool = False,
        bucket_cap_mb: float = 100.0,
        pipeline_size: int = 2,
        contiguous_param_buffer: bool = False,
        contiguous_grad_buffer: bool = False,
        store_params: bool = True,
        store_param_remainders: bool = False,
        with_scaled_states: bool = False,
        nccl_ub: bool = False,
        capturable: bool = False,
        *,
        module: nn.Module | None = None,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        arguments.check_options(given, params)
        names = ("lr", "bias_correction", "betas", "eps", "weight_decay")
        super().__init__(params, {name: given[name] for name in names})
        self.args_dict = given
        self.device = arguments.device_of(self.parameters(), device)
        arguments.check_nccl_ub(given, self.device)
        setup.prepare(self, given)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do; on all ranks, whose parameters become rank 0's."""
        super().add_param_group(param_group)
        if "buckets" in self.state:
            setup.add_group(self)

    __getstate__ = arguments.refuse_copies

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.args_dict.items())
        return f"{type(self).__name__}({given})"

    @property
    def _state_scales(self) -> dict[tuple[int, int, int], dict[str, Tensor]]:
        """Scales of this rank's states, by ids of group, parameter and bucket."""
        return scaling.as_dict(self.state["buckets"])

    # What the engine's files do, by Apex's names.

    _broadcast_params = setup.broadcast_parameters
    _make_post_backward_hook = gradients.make_hook
    init_params = plans.init_params
    init_params_bucket = plans.init_params_bucket
    _init_param_state = plans.init_param_state
    init_param_buffer = parameters.init_param_buffer
    grad_buffer_view = buffers.grad_buffer_view
    zero_grad = gradients.zero_grad
    _grad_copy = gradients.copy_gradient
    _try_start_bucket_grad_sync = gradients.try_start
    _finish_bucket_grad_sync = gradients.finish_all
    grad_sync = gradients.grad_sync
    _holds_gradients = gradients.holds_gradients
    check_was_current = parameters.check_was_current
    param_sync = _finish_under_way = parameters.param_sync
    _param_copy_fragments = parameters.copy_fragments
    _check_params_shard_dtypes = parameters.check_shard_dtypes
    _local_grad_norm = norms.local_square
    grad_norm = norms.grad_norm
    clip_grad_norm = norms.clip_grad_norm
    unscale_grads = norms.unscale_grads
    state_dict = checkpoints.state_dict
    load_state_dict = checkpoints.load_state_dict

    # Parameters and their buckets.

    def parameters(self) -> Iterator[Tensor]:
        """All parameters, group by group."""
        return (param for group in self.param_groups for param in group["params"])

    def parameter(self, *args: Any) -> Tensor:
        """The parameter of a fragment, or of ids of its group and of itself."""
        if len(args) == 2 and all(isinstance(arg, int) for arg in args):
            return self.param_groups[args[0]]["params"][args[1]]
        if len(args) == 1 and isinstance(args[0], layout.ParameterFragment):
            return self.param_groups[args[0].param_group_id]["params"][args[0].param_id]
        raise TypeError(
            f"{NAME}.parameter: expected a fragment, or ids of a group and of a parameter, got "
            f"{args}."
        )

    def owns(self, param: Tensor) -> bool:
        """Whether ``param`` is one of this optimizer's."""
        return id(param) in self._positions

    def position_of(self, param: Tensor) -> tuple[int, int]:
        """Ids of a parameter's group and of itself; RuntimeError if it is not this optimizer's."""
        if not self.owns(param):
            raise RuntimeError(
                f"{NAME}: a parameter of shape {list(param.shape)} is not this optimizer's."
            )
        return self._positions[id(param)]

    # Gradients.

    @contextmanager
    def no_sync(self, greedy_grad_copy: bool = False) -> Iterator[None]:
        """Context: backward passes add gradients up on this rank alone.

        Args:
            greedy_grad_copy: add them up in buckets, instead of in ``param.grad``.
        """
        before = self.overlap_grad_sync, self.greedy_grad_copy
        self.overlap_grad_sync, self.greedy_grad_copy = False, greedy_grad_copy
        try:
            yield
        finally:
            self.overlap_grad_sync, self.greedy_grad_copy = before

    def try_grad_sync(self, params: Iterable[Tensor]) -> None:
        """Copy gradients into buckets, and reduce those that are full."""
        params = list(params)
        for param in params:
            self._grad_copy(param)
        self._try_start_bucket_grad_sync(params=params)

    def note_gradients(self) -> None:
        """Gradients have changed: they are to be reduced, and their norm is not known any more."""
        self.is_reduced, self.is_stepped, self._grad_norm = False, False, None

    def _try_start_bucket_param_sync(self, params: Iterable[Tensor] | None = None) -> None:
        """Nothing is left to start: :meth:`step` has all new parameters under way."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Take one step; a collective call.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_scaler: what ``torch.amp.GradScaler.step`` passes. If a gradient of any rank is not
                finite, no rank changes anything.

        Returns:
            What ``closure`` returned, or None.
        """
        loss = loss_of(closure)
        parameters.step(self, grad_scaler)
        return loss

    def sharded_state_dict(self) -> dict[str, Any]:
        """The state for ``torch.distributed.checkpoint``, which writes each rank's shares only.

        ``torch.distributed.checkpoint.load`` fills such a dict, also of another number of ranks and
        other options; :meth:`load_sharded_state_dict` then takes it. A collective call.
        """
        from .distributed import sharded_states  # its imports take long

        return sharded_states.make(self)

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """:meth:`load_state_dict` of what ``torch.distributed.checkpoint.load`` has filled."""
        from .distributed import sharded_states

        sharded_states.take(self, state_dict)
