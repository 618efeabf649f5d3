"""SoftmaxCrossEntropyLoss against F.cross_entropy in float64, over dtypes, shapes and layouts."""

import pytest
import torch
import torch.nn.functional as F

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.contrib.xentropy.ops import softmax_xentropy_backward, softmax_xentropy_forward
from apex_testkit import (
    FLOATS,
    LAYOUTS,
    assert_as_accurate_as,
    assert_compiles,
    assert_same_bits,
    opcheck_samples,
)
from apex_testkit.grids import HALVES, for_gpus

# Rows of one, some and many packs; of a block and of several spans; more rows than a GPU's grid.
SHAPES = {
    "empty": (0, 5),
    "one_class": (3, 1),
    "few": (64, 7),
    "odd": (5, 1027),
    "lm": (5, 32_000),
    "gpt2": (3, 50_257),
    "tall": (65_537, 3),
    **for_gpus(block=(3, 776)),
}
NO_PADDING = None


def inputs(shape, dtype, device):
    """Logits, labels of all classes, and a gradient of the losses."""
    rows, classes = shape
    logits = torch.randn(rows, classes, device=device).mul(3).to(dtype)
    labels = torch.randint(classes, (rows,), device=device)
    return logits, labels, torch.randn(rows, device=device).to(dtype)


def torch_losses(logits, labels, smoothing, padding_idx=NO_PADDING):
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    return losses if padding_idx is None else losses.masked_fill(labels == padding_idx, 0)


def with_grad(losses_of, logits, labels, grad_losses, *options):
    """Losses and the gradient of the logits."""
    logits = logits.detach().requires_grad_()
    losses = losses_of(logits, labels, *options)
    return losses, *torch.autograd.grad(losses, logits, grad_losses)


def formula(logits, labels, grad_losses, smoothing, padding_idx=NO_PADDING):
    """Losses and gradient written out: the oracle of float64.

    F.cross_entropy's own float64 is off by up to 7 ulp in losses and 200 in gradients at 50,257
    classes, measured against 80-bit numbers.
    """
    rows = torch.arange(len(labels), device=labels.device)
    kept = torch.ones_like(labels) if padding_idx is None else labels != padding_idx
    shifted = logits - logits.amax(1, keepdim=True)
    sum_exp = shifted.exp().sum(1)
    nll = sum_exp.log() - shifted[rows, labels]
    smooth = sum_exp.log() - shifted.mean(1)
    target = torch.full_like(logits, smoothing / logits.shape[1])
    target[rows, labels] += 1 - smoothing
    grad = (shifted.exp() / sum_exp[:, None] - target) * (grad_losses * kept)[:, None]
    return ((1 - smoothing) * nll + smoothing * smooth) * kept, grad


def assert_matches_torch(logits, labels, grad_losses, smoothing, padding_idx=NO_PADDING, scale=0.0):
    actual = with_grad(
        SoftmaxCrossEntropyLoss.apply, logits, labels, grad_losses, smoothing, padding_idx
    )
    options = smoothing, padding_idx
    if logits.dtype == torch.float64:
        # Truth rounds as often as we do here: exp, sum, quotient and product.
        reference, ulps = (lambda *args: formula(*args, *options)), 4
    else:
        reference, ulps = (lambda *args: with_grad(torch_losses, *args, *options)), 1
    assert_as_accurate_as(reference, actual, logits, labels, grad_losses, ulps=ulps, scale=scale)
    assert actual[0].dtype == actual[1].dtype == logits.dtype


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_formula_is_torchs(smoothing, device):
    arguments = *inputs((64, 1027), torch.float64, device), smoothing, 5
    torch.testing.assert_close(
        formula(*arguments), with_grad(torch_losses, *arguments), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_matches_torch(shape, dtype, smoothing, device):
    assert_matches_torch(*inputs(shape, dtype, device), smoothing)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(5, 1027), (64, 7), (3, 1)], ids=str)
def test_layouts(shape, dtype, layout, device):
    logits, labels, grads = inputs(shape, dtype, device)
    assert_matches_torch(layout(logits), layout(labels), layout(grads), 0.1)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_to_float(dtype, device):
    """Losses and their gradient are float32; rounding is left to the gradient of the logits."""
    logits, labels, grads = inputs((64, 1027), dtype, device)
    grads = grads.float()
    losses, grad_logits = with_grad(
        SoftmaxCrossEntropyLoss.apply, logits, labels, grads, 0.1, NO_PADDING, True
    )
    assert losses.dtype == torch.float32
    assert grad_logits.dtype == dtype
    reference = lambda *args: with_grad(torch_losses, *args, 0.1)
    assert_as_accurate_as(reference, (losses, grad_logits), logits, labels, grads)


def test_expanded_gradient(device):
    """What sum() and mean() send back is one number for all rows."""
    logits, labels, _ = inputs((9, 100), torch.float32, device)

    def grad_of_mean(losses_of, x):
        return torch.autograd.grad(losses_of(x, labels, 0.1, NO_PADDING).mean(), x)

    actual = grad_of_mean(SoftmaxCrossEntropyLoss.apply, logits.requires_grad_())
    assert_as_accurate_as(lambda x: grad_of_mean(torch_losses, x), actual, logits)


class TestPadding:
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("padding_idx", [0, 3, -100])
    def test_rows_are_left_out(self, padding_idx, dtype, device):
        logits, labels, grads = inputs((64, 7), dtype, device)
        assert_matches_torch(logits, labels, grads, 0.1, padding_idx)

    def test_default_masks_class_0(self, device):
        logits, labels, _ = inputs((64, 7), torch.float32, device)
        losses = SoftmaxCrossEntropyLoss.apply(logits, labels)
        assert torch.equal(losses == 0, labels == 0)

    def test_label_needs_no_class(self, device):
        """As with F.cross_entropy's ignore_index of -100."""
        logits, labels, grads = inputs((8, 7), torch.float32, device)
        labels[::2] = -100
        losses, grad_logits = with_grad(
            SoftmaxCrossEntropyLoss.apply, logits, labels, grads, 0.1, -100
        )
        for values in (losses, grad_logits):
            assert torch.equal(values[::2], torch.zeros_like(values[::2]))
            assert (values[1::2] != 0).all()

    def test_padded_rows_may_hold_anything(self, device):
        logits, labels, grads = inputs((8, 70), torch.float32, device)
        labels[2], labels[3:] = 0, labels[3:].clamp(min=1)
        logits[2] = torch.nan
        losses, grad_logits = with_grad(
            SoftmaxCrossEntropyLoss.apply, logits, labels, grads, 0.1, 0
        )
        assert losses[2] == 0
        assert (grad_logits[2] == 0).all()
        assert losses.isfinite().all()
        assert grad_logits.isfinite().all()


class TestExtremes:
    @pytest.mark.parametrize("offset", [1e4, -1e4])
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_offset_does_not_cancel(self, smoothing, offset, device):
        """Were max and sum one number, an offset of 10^4 would spoil gradients' fourth digit."""
        logits, labels, grads = inputs((16, 512), torch.float32, device)
        assert_matches_torch(logits + offset, labels, grads, smoothing)

    def test_certain_labels(self, device):
        """Where p is nearly 1, loss and gradient are small differences."""
        logits, labels, grads = inputs((64, 33), torch.float32, device)
        logits = logits - 20
        logits[torch.arange(64), labels] = torch.linspace(0, 30, 64, device=device)
        # A GPU's exp errs by more than a rounding, of p as well.
        scale = 1.0 if device.type == "cuda" else 0.0
        assert_matches_torch(logits, labels, grads, 0.0, scale=scale)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("classes", [500, 3000])
    def test_growing_rows(self, classes, dtype, device):
        """Every logit is a new maximum: each step rescales the sum so far."""
        logits = torch.linspace(-60, 60, classes, device=device).to(dtype).repeat(2, 1)
        logits[1] = logits[1].flip(0)
        labels = torch.tensor([0, 5], device=device)
        assert_matches_torch(logits, labels, torch.ones(2, device=device, dtype=dtype), 0.1)

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("where", ["label", "other", "all", "first_block"])
    @pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
    @pytest.mark.parametrize("classes", [200, 700])
    def test_non_finite_logits(self, classes, value, where, smoothing, device):
        """What is inf or NaN is what F.cross_entropy has so; other rows do not notice."""
        logits, labels, grads = inputs((4, classes), torch.float32, device)
        columns = {
            "label": labels[1:2],
            "other": (labels[1:2] + 1) % classes,
            "all": slice(None),
            "first_block": slice(0, 128),
        }
        logits[1, columns[where]] = value
        if where == "first_block":
            labels[1] = 150
        assert_matches_torch(logits, labels, grads, smoothing)

    def test_nan_with_every_bit_set(self, device):
        """The payload of a NaN must not look like a number to the exponent's arithmetic."""
        logits, labels, grads = inputs((2, 200), torch.float32, device)
        logits[1, 7] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
        values = with_grad(SoftmaxCrossEntropyLoss.apply, logits, labels, grads, 0.0, NO_PADDING)
        for value in values:
            assert value[0].isfinite().all()
            assert value[1].isnan().all()


def test_inputs_are_not_written(device):
    """Upstream's backward zeroes the incoming gradient where labels are padding."""
    logits, labels, grads = inputs((8, 70), torch.float32, device)
    labels[::2] = 0
    before = [t.clone() for t in (logits, labels, grads)]
    with_grad(SoftmaxCrossEntropyLoss.apply, logits, labels, grads, 0.1)
    for tensor, copy in zip((logits, labels, grads), before, strict=True):
        assert torch.equal(tensor, copy)


def test_threads_do_not_matter():
    logits, labels, grads = inputs((64, 5000), torch.float32, "cpu")
    loss = SoftmaxCrossEntropyLoss.apply
    assert_same_bits(lambda: with_grad(loss, logits, labels, grads, 0.1))


class TestTorchFeatures:
    @pytest.mark.parametrize("smoothing", [0.0, 0.3])
    @pytest.mark.parametrize("padding_idx", [None, 2])
    def test_gradcheck(self, smoothing, padding_idx, device):
        logits, labels, _ = inputs((6, 5), torch.float64, device)
        loss = lambda x: SoftmaxCrossEntropyLoss.apply(x, labels, smoothing, padding_idx)
        torch.autograd.gradcheck(loss, logits.requires_grad_())

    def test_opcheck(self, device):
        forwards, backwards = [], []
        for dtype in FLOATS:
            for half_to_float in {False, dtype in HALVES}:
                logits, labels, grads = inputs((4, 33), dtype, device)
                grads = grads.float() if half_to_float else grads
                _, maxima, sums_exp = softmax_xentropy_forward(logits, labels, 0.1, 3, False)
                forwards.append((logits, labels, 0.1, None, half_to_float))
                forwards.append((logits.T.contiguous().T, labels, 0.0, 0, half_to_float))
                backwards.append((grads, logits, maxima, sums_exp, labels, 0.1, 3))
        opcheck_samples(softmax_xentropy_forward, forwards)
        opcheck_samples(softmax_xentropy_backward, backwards)

    @pytest.mark.parametrize("dynamic", [None, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_compile(self, dtype, dynamic, device):
        logits, labels, _ = inputs((8, 100), dtype, device)
        half_to_float = dtype == torch.bfloat16

        def loss(logits):
            return SoftmaxCrossEntropyLoss.apply(logits * 2, labels, 0.1, 0, half_to_float)

        assert_compiles(loss, logits.requires_grad_(), dynamic=dynamic)

    def test_autocast(self, device):
        """The loss takes autocast's 16-bit logits as they are, and computes in float32."""
        linear = torch.nn.Linear(16, 50, device=device)
        x, labels = torch.randn(8, 16, device=device), torch.randint(50, (8,), device=device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = linear(x)
            losses = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, NO_PADDING, True)
        assert logits.dtype == torch.bfloat16
        assert losses.dtype == torch.float32
        losses.mean().backward()
        reference = lambda logits: torch_losses(logits, labels, 0.1)
        assert_as_accurate_as(reference, losses, logits.detach())
        assert linear.weight.grad.dtype == torch.float32
        assert linear.weight.grad.isfinite().all()
