"""diffusers' UNet and VAE with every GroupNorm replaced by ours: equal outputs and gradients."""

import copy

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from apex.contrib.group_norm import GroupNorm
from apex.contrib.group_norm import group_norm as ours


def small_unet():
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=16,
    )


def small_vae():
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=16,
    )


def of_unet(model, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 16, 16, generator=generator).to(dtype)
    text = torch.randn(2, 5, 32, generator=generator).to(dtype)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    return x, model(x, torch.tensor([3, 700]), text).sample


def of_vae(model, dtype):
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    return x, model(x, sample_posterior=False).sample


MODELS = {"unet": (small_unet, of_unet), "vae": (small_vae, of_vae)}


def replaced(norm: nn.GroupNorm, act: str | None = None) -> GroupNorm:
    """Our module with the same parameters."""
    new = GroupNorm(norm.num_groups, norm.num_channels, norm.eps, norm.affine, act=act)
    new.load_state_dict(norm.state_dict())
    return new.to(norm.weight.dtype)


def swap(model) -> int:
    """Replace every torch.nn.GroupNorm, with SiLU where a block's norms alone precede it."""
    for block in model.modules():
        if isinstance(block, ResnetBlock2D) and block.time_emb_proj is None:
            block.norm1, block.norm2 = replaced(block.norm1, "silu"), replaced(block.norm2, "silu")
            block.nonlinearity = nn.Identity()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, replaced(child))
    return sum(isinstance(m, GroupNorm) for m in model.modules())


@pytest.fixture
def calls(monkeypatch):
    """The shapes with which our kernels were called, and whether SiLU followed."""
    seen = []
    original = ours.group_norm

    def counting(x, groups, weight, bias, eps, act, **options):
        seen.append((tuple(x.shape), act))
        return original(x, groups, weight, bias, eps, act, **options)

    monkeypatch.setattr(ours, "group_norm", counting)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_equal_outputs_and_gradients(name, dtype, calls):
    make, run = MODELS[name]
    plain = make().to(dtype).to(memory_format=torch.channels_last)
    fused = copy.deepcopy(plain)
    norms = swap(fused)
    assert norms == sum(isinstance(m, nn.GroupNorm) for m in plain.modules()) > 5
    # Float64 decides; bfloat16 convolutions between the norms round more than these do.
    exact = copy.deepcopy(plain).double()
    results = {}
    for key, model in (("plain", plain), ("fused", fused), ("exact", exact)):
        x, y = run(model, torch.float64 if key == "exact" else dtype)
        y.square().mean().backward()
        parameters = {k: p.grad for k, p in model.named_parameters()}
        results[key] = {"y": y.detach(), "x": x.grad, **parameters}
    assert results["plain"].keys() == results["fused"].keys()
    for key, expected in results["exact"].items():
        error, of_plain = (
            (results[k][key].double() - expected).norm() / expected.norm()
            for k in ("fused", "plain")
        )
        assert error <= 2 * of_plain + 8 * torch.finfo(dtype).eps, key
    assert len(calls) > 5
    if name == "vae":
        assert {act for _, act in calls} == {None, "silu"}


def test_compiled(calls):
    model = small_vae().eval().to(memory_format=torch.channels_last)
    fused = copy.deepcopy(model)
    swap(fused)
    with torch.no_grad():
        _, expected = of_vae(model, torch.float32)
        _, actual = of_vae(torch.compile(fused), torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
