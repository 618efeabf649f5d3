"""Processes and their groups, and what has to be summed over which of them."""

import os

import torch
import torch.distributed as dist
from optimizers import is_sharded
from torch import Tensor, nn

from apex.transformer import parallel_state
from apex.transformer.failures import explained
from apex.transformer.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate


def start_processes(tensor: int, pipeline: int) -> torch.device:
    """Join the processes that torchrun started, or be the only one; make the groups."""
    has_gpu = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if has_gpu
        else torch.device("cpu")
    )
    if has_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if has_gpu else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor, pipeline)
    return device


def stop_processes() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def layout() -> dict[str, int]:
    """How many tensor-parallel ranks, pipeline stages and replicas there are."""
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
    }


def add_up(what: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Add ``tensor`` over the group, in place; an error says which ranks may have failed."""
    with explained(f"adding up {what}", group):
        dist.all_reduce(tensor, group=group)


def mean_of_losses(losses: list[Tensor], device: torch.device) -> float:
    """The mean over micro-batches, which the last stage has, and over replicas; on every rank."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if losses:
        total += torch.stack(losses).double().mean()
    add_up("the losses", total, parallel_state.get_pipeline_model_parallel_group())
    add_up("the losses", total, parallel_state.get_data_parallel_group())
    return total.item() / parallel_state.get_data_parallel_world_size()


def complete_gradients(model: nn.Module) -> None:
    """With sequence parallelism, add up what each rank knows of its part of the sequence."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        for param in model.parameters():
            if getattr(param, "sequence_parallel_enabled", False):
                group = parallel_state.get_tensor_model_parallel_group()
                add_up("gradients", param.grad, group)


def clip_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, largest: float) -> float:
    """Scale the gradients so that the norm of all of them, on all ranks, is at most ``largest``.

    Returns the norm before. Parameters that every tensor-parallel rank has count once.
    """
    params = list(model.parameters())
    counted = [p for p in params if param_is_not_tensor_parallel_duplicate(p)]
    squared = torch.zeros((), dtype=torch.float64, device=params[0].device)
    if is_sharded(optimizer):
        squared += optimizer.grad_norm(counted).double().square()
    elif counted:
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in counted]
        squared += torch.stack(norms).square().sum()
    add_up("the gradients' norm", squared, parallel_state.get_model_parallel_group())
    norm = squared.sqrt().item()
    if norm > largest and is_sharded(optimizer):
        optimizer.unscale_grads(inv_scale=largest / norm)
    elif norm > largest:
        torch._foreach_mul_([p.grad for p in params], largest / norm)
    return norm
