"""The legacy module ``syncbn``: old signatures, and an ImportError where kernels cannot run."""

import subprocess
import sys

import pytest
import syncbn
import torch
from torch.nn import functional as F

FIRST = (syncbn.welford_mean_var, syncbn.reduce_bn, syncbn.batchnorm_backward)
LAST = (syncbn.welford_mean_var_c_last, syncbn.reduce_bn_c_last, syncbn.batchnorm_backward_c_last)


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_step_with_the_old_functions(dtype, last, affine, device):
    x = torch.randn(6, 4, 5, device=device).to(dtype)  # [N, C, L]; [N, L, C] below if last
    dy = torch.randn(6, 4, 5, device=device).to(dtype)
    weight, bias = torch.rand(2, 4, device=device).to(dtype) if affine else (None, None)
    a, *parameters = (None if v is None else v.double().requires_grad_() for v in (x, weight, bias))
    wanted = F.batch_norm(a, None, None, *parameters, True, 0.0, 1e-3)
    wanted.backward(dy.double())
    moments, reduce, backward = LAST if last else FIRST
    x, dy = (v.transpose(1, 2) if last else v for v in (x, dy))
    mean, var = moments(x)
    counts = torch.tensor([12, 18], dtype=torch.int32, device=device)
    halves = [v.expand(2, 4) for v in (mean, var)]
    mean, var, inv_std = syncbn.welford_parallel(*halves, counts, 1e-3)
    if last:
        out = syncbn.batchnorm_forward_c_last(x, None, mean, inv_std, weight, bias, False)
        relu = syncbn.batchnorm_forward_c_last(x, dy, mean, inv_std, weight, bias, True)
        mask = syncbn.relu_bw_c_last(dy, x, dy, mean, inv_std, weight, bias)
        assert torch.equal(mask != 0, (relu > 0) & (dy != 0))
    else:
        out = syncbn.batchnorm_forward(x, mean, inv_std, weight, bias)
    sums = reduce(dy, x, mean, inv_std, weight)
    dx = backward(dy, x, mean, inv_std, weight, *sums[:2], counts)
    results = [(out, wanted), (dx, a.grad)]
    results = [(mine.transpose(1, 2) if last else mine, true) for mine, true in results]
    if affine:
        results += zip(sums[2:], (p.grad for p in parameters), strict=True)
    else:
        assert [s.numel() for s in sums[2:]] == [0, 0]
    for mine, true in results:
        # torch.testing's default tolerance for the dtype, which stands for its rounding.
        torch.testing.assert_close(mine, true.to(dtype))


def test_counts_must_be_integers():
    one = torch.ones(1, 2)
    with pytest.raises(TypeError, match=r"numel must be an int32 tensor, got torch.float32"):
        syncbn.welford_parallel(one, one, torch.ones(1), 1e-5)


def test_import_error_where_nothing_can_run():
    """Fallbacks of the kind try/except ImportError must fire, with the reason in the text."""
    script = """
import os
import torch
from apex.parallel._ops import library
library.manifest = lambda: {}
os.environ["APEX_JIT"] = "0"
try:
    import syncbn
except ImportError as error:
    assert "nor can they be compiled here, because APEX_JIT=0 forbids" in str(error), error
else:
    raise SystemExit("imported")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
