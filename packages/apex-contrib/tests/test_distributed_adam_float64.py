"""DistributedFusedAdam with float64 models, integers in buffers, and half-empty buckets."""

import itertools
import warnings

import pytest
import torch
from torch import nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def trained(dtype, make_optimizer, rank, world, steps=4):
    """A model after some steps, with a frozen parameter that a user has set."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 3)).to(dtype)
    optimizer = make_optimizer(model.parameters())
    is_ours = isinstance(optimizer, DistributedFusedAdam)
    for step in range(steps):
        inputs = torch.randn(world, 4, 5, dtype=torch.float64).to(dtype)
        own = inputs[rank] if is_ours else inputs.flatten(0, 1)
        model(own).square().mean().backward()
        if is_ours:
            optimizer.clip_grad_norm(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 1:
            model[2].bias.requires_grad_(False).fill_(0.3)
        if is_ours and step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
            model[2].bias.data.fill_(0.3)
    return list(model.parameters())


def check_float64(rank, world, **given):
    dtype = given.pop("model", torch.float64)
    options = {**OPTIONS, "bucket_cap_mb": 0.001, **given}
    found = trained(dtype, lambda p: DistributedFusedAdam(p, **options), rank, world)
    expected = trained(torch.float64, lambda p: torch.optim.AdamW(p, **OPTIONS), rank, world)
    for param, wanted in zip(found, expected, strict=True):
        assert param.dtype == dtype
        # States are float32; int32 keeps the upper half of float64 numbers, 21 bits.
        torch.testing.assert_close(param.double(), wanted, rtol=2e-6, atol=1e-6)


F64 = [
    {},
    {"store_params": False},
    {"store_params": False, "param_sync_dtype": torch.float64},
    {"param_sync_dtype": torch.float64, "contiguous_param_buffer": True},
    {"param_sync_dtype": torch.int64, "contiguous_param_buffer": True},
    {"param_sync_dtype": torch.int32},
    {"capturable": True, "param_sync_dtype": torch.float64},
]
INTEGERS = [
    {"contiguous_param_buffer": True, "store_params": kept, "contiguous_grad_buffer": both}
    for kept, both in itertools.product([True, False], [True, False])
]


@pytest.mark.parametrize("options", F64, ids=str)
def test_float64_models_train(options, two_ranks):
    two_ranks(check_float64, **options)


@pytest.mark.parametrize("options", INTEGERS, ids=str)
def test_integers_in_a_parameter_buffer(options, two_ranks):
    options = {**options, "model": torch.float32, "param_sync_dtype": torch.int32}
    two_ranks(check_float64, **options)


def check_refusals(rank, world):
    params = [nn.Parameter(torch.ones(3, dtype=torch.float64))]
    for dtype in (torch.int32, torch.float32, torch.uint8):
        with pytest.raises(RuntimeError, match=r"cannot hold a parameter of torch\.float64"):
            DistributedFusedAdam(params, param_sync_dtype=dtype, contiguous_param_buffer=True)
    with pytest.raises(RuntimeError, match="param_sync_dtype narrower than float32"):
        DistributedFusedAdam(
            params,
            dtype=torch.float16,
            param_sync_dtype=torch.float64,
            with_scaled_states=True,
        )


def test_buffers_that_do_not_fit(two_ranks):
    two_ranks(check_refusals)


def check_warning(rank, world):
    """Sizes are in MiB of float32: four parameters of 0.25."""

    def warnings_of(cap, use=lambda optimizer, params: optimizer.init_params()):
        params = [nn.Parameter(torch.zeros(1 << 16)) for _ in range(4)]
        optimizer = DistributedFusedAdam(params, bucket_cap_mb=cap)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use(optimizer, params)
        return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]

    text = "Only 50.0% of buckets are used. Consider decreasing the bucket_cap_mb argument."
    assert warnings_of(2) == [text]
    assert warnings_of(1) == warnings_of(0.3) == warnings_of(1.4) == []
    assert warnings_of(2, lambda optimizer, params: optimizer.init_params(params[1:])) == []

    def train(optimizer, params):
        for _ in range(3):
            sum(param.sum() for param in params).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert warnings_of(2, train) == [text]


def test_the_warning_of_empty_buckets(two_ranks):
    two_ranks(check_warning)
