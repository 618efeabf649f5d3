"""Random calls of the raw operators: right, or refused with nothing changed."""

import pytest
import torch

from apex.parallel.syncbn import ops
from apex_testkit.raw_calls import Call, run_random_calls

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def operands(rng):
    """An input of four or fewer channels, and statistics."""
    channel_last = rng.random() < 0.5
    shape = rng.choice(((3, 2), (4, 4, 5), (0, 3), (2, 3, 2, 40)))
    dtype = rng.choice(FLOATS)
    channels = shape[-1] if channel_last else shape[1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    vectors = [torch.rand(channels, dtype=wide) + 0.5 for _ in range(4)]
    return torch.randn(shape, dtype=torch.float64).to(dtype), channel_last, channels, vectors


def columns(x, channel_last):
    """[channels, elements]"""
    if x.dim() < (1 if channel_last else 2):
        raise ValueError("must be refused")
    x = x.movedim(-1 if channel_last else 1, 0)
    return x.reshape(len(x), -1) if x.numel() else x.new_zeros(len(x), 0)


def along(vector, x, channel_last):
    dim = (-1 if channel_last else 1) % x.dim()
    if vector.numel() != x.shape[dim]:
        raise ValueError("must be refused")
    return vector.reshape([-1 if d == dim else 1 for d in range(x.dim())])


def one_way_not_finite(op):
    """The operator, with NaN for infinities. The mean of infinities depends on the way it is found:
    sums find an infinity, merged moments NaN. The variance is NaN either way."""

    def run(**args):
        return not_finite_to_nan(op(**args))

    return run


def not_finite_to_nan(tensors):
    return [torch.where(t.isfinite(), t, torch.nan) for t in tensors]


def mean_var(rng):
    x, channel_last, *_ = operands(rng)

    def expected(a):
        rows = columns(a["input"], a["channel_last"])
        if rows.shape[1] == 0:
            return {"result": [rows.new_zeros(len(rows))] * 2}
        return {"result": not_finite_to_nan([rows.mean(1), rows.var(1, correction=0)])}

    run = one_way_not_finite(ops.welford_mean_var)
    return Call(run, {"input": x, "channel_last": channel_last}, expected)


def statistics(rng):
    x, channel_last, _, (mean, var, *_) = operands(rng)
    args = {"input": x, "running_mean": mean, "running_var": var.abs()}
    args["num_batches"] = torch.randint(0, 9, rng.choice(((), (1,))))
    args = {name: rng.choice((None, v)) if name != "input" else v for name, v in args.items()}
    args |= {"channel_last": channel_last, "eps": 1e-3, "momentum": rng.choice((0.0, 0.1, 1.0))}

    def expected(a):
        rows, keep = columns(a["input"], a["channel_last"]), 1 - a["momentum"]
        if rows.shape[1] < 2 or not a["eps"] > 0 or not 0 <= a["momentum"] <= 1:
            raise ArithmeticError("not what the formula is for")
        mean, var = rows.mean(1), rows.var(1)
        inv_std = torch.rsqrt(rows.var(1, correction=0) + a["eps"])
        found = {"result": [mean, var, inv_std, torch.tensor([rows.shape[1]])]}
        for name, new in (("running_mean", mean), ("running_var", var)):
            if a[name] is not None:
                found[name] = keep * a[name].reshape(-1) + a["momentum"] * new
        if a["num_batches"] is not None:
            found["num_batches"] = a["num_batches"].reshape(-1) + 1
        return found

    run = one_way_not_finite(ops.batch_statistics)
    return Call(run, args, expected, ("running_mean", "running_var", "num_batches"))


def merge(rng):
    parts, channels = rng.choice(((1, 3), (4, 2), (2, 65)))
    dtype = rng.choice((torch.float32, torch.float64))
    mean, var = torch.randn(parts, channels, dtype=dtype), torch.rand(parts, channels, dtype=dtype)
    count = torch.randint(1, 9, (parts,))
    args = {"mean": mean, "biased_var": var, "count": count, "eps": 1e-3}

    def expected(a):
        mean, count = a["mean"], a["count"].reshape(-1, 1)
        if mean.numel() != a["biased_var"].numel() or (count < 0).any():
            raise ValueError("must be refused")
        if not (a["eps"] > 0) or count.sum() < 2 or len(mean) != len(count):
            raise ArithmeticError("not what the formula is for")
        n, var = count.sum(), a["biased_var"].reshape(mean.shape)
        total = (mean * count).sum(0) / n
        biased = ((var + (mean - total) ** 2) * count).sum(0) / n
        moments = [total, biased * n / (n - 1), torch.rsqrt(biased + a["eps"])]
        return {"result": not_finite_to_nan(moments)}

    return Call(one_way_not_finite(ops.welford_parallel), args, expected)


def forward(rng):
    x, channel_last, _, (mean, inv_std, weight, bias) = operands(rng)
    args = {"input": x, "z": rng.choice((None, torch.randn(x.shape).to(x.dtype))), "mean": mean}
    args |= {"inv_std": inv_std, "weight": weight, "bias": bias, "channel_last": channel_last}
    args["fuse_relu"] = rng.random() < 0.5

    def expected(a):
        x = a["input"]
        columns(x, a["channel_last"])
        names = ("mean", "inv_std", "weight", "bias")
        mean, inv_std, weight, bias = (along(a[n], x, a["channel_last"]) for n in names)
        y = (x - mean) * inv_std * weight + bias
        y = y if a["z"] is None else y + a["z"].reshape(x.shape)
        return {"result": y.relu() if a["fuse_relu"] else y}

    return Call(ops.batchnorm_forward, args, expected)


def sums(rng):
    x, channel_last, _, (mean, inv_std, *_) = operands(rng)
    args = {"grad_output": torch.randn(x.shape).to(x.dtype), "input": x, "mean": mean}
    args |= {"inv_std": inv_std, "channel_last": channel_last}

    def expected(a):
        x, dy = a["input"], a["grad_output"].reshape(a["input"].shape)
        columns(x, a["channel_last"])
        spread = x - along(a["mean"], x, a["channel_last"])
        sums = [columns(v, a["channel_last"]).sum(1) for v in (dy, dy * spread)]
        return {"result": [*sums, sums[1] * a["inv_std"].reshape(-1)]}

    return Call(ops.reduce_bn, args, expected)


def backward(rng):
    x, channel_last, channels, (mean, inv_std, weight, sum_dy) = operands(rng)
    args = {"grad_output": torch.randn(x.shape).to(x.dtype), "input": x, "mean": mean}
    args |= {"inv_std": inv_std, "weight": weight, "sum_dy": sum_dy, "sum_dy_xmu": sum_dy.clone()}
    args |= {"count": torch.tensor([max(x.numel() // channels, 1)]), "channel_last": channel_last}

    def expected(a):
        x, n = a["input"], a["count"]
        if n.numel() != 1 or n < 0:
            raise ValueError("must be refused")
        columns(x, a["channel_last"])
        names = ("mean", "inv_std", "weight", "sum_dy", "sum_dy_xmu")
        mean, inv_std, weight, dy, xmu = (along(a[k], x, a["channel_last"]) for k in names)
        grad = a["grad_output"].reshape(x.shape) - dy / n
        grad = grad - (x - mean) * inv_std**2 * xmu / n
        return {"result": grad * weight * inv_std}

    return Call(ops.batchnorm_backward, args, expected)


def gradients(rng):
    x, channel_last, channels, (mean, inv_std, weight, _) = operands(rng)
    args = {"grad_output": torch.randn(x.shape).to(x.dtype), "input": x, "mean": mean}
    args |= {"inv_std": inv_std, "weight": weight}
    args |= {"count": torch.tensor([max(x.numel() // channels, 1)]), "channel_last": channel_last}

    def expected(a):
        x, n = a["input"], a["count"]
        if n.numel() != 1 or n < 0:
            raise ValueError("must be refused")
        columns(x, a["channel_last"])
        mean, inv_std, weight = (
            along(a[k], x, a["channel_last"]) for k in ("mean", "inv_std", "weight")
        )
        dy = a["grad_output"].reshape(x.shape)
        sums = [columns(v, a["channel_last"]).sum(1) for v in (dy, dy * (x - mean))]
        of_dy, of_xmu = (along(v, x, a["channel_last"]) for v in sums)
        grad = (dy - of_dy / n - (x - mean) * inv_std**2 * of_xmu / n) * weight * inv_std
        return {"result": [grad, sums[0], sums[1] * a["inv_std"].reshape(-1)]}

    return Call(ops.batchnorm_gradients, args, expected)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_calls(seed):
    counts = run_random_calls(
        [mean_var, statistics, merge, forward, sums, backward, gradients], seed
    )
    assert counts["done"] > 0.2 * counts.total()
    assert counts["refused"] > 0.1 * counts.total()


def test_freed_memory_is_refused():
    """Once a segmentation fault."""
    x = torch.randn(4, 3, 5)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"welford_mean_var: input is .* not allocated yet"):
        ops.welford_mean_var(x, False)


def test_negative_counts_are_refused():
    count = torch.tensor([4, -1])
    with pytest.raises(RuntimeError, match=r"welford_parallel: count\[1\] must not be negative"):
        ops.welford_parallel(torch.zeros(2, 3), torch.ones(2, 3), count, 1e-5)
