"""The FusedSGD optimizer class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .checks import check_hyper, check_params, check_state_dict
from .launches import BUFFER, GroupLaunches, Launch
from .ops import sgd_step

# Attributes that the formula depends on, or that amp sets; torch's own pickling would lose them.
_ATTRIBUTES = (
    "wd_after_momentum",
    "materialize_master_grads",
    "set_grad_none",
    "most_recent_scale",
    "scale_set_by_backward",
    "_dummy_overflow_buf",
)


class FusedSGD(torch.optim.Optimizer):
    r"""SGD with momentum, updating all parameters of one device and dtype in a single launch.

    .. math::
        b_t = \mu b_{t-1} + (1-d) (g_t + \lambda p_{t-1}), \qquad p_t = p_{t-1} - \eta b_t

    with :math:`b_1 = g_1 + \lambda p_0`. With ``nesterov`` the update is
    :math:`g_t + \lambda p_{t-1} + \mu b_t` instead of :math:`b_t`; with ``wd_after_momentum`` the
    decay :math:`\lambda p_{t-1}` is added to the update and not to the gradient.

    Args:
        params: parameters, or dicts with parameter groups, as for every ``torch.optim`` optimizer.
            float64, float32, float16 or bfloat16, also mixed in a group; any shape; dense memory in
            any format (contiguous, channels_last, transposed).
        lr: learning rate :math:`\eta`, parameter units per gradient unit and step; ``>= 0``. A
            number, or a tensor of one element; a float32 tensor on the parameters' GPU is read
            there. May be left out if every group has its own.
        momentum: :math:`\mu`, decay of the buffer per step; ``>= 0``.
        dampening: :math:`d`; not applied in a parameter's first step.
        weight_decay: :math:`\lambda`, per step; ``>= 0``.
        nesterov: needs ``momentum > 0`` and ``dampening == 0``.
        wd_after_momentum: see above.
        materialize_master_grads: with :mod:`apex.amp` and master weights: ``True`` takes unscaled
            gradients of the masters; ``False`` the model's scaled 16-bit gradients, which are
            unscaled in the same launch.
        set_grad_none: ``zero_grad()`` sets gradients to None; ``False`` leaves that to torch, whose
            default is the same.
        maximize: add the update instead of subtracting it.

    State, per parameter, same shape, dtype and memory format as the parameter (with master weights:
    as the float32 master):
        ``momentum_buffer``; none if ``momentum`` is 0. Names and meaning, in state and groups, are
        those of :class:`torch.optim.SGD`, so checkpoints load in both directions.

    Raises:
        ValueError: a hyper-parameter is out of range, or missing.
        TypeError: a parameter is not real floating point.
        RuntimeError: in :meth:`step`: a gradient is sparse or does not match its parameter. No
            parameter and no state is changed then.

    Note:
        Differs from ``torch.optim.SGD`` in that 16-bit parameters are updated in float32 and
        rounded once. With master weights of :mod:`apex.amp` the same launch writes the model's
        16-bit parameters. A step with momentum moves 20 bytes per float32 parameter. ``inf`` and
        ``nan`` gradients reach the parameter; use :mod:`apex.amp` or a ``GradScaler`` to skip such
        steps.

    Source:
        Sutskever et al., *On the importance of initialization and momentum in deep learning*,
        ICML 2013, section 2, in the form of :class:`torch.optim.SGD`.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        # Set by amp: gradients are this many times too large in the next step.
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)
        self._launches: list[GroupLaunches] = []
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            # Of no effect; in the groups of torch.optim.SGD.
            "foreach": None,
            "differentiable": False,
            "fused": None,
        }
        super().__init__(params, defaults)

    @property
    def multi_tensor_sgd(self) -> Callable[..., None]:
        """``amp_C.multi_tensor_sgd``, for subclasses written for Apex."""
        import amp_C

        return amp_C.multi_tensor_sgd

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: a hyper-parameter of the group is out of range, or it has no ``lr``.
            TypeError: a parameter is not real floating point.
        """
        check_hyper({**self.defaults, **param_group})
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            check_params(self.param_groups[-1]["params"])
        except TypeError:
            del self.param_groups[before:]
            raise

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients: set them to None, or to zero.

        Args:
            set_to_none: as in torch; without it, see the constructor's ``set_grad_none``.
        """
        if set_to_none is not None:
            super().zero_grad(set_to_none)
        elif self.set_grad_none:
            super().zero_grad(True)
        else:
            super().zero_grad()

    def get_momentums(self, params: list[Tensor]) -> tuple[list[Tensor], bool]:
        """The momentum buffers of ``params``, made of zeros where missing.

        Returns:
            The buffers, and whether none of them existed, that is, the next step is the first.
            :meth:`step` does not use it: it knows per parameter which step is the first.
        """
        existing = [self.state[p].get(BUFFER) for p in params]
        for param, buffer in zip(params, existing, strict=True):
            if buffer is None:
                self.state[param][BUFFER] = torch.zeros_like(param, requires_grad=False)
        buffers = [self.state[p][BUFFER] for p in params]
        return buffers, all(buffer is None for buffer in existing)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _ATTRIBUTES}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._launches = []
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of ``torch.optim.SGD``.

        Raises:
            ValueError: groups, or shapes of the state, do not fit; or ``differentiable`` is set.
                Nothing is changed then.
        """
        check_state_dict(self, state_dict)
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without gradient are left alone.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            RuntimeError: a gradient cannot be used; nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        launches = self._collect()
        if len(launches) > 1:
            # With a single launch the kernel itself checks everything before it writes.
            for launch in launches:
                launch.check()
        for launch in launches:
            self._run(launch)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        return loss

    def _collect(self) -> list[Launch]:
        twins = _models_of_masters(self)
        missing = len(self.param_groups) - len(self._launches)
        self._launches.extend(GroupLaunches() for _ in range(missing))
        return [
            launch
            for group, launches in zip(self.param_groups, self._launches, strict=False)
            for launch in launches.collect(
                group, self.state, twins, not self.materialize_master_grads
            )
        ]

    def _run(self, launch: Launch) -> None:
        if launch.is_new:
            launch.check()
            launch.conform_buffers()
        try:
            self._call(launch)
        except RuntimeError:
            launch.check()
            if not launch.match_gradients():
                raise
            self._call(launch)
        if launch.is_new:
            launch.keep_buffers(self.state)
        # Autograd then notices a backward pass over values from before the step.
        torch.autograd.graph.increment_version(launch.params + launch.copies)

    def _call(self, launch: Launch) -> None:
        group = launch.group
        lr, device_lr = group["lr"], None
        if isinstance(lr, Tensor) and lr.is_cuda and lr.dtype == torch.float32:
            lr, device_lr = 0.0, lr
        scale = 1.0 / self.most_recent_scale
        sgd_step(
            launch.params,
            launch.grads,
            launch.buffers,
            launch.copies,
            float(lr),
            device_lr,
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            bool(group["nesterov"]),
            bool(self.wd_after_momentum),
            launch.is_first_run,
            -scale if group["maximize"] else scale,
            None,
        )


def _models_of_masters(optimizer: FusedSGD) -> dict[int, Tensor]:
    """The model's 16-bit parameter by ``id`` of the float32 master that amp made of it."""
    stash = getattr(optimizer, "_amp_stash", None)
    masters = getattr(stash, "fp32_from_fp16_groups", None)
    if masters is None:
        return {}
    return {
        id(master): model
        for master_group, model_group in zip(masters, stash.fp16_groups, strict=True)
        for master, model in zip(master_group, model_group, strict=True)
    }
