"""How a dimension and a vocabulary are divided over tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor

from ..utils import divide

__all__ = ["VocabUtility", "split_tensor_along_last_dim"]


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """``tensor`` in ``num_partitions`` equal parts along its last dimension.

    The parts are views, or copies with ``contiguous_split_chunks``. Raises ``ValueError`` if the
    dimension is not divisible.
    """
    what = "split_tensor_along_last_dim: last dimension of tensor"
    size = divide(tensor.shape[-1], num_partitions, what=what, by="partitions (num_partitions)")
    parts = tensor.split(size, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """Ranges ``[first, last)`` of the ids that a rank holds."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """The range of ``rank``, where every rank has ``per_partition_vocab_size`` ids."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """The range of ``rank``, where all ranks together have ``global_vocab_size`` ids.

        ``ValueError`` if ``world_size`` does not divide it.
        """
        what = "vocab_range_from_global_vocab_size: global_vocab_size"
        return VocabUtility.vocab_range_from_per_partition_vocab_size(
            divide(global_vocab_size, world_size, what=what, by="ranks (world_size)"),
            rank,
            world_size,
        )
