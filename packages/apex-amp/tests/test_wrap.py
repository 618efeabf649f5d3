"""Wrappers and helpers that scripts import from apex.amp.wrap, utils, compat and rnn_compat."""

import types

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import compat, rnn_compat, utils, wrap

half, bfloat16, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
CASTS = {half: utils.maybe_half, bfloat16: utils.maybe_bfloat16, single: utils.maybe_float}


def dtypes(*args, **kwargs):
    values = [*args, *kwargs.values()]
    return [[i.dtype for i in v] if isinstance(v, (list, tuple)) else v.dtype for v in values]


def module_of(function=dtypes):
    return types.SimpleNamespace(function=function)


def ones(dtype, device="cpu"):
    return torch.ones(2, device=device).to(dtype)


@pytest.mark.parametrize("dtype", CASTS, ids=str)
def test_casts_of_one_value(dtype, device, capsys):
    cast = CASTS[dtype]
    for source in (half, bfloat16, single, double):
        x = ones(source, device)
        assert cast(x).dtype is dtype
        assert (cast(x) is x) == (source is dtype)
    n = torch.ones(2, dtype=torch.int32)
    assert cast(n) is n
    nested = cast([x, (x, n)])
    assert dtypes(nested[0], nested[1]) == [dtype, [dtype, torch.int32]]
    assert capsys.readouterr().out == ""
    cast(x, "name", verbose=True)
    assert "float64->" in capsys.readouterr().out


def test_questions_about_values():
    x, n, p = ones(half), torch.ones(1, dtype=torch.int32), nn.Parameter(ones(single))
    assert [utils.is_nested(v) for v in ([], (), {}, x)] == [True, True, False, False]
    assert [utils.is_fp_tensor(v) for v in (x, n, [x, (x,)], [x, n], 1.0)] == [
        *(True, False, True, False, False)
    ]
    assert [utils.should_cache(v) for v in (p, [p, p], [p, x], x, nn.Parameter(x))] == [
        *(True, True, False, False, False)
    ]
    types_found = utils.collect_fp_tensor_types((x, n, [p, x]), {"a": ones(bfloat16), "b": 3})
    assert types_found == ["HalfTensor", "FloatTensor", "BFloat16Tensor"]
    assert utils.type_string(n) == "IntTensor"
    kwargs = {"a": x, "b": n}
    assert utils.casted_args(utils.maybe_float, (x, 3, [x]), kwargs)[1] == 3
    assert dtypes(*kwargs.values()) == [single, torch.int32]
    assert list(utils.as_inplace(["exp", "log"])) == ["exp_", "log_"]
    assert utils.is_cuda_enabled() == (torch.version.cuda is not None)
    version = utils.get_cuda_version()
    assert version is None or version[0] >= 9


@pytest.mark.parametrize("make", [dict, lambda **kw: types.SimpleNamespace(**kw)])
def test_functions_by_name(make):
    mod = make(function=dtypes)
    handle = amp.init()
    assert utils.has_func(mod, "function")
    assert not utils.has_func(mod, "other")
    utils.set_func_save(handle, mod, "function", len)
    assert utils.get_func(mod, "function") is len
    handle._deactivate()
    assert utils.get_func(mod, "function") is dtypes


def test_inherited_functions_are_uninherited_again():
    class Base:
        function = staticmethod(dtypes)

    class Derived(Base):
        pass

    handle = amp.init()
    wrap.cached_cast(Derived, "function", utils.maybe_half, handle)
    assert Derived.function(ones(single)) == [half]
    handle._deactivate()
    assert "function" not in vars(Derived)


def test_cast_wrapper(capsys):
    handle, mod = amp.init(), module_of()
    wrap.cached_cast(mod, "function", utils.maybe_bfloat16, handle, verbose=True)
    wrap.cached_cast(mod, "no_such_function", utils.maybe_half, handle)
    x, n = ones(single), torch.ones(1, dtype=torch.int32)
    assert mod.function(x, [x, x], [x, n], y=x) == [
        *(bfloat16, [bfloat16, bfloat16], [single, torch.int32], bfloat16)
    ]
    assert "float32->bfloat16 (function)" in capsys.readouterr().out
    with amp.disable_casts():
        assert mod.function(x) == [single]
    handle._deactivate()
    assert mod.function is dtypes


class TestCache:
    """A hit is the very tensor; everything that makes it wrong makes it a miss."""

    def setup_method(self):
        self.handle, self.mod = amp.init(), module_of(lambda x: x)
        wrap.cached_cast(self.mod, "function", utils.maybe_half, self.handle, try_caching=True)
        self.param = nn.Parameter(ones(single))

    def cast(self):
        return self.mod.function(self.param)

    def test_hit(self):
        first = self.cast()
        assert self.cast() is first
        assert list(self.handle.cache) == [self.param]
        (both,) = {id(x) for x in self.mod.function([self.param, self.param])}
        assert both == id(first)
        first.float().sum().backward()
        assert self.param.grad is not None

    def test_evaluation_then_training(self):
        with torch.no_grad():
            first = self.cast()
            assert not first.requires_grad
            assert self.cast() is first
        assert self.cast().requires_grad
        with torch.no_grad():
            assert self.cast().requires_grad  # a graph that nobody uses does no harm

    def test_frozen_and_unfrozen(self):
        self.cast()
        self.param.requires_grad_(False)
        assert not self.cast().requires_grad
        self.param.requires_grad_(True)
        assert self.cast().requires_grad

    def test_changed_in_place(self):
        self.cast()
        with torch.no_grad():
            self.param.mul_(3)
        assert self.cast().tolist() == [3.0, 3.0]

    def test_optimizer_step(self):
        self.cast().float().sum().backward()
        torch.optim.SGD([self.param], lr=1.0).step()
        assert self.cast().tolist() == [0.0, 0.0]

    def test_scale_loss_clears(self):
        optimizer = torch.optim.SGD([self.param], lr=0.0)
        _, optimizer = amp.initialize(nn.Linear(1, 1), optimizer, verbosity=0)
        cache = amp._amp_state.handle.cache
        cache[self.param] = self.param.half()
        with amp.scale_loss(self.param.sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert cache == {}
        cache[self.param] = self.param.half()
        optimizer.step()
        assert cache == {}

    def test_casts_of_others_are_noticed(self):
        self.handle.cache[self.param] = nn.Parameter(ones(single)).half()
        with pytest.raises(RuntimeError, match="another tensor"):
            self.cast()

    def test_what_needs_no_cast_is_not_kept(self):
        cache = {}
        param = nn.Parameter(ones(single))
        assert utils.cached_cast(utils.maybe_float, param, cache) is param
        assert cache == {}

    def test_no_cache(self):
        handle = amp.init(enable_caching=False)
        mod = module_of(lambda x: x)
        wrap.cached_cast(mod, "function", utils.maybe_half, handle, try_caching=True)
        assert mod.function(self.param) is not mod.function(self.param)
        assert handle.cache == {}


PROMOTIONS = [
    ((half, half), half),
    ((half, single), single),
    ((bfloat16, single), single),
    ((half, bfloat16), single),
    ((half, bfloat16, double), double),
]


@pytest.mark.parametrize(("given", "expected"), PROMOTIONS, ids=str)
def test_promote(given, expected, capsys):
    handle, mod = amp.init(), module_of()
    wrap.promote(mod, "function", handle)
    tensors = [ones(d) for d in given]
    assert mod.function(*tensors[:-1], y=tensors[-1]) == [expected] * len(given)
    with amp.disable_casts():
        assert mod.function(*tensors) == list(given)
    always = wrap.make_promote_wrapper(dtypes, utils.maybe_float)
    handle._deactivate()
    assert mod.function is dtypes
    assert always(*tensors) == [expected] * len(given)


@pytest.mark.parametrize(("given", "expected"), PROMOTIONS, ids=str)
def test_sequence_promote(given, expected):
    handle, mod = amp.init(), module_of()
    wrap.sequence_promote(mod, "function", handle)
    tensors = [ones(d) for d in given]
    assert mod.function(tensors, ones(half)) == [[expected] * len(given), half]
    with amp.disable_casts():
        assert mod.function(tensors) == [list(given)]


def test_match_the_first():
    handle, mod = amp.init(), module_of()
    wrap.promote_match_arg0(mod, "function", handle)
    wrap.promote_match_arg0(mod, "no_such_function", handle)
    for first in (half, bfloat16, single):
        for second in (half, bfloat16, single):
            assert mod.function(ones(first), ones(second), y=ones(second)) == [first] * 3
    assert mod.function(ones(double), ones(half)) == [double, half]
    with pytest.raises(TypeError, match="got int"):
        mod.function(1)
    with amp.disable_casts():
        assert mod.function(ones(half), ones(single)) == [half, single]


@pytest.mark.parametrize("lower", [half, bfloat16], ids=str)
def test_refusing_wrappers(lower):
    handle, first, anywhere = amp.init(), module_of(), module_of()
    wrap.err_if_arg0_half(first, "function", handle)
    wrap.err_if_any_half(anywhere, "function", handle)
    for make in (wrap.err_if_arg0_half, wrap.err_if_any_half, wrap.disable_casts):
        make(first, "no_such_function", handle)
    assert first.function(ones(single), ones(lower)) == [single, single]
    assert anywhere.function(ones(single), y=ones(double)) == [single, double]
    for call in (
        lambda: first.function(ones(lower)),
        lambda: anywhere.function(ones(single), y=[ones(lower)]),
    ):
        with pytest.raises(NotImplementedError, match="function computes in float32"):
            call()
        with amp.disable_casts():
            call()
    wrap.err_if_any_half(anywhere, "function", handle, custom_err_msg="not this one")
    with pytest.raises(NotImplementedError, match="not this one"):
        anywhere.function(ones(lower))


def test_wrapper_without_casts():
    handle, mod = amp.init(), module_of(lambda x: x @ x)
    wrap.disable_casts(mod, "function", handle)
    assert mod.function(torch.ones(2, 2)).dtype is single


def test_compat():
    assert (compat.variable_is_tensor(), compat.tensor_is_variable()) == (True, False)
    assert compat.tensor_is_float_tensor() is False
    assert [compat.is_tensor_like(v) for v in (ones(half), [1.0])] == [True, False]
    assert [compat.is_floating_point(v) for v in (ones(half), torch.ones(1).int(), 1.0)] == [
        *(True, False, False)
    ]
    assert compat.scalar_python_val(torch.tensor([2.5])) == 2.5
    assert compat.scalar_python_val([3]) == 3
    assert compat.filter_attrs(torch, ["exp", "no_such_function"]) == ["exp"]


def test_recurrent_functions_can_be_replaced(monkeypatch):
    assert rnn_compat.RNN_NAMES == ["rnn_relu", "rnn_tanh", "gru", "lstm"]
    assert not rnn_compat.has_old_rnns()
    shim = rnn_compat.VariableFunctionsShim()
    monkeypatch.setattr(torch.nn.modules.rnn, "_VF", shim)
    handle = amp.init(device_types=["cpu"])
    for name in rnn_compat.RNN_NAMES:
        wrap.cached_cast(shim, name + "_cell", utils.maybe_bfloat16, handle)
    seen = []
    inner = shim.gru_cell
    shim.gru_cell = lambda *args: seen.append(1) or inner(*args)
    assert nn.GRUCell(2, 2)(torch.ones(1, 2)).dtype is half  # the dispatcher has the last word
    assert seen == [1]
    assert nn.LSTM(2, 2)(torch.ones(1, 1, 2))[0].dtype is half
