"""One step of recurrent cells: functions of input, hidden state and weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .RNNBackend import RNNCell

__all__ = ["GRUCell", "LSTMCell", "RNNReLUCell", "RNNTanhCell", "mLSTMCell", "mLSTMRNNCell"]

States = tuple[Tensor, Tensor] | list[Tensor]


def LSTMCell(
    input: Tensor,
    hidden: States,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""A step of long short-term memory.

    .. math::
        (i, f, g, o) = W_{ih} x + b_{ih} + W_{hh} h + b_{hh}, \quad
        c' = \sigma(f) c + \sigma(i) \tanh(g), \quad h' = \sigma(o) \tanh(c')

    Args:
        input: ``[B, input]``.
        hidden: h ``[B, out]`` and c ``[B, H]``.
        w_ih, w_hh: ``[4 * H, input]`` and ``[4 * H, out]``, gates in the order i, f, g, o.
        b_ih, b_hh: ``[4 * H]`` or None.

    Returns:
        h' and c', both ``[B, H]``.

    Source:
        Hochreiter & Schmidhuber, *Long short-term memory*, 1997; Gers et al., 2000 (forget gate).
    """
    h, c = hidden
    if h.shape[-1] == c.shape[-1]:
        return torch.lstm_cell(input, (h, c), w_ih, w_hh, b_ih, b_hh)
    return _lstm_update(F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh), c)


def GRUCell(
    input: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    r"""A step of a gated recurrent unit, as of :class:`torch.nn.GRUCell`.

    Args:
        input: ``[B, input]``.
        hidden: ``[B, H]``.
        w_ih, w_hh: ``[3 * H, input]`` and ``[3 * H, H]``, gates in the order r, z, n.
        b_ih, b_hh: ``[3 * H]`` or None.

    Returns:
        The next hidden state, ``[B, H]``.

    Source:
        Cho et al., https://arxiv.org/abs/1406.1078.
    """
    return torch.gru_cell(input, hidden, w_ih, w_hh, b_ih, b_hh)


def RNNReLUCell(
    input: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """``relu(W_ih x + b_ih + W_hh h + b_hh)``: input ``[B, input]``, hidden ``[B, out]``."""
    return (F.linear(input, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)).relu()


def RNNTanhCell(
    input: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """``tanh(W_ih x + b_ih + W_hh h + b_hh)``: input ``[B, input]``, hidden ``[B, out]``."""
    return (F.linear(input, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)).tanh()


def mLSTMCell(
    input: Tensor,
    hidden: States,
    w_ih: Tensor,
    w_hh: Tensor,
    w_mih: Tensor,
    w_mhh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""A step of a multiplicative LSTM: :func:`LSTMCell` of x and m instead of x and h.

    .. math::
        m = (W_{mih} x) \odot (W_{mhh} h)

    Args:
        input: ``[B, input]``.
        hidden: h ``[B, out]`` and c ``[B, H]``.
        w_ih, w_hh: ``[4 * H, input]`` and ``[4 * H, out]``, gates in the order i, f, g, o.
        w_mih, w_mhh: ``[out, input]`` and ``[out, out]``.
        b_ih, b_hh: ``[4 * H]`` or None.

    Returns:
        h' and c', both ``[B, H]``.

    Source:
        Krause et al., https://arxiv.org/abs/1609.07959, equations 13 to 19.
    """
    h, c = hidden
    m = F.linear(input, w_mih) * F.linear(h, w_mhh)
    return _lstm_update(F.linear(input, w_ih, b_ih) + F.linear(m, w_hh, b_hh), c)


def _lstm_update(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, dim=-1)
    # Under autocast c may still be float32; the cell is to run in one dtype, as torch.nn's does.
    c = f.sigmoid() * c.to(gates.dtype) + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class mLSTMRNNCell(RNNCell):
    """An :class:`~apex.RNN.RNNBackend.RNNCell` of :func:`mLSTMCell`.

    Args:
        input_size, hidden_size, bias, output_size: as there.

    Parameters:
        w_mih ``[out, input]``, w_mhh ``[out, out]``: besides those of the base class.
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = False, output_size: int | None = None
    ) -> None:
        super().__init__(
            4, input_size, hidden_size, mLSTMCell, 2, bias=bias, output_size=output_size
        )
        self.w_mih = nn.Parameter(torch.empty(self.output_size, self.input_size))
        self.w_mhh = nn.Parameter(torch.empty(self.output_size, self.output_size))
        self.reset_parameters()

    def _weights(self) -> tuple[Tensor, ...]:
        return self.w_ih, self.w_hh, self.w_mih, self.w_mhh

    def new_like(self, new_input_size: int | None = None) -> mLSTMRNNCell:
        """A cell of the same kind with parameters of its own."""
        size = self.input_size if new_input_size is None else new_input_size
        return type(self)(size, self.hidden_size, self.bias, self.output_size)
