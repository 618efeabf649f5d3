"""Checkpoints of a divided model: a folder per step, a file per part."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from apex.transformer import parallel_state
from apex.transformer.failures import explained

KEPT = 2  # newest checkpoints


def part() -> str:
    """The file of what this rank has of the model."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return f"stage{stage}-tensor{parallel_state.get_tensor_model_parallel_rank()}.pt"


def meet(step: int) -> None:
    """Wait for the others, each of which has done its part of saving."""
    with explained(f"waiting for the others to save step {step}"):
        dist.barrier()


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Every part is written by its first replica; the folder has its name when all are there."""
    whole = folder / f"step-{step:08d}"
    partial = folder / "partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    meet(step)
    if parallel_state.get_data_parallel_rank() == 0:
        torch.save(state, partial / part())
    meet(step)
    if dist.get_rank() == 0:
        shutil.rmtree(whole, ignore_errors=True)
        partial.replace(whole)
        for old in sorted(folder.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old)
    meet(step)


def newest(folder: Path, run: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
    """This rank's state of the newest checkpoint, or None where there is none.

    ``run`` is what the checkpoint must have in common with this run; if it has not, the program
    ends and says so.
    """
    found = sorted(folder.glob("step-*"))
    if not found:
        return None
    file = found[-1] / part()
    state = torch.load(file, map_location=device, weights_only=True) if file.exists() else {}
    saved = state.get("run")
    if saved != run:
        raise SystemExit(
            f"--output: {found[-1]} is a checkpoint of another run or layout:\n{saved}\n"
            f"This run is\n{run}\nContinue it with the same options, or choose another folder."
        )
    return state
