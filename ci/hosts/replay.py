"""The run that nobody interrupted: the same steps by the same numbers of ranks, in one go.

torchrun --nproc-per-node=3 replay.py EVERY FOLDER RANKS:END... takes steps up to END by that
number of ranks, and prints the history as JSON. State passes from one number of ranks to the next
in memory. FOLDER is empty, for the processes to find each other.
"""

import importlib.util
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "several_hosts" / "train.py"
TIMEOUT = timedelta(seconds=60)


def main() -> None:
    every, folder, plan = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    specification = importlib.util.spec_from_file_location("train", EXAMPLE)
    train = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(train)

    rank, most = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    training = train.Training()
    for index, part in enumerate(plan):
        ranks, end = map(int, part.split(":"))
        for phase, world in (("share", most), ("train", ranks)):
            if rank < world:
                store = dist.FileStore(str(folder / f"{phase}-{index}"), world)
                dist.init_process_group(
                    "gloo", store=store, timeout=TIMEOUT, world_size=world, rank=rank
                )
                if phase == "share":  # a rank that joins takes the state of those that trained
                    training.take(training.state_dict())
                else:
                    training.run(end, every)
                dist.barrier()
                dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(training.history))


if __name__ == "__main__":
    main()
