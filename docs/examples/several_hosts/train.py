"""A training that goes on while hosts come and go, from the newest checkpoint, bit for bit.

Each host runs, as docs/guides/several-hosts.md explains:

    GLOO_SOCKET_IFNAME=eth0 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2:3 \
        --rdzv-backend=c10d --rdzv-endpoint=STORE:29400 --rdzv-conf is_host=0 ... train.py
"""

import argparse
import hashlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

SEED = 1000
ROWS = 12  # of a global batch, a multiple of every number of ranks that may train
FEATURES, CLASSES = 32, 8
KEPT = 2  # newest checkpoints of each host


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step, [ROWS, FEATURES] and labels [ROWS]: the same for every rank."""
    inputs = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(SEED + step))
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(SEED - 1))
    return inputs, (inputs @ teacher).argmax(1)


class Training:
    """All that a checkpoint holds: model, optimizer, the next step, and who took the steps so far.

    ``history`` has an entry per checkpoint: its step, the number of ranks since the checkpoint
    before it, and a digest of the state.
    """

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        layers = (nn.Linear(FEATURES, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, CLASSES))
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0
        self.history: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "step": self.step,
            "history": self.history,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state`` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.history = state["step"], state["history"]

    def take(self, state: dict[str, Any] | None) -> None:
        """Go on from the newest state that any rank has; collective. None counts as no state."""
        steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, state["step"] if state else 0)
        if max(steps) > 0:
            shared = [state]
            dist.broadcast_object_list(shared, src=steps.index(max(steps)))
            self.load_state_dict(shared[0])

    def digest(self) -> str:
        """A hash of every bit of the weights and the optimizer's state."""
        hashed = hashlib.sha256()
        for state in (self.model.state_dict(), *self.optimizer.state_dict()["state"].values()):
            for name, tensor in state.items():
                hashed.update(name.encode() + tensor.numpy().tobytes())
        return hashed.hexdigest()

    def run(self, end: int, every: int, folder: Path | None = None) -> None:
        """Train to step ``end`` on the ranks of the process group; checkpoint every few steps."""
        rank, world = dist.get_rank(), dist.get_world_size()
        network = DistributedDataParallel(self.model)
        while self.step < end:
            inputs, labels = (part.tensor_split(world)[rank] for part in batch_of(self.step))
            torch.manual_seed(SEED + self.step * ROWS + rank)  # of dropout
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(inputs), labels)
            loss.backward()
            self.optimizer.step()
            self.step += 1
            if self.step % every == 0:
                self.history.append({"step": self.step, "ranks": world, "digest": self.digest()})
                if folder is not None and os.environ["LOCAL_RANK"] == "0":
                    save(self.state_dict(), folder)
                if rank == 0:
                    print(f"step {self.step}/{end} ranks {world} loss {loss:.4f}", flush=True)


def save(state: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint that has its name only when it is complete, and remove the old ones."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "partial"
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / f"step-{state['step']:08d}.pt")
    for old in sorted(folder.glob("step-*.pt"))[:-KEPT]:
        old.unlink()


def newest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint of this host, or None."""
    found = sorted(folder.glob("step-*.pt"))
    return torch.load(found[-1], weights_only=True) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of this host alone")
    parser.add_argument("--steps", type=int, default=200, help="%(default)s")
    parser.add_argument("--every", type=int, default=10, help="steps per checkpoint; %(default)s")
    parser.add_argument("--timeout", type=float, default=60, help="seconds, of a silent rank")
    args = parser.parse_args()

    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    training = Training()
    training.take(newest(args.checkpoints))
    if dist.get_rank() == 0:
        print(f"begins at step {training.step}, ranks {dist.get_world_size()}", flush=True)
    training.run(args.steps, args.every, args.checkpoints)
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
