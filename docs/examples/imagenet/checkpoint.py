"""Files that are either whole or absent, and checkpoints of model, optimizer and loss scaler."""

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from options import UsageError
from torch import nn

from apex import amp


def check_writable(option: str, folder: Path) -> None:
    """Create the folder if it is missing; raise UsageError where no file can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{option}: cannot write into {folder}: {error.strerror}.") from error


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a file, then give it its name: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(
    folder: Path,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    identity: dict,
    epochs: list[dict],
    is_best: bool,
    scaling: Any = amp,
) -> None:
    """Write checkpoint.pth.tar, and model_best.pth.tar too if ``is_best``.

    ``identity``: what a resumed run must have in common; ``epochs``: scores of the finished ones;
    ``scaling``: amp, or torch's GradScaler.
    """
    state = {
        "identity": identity,
        "epochs": epochs,
        "state_dict": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": scaling.state_dict(),
    }
    write_atomically(folder / "checkpoint.pth.tar", lambda file: torch.save(state, file))
    if is_best:
        write_atomically(folder / "model_best.pth.tar", lambda file: torch.save(state, file))


def load_checkpoint(
    path: Path,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    identity: dict,
    device: torch.device,
    scaling: Any = amp,
) -> list[dict]:
    """Restore what `save_checkpoint` wrote, exactly, and return the finished epochs' scores.

    Call it after ``amp.initialize``, with the same opt level as in the saved run.

    Raises:
        UsageError: the file is no checkpoint of this example, is cut off, or of another run's
            ``identity``. Nothing is changed then.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # its class depends on where the file was cut off
        raise UsageError(f"--resume: {path} is not a checkpoint, or not a whole one.") from error
    if not isinstance(state, dict) or "identity" not in state:
        raise UsageError(f"--resume: {path} is not a checkpoint of this example.")
    saved = state["identity"]
    differing = [name for name in identity if saved.get(name) != identity[name]]
    if differing:
        had = ", ".join(f"{name} {saved.get(name)}" for name in differing)
        have = ", ".join(f"{name} {identity[name]}" for name in differing)
        raise UsageError(f"--resume: {path} was saved with {had}, but this run has {have}.")

    # The network's state brings amp's float32 masters back, too.
    restore({"state_dict": network, "optimizer": optimizer, "amp": scaling}, state)
    return state["epochs"]


def restore(parts: dict[str, Any], state: dict[str, Any]) -> None:
    """Let every part load its entry of ``state``; if one refuses, none is changed."""
    before = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except Exception:
        for name, part in parts.items():
            part.load_state_dict(before[name])
        raise
