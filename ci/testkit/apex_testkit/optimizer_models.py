"""One step of every optimizer in plain float64, from the formulas of the papers.

Slow and simple on purpose, and without any code of the optimizers: state machines compare with it.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

_SHORT = (torch.float16, torch.bfloat16)


@dataclasses.dataclass
class ModelParam:
    """A parameter (or its master), its moments by name, and the steps that it has taken."""

    value: Tensor  # float64; of complex ones with a last dimension of real and imaginary part
    state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    steps: int = 0
    has_master: bool = False
    stale: bool = False  # its value was written to from outside
    is_complex: bool = False

    def moment(self, name: str) -> Tensor:
        """A moment, zero at first."""
        return self.state.setdefault(name, torch.zeros_like(self.value))


def _decay(hyper: dict[str, Any], value: Tensor) -> Tensor | float:
    return hyper["weight_decay"] * value if hyper["weight_decay"] else 0.0


def _corrections(own: ModelParam, hyper: dict[str, Any]) -> tuple[float, float]:
    if not hyper["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = hyper["betas"]
    return 1 - beta1**own.steps, 1 - beta2**own.steps


def _adam_update(own: ModelParam, grad: Tensor, hyper: dict[str, Any], weight: float) -> Tensor:
    """Moments and the direction that Adam and LAMB share; Kingma & Ba 2015, algorithm 1."""
    beta1, beta2 = hyper["betas"]
    if not hyper["adam_w_mode"]:
        grad = grad + _decay(hyper, own.value)
    first = own.state["exp_avg"] = beta1 * own.moment("exp_avg") + weight * grad
    second = own.moment("exp_avg_sq") * beta2 + (1 - beta2) * grad * grad
    own.state["exp_avg_sq"] = second
    if hyper.get("amsgrad"):  # Reddi, Kale & Kumar 2018, algorithm 2
        second = own.state["max_exp_avg_sq"] = own.moment("max_exp_avg_sq").maximum(second)
    correction1, correction2 = _corrections(own, hyper)
    update = first / correction1 / ((second / correction2).sqrt() + hyper["eps"])
    return update + _decay(hyper, own.value) if hyper["adam_w_mode"] else update


def adam(own: ModelParam, grad: Tensor, hyper: dict[str, Any], _: float) -> None:
    own.value = own.value - hyper["lr"] * _adam_update(own, grad, hyper, 1 - hyper["betas"][0])


def lamb(own: ModelParam, grad: Tensor, hyper: dict[str, Any], norm: float) -> None:
    """You et al. 2020, algorithm 2, with clipping by the norm of all gradients."""
    limit = hyper["max_grad_norm"]
    if limit > 0 and norm > limit:
        grad = grad / (norm / limit)
    weight = 1 - hyper["betas"][0] if hyper["grad_averaging"] else 1.0
    update = _adam_update(own, grad, hyper, weight)
    ratio = 1.0
    if hyper["use_nvlamb"] or hyper["weight_decay"]:
        lengths = own.value.norm().item(), update.norm().item()
        ratio = lengths[0] / lengths[1] if all(lengths) else 1.0
    own.value = own.value - hyper["lr"] * ratio * update


def novograd(own: ModelParam, grad: Tensor, hyper: dict[str, Any], _: float) -> None:
    """Ginsburg et al. 2019, algorithm 1, with bias correction."""
    beta1, beta2 = hyper["betas"]
    is_max = hyper["norm_type"] == 0
    sizes = grad.norm(dim=-1) if own.is_complex else grad.abs()
    length = sizes.max() if is_max and grad.numel() else grad.norm()
    if own.steps == 1:
        own.state["norm"] = torch.zeros_like(length) if hyper["init_zero"] else length
    old = own.state["norm"]
    if is_max:
        new = beta2 * old + (1 - beta2) * length
    else:
        new = (beta2 * old**2 + (1 - beta2) * length**2).sqrt()
    own.state["norm"] = new
    correction1, correction2 = _corrections(own, hyper)
    scale = new / correction2**0.5 + hyper["eps"]
    weight = 1 - beta1 if hyper["grad_averaging"] else 1.0
    is_inside = hyper["reg_inside_moment"]
    added = grad / scale + _decay(hyper, own.value) if is_inside else grad
    first = own.state["exp_avg"] = beta1 * own.moment("exp_avg") + weight * added
    update = first / correction1
    if not is_inside:
        update = update / scale + _decay(hyper, own.value)
    own.value = own.value - hyper["lr"] * update


def adagrad(own: ModelParam, grad: Tensor, hyper: dict[str, Any], _: float) -> None:
    """Duchi, Hazan & Singer 2011, figure 1."""
    if not hyper["adagrad_w_mode"]:
        grad = grad + _decay(hyper, own.value)
    total = own.state["sum"] = own.moment("sum") + grad * grad
    update = grad / (total.sqrt() + hyper["eps"])
    if hyper["adagrad_w_mode"]:
        update = update + _decay(hyper, own.value)
    own.value = own.value - hyper["lr"] * update


def sgd(own: ModelParam, grad: Tensor, hyper: dict[str, Any], _: float) -> None:
    """Sutskever et al. 2013, section 2, in the form of torch.optim.SGD."""
    late, momentum = hyper["wd_after_momentum"], hyper["momentum"]
    if not late:
        grad = grad + _decay(hyper, own.value)
    update = grad
    if momentum:
        old = own.state.get("momentum_buffer")
        kept = grad if old is None else momentum * old + (1 - hyper["dampening"]) * grad
        own.state["momentum_buffer"] = kept
        update = grad + momentum * kept if hyper["nesterov"] else kept
    if late:
        update = update + _decay(hyper, own.value)
    own.value = own.value - hyper["lr"] * update


def lars(own: ModelParam, grad: Tensor, hyper: dict[str, Any], _: float) -> None:
    """You, Gitman & Ginsburg 2017, algorithm 1."""
    length, size = grad.norm().item(), own.value.norm().item()
    ratio = 1.0
    if not hyper["is_skipped"] and length and size:
        below = length + hyper["weight_decay"] * size + hyper["eps"]
        ratio = hyper["trust_coefficient"] * size / below
    change = hyper["lr"] * ratio * (grad + _decay(hyper, own.value))
    if not hyper["momentum"]:
        own.value = own.value - change
        return
    kept = hyper["momentum"] * own.moment("momentum_buffer") - change
    own.state["momentum_buffer"] = kept
    update = hyper["momentum"] * kept - change if hyper["nesterov"] else kept
    own.value = own.value + update


def global_norm(grads: list[Tensor]) -> float:
    """Euclidean norm of all gradients together."""
    return sum(grad.square().sum().item() for grad in grads) ** 0.5


def random_values(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def random_tensor(shape, seed, dtype):
    if dtype.is_complex:
        return torch.view_as_complex(random_values((*shape, 2), seed)).to(dtype)
    return random_values(shape, seed).to(dtype)


def exact(tensor):
    """A copy in float64, of complex numbers with a last dimension of real and imaginary part."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64, copy=True)


def assert_near(what, real, model, dtype, loose=0.0):
    """Within the rounding of ``dtype``, or of float32 arithmetic, whichever is coarser."""
    real = exact(real)
    limit = max(2e-5, torch.finfo(dtype).eps * 1.01)
    unit = model.abs().nan_to_num(0, 0, 0) + (1.0 if dtype not in _SHORT else 1e-3)
    peak = loose * (unit.max() if unit.numel() else 0)
    near = ((real - model).abs() <= limit * unit + peak) | (real == model)
    near |= real.isnan() & model.isnan()
    # Beyond the largest number of a short dtype there is infinity.
    near |= real.isinf() & (model.abs() > torch.finfo(dtype).max * 0.999)
    assert near.all(), (what, dtype, real, model)


def everything(optimizer, params):
    """Parameters, states and counts by name, copied."""
    found = {}
    for number, param in enumerate(params):
        found[number, "value"] = exact(param)
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                found[number, key] = exact(value)
    for index, group in enumerate(optimizer.param_groups):
        norms = group.get("exp_avg_sq", [])
        for part, value in enumerate([torch.as_tensor(group.get("step", -1)), *norms]):
            found[f"group {index}", part] = exact(value)
    return found
