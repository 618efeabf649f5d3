"""Adam on wide parameters of a 16-bit model, with a running average, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from itertools import chain
from numbers import Real
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import library
from .._shared.native.writes import call_counted, keep_from_tracing
from ..optimizers.given_lists import Batches, loss_of, match_layout
from .adam_swa import adam_swa_step
from .swa_casts import Launch, launch_of, wide
from .swa_lists import LISTS, MOMENTS, NAME, Row, check_lists, check_numbers, check_row, steps_of

__all__ = ["AdamMathType", "FusedAdamSWA"]


class AdamMathType(Enum):
    """Which Adam :class:`FusedAdamSWA` computes; the first and the last are the same formula."""

    ApexAdam = 0
    """L2 regularisation: the decay is added to the gradient."""
    ApexAdamW = 1
    """Decoupled decay."""
    PyTorchAdam = 2
    """L2 regularisation."""


class FusedAdamSWA(torch.optim.Optimizer):
    r"""Adam, the 16-bit copy of the parameters, and their running average, in a single launch.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2

        p_t = p_{t-1} - \eta \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t)} + \epsilon},
        \qquad
        c_t = \mathrm{round}(p_t), \qquad
        s_t = s_{t-1} + (1-\delta) (p_t - s_{t-1}), \quad s_1 = p_1

    where :math:`g` is the gradient of the copy :math:`c`, with which the model computes. The
    weight decay is added to the gradient, ``g += weight_decay * p``, or with
    ``AdamMathType.ApexAdamW`` to the fraction.

    Args:
        params: the parameters :math:`p` that are optimized, or one dict of a group; float64,
            float32, float16 or bfloat16, also mixed; contiguous; CPU or GPU.
        compute_params: a copy :math:`c` of each, whose ``.grad`` is read: of any of these dtypes,
            whatever the parameter's.
        swa_params: an average :math:`s` of each, of its dtype. The first step sets it.
        swa_decay_rate: :math:`\delta`, what an average keeps per step, in ``[0, 1]``.
        lr: learning rate :math:`\eta`, parameter units per step; ``>= 0``.
        bias_correction: divide the moments by :math:`1-\beta^t`.
        betas: decay of the two running averages per step, each in ``[0, 1)``.
        eps: added to the root, in gradient units; ``>= 0``.
        adam_math_mode: an :class:`AdamMathType`: ``ApexAdam`` and ``PyTorchAdam`` add the decay to
            the gradient, ``ApexAdamW`` decouples it.
        weight_decay: per step; ``>= 0``.
        amsgrad, capturable, master_weights: not supported; ``True`` raises.
        set_grad_none: ``zero_grad()`` sets gradients to None by default.

    State, per parameter, of its shape: ``exp_avg``, ``exp_avg_sq``, float32, or float64 for float64
    parameters; and ``step``, an int. Names and meaning are those of :class:`torch.optim.Adam`, so
    checkpoints load in both directions. ``group["step"]`` counts calls of :meth:`step`, and
    ``swa_param_groups[0]["n_averaged"]`` those that the averages are of. ``state_dict()`` has both
    counts, but not the averages: save ``swa_params`` as you save the model.

    Raises:
        ValueError: a list is missing or empty, lists differ in length, shapes, devices or dtypes, a
            tensor is not contiguous or stands in two lists, or a number is out of range.
        TypeError: a dtype is not one of those above.
        NotImplementedError: ``amsgrad``, ``capturable`` or ``master_weights``.
        RuntimeError: there is more than one group, or the kernels cannot run here.

    Note:
        A step moves 36 bytes per parameter with a bfloat16 copy. There are kernels for float32
        parameters whose copies are float32, float16 or bfloat16, and for float64 alone. A step of
        other dtypes makes temporaries of float32, or of float64 if one is, and rounds from them;
        copies are those of the rounded parameters. A 16-bit average loses moves that are smaller
        than its rounding. Parameters without a gradient keep their value and state, and are
        averaged like the others. Gradients that are ``inf`` or ``nan`` reach parameter and average.

    Source:
        Kingma & Ba, *Adam*, ICLR 2015, algorithm 1; Loshchilov & Hutter, *Decoupled Weight Decay
        Regularization*, ICLR 2019, algorithm 2; Izmailov et al., *Averaging Weights Leads to Wider
        Optima and Better Generalization*, UAI 2018, section 3.2, with a constant decay.

    Example:
        >>> model = torch.nn.Linear(8, 4).bfloat16()
        >>> params = [p.detach().float() for p in model.parameters()]
        >>> averages = [torch.zeros_like(p) for p in params]
        >>> optimizer = FusedAdamSWA(params, model.parameters(), averages, swa_decay_rate=0.999)
        >>> model(torch.randn(2, 8).bfloat16()).float().square().mean().backward()
        >>> optimizer.step(grad_clip_scale=0.5)
    """

    _held: _Held | None = None

    def __init__(
        self,
        params: Any,
        compute_params: Iterable[Tensor],
        swa_params: Iterable[Tensor],
        swa_decay_rate: float,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_math_mode: AdamMathType = AdamMathType.PyTorchAdam,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        for name, is_wanted in (
            ("amsgrad", amsgrad),
            ("capturable", capturable),
            ("master_weights", master_weights),
        ):
            if is_wanted:
                raise NotImplementedError(f"{NAME}: {name}=True is not supported.")
        for name, given in zip(LISTS, (params, compute_params, swa_params), strict=True):
            if given is None:
                raise ValueError(f"{NAME}: {name} must be a list of tensors, got None.")
        self.adam_math_mode = _mode_of(adam_math_mode)
        if swa_decay_rate is None or not 0 <= swa_decay_rate <= 1:
            raise ValueError(f"{NAME}: swa_decay_rate must be in [0, 1], got {swa_decay_rate}.")
        self.swa_decay_rate, self.set_grad_none = float(swa_decay_rate), set_grad_none
        self.compute_param_groups = [{"params": list(compute_params)}]
        self.swa_param_groups = [{"params": list(swa_params), "n_averaged": 0}]
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        keep_from_tracing(type(self))
        super().__init__(params, defaults)
        lists = self._lists()
        check_lists(lists)
        for device_type in {param.device.type for param in lists[0]} & {"cpu", "cuda"}:
            library.require(Path(__file__).parent / "adam_swa", NAME, device_type)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the only group.

        Raises:
            RuntimeError: there is one already.
            ValueError: a number of it is out of range.
        """
        if self.param_groups:
            raise RuntimeError(
                f"{NAME}: there can be one group of parameters only; make an optimizer per group."
            )
        check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _lists(self) -> list[list[Tensor]]:
        groups = (self.param_groups, self.compute_param_groups, self.swa_param_groups)
        return [group[0]["params"] for group in groups]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients of the copies: set them to None, or to zero.

        Args:
            set_to_none: defaults to the constructor's ``set_grad_none``.
        """
        set_to_none = self.set_grad_none if set_to_none is None else set_to_none
        for tensor in self.compute_param_groups[0]["params"]:
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad.detach_().zero_()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grad_clip_scale: float | Tensor | None = None,
    ) -> Any:
        """Take a step.

        Args:
            closure: computes the loss again; called with gradients enabled.
            grad_clip_scale: what gradients are multiplied by: a number, or a tensor of one element,
                which nothing waits for.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a gradient is sparse, or tensors do not match.
            TypeError: the dtype of a parameter or copy is no longer one that the class takes.
                Either way no parameter, average or state is changed.
        """
        loss = loss_of(closure)
        group, averages = self.param_groups[0], self.swa_param_groups[0]
        weight = 1.0 - self.swa_decay_rate if averages["n_averaged"] else 1.0
        beta1, beta2 = group["betas"]
        hyper = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        options = (bool(group["bias_correction"]), self.adam_math_mode is AdamMathType.ApexAdamW)
        numbers = _Numbers(*map(float, hyper), *options, weight)
        if not self._step_as_before(numbers, grad_clip_scale):
            self._step_checked(numbers, grad_clip_scale)
        group["step"] = group.get("step", 0) + 1
        averages["n_averaged"] += 1
        return loss

    def _step_as_before(self, numbers: _Numbers, grad_clip_scale: float | Tensor | None) -> bool:
        """Launch with the tensors of the last step, where these are one launch; False: not done.

        The operator checks what could have changed in them, and changes nothing where it refuses.
        """
        held, self._held = self._held, None
        lists = self._lists()
        if held is None or not (
            _are_same(chain(*lists), chain(*held.lists))
            and _are_same(self.state.values(), held.states)
        ):
            return False
        params, copies, averages = lists
        grads = [copy.grad for copy in copies]
        steps = {state["step"] for state in held.states}
        if len(steps) != 1 or not all(
            grad is not None and grad.layout is torch.strided and row.is_alike()
            for grad, row in zip(grads, map(Row, *lists), strict=True)
        ):
            return False
        moments = [[state[key] for state in held.states] for key in MOMENTS]
        scale = _scales(grad_clip_scale, params[0].device)
        try:
            lists = [params, grads, *moments, copies, averages]
            numbers.launch(Launch(lists, []), scale, steps.pop() + 1)
        except RuntimeError:
            batches = self._collect()[0]
            if batches.is_only(lists) and all(launch_of(own).is_direct() for _, own in batches):
                raise
            return False  # tensors do not fit as they are: the checks will say which, or copy them
        for state in held.states:
            state["step"] += 1
        self._held = held
        return True

    def _step_checked(self, numbers: _Numbers, grad_clip_scale: float | Tensor | None) -> None:
        """Check every tensor, launch, and hold the tensors if that was one launch."""
        batches, idle, states = self._collect()
        scales = {device: _scales(grad_clip_scale, device) for device in batches.devices}
        # All temporaries first: to run out of memory changes nothing.
        launches = [(step, launch_of(lists)) for (step,), lists in batches]
        for step, launch in launches:
            numbers.launch(launch, scales[launch.lists[0][0].device], step)
        weight = numbers.average_weight
        for row in idle:
            row.average.copy_(row.param) if weight == 1 else row.average.lerp_(row.param, weight)
        for param, state in states:
            state["step"] += 1
            self.state[param] = state
        if len(launches) == 1 and launches[0][1].is_direct() and not idle:
            lists = self._lists()
            grads = launches[0][1].lists[1]
            if _are_same(grads, (copy.grad for copy in lists[1])):  # none is a copy
                self._held = _Held([list(own) for own in lists], list(self.state.values()))

    def _collect(self) -> tuple[Batches, list[Row], list[tuple[Tensor, dict[str, Any]]]]:
        """What to launch, parameters without gradient, and states; nothing is changed here."""
        batches, idle, states = Batches(), [], []
        where = f"{NAME}.step"
        for index, parts in enumerate(zip(*self._lists(), strict=True)):
            row = Row(*parts)
            grad = row.compute.grad
            if grad is None:
                check_row(where, index, row, (), RuntimeError)
                idle.append(row)
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"{where}: the gradient of compute_params[{index}] is sparse ({grad.layout}); "
                    "use torch.optim.SparseAdam, or sparse=False in the embedding."
                )
            state = self.state.get(row.param)
            if not state:
                state = {"step": 0, **{key: _moment_like(row.param).zero_() for key in MOMENTS}}
            moments = [state[key] for key in MOMENTS]
            check_row(where, index, row, (grad, *moments), RuntimeError)
            grad = match_layout(grad, row.compute)
            batches.add((state["step"] + 1,), row.param, grad, *moments, row.compute, row.average)
            states.append((row.param, state))
        return batches, idle, states

    # Checkpoints and copies.

    def state_dict(self) -> dict[str, Any]:
        """The state, with ``n_averaged`` in the group; see :meth:`load_state_dict`."""
        saved = super().state_dict()
        saved["param_groups"][0]["n_averaged"] = self.swa_param_groups[0]["n_averaged"]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, of Apex's, or of ``torch.optim.Adam`` and ``AdamW``.

        After a state of torch's, which knows no averages, the next step sets them anew. Apex's
        counts none: there, each step was averaged.

        Raises:
            ValueError: another number of parameters, other shapes, or the state of another formula.
                Nothing is changed then.
        """
        (params, *_) = self._lists()
        is_decoupled = self.adam_math_mode is AdamMathType.ApexAdamW
        counts = steps_of(params, is_decoupled, state_dict)
        hooked: dict[str, Any] = {}  # what hooks leave of it: torch casts moments to 16 bits
        handle = self.register_load_state_dict_pre_hook(lambda _, state: hooked.update(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        (group,) = self.param_groups
        group.pop("decoupled_weight_decay", None)  # torch's; here adam_math_mode says it
        for key, value in self.defaults.items():
            group.setdefault(key, value)
        (indices,) = (saved["params"] for saved in hooked["param_groups"])
        for param, count, index in zip(params, counts, indices, strict=True):
            state = self.state.get(param)
            if state:
                saved = hooked["state"].get(index, state)
                moments = {key: _moment_like(param).copy_(saved[key]) for key in MOMENTS}
                state.update(step=count, **moments)
        averaged = int(group.pop("n_averaged", group.get("step", 0)))
        self.swa_param_groups[0]["n_averaged"] = averaged
        group["step"] = int(group.get("step", max(counts, default=0)))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _KEPT}}

    @classmethod
    def from_optim(
        cls,
        adam_optimizer: torch.optim.Optimizer,
        fp32_params: Iterable[Tensor],
        bf16_params: Iterable[Tensor],
        swa_params: Iterable[Tensor],
        swa_decay_rate: float,
    ) -> FusedAdamSWA:
        """Make one with the numbers and a copy of the state of another Adam.

        Args:
            adam_optimizer: a ``torch.optim.Adam`` or ``AdamW``, or Apex's ``FusedAdam``, of one
                group; also before its first step.
            fp32_params: its parameters, or others in their order, which are optimized from now on.
            bf16_params, swa_params, swa_decay_rate: as of the class.

        Raises:
            RuntimeError: it has more than one group.
            ValueError: its parameters have taken different numbers of steps, or it has
                ``amsgrad`` or ``maximize``.
        """
        saved = adam_optimizer.state_dict()
        if len(saved["param_groups"]) != 1:
            raise RuntimeError(
                f"{NAME}.from_optim: adam_optimizer must have one group of parameters, got "
                f"{len(saved['param_groups'])}."
            )
        steps = {int(state["step"]) for state in saved["state"].values()}
        if len(steps) > 1:
            raise ValueError(
                f"{NAME}.from_optim: the parameters of adam_optimizer have taken different numbers "
                f"of steps, {sorted(steps)}. Make a {NAME}, and give its load_state_dict() the "
                "state: that keeps the number of each."
            )
        (group,) = saved["param_groups"]
        of_apex = getattr(adam_optimizer, "adam_w_mode", False)
        is_decoupled = group.get("decoupled_weight_decay", of_apex)
        mode = AdamMathType.ApexAdamW if is_decoupled else AdamMathType.PyTorchAdam
        lists = (fp32_params, bf16_params, swa_params)
        optimizer = cls(*lists, swa_decay_rate, adam_math_mode=mode)
        optimizer.load_state_dict(saved)
        optimizer.swa_param_groups[0]["n_averaged"] = 0
        return optimizer


_KEPT = (
    "adam_math_mode",
    "compute_param_groups",
    "set_grad_none",
    "swa_decay_rate",
    "swa_param_groups",
)  # by pickling and copying, beside what torch keeps


class _Numbers(NamedTuple):
    """What a launch is given beside tensors, the scale of gradients and the step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    is_decoupled: bool
    average_weight: float

    def launch(self, launch: Launch, scale: tuple[Tensor | None, float], step: int) -> None:
        """Step all tensors of a launch."""
        call_counted(adam_swa_step, *launch.lists, *scale, *self[:5], step, *self[5:])
        launch.finish()


class _Held(NamedTuple):
    """The tensors of a step that was one launch of all parameters."""

    lists: list[list[Tensor]]
    states: list[dict[str, Any]]


def _are_same(ones: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether they are the same objects, as many, in one order."""
    return all(map(is_, chain(ones, [_END]), chain(others, [_END])))


_END = object()


def _moment_like(param: Tensor) -> Tensor:
    return torch.empty_like(param, dtype=wide(param.dtype), requires_grad=False)


def _mode_of(mode: Any) -> AdamMathType:
    try:
        return AdamMathType(mode)
    except ValueError:
        modes = ", ".join(map(str, AdamMathType))
        raise ValueError(f"{NAME}: adam_math_mode must be one of {modes}, got {mode!r}.") from None


def _scales(scale: float | Tensor | None, device: torch.device) -> tuple[Tensor | None, float]:
    """What gradients are multiplied by: a tensor on their device, or None, and a number."""
    if scale is None:
        return None, 1.0
    if isinstance(scale, float | Real):  # the usual type first: an abstract class asks in Python
        return None, float(scale)
    if not isinstance(scale, Tensor) or scale.numel() != 1:
        got = f"a tensor {list(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
        raise RuntimeError(
            f"{NAME}.step: grad_clip_scale must be a number or a tensor of one element, got {got}."
        )
    return scale.detach().reshape(1).to(device, torch.float64), 1.0
