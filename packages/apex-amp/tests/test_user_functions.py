"""Decorators and registrars: the user's own say in casts."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _amp_state, utils, wrap

half, bfloat16, single = torch.float16, torch.bfloat16, torch.float32
DECORATORS = {
    half: (amp.half_function, amp.register_half_function),
    bfloat16: (amp.bfloat16_function, amp.register_bfloat16_function),
    single: (amp.float_function, amp.register_float_function),
}


def dtypes(*args, **kwargs):
    """The dtypes of all arguments; of a list, those of its elements."""
    values = [*args, *kwargs.values()]
    return [
        [v.dtype for v in value] if isinstance(value, list) else value.dtype for value in values
    ]


@pytest.mark.parametrize("dtype", DECORATORS, ids=str)
@pytest.mark.parametrize("source", [half, bfloat16, single, torch.float64], ids=str)
def test_decorators(dtype, source, device):
    function = DECORATORS[dtype][0](dtypes)
    x = torch.ones(2, device=device).to(source)
    n = torch.ones(2, dtype=torch.int32, device=device)
    assert function(x, [x, n], y=x) == [source, [source, torch.int32], source]
    handle = amp.init()
    assert function(x, [x, n], y=x) == [dtype, [dtype, torch.int32], dtype]
    with amp.disable_casts():
        assert function(x) == [source]
    handle._deactivate()
    assert function(x) == [source]
    assert function.__name__ == "dtypes"


def test_promote_function(device):
    function = amp.promote_function(dtypes)
    x = {d: torch.ones(2, device=device).to(d) for d in (half, bfloat16, single, torch.float64)}
    amp.init()
    assert function(x[half], [x[half]]) == [half, [half]]
    assert function(x[half], [x[single]]) == [single, [single]]
    assert function(x[half], y=x[bfloat16]) == [single, single]
    assert function(x[half], y=x[torch.float64]) == [torch.float64, torch.float64]
    assert function(torch.ones(1, dtype=torch.int32)) == [torch.int32]


def test_decorated_functions_keep_gradients(device):
    x = torch.ones(2, device=device, requires_grad=True)
    amp.init()
    amp.half_function(lambda x: x * 2)(x).float().sum().backward()
    assert x.grad.dtype is single
    assert x.grad.tolist() == [2.0, 2.0]


def test_what_a_decorated_function_calls_still_casts(device):
    linear = nn.Linear(4, 4).to(device)
    amp.init()
    assert amp.half_function(linear.forward)(torch.ones(2, 4, device=device)).dtype is half


@pytest.mark.parametrize("dtype", DECORATORS, ids=str)
def test_registrars(dtype):
    module = types.SimpleNamespace(function=dtypes)
    DECORATORS[dtype][1](module, "function")
    assert module.function is dtypes
    handle = amp.init()
    assert module.function(torch.ones(1, dtype=torch.float64)) == [dtype]
    handle._deactivate()
    assert module.function is dtypes
    amp.init()
    assert module.function is dtypes  # a registration serves the next init


def test_registered_promotion():
    module = types.SimpleNamespace(function=dtypes)
    amp.register_promote_function(module, "function")
    amp.init()
    assert module.function(torch.ones(1), torch.ones(1, dtype=half)) == [single, single]


@pytest.mark.parametrize("register", [r for _, r in DECORATORS.values()])
def test_unknown_names(register):
    with pytest.raises(ValueError, match="no_such_function"):
        register(torch, "no_such_function")


def test_legacy_scripts_initialize_again():
    """A registration stays in force while casts do, through any number of initializations."""
    plain = torch.sigmoid
    amp.register_float_function(torch, "sigmoid")
    x = torch.ones(2, dtype=half)
    for _ in range(3):
        amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
        assert torch.sigmoid(x).dtype is single
        assert F.binary_cross_entropy(torch.sigmoid(x), x.float()).dtype is single
    _amp_state.handle._deactivate()
    assert torch.sigmoid is plain
    assert torch.sigmoid(x).dtype is half


@pytest.mark.parametrize(
    ("register", "module", "name", "expected"),
    [
        (amp.register_float_function, torch, "matmul", single),
        (amp.register_float_function, torch.Tensor, "matmul", single),
        (amp.register_half_function, F, "softmax", half),
        (amp.register_bfloat16_function, F, "linear", bfloat16),
    ],
)
def test_the_users_word_counts_for_torchs_functions(register, module, name, expected):
    register(module, name)
    x = torch.ones(2, 2)
    call = getattr(module, name)
    amp.init()
    arguments = (x, -1) if name == "softmax" else (x, x)
    assert getattr(module, name)(*arguments).dtype is expected
    _amp_state.handle._deactivate()
    assert getattr(module, name) is call


def test_inherited_methods_are_uninherited_again():
    assert "sigmoid" not in vars(torch.Tensor)
    amp.register_float_function(torch.Tensor, "sigmoid")
    amp.init()
    assert torch.ones(1, dtype=half).sigmoid().dtype is single
    _amp_state.handle._deactivate()
    assert "sigmoid" not in vars(torch.Tensor)


def test_decorated_functions_compile():
    module = nn.Linear(4, 4)
    function = amp.float_function(lambda x: x * 2)
    model = amp.initialize(module, opt_level="O1", verbosity=0)
    compiled = torch.compile(lambda x: function(model(x)), fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2, 4)).dtype is single


class Methods:
    @staticmethod
    def static(x):
        return x.dtype

    @classmethod
    def of_class(cls, x):
        return cls, x.dtype


class Derived(Methods):
    pass


def calls(cls, x):
    """What a class and its instances give."""
    values = [f(x) for f in (cls.static, cls().static, cls.of_class, cls().of_class)]
    assert values[0] is values[1]
    assert values[2] == values[3]
    return values[0], values[2]


@pytest.mark.parametrize("owner", [Methods, Derived], ids=["own", "inherited"])
def test_registered_static_and_class_methods(owner):
    x, before = torch.ones(1, dtype=half), dict(vars(owner))
    for name in ("static", "of_class"):
        amp.register_float_function(owner, name)
    handle = amp.init()
    assert calls(owner, x) == (single, (owner, single))
    assert calls(Derived, x) == (single, (Derived, single))
    handle._deactivate()
    assert calls(owner, x) == (half, (owner, half))
    assert dict(vars(owner)) == before


@pytest.mark.parametrize("owner", [Methods, Derived], ids=["own", "inherited"])
def test_wrapped_static_and_class_methods(owner):
    x, before = torch.ones(1, dtype=half), dict(vars(owner))
    handle = amp.init()
    for name in ("static", "of_class"):
        wrap.cached_cast(owner, name, utils.maybe_float, handle)
    assert calls(owner, x) == (single, (owner, single))
    handle._deactivate()
    assert calls(owner, x) == (half, (owner, half))
    assert dict(vars(owner)) == before
