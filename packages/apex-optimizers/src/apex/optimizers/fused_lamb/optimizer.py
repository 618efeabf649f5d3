"""The FusedLAMB optimizer class."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..stepping.buckets import StateLayout
from ..stepping.checks import SEED
from ..stepping.optimizer import amp_c_function
from .shared_step import LambOptimizer


class FusedLAMB(LambOptimizer):
    r"""LAMB, updating all parameters of one device and dtype in two launches.

    .. math::
        g_t = \hat g_t / \max(1, \lVert \hat g_t \rVert / \gamma), \qquad
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2

        u_t = \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t)} + \epsilon}
              + \lambda p_{t-1}, \qquad
        p_t = p_{t-1} - \eta \frac{\lVert p_{t-1} \rVert}{\lVert u_t \rVert} u_t

    The norm of the gradient :math:`\hat g` is taken over all parameters of all groups together,
    those of :math:`p` and :math:`u` for each parameter. Their ratio is replaced by 1 where one of
    them is 0, and in groups with :math:`\lambda = 0` unless ``use_nvlamb``. With
    ``adam_w_mode=False`` the decay goes into the gradient: ``g += weight_decay * p``.

    Args:
        params: parameters, or dicts with parameter groups, as for every ``torch.optim`` optimizer.
            float64, float32, float16, bfloat16, complex64 or complex128, also mixed in a group; any
            shape; dense memory in any format (contiguous, channels_last, transposed). Real and
            imaginary parts are updated as numbers of their own; norms are those of the complex
            numbers.
        lr: learning rate :math:`\eta`, without unit where the ratio of norms applies; ``>= 0``. A
            number, or a tensor of one element.
        bias_correction: divide the moments by :math:`1-\beta^t`.
        betas: decay of the two running averages per step, each in ``[0, 1)``.
        eps: added to the root, in gradient units; ``>= 0``.
        weight_decay: :math:`\lambda`, per step; ``>= 0``.
        amsgrad: not supported; ``True`` raises.
        adam_w_mode: decoupled decay, or L2 regularisation (``False``).
        grad_averaging: weigh the gradient by :math:`1-\beta_1` in the first moment; else by 1.
        set_grad_none: ``zero_grad()`` sets gradients to None by default.
        max_grad_norm: :math:`\gamma`, in gradient units; ``>= 0``; 0 or infinity does not
            clip. May differ between groups.
        use_nvlamb: use the ratio of norms also in groups without decay.
        maximize: maximize instead of minimizing.
        capturable: keep ``lr`` and ``step`` on the device; see :class:`FusedAdam`.
        stochastic_rounding: round bfloat16 parameters up or down by chance, so that updates far
            below their precision add up in the mean, without masters; see :class:`FusedAdam`.
        rounding_seed: in [0, 2**32); may differ between groups, whose entry it becomes.

    State, per parameter, same shape and memory format as the parameter:
        ``exp_avg``, ``exp_avg_sq``: float32, or of the parameter's dtype if that is float64 or
        complex (8 bytes per parameter of up to 32 bits); ``step``: the count of steps that the
        parameter took. ``group["step"]`` counts the group's steps.

    Raises:
        ValueError: a hyper-parameter is out of range.
        TypeError: a parameter has another dtype, or is float16 with ``stochastic_rounding``.
        RuntimeError: ``amsgrad``; in :meth:`step`: a gradient is sparse or does not match its
            parameter. No parameter and no state is changed then.

    Note:
        Unlike Apex's: gradients are left as they are; every group uses its own ``max_grad_norm``,
        and 0 switches clipping off; bfloat16 and float64 work; moments of 16-bit parameters are
        float32; a parameter counts its own steps. A step moves 44 bytes per float32 parameter: 4 to
        take the norm of gradients, 24 for the moments, 16 for the update; the norm is float64 only
        among float64 gradients. As with ``torch.nn.utils.clip_grad_norm_``, a ``nan`` in one
        gradient makes all parameters ``nan``; an ``inf`` makes its own tensor ``nan``, and clips
        the finite gradients of the others to 0. Use :mod:`apex.amp` or a ``GradScaler`` to skip
        such steps.

    Source:
        You et al., *Large Batch Optimization for Deep Learning: Training BERT in 76 minutes*, ICLR
        2020, algorithm 2.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = FusedLAMB(model.parameters(), lr=1e-2)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    layout = StateLayout("FusedLAMB", ("exp_avg", "exp_avg_sq"))
    multi_tensor_lamb = amp_c_function("multi_tensor_lamb")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
    ) -> None:
        self.capturable = capturable
        self.stochastic_rounding = stochastic_rounding
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "maximize": maximize,
            **({SEED: rounding_seed} if stochastic_rounding else {}),
        }
        super().__init__(params, defaults, amsgrad)
