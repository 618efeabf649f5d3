"""Model parallelism for the length of a test, over several processes or in this one alone."""

import contextlib

import pytest
import torch.distributed as dist


@contextlib.contextmanager
def model_parallel(tensor=1, pipeline=1, **options):
    """Initialise ``parallel_state`` with these sizes; a check on ranks runs inside."""
    from apex.transformer import parallel_state

    parallel_state.initialize_model_parallel(tensor, pipeline, **options)
    dist.barrier()  # gloo fails on a rank that still connects to groups another has left
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


@pytest.fixture
def alone():
    """This process is the one rank of a world with model parallelism."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        with model_parallel():
            yield
    finally:
        dist.destroy_process_group()
