"""Every function of the cast lists: dtypes of the result and of the gradient under O1 and O4."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from apex import amp
from apex.amp.casting.functions import cast_functions
from apex.amp.casting.rules import cast_rules
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

half, bfloat16, single = torch.float16, torch.bfloat16, torch.float32
LEVELS = {"O1": half, "O4": bfloat16}

# How to call each function of x, a [4, 4] tensor of values in [0.1, 0.9]. Other arguments are in
# x's dtype or in float32, whichever plain torch would refuse or round.


def w(x, *shape, dtype=None):
    """Ones of a shape, in x's dtype or another."""
    return torch.ones(shape, device=x.device, dtype=dtype or x.dtype)


def index(x, *shape):
    return torch.zeros(shape, dtype=torch.long, device=x.device)


def sign(x):
    return w(x, 4, dtype=single)


def ctc(x):
    targets = torch.ones(1, 1, dtype=torch.long, device=x.device)
    return F.ctc_loss(x.unsqueeze(1), targets, torch.tensor([4]), torch.tensor([1]))


FUNCTIONAL = {
    "conv1d": lambda x: F.conv1d(x.unsqueeze(0), w(x, 4, 4, 3, dtype=single)),
    "conv2d": lambda x: F.conv2d(x.view(1, 1, 4, 4), w(x, 1, 1, 3, 3, dtype=single)),
    "conv3d": lambda x: F.conv3d(x.view(1, 1, 1, 4, 4), w(x, 1, 1, 1, 3, 3, dtype=single)),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x.unsqueeze(0), w(x, 4, 4, 3, dtype=single)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(
        x.view(1, 1, 4, 4), w(x, 1, 1, 3, 3, dtype=single)
    ),
    "conv_transpose3d": lambda x: F.conv_transpose3d(
        x.view(1, 1, 1, 4, 4), w(x, 1, 1, 1, 3, 3, dtype=single)
    ),
    "conv_tbc": lambda x: F.conv_tbc(
        x.unsqueeze(1), w(x, 3, 4, 2, dtype=single), w(x, 2, dtype=single)
    ),
    "linear": lambda x: F.linear(x, w(x, 4, 4, dtype=single)),
    "interpolate": lambda x: F.interpolate(x.view(1, 1, 4, 4), scale_factor=2.0, mode="bilinear"),
    "grid_sample": lambda x: F.grid_sample(
        x.view(1, 1, 4, 4), w(x, 1, 2, 2, 2), align_corners=False
    ),
    "softplus": F.softplus,
    "softmin": lambda x: F.softmin(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmax": lambda x: F.softmax(x, -1),
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, (4,), w(x, 4, dtype=single)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "local_response_norm": lambda x: F.local_response_norm(x.unsqueeze(0), 2),
    "normalize": F.normalize,
    "cosine_similarity": lambda x: F.cosine_similarity(x, w(x, 4, 4)),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, w(x, 4, 4)),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, w(x, 4, 4), sign(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, index(x, 4)),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, sign(x)),
    "kl_div": lambda x: F.kl_div(x, w(x, 4, 4), reduction="batchmean"),
    "l1_loss": lambda x: F.l1_loss(x, w(x, 4, 4)),
    "mse_loss": lambda x: F.mse_loss(x, w(x, 4, 4)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x.select(0, 0), w(x, 4), sign(x)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, index(x, 4, 4)),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, w(x, 4, 4)),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, index(x, 4)),
    "nll_loss": lambda x: F.nll_loss(x, index(x, 4)),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, w(x, 4, 4)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, w(x, 4, 4)),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, w(x, 4, 4)),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, w(x, 4, 4), -x),
    "ctc_loss": ctc,
}
# Functions of torch that are methods, too, and operators: all arguments.
TORCH = {
    "conv1d": lambda x: (x.unsqueeze(0), w(x, 4, 4, 3, dtype=single)),
    "conv2d": lambda x: (x.view(1, 1, 4, 4), w(x, 1, 1, 3, 3, dtype=single)),
    "conv3d": lambda x: (x.view(1, 1, 1, 4, 4), w(x, 1, 1, 1, 3, 3, dtype=single)),
    "conv_transpose1d": lambda x: (x.unsqueeze(0), w(x, 4, 4, 3, dtype=single)),
    "conv_transpose2d": lambda x: (x.view(1, 1, 4, 4), w(x, 1, 1, 3, 3, dtype=single)),
    "conv_transpose3d": lambda x: (x.view(1, 1, 1, 4, 4), w(x, 1, 1, 1, 3, 3, dtype=single)),
    "conv_tbc": lambda x: (x.unsqueeze(1), w(x, 3, 4, 2, dtype=single), w(x, 2, dtype=single)),
    "prelu": lambda x: (x, w(x, 1, dtype=single)),
    "addmm": lambda x: (x, w(x, 4, 4, dtype=single), w(x, 4, 4)),
    "addmv": lambda x: (x.select(0, 0), w(x, 4, 4, dtype=single), w(x, 4)),
    "addr": lambda x: (x, w(x, 4, dtype=single), w(x, 4)),
    "matmul": lambda x: (x, w(x, 4, 4, dtype=single)),
    "__matmul__": lambda x: (x, w(x, 4, 4, dtype=single)),
    "mm": lambda x: (x, w(x, 4, 4, dtype=single)),
    "mv": lambda x: (x, w(x, 4, dtype=single)),
    "addbmm": lambda x: (x, w(x, 2, 4, 4, dtype=single), w(x, 2, 4, 4)),
    "baddbmm": lambda x: (x.unsqueeze(0), w(x, 1, 4, 4, dtype=single), w(x, 1, 4, 4)),
    "bmm": lambda x: (x.unsqueeze(0), w(x, 1, 4, 4, dtype=single)),
    **{name: lambda x: (x, 2) for name in ("pow", "__pow__", "__ipow__", "__rpow__")},
    **{name: lambda x: (x, 0) for name in ("cumprod", "cumsum")},
    "dist": lambda x: (x, w(x, 4, 4)),
    "renorm": lambda x: (x, 2, 0, 1.0),
    "addcdiv": lambda x: (x, w(x, 4, 4, dtype=single), w(x, 4, 4)),
    "addcmul": lambda x: (x, w(x, 4, 4), w(x, 4, 4, dtype=single)),
    "cross": lambda x: (x.narrow(1, 0, 3), w(x, 4, 3, dtype=single)),
    "bilinear": lambda x: (x, w(x, 4, 4), w(x, 2, 4, 4, dtype=single)),
    "dot": lambda x: (x.select(0, 0), w(x, 4, dtype=single)),
    "cat": lambda x: ([x, w(x, 4, 4, dtype=single)],),
    "stack": lambda x: ([w(x, 4, 4, dtype=single), x],),
}
UNARY = {"acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal"} | {
    *("rsqrt", "sinh", "tan", "norm", "prod", "std", "sum", "var", "cpu")
}
COMPARISONS = {"eq", "equal", "ge", "gt", "le", "lt", "ne"}
LISTS = {
    "FP16_FUNCS": "lower",
    "FP32_FUNCS": "single",
    "CASTS": "widest",
    "SEQUENCE_CASTS": "widest",
}


def cases():
    for module in (functional_overrides, torch_overrides, tensor_overrides):
        for name_of_list, kind in LISTS.items():
            for name in getattr(module, name_of_list, ()):
                yield pytest.param(module, name, kind, id=f"{module.MODULE.__name__}.{name}")


def call(module, name, x, partner=(4, 4)):
    """``partner``: the shape of the second tensor, of functions of any two."""
    if module is functional_overrides:
        return FUNCTIONAL[name](x)
    if name in UNARY:
        arguments = (x,)
    elif name in TORCH:
        arguments = TORCH[name](x)
    else:  # two tensors of different dtypes
        arguments = x, w(x, *partner, dtype=single)
    return getattr(module.MODULE, name)(*arguments)


def expected_dtype(name, kind, level):
    if kind == "widest" and name.strip("_") in COMPARISONS:
        return torch.bool
    return LEVELS[level] if kind == "lower" else single


def sample(device, dtype):
    return torch.linspace(0.1, 0.9, 16, device=device).view(4, 4).to(dtype)


@pytest.mark.filterwarnings("ignore:Using torch.cross without")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("module", "name", "kind"), list(cases()))
def test_dtypes_of_results_and_gradients(module, name, kind, level, device):
    amp.init(patch_type=LEVELS[level])
    expected = expected_dtype(name, kind, level)
    is_in_place = name.startswith("__i")
    for source in (half, bfloat16, single):
        x = sample(device, source)
        result = call(module, name, x.clone())
        if name == "equal":
            assert result is False
            continue
        assert result.dtype is expected
        assert call(module, name, x.clone(), partner=()).dtype is expected
        assert result.device.type == ("cpu" if name == "cpu" else device.type)
        if expected is not torch.bool and not is_in_place:
            x.requires_grad_()
            call(module, name, x).float().sum().backward()
            assert x.grad.dtype is source


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test above runs on the GPU itself")
@pytest.mark.filterwarnings("ignore:Using torch.cross without")
@pytest.mark.parametrize("level", LEVELS)
def test_dtypes_on_a_gpu_that_is_not_there(level):
    """Fake tensors of a GPU go through its autocast; only results without kernels are computed."""
    need_a_gpu = {"ctc_loss", "grid_sample", "equal"}
    torch.set_autocast_dtype("cuda", LEVELS[level])
    torch.set_autocast_enabled("cuda", True)
    wrong = []
    try:
        with cast_rules(["cuda"], allow_banned=False), cast_functions(), FakeTensorMode():
            for module, name, kind in (case.values for case in cases()):
                for source in (half, bfloat16, single) if name not in need_a_gpu else ():
                    x = torch.empty(4, 4, device="cuda", dtype=source)
                    for partner in ((4, 4), ()):
                        dtype = call(module, name, x, partner).dtype
                        if dtype is not expected_dtype(name, kind, level):
                            wrong.append((name, source, partner, dtype))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert wrong == []


def test_every_listed_function_is_tested():
    """The lists name no more and no less than amp has promised since its first release."""
    sizes = {
        (functional_overrides, "FP16_FUNCS"): 8,
        (functional_overrides, "FP32_FUNCS"): 29,
        (functional_overrides, "BANNED_FUNCS"): 1,
        (torch_overrides, "FP16_FUNCS"): 17,
        (torch_overrides, "FP32_FUNCS"): 23,
        (torch_overrides, "CASTS"): 16,
        (torch_overrides, "SEQUENCE_CASTS"): 2,
        (tensor_overrides, "FP16_FUNCS"): 11,
        (tensor_overrides, "FP32_FUNCS"): 27,
    }
    for (module, name), size in sizes.items():
        assert len(set(getattr(module, name))) == len(getattr(module, name)) == size, name
    for module in (functional_overrides, torch_overrides, tensor_overrides):
        assert module.BFLOAT16_FUNCS == module.FP16_FUNCS
        assert module.BFLOAT16_FUNCS is not module.FP16_FUNCS
    operators = [name for name in tensor_overrides.CASTS if name.startswith("__")]
    assert len(tensor_overrides.CASTS) == len(operators) + 15  # of 16, bilinear is no method
    assert {"__add__", "__rtruediv__", "__imul__", "__ne__"} <= set(operators)
