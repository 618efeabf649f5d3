"""A recurrent cell: its weights, and a hidden state of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RNNCell(nn.Module):
    r"""The weights of a recurrent cell, and its hidden state, which stays from call to call.

    The state starts as zeros. If a batch does not continue the one before, call
    :meth:`reset_hidden` first. If it does, call :meth:`detach_hidden` first; otherwise the backward
    pass also goes through the earlier batch. Moving or casting the module, and copying it, drops
    the state.

    Args:
        gate_multiplier: rows of the weights per hidden feature.
        input_size: features of the input.
        hidden_size: features H of the cell.
        cell: called as ``cell(input, hidden, *weights, b_ih, b_hh)``; a single state is passed, and
            returned, as a tensor, several as a list or tuple. See :mod:`apex.RNN.cells`.
        n_hidden_states: number of states; the first is the output.
        bias: whether there are biases.
        output_size: features of the output; if that is not ``hidden_size``, the first state is
            multiplied by a matrix after every step. Default: ``hidden_size``.

    Its parameters are w_ih ``[gate_multiplier * H, input_size]``, w_hh ``[gate_multiplier * H,
    output_size]``, w_ho ``[output_size, H]`` (if the two differ), b_ih and b_hh
    ``[gate_multiplier * H]`` or None.

    Raises:
        ValueError: a size is not positive.

    Source:
        Sak et al., https://arxiv.org/abs/1402.1128 (projected output).
    """

    hidden: list[Tensor | None]

    def __init__(
        self,
        gate_multiplier: int,
        input_size: int,
        hidden_size: int,
        cell: Callable[..., Any],
        n_hidden_states: int = 2,
        bias: bool = False,
        output_size: int | None = None,
    ) -> None:
        super().__init__()
        output_size = hidden_size if output_size is None else output_size
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "output_size": output_size}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"RNNCell: {name} must be positive, got {size}.")
        self.gate_multiplier = gate_multiplier
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.cell = cell
        self.n_hidden_states = n_hidden_states
        self.bias = bias
        self.output_size = output_size
        self.gate_size = rows = gate_multiplier * hidden_size
        self.w_ih = nn.Parameter(torch.empty(rows, input_size))
        self.w_hh = nn.Parameter(torch.empty(rows, output_size))
        if output_size != hidden_size:
            self.w_ho = nn.Parameter(torch.empty(output_size, hidden_size))
        for name in ("b_ih", "b_hh"):
            self.register_parameter(name, nn.Parameter(torch.empty(rows)) if bias else None)
        self.hidden = [None] * n_hidden_states
        self.reset_parameters()

    def new_like(self, new_input_size: int | None = None) -> RNNCell:
        """A cell of the same kind with parameters of its own.

        Args:
            new_input_size: default: that of this cell.
        """
        size = self.input_size if new_input_size is None else new_input_size
        return type(self)(
            *(self.gate_multiplier, size, self.hidden_size, self.cell, self.n_hidden_states),
            *(self.bias, self.output_size),
        )

    def reset_parameters(self, gain: float = 1) -> None:
        """Draw all parameters anew, uniformly from ``gain / sqrt(hidden_size) * [-1, 1]``."""
        bound = gain / math.sqrt(self.hidden_size)
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def init_hidden(self, bsz: int) -> None:
        """Make zero states for a batch of ``bsz`` sequences, if there are none for that size."""
        if self.hidden[0] is not None and self.hidden[0].shape[0] == bsz:
            return
        features = [self.output_size] + [self.hidden_size] * (self.n_hidden_states - 1)
        with torch.no_grad():
            self.hidden = [self.w_ih.new_zeros(bsz, size) for size in features]

    def reset_hidden(self, bsz: int) -> None:
        """Make zero states for a batch of ``bsz`` sequences."""
        self.hidden = [None] * self.n_hidden_states
        self.init_hidden(bsz)

    def init_inference(self, bsz: int) -> None:
        """Make zero states, as :meth:`reset_hidden` does, before generation starts."""
        self.reset_hidden(bsz)

    def detach_hidden(self) -> None:
        """Keep the states' values, and cut them off the graph they came from.

        Raises:
            RuntimeError: there is no state.
        """
        if any(state is None for state in self.hidden):
            raise RuntimeError(
                "detach_hidden: there is no hidden state yet. Run the network, or call "
                "reset_hidden(batch_size)."
            )
        self.hidden = [state.detach() for state in self.hidden]

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """One step.

        Args:
            input: ``[B, input_size]``, in the dtype of the weights unless autocast is on.

        Returns:
            The new states: the output ``[B, output_size]``, then others ``[B, hidden_size]``.
        """
        self.init_hidden(input.shape[0])
        hidden = self.hidden
        if not torch.is_autocast_enabled(input.device.type):
            hidden = [state.to(self.w_ih.dtype) for state in hidden]  # autocast may have made them
        is_single = self.n_hidden_states == 1
        new = self.cell(
            input, hidden[0] if is_single else hidden, *self._weights(), self.b_ih, self.b_hh
        )
        new = [new] if is_single else list(new)
        if self.output_size != self.hidden_size:
            new[0] = F.linear(new[0], self.w_ho)
        self.hidden = new
        return tuple(new)

    def _weights(self) -> tuple[Tensor, ...]:
        return self.w_ih, self.w_hh

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RNNCell:
        self.hidden = [None] * self.n_hidden_states
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # States hang on a graph, which can be neither copied nor pickled.
        return {**self.__dict__, "hidden": [None] * self.n_hidden_states}
