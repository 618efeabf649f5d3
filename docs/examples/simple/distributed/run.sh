#!/bin/sh
# Two processes; on a machine with GPUs, one GPU each.
exec python -m torch.distributed.run --nproc_per_node=2 distributed_data_parallel.py "$@"
