"""What torch launches and moves on a GPU for a call, counted by the same model as ours.

The call runs on the CPU; what it dispatches is what it would dispatch on a GPU, and each operator
is one kernel there, which reads its inputs and writes its outputs once. The lists below, by hand
from torch's sources for CUDA, hold those of which that is not true.
"""

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# Kernels of an operator, and how often its inputs are read.
LISTED = {
    "native_layer_norm_backward": (2, 2),  # dx, then the gradients of the weights
    "native_batch_norm": (1, 2),  # of cuDNN
    "native_batch_norm_backward": (1, 2),
    "native_group_norm": (3, 2),  # moments, factors, result
    "native_group_norm_backward": (5, 2),
    "index_put": (5, 1),  # sorts the indices; accumulates
    "nll_loss_backward": (2, 1),  # zeros, and the classes of the targets
    "linalg_vector_norm": (1, 1),
}
OVER_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
# Tensors that one launch takes, by how many lists there are; and chunks.
_CHUNK = 65536
_TENSORS_A_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_CHUNKS_A_LAUNCH = 320
# Of the second kernel of a norm of lists, and of a concatenation.
_NORMS_A_LAUNCH, _PARTS_A_LAUNCH = 400, 128
# No kernel: memory, and what only looks at a tensor.
NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}


class TorchCosts(TorchDispatchMode):
    """While it is on, kernels that torch would launch on a GPU and bytes that these would move."""

    def __init__(self):
        super().__init__()
        self.launches = self.moved = 0

    def facts(self) -> dict[str, int]:
        return {"torch_launches": self.launches, "torch_moved": self.moved}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        results = function(*arguments, **(keywords or {}))
        name = function.overloadpacket.__name__
        if name in NOTHING or function.namespace != "aten" or function.is_view:
            return results
        given, made = _tensors((arguments, keywords)), _tensors(results)
        launches, times = LISTED.get(name, (1, 1))
        if name in ("cat", "stack"):
            launches = -(-len(arguments[0]) // _PARTS_A_LAUNCH)
        elif name.startswith(OVER_LISTS):
            launches = _launches_of_lists(name, arguments)
        self.launches += launches
        written = made or _tensors(arguments[:1])  # an operator in place may return nothing
        self.moved += times * _bytes(given) + _bytes(written)
        return results


def _tensors(values) -> list[torch.Tensor]:
    return [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of tensors, each once; what is expanded is as large as its storage."""
    found = {}
    for t in tensors:
        held = math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride)
        found[t.data_ptr(), held] = held * t.element_size()
    return sum(found.values())


def _launches_of_lists(name: str, arguments) -> int:
    lists = [a for a in arguments if isinstance(a, (list, tuple)) and _tensors(a)]
    is_norm = name == "_foreach_norm"
    depth = len(lists) + (not is_norm and not name.endswith("_"))  # new results are a list more
    chunks = sum(-(-t.numel() // _CHUNK) for t in lists[0])
    at_once = _TENSORS_A_LAUNCH[min(depth, max(_TENSORS_A_LAUNCH))]
    launches = max(-(-len(lists[0]) // at_once), -(-chunks // _CHUNKS_A_LAUNCH))
    return launches + (-(-len(lists[0]) // _NORMS_A_LAUNCH) if is_norm else 0)


def count(peer: Callable, inputs: list[torch.Tensor]) -> dict[str, dict[str, int]]:
    """Return launches and bytes of each part of torch's call: of "call", or of both passes."""
    peer()  # makes state
    with TorchCosts() as costs:
        outputs = peer()
    if not inputs:
        return {"call": costs.facts()}
    found = {"forward": costs.facts()}
    outputs = [t for t in _tensors(outputs) if t.requires_grad]
    grads = [torch.randn_like(t) for t in outputs]
    with TorchCosts() as costs:
        torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    return found | {"backward": costs.facts()}


# What torch's users write, where torch has no function for it.


def adds_first(norm: Callable, x: torch.Tensor, residual: torch.Tensor) -> Callable:
    def both():
        total = x + residual
        return norm(total), total

    return both


def swiglu(x, bias):
    a, b = (x + bias).chunk(2, -1)
    return F.silu(a) * b


def focal_loss(x, targets):
    t = F.one_hot(targets.clamp(min=-1) + 1, x.shape[1] + 1)[:, 1:].to(x.dtype)
    bce = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    p = x.sigmoid()
    p_t = p * t + (1 - p) * (1 - t)
    weight = 0.25 * t + 0.75 * (1 - t)
    return (weight * (1 - p_t) ** 2 * bce * (targets != -2)[:, None]).float().sum()


def masked_softmax(x, mask):
    return torch.softmax((x * 0.125).masked_fill(mask, -10000.0), -1)


def self_attention(x, module):
    time, batch, features = x.shape
    width = features // module.num_heads
    lin = F.linear(x, module.in_proj_weight, module.in_proj_bias)
    lin = lin.view(time, batch * module.num_heads, 3, width)
    q, k, v = (lin[:, :, i].transpose(0, 1) for i in range(3))
    scores = torch.baddbmm(x.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=module.scaling)
    context = torch.bmm(F.dropout(torch.softmax(scores, -1), module.dropout), v)
    context = context.transpose(0, 1).reshape(time, batch, features)
    return F.linear(context, module.out_proj_weight, module.out_proj_bias)


def rotate(t, cos, sin):
    a, b = t.chunk(2, -1)
    return t * cos + torch.cat((-b, a), -1) * sin


def mlp(x, layers):
    for weight, bias in layers:
        x = F.relu(F.linear(x, weight, bias))
    return x


def dense_gelu_dense(x, weight1, bias1, weight2, bias2):
    return F.linear(F.gelu(F.linear(x, weight1, bias1), approximate="tanh"), weight2, bias2)


def batch_norm(x, norm):
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True)


def unscale(grads):
    found = torch.zeros(1, device=grads[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.ones(1))


def masters_step(optimizer: Callable, averages: bool = False, **options) -> Callable:
    """Return what makes a step over float32 masters of a model, with scaled gradients."""

    def make(params):
        masters = [p.detach().float().requires_grad_() for p in params]
        for master in masters:
            master.grad = torch.zeros_like(master)
        own, wide = [p.grad for p in params], [master.grad for master in masters]
        mean = [p.detach().clone() for p in masters]
        inner = optimizer(masters, lr=1e-3, fused=True, **options)

        @torch.no_grad()
        def step():
            torch._foreach_copy_(wide, own)
            torch._foreach_mul_(wide, 0.5)
            inner.step()
            torch._foreach_copy_(params, masters)
            if averages:
                torch._foreach_lerp_(mean, masters, 0.001)

        return step

    return make
