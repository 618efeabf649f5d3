"""When a call is plain, and that the functions of plain calls are those of all others."""

import contextlib
import copy
import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import func
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

SHARED = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SHARED.parent))
sys.path.insert(0, str(SHARED / "tests"))

from formula_case import CASE, formula  # noqa: E402

from shared_csrc.native import formula as formulas  # noqa: E402
from shared_csrc.native.composed import Composed  # noqa: E402
from shared_csrc.native.plain import (  # noqa: E402
    NOT_PLAIN,
    WITH_GRADIENT,
    WITHOUT_GRADIENT,
    explain,
    plainness,
)


class Subclass(torch.Tensor):
    pass


def seen_by(context):
    """What plainness() answers of a tensor within a context."""
    x = torch.ones(2)
    with context:
        return plainness(x)


def seen_in(transform):
    """The same within a transform of functions of one tensor."""
    seen = []

    def function(x):
        seen.append(plainness(x))
        return x.sum()

    transform(function)(torch.ones(2))
    return seen[0]


def test_plain_tensors():
    x, wanting = torch.ones(2), torch.ones(2, requires_grad=True)
    assert plainness(x, None) == WITHOUT_GRADIENT
    assert plainness(x, None, wanting) == WITH_GRADIENT
    assert plainness(torch.nn.Parameter(x)) == WITH_GRADIENT
    assert plainness() == WITHOUT_GRADIENT
    with torch.no_grad():
        assert plainness(wanting) == WITHOUT_GRADIENT
    with torch.inference_mode():
        assert plainness(torch.ones(2)) == WITHOUT_GRADIENT


@pytest.mark.parametrize("other", [torch.ones(2).as_subclass(Subclass), 1.0, [torch.ones(2)]])
def test_something_else_is_not_plain(other):
    assert plainness(torch.ones(2), other) == NOT_PLAIN


def test_fake_tensors_are_not_plain():
    from torch._subclasses import FakeTensorMode

    assert plainness(FakeTensorMode().from_tensor(torch.ones(2))) == NOT_PLAIN


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cuda", torch.bfloat16),
        lambda: forward_ad.dual_level(),
        lambda: TorchDispatchMode(),
    ],
    ids=["autocast of the CPU", "autocast of a GPU", "forward mode", "dispatch mode"],
)
@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_contexts_that_are_not_plain(context):
    context = context()
    is_none = getattr(context, "_enabled", True) is False  # autocast of a GPU that is not there
    assert seen_by(context) == (WITHOUT_GRADIENT if is_none else NOT_PLAIN)
    assert plainness(torch.ones(2)) == WITHOUT_GRADIENT


@pytest.mark.parametrize(
    "transform",
    [
        func.grad,
        func.vmap,
        lambda f: lambda x: func.jvp(f, (x,), (x,)),
        lambda f: lambda x: torch.jit.trace(f, x),
        lambda f: torch.fx.experimental.proxy_tensor.make_fx(f),
    ],
    ids=["grad", "vmap", "jvp", "jit.trace", "make_fx"],
)
def test_within_transforms_nothing_is_plain(transform):
    assert seen_in(transform) == NOT_PLAIN
    assert plainness(torch.ones(2)) == WITHOUT_GRADIENT


def test_what_a_transform_left_is_not_plain():
    left = []
    func.grad(lambda x: left.append(2 * x) or x.sum())(torch.ones(2))
    assert plainness(left[0]) == NOT_PLAIN
    weight = torch.randn(2)
    expected = formula(torch.full((2,), 2.0), weight, 0.5)
    torch.testing.assert_close(formula(left[0], weight, 0.5), expected)


def test_compiled_code_is_not_plain():
    compiled = torch.compile(lambda x: x + plainness(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2) + NOT_PLAIN)


def calls_of(function):
    """How many functions of Python a call enters."""
    function()
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    function()
    sys.setprofile(None)
    return count


def test_python_calls():
    """Of a formula: the call, the question, its compiler's; then forward. A backward is one."""
    x, weight, scale = CASE.arguments(torch.float32, "cpu")
    of_kernel = calls_of(lambda: formula.forward._op(x, weight, scale)) - 1
    assert calls_of(lambda: formula(x, weight, scale)) - 1 - of_kernel == 4
    (y, z), mean = formula(x.requires_grad_(), weight, scale), x.mean(-1)
    assert calls_of(lambda: formula(x, weight, scale)) - 1 - of_kernel == 4
    of_kernel = calls_of(lambda: formula.backward._op(y, z, x, weight, mean, scale)) - 1
    differentiate = lambda y: torch.autograd.grad(y, x, y.detach(), retain_graph=True)
    assert calls_of(lambda: differentiate(y)) - calls_of(lambda: differentiate(2 * x)) == (
        1 + of_kernel
    )


def test_compilers_trace_the_backward_of_all_calls():
    x, weight, scale = CASE.arguments(torch.float32, "cpu")
    x.requires_grad_()
    expected = torch.autograd.grad(formula(x, weight, scale)[0].sum(), x)[0]
    y = formula(x, weight, scale)[0].sum()
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        y.backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])
def test_same_bits_as_other_calls(wanted, used):
    arguments = CASE.arguments(torch.float32, "cpu")
    found = []
    for serve in (formula, formula._apply):
        x, weight = (a.clone().requires_grad_(w) for a, w in zip(arguments, wanted, strict=False))
        outputs = serve(x, weight, arguments[2])
        sum(outputs[i].sum() for i in used).backward()
        found.append([*outputs, x.grad, weight.grad])
    for of_plain, of_other in zip(*found, strict=True):
        assert (of_plain is None) == (of_other is None)
        assert of_plain is None or torch.equal(of_plain, of_other)


def test_copies_keep_their_functions():
    """Those of a formula from its output are its own."""
    twin = copy.copy(formula)
    twin._differentiate(None)
    assert twin.plain[WITH_GRADIENT] is not formula.plain[WITH_GRADIENT]


def test_composed_without_kept_results():
    """A view that an autograd function returns could not be changed in place."""
    identity = Composed(
        "identity",
        lambda _, x: (x.clone().view(x.shape),),
        lambda _, needs, dy, saved: [dy],
        lambda _, x: x.clone(),
        output=lambda x: x.clone().view(x.shape),
    )
    x = torch.ones(2, requires_grad=True)
    y = identity(None, x)
    y.mul_(3).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_explained_errors():
    def check(x):
        if x is None:
            raise TypeError("x is None")

    error = torch.OutOfMemoryError("no memory")

    def call(x):
        try:
            raise error
        except RuntimeError:
            explain(check, x)

    with pytest.raises(torch.OutOfMemoryError) as raised:
        call(torch.ones(2))
    assert raised.value is error
    with pytest.raises(TypeError, match="x is None") as raised:
        call(None)
    assert raised.value.__suppress_context__


def test_errors_hold_no_tensors():
    """As soon as an error is dropped, so is what its frames held: memory may be full."""

    def call(x):
        try:
            raise RuntimeError
        except RuntimeError:
            explain(lambda x: None, x)

    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            held = weakref.ref(x := torch.ones(2))
            call(x)
        del x
        assert held() is None
    finally:
        gc.enable()


def test_formulas_ask_once(monkeypatch):
    asked = []
    monkeypatch.setattr(formulas, "plainness", lambda *t: asked.append(t) or plainness(*t))
    x, weight, scale = CASE.arguments(torch.float32, "cpu")
    formula(x, weight, scale)
    assert [[t is x for t in tensors] for tensors in asked] == [[True, False]]
