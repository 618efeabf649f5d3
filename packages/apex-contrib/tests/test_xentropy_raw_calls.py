"""Random calls of the raw operators: right, or refused with nothing changed."""

import math

import pytest
import torch
import torch.nn.functional as F

from apex.contrib.xentropy.ops import softmax_xentropy_backward, softmax_xentropy_forward
from apex_testkit.raw_calls import Call, run_random_calls

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def arguments(rng):
    rows, columns = rng.choice([(1, 1), (3, 5), (4, 70), (0, 3), (2, 1)])
    logits = torch.randn(rows, columns, dtype=torch.float64).to(rng.choice(FLOATS))
    labels = torch.randint(columns, (rows,))
    return {
        "logits": logits,
        "labels": labels,
        "smoothing": rng.choice((0.0, 0.1, 1.0)),
        "padding_idx": rng.choice((None, 0)),
    }


def losses_of(a):
    logits, labels = a["logits"], a["labels"]
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or not 0 <= a["smoothing"] <= 1:
        raise ValueError("must be refused")
    padding = a["padding_idx"]
    pads = torch.zeros(len(labels), dtype=torch.bool) if padding is None else labels == padding
    labels = labels.long().masked_fill(pads, 0)
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=a["smoothing"])
    return losses.masked_fill(pads, 0)


def forward(rng):
    args = {**arguments(rng), "half_to_float": rng.random() < 0.5}
    narrow = args["logits"].dtype in (torch.float16, torch.bfloat16)
    args["half_to_float"] &= narrow

    def expected(a):
        return {"result": [losses_of(a)]}

    def run(**args):
        return softmax_xentropy_forward(**args)[:1]

    return Call(run, args, expected)


def backward(rng):
    args = arguments(rng)
    x = args["logits"].double()
    maxima = x.amax(1)
    wide = torch.promote_types(args["logits"].dtype, torch.float32)
    args["grad_losses"] = torch.randn(len(x), dtype=torch.float64).to(args["logits"].dtype)
    args["maxima"] = maxima.to(wide)
    args["sums_exp"] = good = (x - maxima[:, None]).exp().sum(1).to(wide)

    def expected(a):
        losses_of(a)  # raises for what must be refused
        if not a["grad_losses"].isfinite().all():
            raise ArithmeticError("autograd's inf - inf is nan, where the formula has inf * x")
        if not torch.equal(a["maxima"], a["logits"].amax(1).to(wide).double()):
            raise ArithmeticError("statistics of other logits")
        if not torch.equal(a["sums_exp"].to(wide), good):
            raise ArithmeticError("statistics of other logits")
        with torch.enable_grad():
            x = a["logits"].requires_grad_()
            (grad,) = torch.autograd.grad(losses_of({**a, "logits": x}), x, a["grad_losses"])
        # Autograd has 0 * nan for logits that are not finite, in rows that do not count.
        pads = a["labels"] == (math.nan if a["padding_idx"] is None else a["padding_idx"])
        return {"result": grad.masked_fill(pads[:, None], 0)}

    return Call(softmax_xentropy_backward, args, expected)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_calls(seed):
    counts = run_random_calls([forward, backward], seed)
    assert counts["done"] > 0.2 * counts.total()
    assert counts["refused"] > 0.1 * counts.total()


def test_freed_memory_is_refused():
    """Once a segmentation fault."""
    logits = torch.randn(4, 8)
    logits.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"logits is .* not allocated yet"):
        softmax_xentropy_forward(logits, torch.zeros(4, dtype=torch.long), 0.0, None, False)


def test_errors_of_raw_operators():
    logits, labels = torch.randn(2, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(RuntimeError, match=r"logits is on cpu, but labels is on meta"):
        softmax_xentropy_forward(logits, labels.to("meta"), 0.0, None, False)
    with pytest.raises(RuntimeError, match=r"labels must be a tensor, got None"):
        softmax_xentropy_forward(logits, None, 0.0, None, False)
    for smoothing in (-0.1, 1.1, float("nan")):
        with pytest.raises(RuntimeError, match=r"smoothing must be in \[0, 1\]"):
            softmax_xentropy_forward(logits, labels, smoothing, None, False)
