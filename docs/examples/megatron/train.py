"""A small GPT of megatron-core, without Transformer Engine, on the kernels of Apex.

    python -m torch.distributed.run --standalone --nproc-per-node=1 train.py

On a GPU if there is one, over NCCL; otherwise on the CPU, over gloo (see without_gpu.py).
"""

import argparse
import contextlib
import time
import warnings

import torch
import torch.distributed as dist
import without_gpu
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
VOCABULARY, SEQUENCE, ROWS, MICRO_BATCHES = 256, 64, 8, 2


def make_model(*, fused: bool) -> nn.Module:
    """A GPT of four layers of 128 features, wrapped for gradients in float32."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        use_cpu_initialization=not HAS_GPU,
        gradient_accumulation_fusion=fused,  # fused_weight_gradient_mlp_cuda
        masked_softmax_fusion=fused,  # scaled_upper_triang_masked_softmax_cuda
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE)  # Apex's norms
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config, ddp, model.bfloat16().to(DEVICE))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """``[ROWS, SEQUENCE]`` tokens, each of which determines the next, and those that follow."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (ROWS, 1), generator=generator)
    tokens = (first + 7 * torch.arange(SEQUENCE + 1)) % VOCABULARY
    return tokens[:, :-1].to(DEVICE), tokens[:, 1:].to(DEVICE)


def train(model: nn.Module, steps: int) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step; micro-batches add to ``main_grad``."""
    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0
    )
    optimizer = get_megatron_optimizer(config, [model])  # Apex's FusedAdam
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(ROWS, -1)
    # The causal softmax takes no mask; the plain one and its kernel for short rows ask for it.
    future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=DEVICE).triu(1)[None, None]
    history = []
    for step in range(steps):
        start = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        total = 0.0
        for part in range(MICRO_BATCHES):
            tokens, labels = batch(step * MICRO_BATCHES + part)
            last = part + 1 == MICRO_BATCHES
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(tokens, positions, future, labels=labels).mean() / MICRO_BATCHES
                loss.backward()
            total += loss.item()
        finalize_model_grads([model])
        _, norm, _ = optimizer.step()
        history.append((total, norm))
        rate = MICRO_BATCHES * ROWS * SEQUENCE / (time.perf_counter() - start)
        if dist.get_rank() == 0 and (step == 0 or step % 10 == 9):
            figures = f"loss {total:.4f}  norm {norm:.3f}  {rate:,.0f} tokens/s"
            print(f"step {step + 1}/{steps}  {figures}")
    return history


def main(arguments: list[str] | None = None) -> list[tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="megatron-core's unfused operations")
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    if HAS_GPU:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size)
    with contextlib.nullcontext() if HAS_GPU else without_gpu.cuda_means_cpu():
        torch.manual_seed(0)
        if HAS_GPU:
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        history = train(make_model(fused=not args.plain), args.steps)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return history


if __name__ == "__main__":
    main()
