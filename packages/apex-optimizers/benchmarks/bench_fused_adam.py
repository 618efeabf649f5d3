"""A whole AdamW step(), Python included.  Traffic per fp32 element: read p, g, m, v and write
p, m, v = 28 bytes; per bf16 element with fp32 states 22."""

import importlib.util

import torch

from apex.optimizers import FusedAdam
from apex_testkit.bench import chosen_device, compare
from apex_testkit.bench_models import RESNET50, models, params_with_grads

DEVICE = chosen_device()


MODELS = models(DEVICE, resnet50=RESNET50)


def stepper(cls, sizes, dtype=torch.float32, **options):
    return cls(params_with_grads(sizes, DEVICE, dtype), lr=1e-3, weight_decay=0.01, **options).step


def master_recipe(sizes):
    """bf16 parameters as torch's users keep them: fp32 masters, copied there and back."""
    params = [torch.nn.Parameter(torch.randn(n, device=DEVICE).bfloat16()) for n in sizes]
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    grads = [torch.randn_like(p) for p in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.01, fused=True)

    def step():
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return step


def peers(sizes):
    """Contestants that are there: DeepSpeed where it is installed, on the CPU."""
    if DEVICE == "cuda" or not importlib.util.find_spec("deepspeed"):
        return {}
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return {"deepspeed": stepper(DeepSpeedCPUAdam, sizes, adamw_mode=True)}


for case, sizes in MODELS.items():
    compare(
        "adamw_step",
        case,
        bytes_moved=28 * sum(sizes),
        device=DEVICE,
        apex=stepper(FusedAdam, sizes),
        torch_fused=stepper(torch.optim.AdamW, sizes, fused=True),
        torch_foreach=stepper(torch.optim.AdamW, sizes, foreach=True),
        torch_default=stepper(torch.optim.AdamW, sizes),
        **peers(sizes),
    )

sizes = MODELS["resnet50"]
compare(
    "adamw_step_bf16",
    "resnet50, fp32 states",
    bytes_moved=22 * sum(sizes),
    device=DEVICE,
    apex=stepper(FusedAdam, sizes, torch.bfloat16),
    apex_masters=stepper(FusedAdam, sizes, torch.bfloat16, master_weights=True),
    torch_masters=master_recipe(sizes),
)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
compare(
    "adamw_step_small_states",
    "resnet50, bf16 parameters",
    device=DEVICE,
    apex=stepper(FusedAdam, sizes, BF16),
    apex_bf16=stepper(FusedAdam, sizes, BF16, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16),
    apex_fp8=stepper(FusedAdam, sizes, BF16, exp_avg_dtype=FP8, exp_avg_sq_dtype=FP8),
    apex_remainders=stepper(
        FusedAdam, sizes, BF16, master_weights=True, store_param_remainders=True
    ),
    torch_fused_bf16=stepper(torch.optim.AdamW, sizes, BF16, fused=True),
)
