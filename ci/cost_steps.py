"""Cases of what works on lists of tensors: see ci/cost_cases.py."""

import importlib
from collections.abc import Callable, Iterator

import torch

from ci import cost_peers
from ci.cost_cases import BF16, CASES, F32, Case, of, short

# Tensors, and elements of each: one, a model of many small ones, and one in bfloat16.
LISTS = ((1, 64, F32), (161, 16, F32), (1, 65536, BF16))
MASTERS = ((1, 64, BF16), (161, 16, BF16), LISTS[2])  # of models in bfloat16


def with_gradients(count: int, numel: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(numel, dtype=dtype)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def steps_of(name: str, optimizer: Callable, torchs=None, sizes=LISTS) -> Iterator[Case]:
    """Yield a step for each size; ``optimizer(params)`` and ``torchs(params)`` make one."""
    for number, (count, numel, dtype) in enumerate(sizes):
        step = optimizer(with_gradients(count, numel, dtype))
        peer = torchs(with_gradients(count, numel, dtype)) if torchs else None
        label = f"{name} {short(dtype)} {count} of {numel}"
        yield Case(label, step, is_smallest=number == 0, has_state=True, peer=peer)


@of("multi_tensor_l2norm")
def _l2norm():
    from apex.multi_tensor_apply import multi_tensor_l2norm

    for count, numel, dtype in (LISTS[0], (10_000, 1, F32), LISTS[2]):
        grads = [p.grad for p in with_gradients(count, numel, dtype)]
        name = f"l2norm {short(dtype)} {count} of {numel}"
        peer = lambda g=grads: torch.nn.utils.get_total_norm(g, foreach=True)
        yield Case(name, lambda g=grads: multi_tensor_l2norm(g), is_smallest=count == 1, peer=peer)


def _over_lists(name: str, function: Callable, torchs: Callable) -> Iterator[Case]:
    def step(params):
        grads, flag = [p.grad for p in params], torch.zeros(1, dtype=torch.int32)
        return lambda: function(grads, flag)

    yield from steps_of(name, step, lambda params: lambda: torchs([p.grad for p in params]))


@of("multi_tensor_scale")
def _scale():
    from apex.multi_tensor_apply import multi_tensor_scale

    ours = lambda lists, flag: multi_tensor_scale(lists, lists, flag, 1.0)
    yield from _over_lists("scale", ours, lambda lists: torch._foreach_mul_(lists, 1.0))


@of("multi_tensor_axpby")
def _axpby():
    from apex.multi_tensor_apply import multi_tensor_axpby as axpby

    ours = lambda g, flag: axpby(g, g, g, flag, 0.5, 0.5, -1)
    torchs = lambda g: torch._foreach_add_(torch._foreach_mul(g, 0.5), g, alpha=0.5)
    yield from _over_lists("axpby", ours, torchs)


@of("multi_tensor_l2norm_scale")
def _l2norm_scale():
    from apex.multi_tensor_apply import multi_tensor_l2norm_scale as scaled

    ours = lambda lists, flag: scaled(lists, lists, flag, 1.0)
    torchs = lambda g: torch.nn.utils.get_total_norm(torch._foreach_mul(g, 1.0), foreach=True)
    yield from _over_lists("l2norm_scale", ours, torchs)


@of("multi_tensor")
def _unscale():
    from apex.amp.multi_tensor import scale_

    yield from _over_lists(
        "unscale", lambda lists, flag: scale_(lists, flag, 1.0), cost_peers.unscale
    )
    yield from _amp_steps()


def _amp_steps() -> Iterator[Case]:
    """Yield a training step with all that amp does in it; it is switched off afterwards."""
    from apex import amp
    from apex.amp._amp_state import _amp_state

    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    x = torch.randn(4, 16)

    def step():
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    yield Case("amp O1 step float32 4 layers", step, is_smallest=True)
    _amp_state.handle._deactivate()


@of("clip_grad")
def _clip_grad():
    from apex.contrib.clip_grad import clip_grad_norm_

    torchs = lambda params: lambda: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    yield from steps_of(
        "clip_grad_norm_", lambda params: lambda: clip_grad_norm_(params, 1.0), torchs
    )


def _class_steps(name: str, path: str, torchs=None, **options) -> Callable[[], Iterator[Case]]:
    """Return what yields steps of an optimizer of apex."""

    def cases():
        module, _, cls = path.rpartition(".")
        optimizer = getattr(importlib.import_module(module), cls)
        ours = lambda params: optimizer(params, lr=1e-3, **options).step
        peer = torchs and (lambda params: torchs(params, lr=1e-3, fused=True, **options).step)
        yield from steps_of(name, ours, peer)

    return cases


for _op, _name, _path, _torchs, _options in (
    ("fused_adam", "adamw_step", "apex.optimizers.FusedAdam", torch.optim.AdamW, {}),
    ("fused_adagrad", "adagrad_step", "apex.optimizers.FusedAdagrad", torch.optim.Adagrad, {}),
    ("fused_lamb", "lamb_step", "apex.optimizers.FusedLAMB", None, {}),
    ("fused_lars", "lars_step", "apex.optimizers.FusedLARS", None, {"momentum": 0.9}),
    ("fused_novograd", "novograd_step", "apex.optimizers.FusedNovoGrad", None, {}),
    ("fused_sgd", "sgd_step", "apex.optimizers.FusedSGD", torch.optim.SGD, {"momentum": 0.9}),
):
    CASES[_op] = _class_steps(_name, _path, _torchs, **_options)


@of("fused_adam_compact")
def _adam_compact():
    from apex.optimizers import FusedAdam

    def step(params):
        return FusedAdam(params, lr=1e-3, master_weights=True, store_param_remainders=True).step

    yield from steps_of("adamw_step with remainders", step, None, ((1, 64, BF16), (161, 16, BF16)))


@of("update_scale_hysteresis")
def _update_scale():
    from apex.optimizers.update_scale_hysteresis import update_scale_hysteresis

    scale, found = torch.ones(1), torch.zeros(1)
    trackers = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    call = lambda: update_scale_hysteresis(scale, *trackers, found, 2.0, 0.5, 1000, 2)
    yield Case("update_scale_hysteresis", call, is_smallest=True)


@of("adam_swa")
def _adam_swa():
    from apex.contrib.openfold_triton.fused_adam_swa import FusedAdamSWA

    def step(params):
        masters = [p.detach().float() for p in params]
        averages = [p.clone() for p in masters]
        optimizer = FusedAdamSWA(masters, params, averages, 0.999, lr=1e-3)
        return lambda: optimizer.step(grad_clip_scale=0.5)

    torchs = cost_peers.masters_step(torch.optim.Adam, averages=True)
    yield from steps_of("adam_swa_step", step, torchs, MASTERS)


def _masters_steps(name: str, path: str, torchs, **options) -> Callable[[], Iterator[Case]]:
    def step(params):
        module, _, cls = path.rpartition(".")
        masters = [p.detach().float() for p in params]
        optimizer = getattr(importlib.import_module(module), cls)(masters, lr=1e-3, **options)
        grads, outputs = [p.grad for p in params], [p.data for p in params]
        return lambda: optimizer.step(grads=grads, output_params=outputs, scale=2.0)

    return lambda: steps_of(name, step, cost_peers.masters_step(torchs, **options), MASTERS)


for _op, _name, _path, _torchs, _options in (
    ("legacy_adam", "scaled_adam_step", "FusedAdam", torch.optim.Adam, {}),
    ("legacy_sgd", "masters_sgd_step", "fused_sgd.FusedSGD", torch.optim.SGD, {"momentum": 0.9}),
):
    CASES[_op] = _masters_steps(_name, f"apex.contrib.optimizers.{_path}", _torchs, **_options)


@of("sharded_lamb")
def _sharded_lamb():
    from apex.contrib.optimizers.sharded_lamb import lamb_step

    def step(params):
        lists = [[p.detach() for p in params], [p.grad for p in params]]
        lists += [[torch.zeros_like(p, dtype=F32) for p in params] for _ in range(2)]
        numbers = (1e-3, None, 0.9, 0.99, 1e-6, 0.01, 1, None, True, True, True, False)
        return lambda: lamb_step(*lists, [], *numbers, None, 0.0, None, None)

    yield from steps_of("lamb_step of shards", step)


@of("distributed_adam")
def _distributed_adam():
    from apex.contrib.optimizers.distributed_adam import distributed_adam_step

    def step(params):
        lists = [[p.detach() for p in params], [p.grad for p in params]]
        lists += [[torch.zeros_like(p, dtype=F32) for p in params] for _ in range(2)]
        numbers = (1e-3, 0.9, 0.99, 1e-6, 0.01, 1, True, True)
        return lambda: distributed_adam_step(*lists, [], [], *[None] * 6, *numbers)

    yield from steps_of("adam_step of shards", step)
