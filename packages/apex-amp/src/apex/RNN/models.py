"""The recurrent networks by name."""

from __future__ import annotations

from .cells import GRUCell, LSTMCell, RNNReLUCell, RNNTanhCell, mLSTMRNNCell
from .RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM", "toRNNBackend"]


def toRNNBackend(
    inputRNN: RNNCell | list[RNNCell],
    num_layers: int,
    bidirectional: bool = False,
    dropout: float = 0,
    batch_first: bool = False,
) -> stackedRNN | bidirectionalRNN:
    """A :class:`bidirectionalRNN` or :class:`stackedRNN`, whose arguments these are."""
    network = bidirectionalRNN if bidirectional else stackedRNN
    return network(inputRNN, num_layers, dropout, batch_first)


def LSTM(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Long short-term memory; see :func:`apex.RNN.cells.LSTMCell`.

    Args:
        input_size: features of the input, ``[S, B, input_size]``.
        hidden_size: features of a cell.
        num_layers: number of layers.
        bias: whether cells have biases.
        batch_first: input and output are ``[B, S, features]``.
        dropout: probability of dropout between layers, in training.
        bidirectional: run another stack from the end to the start, and join the features.
        output_size: features of the output, if not ``hidden_size``: it is projected in every step.

    Returns:
        A module; ``module(input)`` gives ``(output, [h, c])``. The state stays from call to call:
        see :class:`apex.RNN.RNNBackend.RNNCell`.
    """
    cell = RNNCell(4, input_size, hidden_size, LSTMCell, 2, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def GRU(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Gated recurrent units; arguments as for :func:`LSTM`, hidden states ``[h]``.

    Raises:
        ValueError: ``output_size`` differs from ``hidden_size``: the unit mixes its last output
            into the next, so both have one size.
    """
    if output_size not in (None, hidden_size):
        raise ValueError(
            f"GRU: output_size must be hidden_size ({hidden_size}) or None, got {output_size}: the "
            "unit adds its last output to the next. LSTM and mLSTM can project."
        )
    cell = RNNCell(3, input_size, hidden_size, GRUCell, 1, bias)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def ReLU(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """An Elman network with ReLU; arguments as for :func:`LSTM`, hidden states ``[h]``."""
    cell = RNNCell(1, input_size, hidden_size, RNNReLUCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def Tanh(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """An Elman network with tanh; arguments as for :func:`LSTM`, hidden states ``[h]``."""
    cell = RNNCell(1, input_size, hidden_size, RNNTanhCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def mLSTM(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """A multiplicative LSTM; arguments and states as of :func:`LSTM`."""
    cell = mLSTMRNNCell(input_size, hidden_size, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)
