"""A whole AdamW step(), Python included.  Traffic per fp32 element: read p, g, m, v and write
p, m, v = 28 bytes; per bf16 element with fp32 states 22. Gradients are the same tensors in every
step, unless they are "new": then giving each parameter another one is part of the time."""

import importlib.util

import torch

from apex.optimizers import FusedAdam
from apex_testkit.bench import chosen_device, compare
from apex_testkit.bench_models import (
    RESNET50,
    compiled_peer,
    models,
    params_with_grads,
    with_new_grads,
)

DEVICE = chosen_device()
TINY = "10,000 x 100"
NEW_GRADS = f"{TINY}, new gradients"


MODELS = models(DEVICE, resnet50=RESNET50)


def stepper(cls, sizes, dtype=torch.float32, has_new_grads=False, **options):
    params = params_with_grads(sizes, DEVICE, dtype)
    step = cls(params, lr=1e-3, weight_decay=0.01, **options).step
    return with_new_grads(params, step) if has_new_grads else step


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


def peers(sizes, dtype=torch.float32, **options):
    """Contestants that are there: DeepSpeed where it is installed, on the CPU."""
    if DEVICE == "cuda" or not importlib.util.find_spec("deepspeed"):
        return {}
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return {"deepspeed": stepper(DeepSpeedCPUAdam, sizes, dtype, adamw_mode=True, **options)}


for case, sizes in [*MODELS.items(), (NEW_GRADS, MODELS[TINY])]:
    options = {"has_new_grads": case == NEW_GRADS}
    compare(
        "adamw_step",
        case,
        bytes_moved=28 * sum(sizes),
        device=DEVICE,
        apex=stepper(FusedAdam, sizes, **options),
        torch_fused=stepper(torch.optim.AdamW, sizes, fused=True, **options),
        torch_foreach=stepper(torch.optim.AdamW, sizes, foreach=True, **options),
        torch_default=stepper(torch.optim.AdamW, sizes, **options),
        **peers(sizes, **options),
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
    **peers(sizes, torch.bfloat16),
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
    apex_fp16_masters=stepper(
        FusedAdam, sizes, BF16, master_weights=True, master_weight_dtype=torch.float16
    ),
    torch_fused_bf16=stepper(torch.optim.AdamW, sizes, BF16, fused=True),
)

compare(
    "adamw_step_by_chance",
    "resnet50, bf16 parameters",
    bytes_moved=22 * sum(sizes),
    device=DEVICE,
    apex=stepper(FusedAdam, sizes, BF16, stochastic_rounding=True),
    apex_to_nearest=stepper(FusedAdam, sizes, BF16),
    apex_masters=stepper(FusedAdam, sizes, BF16, master_weights=True),
)

compare(
    "adamw_step_amsgrad",
    "resnet50",
    bytes_moved=36 * sum(sizes),
    device=DEVICE,
    apex=stepper(FusedAdam, sizes, amsgrad=True),
    apex_without=stepper(FusedAdam, sizes),
    torch_fused=stepper(torch.optim.AdamW, sizes, fused=True, amsgrad=True),
    torch_foreach=stepper(torch.optim.AdamW, sizes, foreach=True, amsgrad=True),
)

halves = [n // 2 for n in sizes]
compare(
    "adamw_step_complex",
    "resnet50, half as many complex numbers",
    bytes_moved=56 * sum(halves),
    device=DEVICE,
    apex=stepper(FusedAdam, halves, torch.complex64),
    torch_foreach=stepper(torch.optim.AdamW, halves, torch.complex64, foreach=True),
    torch_default=stepper(torch.optim.AdamW, halves, torch.complex64),
)


def clipped(has_max_norm, cls, **options):
    """Clipping to a norm, and the step: inside it, or as torch's users do."""
    params = params_with_grads(sizes, DEVICE)
    step = cls(params, lr=1e-3, weight_decay=0.01, **options).step
    if has_max_norm:
        return lambda: step(max_norm=1.0)

    def clip_and_step():
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        step()

    return clip_and_step


compare(
    "adamw_step_clipped",
    "resnet50",
    bytes_moved=32 * sum(sizes),
    device=DEVICE,
    apex=clipped(True, FusedAdam),
    apex_clipped_before=clipped(False, FusedAdam),
    torch_fused=clipped(False, torch.optim.AdamW, fused=True),
)

# At the end: what the compiler leaves on the heap lies between the tensors of later cases.
for case, sizes in MODELS.items():
    if compiled := compiled_peer(torch.optim.AdamW, sizes, DEVICE):
        compare(
            "adamw_step_compiled",
            case,
            bytes_moved=28 * sum(sizes),
            device=DEVICE,
            apex=stepper(FusedAdam, sizes),
            **compiled,
        )
