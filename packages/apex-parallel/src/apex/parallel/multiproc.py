"""Starts a training script once per GPU: ``python -m apex.parallel.multiproc script.py args...``.

For scripts written before ``torchrun``: each process gets ``--world-size N`` and ``--rank i``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

POLL_S = 0.1


def world_size_of(arguments: Sequence[str]) -> int | None:
    """The number after ``--world-size``, or None without it.

    Raises:
        ValueError: no positive integer follows.
    """
    if "--world-size" not in arguments:
        return None
    text = "".join(arguments[arguments.index("--world-size") + 1 :][:1])
    if not text.isdigit() or int(text) == 0:
        raise ValueError(f"multiproc: --world-size needs an integer >= 1, got {text!r}.")
    return int(text)


def with_option(arguments: Sequence[str], option: str, value: int) -> list[str]:
    """``arguments`` with ``option value`` added, or its value replaced."""
    arguments = list(arguments)
    if option in arguments:
        position = arguments.index(option)
        arguments[position : position + 2] = [option, str(value)]
        return arguments
    return [*arguments, option, str(value)]


def run(commands: Sequence[Sequence[str]]) -> int:
    """Run all commands at once; when one fails, end the others.

    Output of the first goes to the terminal, that of number i to ``GPU_<i>.log``.

    Returns:
        0, or the exit code of the first command that failed.
    """
    with ExitStack() as stack:
        workers = []
        for rank, command in enumerate(commands):
            log = stack.enter_context(open(f"GPU_{rank}.log", "w")) if rank else None
            workers.append(subprocess.Popen(command, stdout=log))
        try:
            while any(worker.poll() is None for worker in workers):
                if any(worker.poll() for worker in workers):
                    break
                time.sleep(POLL_S)
            codes = [worker.poll() for worker in workers]
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.terminate()
            for worker in workers:
                worker.wait()
    return next((code for code in codes if code), 0)


def main(arguments: Sequence[str]) -> int:
    """Start one process per rank and wait; returns the exit code."""
    if not arguments:
        print("usage: python -m apex.parallel.multiproc script.py [arguments]", file=sys.stderr)
        return 2
    world_size = world_size_of(arguments)
    if world_size is None:
        world_size = torch.cuda.device_count()
        if world_size == 0:
            print("multiproc: no GPU found. Give the number: --world-size N.", file=sys.stderr)
            return 2
    arguments = with_option(arguments, "--world-size", world_size)
    return run(
        [[sys.executable, *with_option(arguments, "--rank", rank)] for rank in range(world_size)]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
