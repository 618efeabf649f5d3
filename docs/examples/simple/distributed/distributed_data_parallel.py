"""The smallest program with apex.amp and several processes: a linear regression.

python -m torch.distributed.run --nproc_per_node=2 distributed_data_parallel.py
"""

import argparse
import os

import torch
import torch.distributed as dist

from apex import amp
from apex.parallel import DistributedDataParallel


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--opt-level", default="O1", help="O0 to O5; %(default)s")
    parser.add_argument("--steps", type=int, default=500, help="%(default)s")
    # torch.distributed.launch gives it, with either sign; torch.distributed.run sets the variable.
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    parser.add_argument("--local_rank", "--local-rank", type=int, default=local_rank)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    # 1. A device per process, and the process group, if a launcher has started several.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", args.local_rank)
        torch.cuda.set_device(device)
    distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    # 2. Different data in each process, the same model in all.
    torch.manual_seed(1 + (dist.get_rank() if distributed else 0))
    x = torch.randn(64, 1024, device=device)
    y = torch.randn(64, 16, device=device)
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 16).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    # 3. amp first, then the wrapper for several processes.
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    if distributed:
        model = DistributedDataParallel(model)

    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()  # gradients are averaged over the processes on the way
        optimizer.step()

    total = sum(p.detach().double().sum() for p in amp.master_params(optimizer))
    text = f"rank {args.local_rank}: final loss {loss.item():.5f}, sum of weights {total:.10f}\n"
    print(text, end="", flush=True)  # in one piece: processes share the terminal
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
