"""The modules: construction, state, dtypes, and what other projects rely on."""

import copy
import importlib
import inspect
import pickle

import numpy
import pytest
import torch

import apex.normalization
from apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_layer_norm,
)
from apex_testkit import FLOATS, assert_as_accurate_as

MODULES = [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm]
TORCH = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


def torch_twin(module):
    """Return torch's module of the same kind, with the same parameters."""
    kind = TORCH["RMSNorm" if "RMS" in type(module).__name__ else "LayerNorm"]
    weight = next(module.parameters(), torch.empty(0))
    options = {"dtype": weight.dtype, "device": weight.device}
    if kind is torch.nn.LayerNorm and module.weight is not None:
        options["bias"] = module.bias is not None
    twin = kind(module.normalized_shape, module.eps, module.elementwise_affine, **options)
    twin.load_state_dict(module.state_dict())
    return twin


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm])
def test_equals_torch(kind, dtype, options, device):
    if kind is FusedRMSNorm and "bias" in options:
        options = {}
    module = kind(33, dtype=dtype, device=device, **options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 33, device=device, dtype=dtype)

    def norm(x, *parameters):
        twin = torch_twin(module).to(x.dtype)
        for own, given in zip(twin.parameters(), parameters, strict=True):
            own.data = given.data
        return twin(x)

    assert_as_accurate_as(norm, module(x), x, *module.parameters())


@pytest.mark.parametrize("kind", MODULES)
def test_attributes_and_state(kind):
    module = kind(5)
    assert module.normalized_shape == torch.Size([5])
    assert (module.eps, module.elementwise_affine, module.memory_efficient) == (1e-5, True, False)
    names = ["weight"] if "RMS" in kind.__name__ else ["weight", "bias"]
    assert list(module.state_dict()) == names
    assert torch.equal(module.weight, torch.ones(5))
    assert "RMS" in kind.__name__ or torch.equal(module.bias, torch.zeros(5))
    assert repr(module) == f"{kind.__name__}((5,), eps=1e-05, elementwise_affine=True)"
    torch.nn.init.normal_(module.weight)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(5))
    assert kind((2, 3)).weight.shape == (2, 3)


@pytest.mark.parametrize("kind", MODULES)
def test_checkpoints_of_torch_load(kind):
    module = kind(7)
    twin = torch_twin(module)
    torch.nn.init.normal_(twin.weight)
    module.load_state_dict(twin.state_dict())
    assert torch.equal(module.weight, twin.weight)


@pytest.mark.parametrize("kind", MODULES)
def test_copies_and_pickles(kind, device):
    module = kind(7, memory_efficient=True).to(device)
    x = torch.randn(3, 7, device=device)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
        assert other.memory_efficient


def test_not_affine_has_no_parameters():
    for kind in (FusedLayerNorm, FusedRMSNorm):
        module = kind(5, elementwise_affine=False)
        assert list(module.parameters()) == []
        assert module.weight is None
    assert FusedLayerNorm(5, elementwise_affine=False).bias is None
    assert FusedLayerNorm(5, bias=False).bias is None


@pytest.mark.parametrize("kind", [MixedFusedLayerNorm, MixedFusedRMSNorm])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mixed_takes_any_input(kind, dtype, device):
    module = kind(9).to(device)
    x = torch.randn(4, 9, device=device, dtype=dtype, requires_grad=True)
    y = module(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert (x.grad.dtype, module.weight.grad.dtype) == (dtype, torch.float32)


def test_a_mixed_norm_whose_weight_was_taken_away_does_not_forget_its_bias():
    module = MixedFusedLayerNorm(8)
    module.weight = None
    for x in (torch.randn(2, 8), torch.nn.Parameter(torch.randn(2, 8))):
        with pytest.raises(ValueError, match="a bias was given without a weight"):
            module(x)


@pytest.mark.parametrize("kind", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_mixed_keywords(kind):
    with pytest.warns(UserWarning, match="elementwise_affine is always True"):
        kind(5, elementwise_affine=True)
    with (
        pytest.warns(UserWarning, match="elementwise_affine is always True"),
        pytest.raises(RuntimeError, match="elementwise_affine=False use Fused"),
    ):
        kind(5, elementwise_affine=False)
    with pytest.warns(UserWarning, match="ignored the keywords sequence_parallel"):
        kind(5, sequence_parallel=True)
    assert kind(5, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="no bias"):
        MixedFusedRMSNorm(5, bias=True)


@pytest.mark.parametrize("kind", MODULES)
def test_meta_and_deferred_initialization(kind):
    module = kind(7, device="meta") if "Mixed" not in kind.__name__ else kind(7).to("meta")
    assert module(torch.empty(3, 7, device="meta")).shape == (3, 7)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(7))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("shape", [(), 0, (3, 0), -1], ids=str)
def test_bad_shapes_are_refused(kind, shape):
    text = rf"^{kind.__name__}: normalized_shape must name at least one dimension"
    with pytest.raises(ValueError, match=text):
        kind(shape)
    with pytest.raises(TypeError, match=rf"^{kind.__name__}: normalized_shape must be an int or"):
        kind(0.5)


@pytest.mark.parametrize("kind", MODULES)
def test_errors_name_the_module(kind):
    """Not the function behind it, which the caller did not call."""
    modules = [kind(7)]
    if "Mixed" not in kind.__name__:
        modules.append(kind(7, elementwise_affine=False))
    for module in modules:
        with pytest.raises(ValueError, match=rf"^{kind.__name__}: normalized_shape is \[7\], but "):
            module(torch.randn(3, 6))
        with pytest.raises(TypeError, match=rf"^{kind.__name__}: input must be a float64, "):
            module(torch.ones(3, 7, dtype=torch.int64))


@pytest.mark.parametrize("shape", [numpy.int64(5), [numpy.int64(5)], torch.tensor(5)], ids=repr)
def test_shapes_of_integers(shape, device):
    """Whatever is an index, as with torch's modules."""
    x = torch.randn(2, 5, device=device)
    module = FusedLayerNorm(shape, device=device)
    assert module.normalized_shape == (5,)
    assert torch.equal(fused_layer_norm.fused_layer_norm(x, shape, 1e-5), module(x))


def test_shapes_of_something_else_are_refused():
    with pytest.raises(TypeError, match="must be an int or a sequence of ints, got float"):
        FusedLayerNorm(5.0)


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
def test_bad_eps_is_refused(eps):
    with pytest.raises(ValueError, match="FusedLayerNorm: eps must be finite and not negative"):
        FusedLayerNorm(5, eps=eps)


@pytest.mark.parametrize("kind", MODULES)
def test_sequence_parallel_mark(kind):
    """By which Megatron's and Apex's trainers find the gradients to sum over tensor ranks."""
    for enabled in (False, True):
        module = kind(5, sequence_parallel_enabled=enabled)
        assert module.sequence_parallel_enabled is enabled
        for parameter in module.parameters():
            assert parameter.sequence_parallel_enabled is enabled
    assert not kind(5).weight.sequence_parallel_enabled


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_sequence_parallel_mark_survives(kind, enabled, monkeypatch):
    """Copies, deferred initialization, and parameters that are assigned; torch copies no marks."""
    make = lambda **options: kind(5, sequence_parallel_enabled=enabled, **options)
    assigned = make()
    assigned.load_state_dict(kind(5).state_dict(), assign=True)
    assigned.weight = torch.nn.Parameter(torch.ones(5))
    swapped = make()
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    swapped.load_state_dict(kind(5).state_dict())
    for module in (
        copy.deepcopy(make()),
        pickle.loads(pickle.dumps(make())),
        make(device="meta").to_empty(device="cpu"),
        torch.nn.Sequential(make().to("meta")).to_empty(device="cpu"),
        make().double(),
        assigned,
        swapped,
    ):
        for parameter in module.parameters():
            assert parameter.sequence_parallel_enabled is enabled


def test_sequence_parallel_marks_of_others_stay():
    module = FusedLayerNorm(5)
    module.weight.sequence_parallel_enabled = True  # as Megatron marks torch's norms
    assert module.double().weight.sequence_parallel_enabled


def test_positions_are_those_of_apex():
    """What is new in the constructors is by keyword only."""
    for kind in (FusedLayerNorm, FusedRMSNorm):
        parameters = list(inspect.signature(kind).parameters.values())
        positions = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positions == ["normalized_shape", "eps", "elementwise_affine", "memory_efficient"]


def test_megatron_finds_memory_efficient():
    """Megatron reads the argument's name from the signature of forward."""
    for name in ("FusedLayerNormAffineFunction", "FusedRMSNormAffineFunction"):
        function = getattr(fused_layer_norm, name)
        assert callable(function.apply)
        assert "memory_efficient" in inspect.getfullargspec(function.forward).args


def test_megatron_calls(device):
    x, weight, bias = (torch.randn(s, device=device) for s in ((4, 6), (6,), (6,)))
    weight.requires_grad_()
    size = torch.Size([6])
    y = fused_layer_norm.FusedLayerNormAffineFunction.apply(x, weight, bias, size, 1e-5, True)
    y.sum().backward()
    assert weight.grad.shape == (6,)
    # Without the last argument, as older versions call it.
    y = fused_layer_norm.FusedRMSNormAffineFunction.apply(x, weight, size, 1e-5)
    y.sum().backward()


def test_gpt_neox_calls(device):
    """It imports the kernel module by name and the functions, and leaves memory_efficient out."""
    legacy = importlib.import_module("fused_layer_norm_cuda")
    assert callable(legacy.forward_affine)
    x, weight = (torch.randn(s, device=device) for s in ((4, 6), (6,)))
    norm = fused_layer_norm.FusedLayerNormAffineFunction
    y = norm.apply(x.requires_grad_(), weight, weight, torch.Size([6]), 1e-5)
    y.sum().backward()
    expected = torch.nn.functional.layer_norm(x, (6,), weight, weight)
    torch.testing.assert_close(y, expected)


def test_exports():
    names = {kind.__name__ for kind in MODULES}
    assert set(apex.normalization.__all__) == names | {
        "Swaps",
        "from_torch",
        "fused_add_layer_norm",
        "fused_add_rms_norm",
    }
    assert fused_layer_norm.supports_custom_op() is True


def test_subclasses_may_override_the_constructor(device):
    """As ColossalAI and Open-Sora do."""

    class Norm(FusedLayerNorm):
        def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True):
            super().__init__(normalized_shape, eps, elementwise_affine)

    x = torch.randn(2, 6, device=device)
    assert torch.equal(Norm(6).to(device)(x), FusedLayerNorm(6).to(device)(x))
