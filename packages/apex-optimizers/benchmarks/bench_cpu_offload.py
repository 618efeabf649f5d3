"""A step of parameters that live elsewhere, over links of several speeds, and beside the CPU alone.

100 million bf16 parameters with float32 masters and moments. The link only takes its time, as a
GPU's copies take no core; those of peers go over the same, before their step and after it. Traffic
per element: read the gradient and write the parameter, 2 bytes each, read and write master and
moments, 24 bytes.
"""

import importlib.util

import torch

from apex.optimizers import CPUOffload, FusedAdam
from apex_testkit.bench import compare
from apex_testkit.simulated_link import SimulatedLink

BF16 = torch.bfloat16
LAYERS = [(1024, 4096), (4096, 1024)] * 12
SPEEDS = {"1 GB/s": 1e9, "10 GB/s": 10e9, "50 GB/s": 50e9}
HYPER = {"lr": 1e-3, "weight_decay": 0.01}
ELEMENTS = sum(rows * columns for rows, columns in LAYERS)


def parameters():
    params = [torch.nn.Parameter(torch.randn(size).to(BF16)) for size in LAYERS]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def offloaded(speed, **options):
    link = SimulatedLink(speed, copies=False)
    return CPUOffload(parameters(), FusedAdam, link=link, master_weights=True, **HYPER, **options)


def link_alone(speed):
    """Both ways at the same time."""
    link, far = SimulatedLink(speed, copies=False), parameters()
    near = parameters()

    def go():
        trips = [link.receive([b], [a.grad]) for a, b in zip(far, near, strict=True)]
        trips += [link.send([b], [a]) for a, b in zip(far, near, strict=True)]
        for trip in trips:
            trip.synchronize()

    return go


def with_copies(optimizer, params, speed):
    """Gradients come, all is stepped, parameters go."""
    link, far = SimulatedLink(speed, copies=False), parameters()
    masters = [p.dtype == torch.float32 for p in params]
    grads = [torch.empty_like(p, dtype=BF16) for p in params]
    sent = [torch.empty_like(p, dtype=BF16) for p in params]

    @torch.no_grad()
    def step():
        trips = [link.receive([g], [p.grad]) for g, p in zip(grads, far, strict=True)]
        for trip in trips:
            trip.synchronize()
        for param, grad, is_master in zip(params, grads, masters, strict=True):
            param.grad = grad.float() if is_master else grad
        optimizer.step()
        torch._foreach_copy_(sent, params)
        trips = [link.send([s], [p]) for s, p in zip(sent, far, strict=True)]
        for trip in trips:
            trip.synchronize()

    return step


def torch_fused(speed):
    masters = [torch.nn.Parameter(torch.randn(size)) for size in LAYERS]
    return with_copies(torch.optim.AdamW(masters, fused=True, **HYPER), masters, speed)


def deepspeed(speed):
    """Its CPUAdam where it is installed; parameters float32, as its masters are."""
    if not importlib.util.find_spec("deepspeed"):
        return {}
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    masters = [torch.nn.Parameter(torch.randn(size)) for size in LAYERS]
    return {"deepspeed": with_copies(DeepSpeedCPUAdam(masters, **HYPER), masters, speed)}


def plain():
    return FusedAdam(parameters(), master_weights=True, **HYPER).step


for name, speed in SPEEDS.items():
    compare(
        "cpu_offload",
        f"100M, {name}",
        bytes_moved=28 * ELEMENTS,
        apex=offloaded(speed).step,
        apex_cpu_alone=plain(),
        link_alone=link_alone(speed),
        torch_fused=torch_fused(speed),
        **deepspeed(speed),
    )
