"""Stacks of recurrent cells that run over sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._cell import RNNCell

__all__ = ["RNNCell", "bidirectionalRNN", "flatten_list", "is_iterable", "stackedRNN"]

Hidden = list[Tensor]  # one tensor per state, [layers, B, features]


def is_iterable(maybe_iterable: Any) -> bool:
    """Whether ``iter()`` takes the value."""
    return isinstance(maybe_iterable, Iterable)


def flatten_list(tens_list: Tensor | Sequence[Tensor]) -> Tensor:
    """Stack a sequence of tensors of one shape; return anything else as it is."""
    if isinstance(tens_list, Tensor) or not is_iterable(tens_list):
        return tens_list
    return torch.stack(list(tens_list))


class _Stack(nn.Module):
    """What stacked and bidirectional networks share: everything is done for each of ``rnns``."""

    rnns: nn.ModuleList

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for rnn in self.rnns:
            rnn.reset_parameters()

    def init_hidden(self, bsz: int) -> None:
        """Make zero states for a batch of ``bsz`` sequences, if there are none for that size."""
        for rnn in self.rnns:
            rnn.init_hidden(bsz)

    def reset_hidden(self, bsz: int) -> None:
        """Make zero states for a batch of ``bsz`` sequences."""
        for rnn in self.rnns:
            rnn.reset_hidden(bsz)

    def init_inference(self, bsz: int) -> None:
        """Make zero states, as :meth:`reset_hidden` does, before generation starts."""
        for rnn in self.rnns:
            rnn.init_inference(bsz)

    def detach_hidden(self) -> None:
        """Keep the states' values, and cut them off their graph; ``RuntimeError`` without any."""
        for rnn in self.rnns:
            rnn.detach_hidden()


class stackedRNN(_Stack):
    """Layers of cells that run over a sequence.

    Args:
        inputRNN: a cell, of which deeper layers get copies with parameters of their own, or a list
            of ``num_layers`` cells.
        num_layers: number of layers.
        dropout: probability of an output of a layer to be zeroed on its way to the next, in
            training.
        batch_first: input and output are ``[B, S, features]`` instead of ``[S, B, features]``.

    Raises:
        ValueError: the list does not have ``num_layers`` cells, the cells differ in size, or
            ``dropout`` is not in [0, 1].
        RuntimeError: ``inputRNN`` is neither a cell nor a list of cells.
    """

    def __init__(
        self,
        inputRNN: RNNCell | list[RNNCell],
        num_layers: int = 1,
        dropout: float = 0,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        self.rnns = nn.ModuleList(_layers(inputRNN, num_layers))
        if not 0 <= dropout <= 1:
            raise ValueError(f"stackedRNN: dropout must be in [0, 1], got {dropout}.")
        self.nLayers = num_layers
        self.dropout = dropout
        self.batch_first = batch_first

    def forward(
        self, input: Tensor, collect_hidden: bool = False, reverse: bool = False
    ) -> tuple[Tensor, Hidden | list[Hidden]]:
        """Run over the sequence, from the cells' present states.

        Args:
            input: ``[S, B, input_size]`` (see ``batch_first``), S > 0.
            collect_hidden: return the states after every step, not only after the last.
            reverse: run from the last step to the first.

        Returns:
            The output, ``[S, B, output_size]``, in the order of the input; and the states after the
            last step that was run, one tensor ``[num_layers, B, features]`` each. With
            ``collect_hidden`` a list of those, by step in the order of the input.

        Raises:
            ValueError: the input has other dimensions.
        """
        if input.dim() != 3 or 0 in input.shape[:2]:
            raise ValueError(
                f"stackedRNN: input must be [steps, batch, features] with at least one step and "
                f"sequence, got {list(input.shape)}."
            )
        sequence = list(input.unbind(1 if self.batch_first else 0))
        order = range(len(sequence))[:: -1 if reverse else 1]
        layers = []  # of lists, by step, of tuples of states
        for number, rnn in enumerate(self.rnns):
            if number and self.dropout:
                sequence = list(F.dropout(torch.stack(sequence), self.dropout, self.training))
            states: list[Any] = [None] * len(sequence)
            for step in order:
                states[step] = rnn(sequence[step])
            sequence = [state[0] for state in states]
            layers.append(states)
        output = torch.stack(sequence, 1 if self.batch_first else 0)
        if collect_hidden:
            return output, [_hidden(layers, step) for step in range(len(sequence))]
        return output, _hidden(layers, order[-1])


class bidirectionalRNN(_Stack):
    """Two stacks over a sequence, one from either end; each sees its own direction only.

    Args:
        inputRNN, num_layers, dropout, batch_first: as for :class:`stackedRNN`; the second stack has
            parameters of its own.
    """

    def __init__(
        self,
        inputRNN: RNNCell | list[RNNCell],
        num_layers: int = 1,
        dropout: float = 0,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        cells = _layers(inputRNN, num_layers)
        self.fwd = stackedRNN(cells, num_layers, dropout, batch_first)
        reversed_cells = [cell.new_like() for cell in cells]
        self.bckwrd = stackedRNN(reversed_cells, num_layers, dropout, batch_first)
        self.rnns = nn.ModuleList([self.fwd, self.bckwrd])

    def forward(
        self, input: Tensor, collect_hidden: bool = False
    ) -> tuple[Tensor, Hidden | list[Hidden]]:
        """As of :class:`stackedRNN`; outputs and states have the features of both directions."""
        forth, hidden_forth = self.fwd(input, collect_hidden)
        back, hidden_back = self.bckwrd(input, collect_hidden, reverse=True)
        output = torch.cat([forth, back], -1)
        if not collect_hidden:
            return output, _joined(hidden_forth, hidden_back)
        return output, [_joined(*both) for both in zip(hidden_forth, hidden_back, strict=True)]


def _layers(inputRNN: RNNCell | list[RNNCell], num_layers: int) -> list[RNNCell]:
    if num_layers < 1:
        raise ValueError(f"stackedRNN: num_layers must be positive, got {num_layers}.")
    if isinstance(inputRNN, RNNCell):
        deeper = (inputRNN.new_like(inputRNN.output_size) for _ in range(num_layers - 1))
        return [inputRNN, *deeper]
    if not isinstance(inputRNN, list):
        raise RuntimeError(
            f"stackedRNN: inputRNN must be an RNNCell or a list of them, got "
            f"{type(inputRNN).__name__}."
        )
    if len(inputRNN) != num_layers:
        raise ValueError(f"stackedRNN: got {len(inputRNN)} cells for num_layers={num_layers}.")
    sizes = {(c.output_size, c.hidden_size, c.n_hidden_states) for c in inputRNN}
    if len(sizes) > 1:
        raise ValueError(
            "stackedRNN: cells must agree in output_size, hidden_size and n_hidden_states, got "
            f"{sorted(sizes)}: the states of all layers are returned as one tensor."
        )
    return inputRNN


def _hidden(layers: list[list[tuple[Tensor, ...]]], step: int) -> Hidden:
    """The states after a step: for each a tensor over the layers."""
    return [torch.stack(states) for states in zip(*(layer[step] for layer in layers), strict=True)]


def _joined(forth: Hidden, back: Hidden) -> Hidden:
    return [torch.cat(both, -1) for both in zip(forth, back, strict=True)]
