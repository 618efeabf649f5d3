"""Random numbers that differ between tensor-parallel ranks where they must, and checkpointing.

"cuda" in a name means the device that computes: on a CPU its generator is the CPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...parallel._shared.native.named_functions import NamedFunction
from .. import parallel_state
from ..placement import current_device
from ..utils import (
    divide,
    gather_split_1d_tensor,
    split_tensor_into_1d_equal_chunks,
    tensor_rank_share,
)
from .memory import MemoryBuffer, allocate_mem_buff

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "get_cuda_rng_tracker",
    "init_checkpointed_activations_memory_buffer",
    "model_parallel_cuda_manual_seed",
    "reset_checkpointed_activations_memory_buffer",
]

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_checkpointed_activations: MemoryBuffer | None = None


def init_checkpointed_activations_memory_buffer(
    micro_batch_size: int,
    max_position_embeddings: int,
    hidden_size: int,
    num_layers: int,
    tensor_model_parallel_size: int,
    checkpoint_num_layers: int,
    fp16: bool,
) -> None:
    """Take memory for what :func:`checkpoint` keeps with ``distribute_saved_activations``.

    It has room for this rank's part of the input of every ``checkpoint_num_layers``-th layer.
    Raises ``RuntimeError`` if it was called before, ``ValueError`` if layers do not divide.
    """
    global _checkpointed_activations
    if _checkpointed_activations is not None:
        raise RuntimeError("the buffer of checkpointed activations was made before")
    name = "init_checkpointed_activations_memory_buffer"
    elements = divide(
        micro_batch_size * max_position_embeddings * hidden_size,
        tensor_model_parallel_size,
        what=f"{name}: micro_batch_size * max_position_embeddings * hidden_size",
        by="ranks (tensor_model_parallel_size)",
    )
    layers = divide(
        *(num_layers, checkpoint_num_layers),
        what=f"{name}: num_layers",
        by="layers at once (checkpoint_num_layers)",
    )
    dtype = torch.float16 if fp16 else torch.float32
    name = "checkpointed activations"
    _checkpointed_activations = allocate_mem_buff(name, elements * layers, dtype, track_usage=False)


def reset_checkpointed_activations_memory_buffer() -> None:
    """Use the buffer from its beginning again: call it after each backward."""
    if _checkpointed_activations is not None:
        _checkpointed_activations.reset()


def _generator(device: int | str | torch.device = -1) -> torch.Generator:
    """The default generator of a device; -1 is the current one."""
    if device == -1:
        device = current_device()
    elif isinstance(device, int):
        device = torch.device("cuda", device)
    device = torch.device(device)
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _set_cuda_rng_state(new_state: Tensor, device: int | str | torch.device = -1) -> None:
    """Set the state of the device's generator."""
    _generator(device).set_state(new_state)


class CudaRNGStatesTracker:
    """Named states of the device's generator, one of which a :meth:`fork` uses and advances."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """The states by name; a new dict."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace the states."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Begin a state called ``name`` from ``seed``; ``ValueError`` if either is there."""
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} already exists")
        if name in self.states_:
            raise ValueError(f"cuda rng state {name} already exists")
        generator = _generator()
        before = generator.get_state()
        generator.manual_seed(seed)
        self.states_[name] = generator.get_state()
        self.seeds_.add(seed)
        generator.set_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from the state ``name`` inside, and leave the device's own state as it was.

        Raises ``ValueError`` for an unknown name. The state keeps what was drawn, even when an
        exception ends the block.
        """
        if name not in self.states_:
            raise ValueError(
                f"cuda rng state {name} is not added: "
                "call model_parallel_cuda_manual_seed, or add() it"
            )
        generator = _generator()
        before = generator.get_state()
        generator.set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = generator.get_state()
            generator.set_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker whose states the layers of this package use."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device: the same on all tensor-parallel ranks, and another for each inside a fork.

    The default state starts from ``seed``, the tracker's from ``seed + 2718 + tensor rank``. Ranks
    that hold other parts of the model, or other data, pass different seeds if they like.
    """
    _tracker.reset()
    _generator().manual_seed(seed)
    rank = parallel_state.get_tensor_model_parallel_rank()
    _tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + rank)


def _random_states() -> tuple[Tensor, dict[str, Tensor]]:
    return _generator().get_state(), _tracker.get_states()


class _DrawingAgain:
    """Inside, the random states are those of when this was made; outside, nothing was drawn.

    It can be entered several times: a graph that is retained is computed again each time.
    """

    def __init__(self) -> None:
        self._then = _random_states()

    def __enter__(self) -> None:
        self._before = _random_states()
        self._set(*self._then)

    def __exit__(self, *_: object) -> None:
        self._set(*self._before)

    def _set(self, device_state: Tensor, tracked: dict[str, Tensor]) -> None:
        _generator().set_state(device_state)
        _tracker.set_states(dict(tracked))


def _distributed(tensor: Any) -> contextlib.AbstractContextManager:
    """Let autograd keep this rank's part of ``tensor``, and gather the parts in the backward."""
    if not isinstance(tensor, Tensor):
        return contextlib.nullcontext()
    place, whole = tensor.data_ptr(), tensor.shape  # autograd keeps `pack`, and what it refers to

    def pack(saved: Tensor) -> Any:
        if saved.data_ptr() != place or saved.shape != whole:
            return saved
        part = split_tensor_into_1d_equal_chunks(saved.detach())
        buffer = _checkpointed_activations
        fits = buffer is not None and part.dtype == buffer.dtype
        return saved.shape, buffer.add(part) if fits else part.clone()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        shape, part = kept
        return gather_split_1d_tensor(part).view(shape)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class CheckpointFunction(NamedFunction):
    """Apex's class behind :func:`checkpoint`."""

    @staticmethod
    def apply(run_function: Callable, distribute_saved_activations: bool, *args: Any) -> Any:
        """See :func:`checkpoint`."""
        from torch.utils.checkpoint import checkpoint

        def contexts() -> tuple[contextlib.nullcontext, _DrawingAgain]:
            return contextlib.nullcontext(), _DrawingAgain()

        keeping = contextlib.nullcontext()
        if distribute_saved_activations and args:
            if isinstance(args[0], Tensor):
                what = "checkpoint: distribute_saved_activations: elements of the first argument"
                tensor_rank_share(what, args[0].numel())
            keeping = _distributed(args[0])
        with keeping:
            return checkpoint(run_function, *args, use_reentrant=False, context_fn=contexts)


def checkpoint(function: Callable, distribute_saved_activations: bool, *args: Any) -> Any:
    """``function(*args)``, whose activations are computed again in the backward, not kept.

    The second computation draws the same random numbers: from the CPU's generator, the device's,
    and the states of :func:`get_cuda_rng_tracker`.

    Args:
        function: what to compute; it may return any structure of tensors.
        distribute_saved_activations: keep only this tensor-parallel rank's part of the first
            argument, which must be the same on all ranks of the group and divisible by their
            number, and gather it in the backward.
        args: any objects. Tensors among them are kept.

    Raises:
        ValueError: ``distribute_saved_activations``, and the ranks do not divide the argument.
    """
    return CheckpointFunction.apply(function, distribute_saved_activations, *args)
