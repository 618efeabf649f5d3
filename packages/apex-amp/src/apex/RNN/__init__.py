"""Recurrent networks of cells that torch.nn lacks: multiplicative LSTM, projections.

The networks keep their hidden state from call to call; see :class:`apex.RNN.RNNBackend.RNNCell`.
"""

from . import models
from .models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM", "models"]
