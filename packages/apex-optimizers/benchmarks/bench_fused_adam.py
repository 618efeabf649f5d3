"""A whole AdamW step(), Python included.  Traffic per fp32 element: read p, g, m, v and write
p, m, v = 28 bytes; per bf16 element with fp32 states 22."""

import importlib.util

import torch

from apex.optimizers import FusedAdam
from apex_testkit.bench import chosen_device, compare

DEVICE = chosen_device()


def resnet50_sizes():
    """Element counts of the 161 parameters of torchvision's resnet50, 25.6 M in all."""
    sizes, channels = [64 * 3 * 7 * 7, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            wide = 4 * width
            for weight, norm in ((channels, width), (9 * width, width), (width, wide)):
                sizes += [weight * norm, norm, norm]
            if block == 0:
                sizes += [channels * wide, wide, wide]
            channels = wide
    return [*sizes, 2048 * 1000, 1000]


MODELS = {
    "resnet50": resnet50_sizes(),
    "10,000 x 100": [100] * 10_000,
    "norms 400 x 1k": [1_000] * 400,
    "mlp 2 x 10M": [10_000_000] * 2,
    **({"mlp 2 x 200M": [200_000_000] * 2} if DEVICE == "cuda" else {}),
}


def stepper(cls, sizes, dtype=torch.float32, **options):
    params = [torch.nn.Parameter(torch.randn(n, device=DEVICE).to(dtype)) for n in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    return cls(params, lr=1e-3, weight_decay=0.01, **options).step


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
