"""The contract of ops made of rows: a row's bits do not depend on the batch, place or threads.

docs/guides/batch-invariance.md says it to users.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .devices import runs_gpu_kernels

BATCHES, THREADS = (1, 2, 3, 5, 17, 64), (1, 2)
GPU_BATCHES, GPU_THREADS = (2, 5), (1,)  # emulated, they take their time; threads are the CPU's


def assert_batch_invariant(case: Any, arguments: Sequence[Any]) -> None:
    """Check that each row's result and gradients have the bits that the row has alone.

    Batches of several sizes hold the rows in another order, and begin anywhere in memory. They run
    with one thread and with two. Gradients of what rows share are sums, and not compared.

    Args:
        case: of ``formulas``. Rows that are ``by_place`` keep theirs: the batch is the first part
            of a larger one.
        arguments: all of the function's, a few rows.

    Raises:
        AssertionError: which row, in which batch and where, differs.
    """
    __tracebackhide__ = True
    count = arguments[case.rows[0]].shape[0]
    on_gpu = runs_gpu_kernels(arguments[case.rows[0]].device)
    batches, threads = (GPU_BATCHES, GPU_THREADS) if on_gpu else (BATCHES, THREADS)
    seeds = torch.randn_like(case.function(*arguments).detach())
    run = lambda order, offset: _run(case, arguments, seeds, order, offset)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        if case.by_place:
            whole = run([place % count for place in range(max(batches))], 0)
        else:
            alone = [run([row], 0) for row in range(count)]
        for number, size in itertools.product(threads, batches):
            torch.set_num_threads(number)
            # A row stands at the beginning, within and at the end of batches, beside others.
            step = 1 if case.by_place else 7
            order = [(step * place + (step > 1) * size) % count for place in range(size)]
            for offset in (0, 1 + size % 7):
                for i, together in enumerate(run(order, offset)):
                    single = whole[i] if case.by_place else torch.cat([alone[r][i] for r in order])
                    what = "result" if i == 0 else f"gradient {i}"
                    place = f"{offset} elements into its memory, {number} threads"
                    _compare(together, single, f"{what} in a batch of {size}, {place}")
    finally:
        torch.set_num_threads(before)


def _run(case, arguments, seeds, order, offset) -> list[Tensor]:
    """The result and the gradients, of the rows in this order."""
    given, grads = list(arguments), [i for i in case.grads if i in case.rows]
    for i in case.rows:
        given[i] = _placed(arguments[i], order, offset)
        if i in grads:
            given[i].requires_grad_()
    y = case.function(*given)
    leaves = [given[i] for i in grads]
    return [y.detach(), *torch.autograd.grad(y, leaves, _placed(seeds, order, offset))]


def _placed(tensor: Tensor, order: Sequence[int], offset: int) -> Tensor:
    """The rows in this order, laid out as before, so many elements into memory."""
    chosen = tensor.detach()[torch.tensor(order, device=tensor.device)]
    memory = chosen.new_empty(chosen.numel() + offset)
    # Dimensions as they lie in memory: channels-last stays that.
    dims = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    dims = [0, *[dim for dim in dims if dim != 0]]
    lies = memory[offset:].view([chosen.shape[dim] for dim in dims])
    return lies.permute([dims.index(dim) for dim in range(tensor.dim())]).copy_(chosen)


def _compare(together, single, where) -> None:
    __tracebackhide__ = True
    single = single[: together.shape[0]]
    differ = (together != single) & ~(together.isnan() & single.isnan())
    if not differ.any():
        return
    row = differ.nonzero()[0, 0].item()
    error = (together[row].double() - single[row].double()).abs().max().item()
    raise AssertionError(
        f"{where}: row {row} differs from the same row alone in {int(differ[row].sum())} of "
        f"{differ[row].numel()} elements, by up to {error:.3e} "
        f"({str(together.dtype).removeprefix('torch.')}, row of {list(together.shape[1:])})"
    )
