"""Self attention modules, forward and backward, with and without dropout.

The peers have the same parameters and masks: "torch" is matrix products, softmax and dropout, as
Apex's own ``impl="default"``; "torch_sdpa" is ``scaled_dot_product_attention`` between the
projections. Products take most of the time, so no bandwidth is given; "products" is those alone, in
torch, which nobody who takes torch's products can undercut.
"""

import torch
from torch.nn import functional as F

from apex.contrib.multihead_attn import SelfMultiheadAttn
from apex_testkit.bench import chosen_device, compare

BATCH, HEADS, FEATURES = 2, 8, 512
TIMES = [128, 256, 512, 1024]
# torch's float16 products take seconds on CPUs without float16 arithmetic.
SHORT = [128, 256]


def eager(x, module, hidden, p):
    t, b, e = x.shape
    lin = F.linear(x, module.in_proj_weight, module.in_proj_bias).view(t, b * HEADS, 3, e // HEADS)
    q, k, v = (lin[:, :, i].transpose(0, 1) for i in range(3))
    scores = torch.baddbmm(x.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=module.scaling)
    scores = scores.view(b, HEADS, t, t).masked_fill(hidden[:, None, None], -torch.inf)
    weights = F.dropout(torch.softmax(scores, -1), p).view(b * HEADS, t, t)
    context = torch.bmm(weights, v).transpose(0, 1).reshape(t, b, e)
    return F.linear(context, module.out_proj_weight, module.out_proj_bias)


def products(x, module):
    t, b, e = x.shape
    lin = F.linear(x, module.in_proj_weight, module.in_proj_bias).view(t, b * HEADS, 3, e // HEADS)
    q, k, v = (lin[:, :, i].transpose(0, 1) for i in range(3))
    context = torch.bmm(torch.bmm(q, k.transpose(1, 2)), v).transpose(0, 1).reshape(t, b, e)
    return F.linear(context, module.out_proj_weight, module.out_proj_bias)


def sdpa(x, module, hidden, p):
    t, b, e = x.shape
    lin = F.linear(x, module.in_proj_weight, module.in_proj_bias).view(t, b, HEADS, 3, e // HEADS)
    q, k, v = lin.permute(3, 1, 2, 0, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, ~hidden[:, None, None], p)
    return F.linear(
        y.permute(2, 0, 1, 3).reshape(t, b, e), module.out_proj_weight, module.out_proj_bias
    )


def run(time: int, dtype: torch.dtype, p: float, device: str) -> None:
    """Measure one length, dtype and probability of dropout."""
    module = SelfMultiheadAttn(FEATURES, HEADS, dropout=p, bias=True).to(device, dtype)
    x = torch.randn(time, BATCH, FEATURES, device=device).to(dtype).requires_grad_()
    dy = torch.randn_like(x)
    hidden = torch.zeros(BATCH, time, dtype=torch.bool, device=device)
    hidden[:, -time // 8 :] = True
    wanted = [x, *module.parameters()]

    def both(function):
        return lambda: torch.autograd.grad(function(), wanted, dy)

    compare(
        f"multihead_attn {'dropout' if p else 'no dropout'} fwd+bwd",
        f"{str(dtype).removeprefix('torch.')} {time}x{BATCH}x{FEATURES}, {HEADS} heads",
        device=device,
        apex=both(lambda: module(x, x, x, key_padding_mask=hidden)[0]),
        torch=both(lambda: eager(x, module, hidden, p)),
        torch_sdpa=both(lambda: sdpa(x, module, hidden, p)),
        **({} if dtype == torch.float16 else {"products": both(lambda: products(x, module))}),
    )


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for p in (0.0, 0.1):
        for time in SHORT if dtype == torch.float16 else TIMES:
            run(time, dtype, p, chosen_device())
