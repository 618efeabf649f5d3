"""The dtypes, shapes and memory layouts that every op is tested over."""

import os

import torch

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]

# (rows, columns). Vector widths are powers of two up to 64 elements, GPU grids end at 65,535.
SHAPES = {
    "empty": (0, 5),
    "one": (1, 1),
    "odd": (7, 33),
    "tail": (3, 1027),
    "vector": (5, 256),
    "tall": (65_537, 7),
}
# Sizes of lists of tensors: more than a launch's block takes, and more than a chunk of a sum.
LARGE = [100_003]
SEVERAL_CHUNKS = [65_535, 65_536, 65_537, 300_001]

if os.environ.get("APEX_EMULATE"):
    # An emulated GPU takes too long for these: the tall matrix, too, has more splits than a block
    # has rows of threads, and more than one tile to sort.
    SHAPES["tall"] = (1185, 7)
    LARGE, SEVERAL_CHUNKS = [9001], [5, 65_537]


def for_gpus(**shapes) -> dict:
    """Return shapes that matter to GPU engines alone; none where no GPU is there or emulated.

    Rows of 513 to 1,024 columns, and those of more, have blocks of their own.
    """
    return shapes if os.environ.get("APEX_EMULATE") or torch.cuda.is_available() else {}


SHAPES |= for_gpus(block=(3, 776))


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def _every_second(x: torch.Tensor) -> torch.Tensor:
    """Leave a gap after each element of the last dimension."""
    wide = x.new_empty(*x.shape, 2)
    return wide.select(-1, 1).copy_(x)


def _row_slice(x: torch.Tensor) -> torch.Tensor:
    """Leave a gap after each row; elements of a row stay adjacent."""
    wide = x.new_empty(*x.shape[:-1], x.shape[-1] + 3)
    return wide[..., 1:-2].copy_(x)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """Store the dimensions in reverse order."""
    order = list(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, but starting one element into its storage."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


# Each takes a tensor of at least one dimension and returns an equal one, laid out differently.
LAYOUTS = {
    "contiguous": _contiguous,
    "every_second": _every_second,
    "row_slice": _row_slice,
    "transposed": _transposed,
    "misaligned": _misaligned,
}


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Return a 4-D or 5-D tensor in the channels-last memory format."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() not in formats:
        raise ValueError(f"channels_last: expected 4 or 5 dimensions, got {list(x.shape)}")
    return x.contiguous(memory_format=formats[x.dim()])
