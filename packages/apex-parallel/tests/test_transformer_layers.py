"""Parallel layers against undivided float64 layers: outputs, gradients, communication, errors."""

import contextlib
import itertools

import fused_weight_gradient_mlp_cuda as extension
import pytest
import torch
import torch.nn.functional as F

from apex.transformer import parallel_state
from apex.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    layers,
    mappings,
    model_parallel_cuda_manual_seed,
)
from apex.transformer.tensor_parallel.linear import collectives
from apex_testkit.model_parallel import model_parallel

IN, OUT = 8, 12


def numbers(*shape, dtype=torch.float64):
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def undivided(x, weight, bias, dy):
    """Output and gradients of a float64 layer."""
    given = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y = F.linear(*given)
    return [y.detach(), *torch.autograd.grad(y, given, dy.double())]


def part(x, dim):
    """This rank's part of a dimension."""
    world = parallel_state.get_tensor_model_parallel_world_size()
    return x.chunk(world, dim)[parallel_state.get_tensor_model_parallel_rank()]


def filled(layer, weight, bias):
    with torch.no_grad():
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(bias)
    return layer


def close(actual, expected, dtype):
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def run(layer, x, dy, expected, x_dim, y_dim, sums_bias=False):
    """Forward and backward; x and y may be divided along a dimension."""
    divide = lambda t, dim: t if dim is None else part(t, dim)
    dtype, fused = layer.weight.dtype, layer.gradient_accumulation_fusion
    y, bias, w_dim = expected[0], layer.bias, 0 if isinstance(layer, ColumnParallelLinear) else 1
    x = divide(x, x_dim).to(dtype, copy=True).requires_grad_()
    if fused:
        layer.weight.main_grad = torch.ones_like(layer.weight, dtype=torch.float32)
    actual, skipped = layer(x)
    if layer.skip_bias_add:
        assert skipped is bias
        actual = actual + (0 if bias is None else bias)
    else:
        assert skipped is None
    close(actual, divide(y, y_dim), dtype)
    actual.backward(divide(dy, y_dim).to(dtype))
    close(x.grad, divide(expected[1], x_dim), dtype)
    if fused:
        assert layer.weight.grad is None
        close(layer.weight.main_grad - 1, part(expected[2], w_dim), dtype)
    else:
        close(layer.weight.grad, part(expected[2], w_dim), dtype)
    if bias is not None:
        grad = mappings._reduce(bias.grad) if sums_bias else bias.grad
        close(grad, part(expected[3], 0) if w_dim == 0 else expected[3], dtype)


def check_column(rank, world, tensor):
    with model_parallel(tensor):
        weight, bias = numbers(OUT, IN), numbers(OUT)
        variants = [
            # bias, skip_bias_add, fusion, shape
            (True, False, False, (4, 3)),
            (False, False, True, (4, 3)),
            (True, True, True, (8,)),
            (False, True, False, (4, 1, 3)),
        ]
        communication = [  # gather_output, sequence_parallel_enabled, no_async_...
            (True, False, False),
            (True, False, True),
            (False, False, False),
            (False, False, None),
            (False, True, None),
            (False, True, True),
        ]
        for variant, ways in itertools.product(variants, communication):
            (has_bias, skips, fused, shape), (gathers, divided, is_sync) = variant, ways
            if skips and gathers and has_bias:  # the bias fits the part of y alone
                continue
            x, dy = numbers(*shape, IN), numbers(*shape, OUT)
            expected = undivided(x, weight, bias if has_bias else 0 * bias, dy)
            layer = ColumnParallelLinear(
                *(IN, OUT, has_bias, gathers),
                skip_bias_add=skips,
                no_async_tensor_model_parallel_allreduce=is_sync,
                params_dtype=torch.float32 if fused else torch.float64,
                use_cpu_initialization=True,
                gradient_accumulation_fusion=fused,
                sequence_parallel_enabled=divided,
            )
            filled(layer, part(weight, 0), part(bias, 0))
            y_dim = None if gathers else -1
            run(layer, x, dy, expected, 0 if divided else None, y_dim)


def check_row(rank, world, tensor):
    with model_parallel(tensor):
        weight, bias = numbers(OUT, IN), numbers(OUT)
        x, dy = numbers(4, 3, IN), numbers(4, 3, OUT)
        for has_bias, skips, fused in itertools.product((True, False), repeat=3):
            dtype = torch.float32 if fused else torch.float64
            expected = undivided(x, weight, bias if has_bias else 0 * bias, dy)
            for x_is_part, divided in ((False, False), (True, False), (True, True)):
                layer = RowParallelLinear(
                    *(IN, OUT, has_bias, x_is_part),
                    skip_bias_add=skips,
                    params_dtype=dtype,
                    use_cpu_initialization=True,
                    gradient_accumulation_fusion=fused,
                    sequence_parallel_enabled=divided,
                )
                filled(layer, part(weight, 1), bias)
                x_dim, y_dim = -1 if x_is_part else None, 0 if divided else None
                run(layer, x, dy, expected, x_dim, y_dim, sums_bias=divided)
                if has_bias:
                    assert layer.bias.sequence_parallel_enabled == divided


@pytest.mark.parametrize("check", [check_column, check_row], ids=["column", "row"])
def test_linear(two_ranks, four_ranks, check):
    two_ranks(check, tensor=2)
    four_ranks(check, tensor=4)
    four_ranks(check, tensor=2)


def check_frozen(rank, world):
    """What needs no gradient gets none, and nobody waits for it."""
    with model_parallel(world):
        x = numbers(4, 3, IN)
        for divided in (False, True):
            layer = ColumnParallelLinear(
                *(IN, OUT, True, False),
                params_dtype=torch.float64,
                use_cpu_initialization=True,
                sequence_parallel_enabled=divided,
            )
            given = part(x, 0) if divided else x
            layer(given)[0].sum().backward()
            expected = numbers(1).new_ones(12, OUT).t() @ x.reshape(12, IN)
            close(layer.weight.grad, part(expected, 0), torch.float64)
            layer.weight.requires_grad_(False)
            given = given.clone().requires_grad_()
            layer(given)[0].sum().backward()
            assert given.grad is not None


def check_second_order(rank, world):
    """A penalty on gradients reaches input, weight and bias as in the undivided layer."""
    with model_parallel(world):
        whole = [numbers(4, 3, IN), numbers(OUT, IN), numbers(OUT)]
        whole = [t.requires_grad_() for t in whole]
        y = F.linear(*whole).square().sum()
        grads = torch.autograd.grad(y, whole[:2], create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        expected = torch.autograd.grad(penalty, whole)
        for divided in (False, True):
            layer = ColumnParallelLinear(
                *(IN, OUT, True, False),
                params_dtype=torch.float64,
                use_cpu_initialization=True,
                sequence_parallel_enabled=divided,
            )
            filled(layer, part(whole[1], 0), part(whole[2], 0))
            x = part(whole[0], 0) if divided else whole[0]
            x = x.detach().clone().requires_grad_()
            y = layer(x)[0].square().sum()
            dx, dw = torch.autograd.grad(y, [x, layer.weight], create_graph=True)
            # Of dx without sequence parallelism every rank has the whole: one penalty in all.
            dx = dx if divided else mappings.scatter_to_sequence_parallel_region(dx)
            penalty = dx.square().sum() + dw.square().sum()
            dx, dw, db = torch.autograd.grad(penalty, [x, layer.weight, layer.bias])
            close(dx, part(expected[0], 0) if divided else expected[0], torch.float64)
            close(dw, part(expected[1], 0), torch.float64)
            close(db, part(expected[2], 0), torch.float64)
        layer.gradient_accumulation_fusion = True
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        with pytest.raises(RuntimeError, match="turn the fusion off"):
            torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)


def check_overlap(rank, world):
    """The input's gradients are on their way while the weight's are computed."""
    with model_parallel(world), contextlib.ExitStack() as patches:
        log = []
        patch = patches.enter_context(pytest.MonkeyPatch.context())
        own, own_wait = extension.wgrad_gemm_accum_fp32, collectives.Pending.wait

        def wait(self):
            if self.work is not None:
                log.append("wait")
            return own_wait(self)

        patch.setattr(collectives.Pending, "wait", wait)
        patch.setattr(
            extension, "wgrad_gemm_accum_fp32", lambda *given: (log.append("wgrad"), own(*given))
        )
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            function = getattr(collectives, name)
            patch.setattr(
                collectives,
                name,
                lambda x, name=name, function=function: (log.append(name), function(x))[1],
            )
        for divided, expected in (
            (False, ["all_reduce", "wgrad", "wait"]),
            (True, ["all_gather", "reduce_scatter", "wait", "wgrad", "wait"]),
        ):
            layer = ColumnParallelLinear(
                *(IN, OUT, True, False),
                use_cpu_initialization=True,
                gradient_accumulation_fusion=True,
                sequence_parallel_enabled=divided,
            )
            layer.weight.main_grad = torch.zeros_like(layer.weight)
            y, _ = layer(torch.randn(4, 3, IN, requires_grad=True))
            log.clear()
            y.sum().backward()
            assert log == expected


def test_frozen_twice_and_overlap(two_ranks):
    two_ranks(check_frozen)
    two_ranks(check_second_order)
    two_ranks(check_overlap)


def check_16_bit(rank, world):
    """bf16 products reach a float32 main_grad unrounded, under autocast too."""
    with model_parallel(world):
        x = numbers(64, 3, IN, dtype=torch.bfloat16)
        dy = part(numbers(64, 3, OUT, dtype=torch.bfloat16), -1)
        exact = dy.double().reshape(-1, OUT // world).t() @ x.double().reshape(-1, IN)
        largest = exact.abs().max()
        options = {"use_cpu_initialization": True, "gradient_accumulation_fusion": True}
        for dtype, in_16_bit in (
            (torch.bfloat16, False),
            (torch.bfloat16, True),
            (torch.float32, False),  # under autocast
        ):
            layer = ColumnParallelLinear(
                *(IN, OUT, False, False),
                params_dtype=dtype,
                accumulation_in_fp16=in_16_bit,
                **options,
            )
            main_dtype = torch.bfloat16 if in_16_bit else torch.float32
            grad = torch.zeros(OUT // world, IN, dtype=main_dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                y, _ = layer(x)
                assert y.dtype == torch.bfloat16
                layer.weight.main_grad = grad  # only now
                y.backward(dy)
            error = (grad.double() - exact).abs().max()
            assert error <= (4e-3 if in_16_bit else 1e-6) * largest
            assert grad is layer.weight.main_grad
            assert layer.weight.grad is None


def check_autocast(rank, world):
    """Outside the fusion, autocast changes dtypes as it does for torch's linear layer."""
    with model_parallel(world):
        layer = ColumnParallelLinear(IN, OUT, gather_output=False, use_cpu_initialization=True)
        x = numbers(4, 3, IN, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = layer(x)
            expected = F.linear(x, layer.weight, layer.bias)
            assert torch.equal(y, expected)
            y.sum().backward()
        assert x.grad.dtype == layer.weight.grad.dtype == torch.float32


def test_16_bit(two_ranks):
    two_ranks(check_16_bit)
    two_ranks(check_autocast)


def check_embedding(rank, world, tensor):
    with model_parallel(tensor):
        table = numbers(20, 6).requires_grad_()
        layer = VocabParallelEmbedding(
            20, 6, params_dtype=torch.float64, use_cpu_initialization=True
        )
        with torch.no_grad():
            layer.weight.copy_(part(table, 0))
        size = 20 // tensor
        first = size * (rank % tensor)
        assert (layer.vocab_start_index, layer.vocab_end_index) == (first, first + size)
        assert layer.num_embeddings_per_partition == size
        ids = torch.randint(20, (5, 3), generator=torch.Generator().manual_seed(1))
        dy = numbers(5, 3, 6)
        y, expected = layer(ids), F.embedding(ids, table)
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
        y.backward(dy)
        (grad,) = torch.autograd.grad(expected, table, dy)
        torch.testing.assert_close(layer.weight.grad, part(grad, 0), rtol=0, atol=1e-15)


def test_embedding(four_ranks):
    four_ranks(check_embedding, tensor=4)
    four_ranks(check_embedding, tensor=2)


def check_initialisation(rank, world):
    with model_parallel(2):
        me, options = rank % 2, {"keep_master_weight_for_test": True}
        torch.manual_seed(3)
        column = ColumnParallelLinear(IN, OUT, stride=2, use_cpu_initialization=True, **options)
        whole = column.master_weight
        assert whole.shape == (OUT, IN)
        # Blocks of 3 rows go to the two ranks in turn.
        blocks = whole.split(3)
        assert torch.equal(column.weight, torch.cat((blocks[me], blocks[2 + me])))
        row = RowParallelLinear(
            *(IN, OUT), use_cpu_initialization=True, params_dtype=torch.float16, **options
        )
        assert torch.equal(row.weight, row.master_weight.chunk(2, 1)[me])
        for name, value in (("dim", 0), ("stride", 2)):
            assert getattr(column.weight, f"partition_{name}") == value
            assert getattr(column.bias, f"partition_{name}") == value
        assert column.weight.tensor_model_parallel
        assert row.weight.partition_dim == 1
        assert not hasattr(row.bias, "tensor_model_parallel")

        model_parallel_cuda_manual_seed(11)
        before = torch.get_rng_state()
        layer = RowParallelLinear(IN, OUT, init_method=torch.nn.init.normal_, **options)
        assert torch.equal(torch.get_rng_state(), before)
        own = torch.Generator().manual_seed(11 + 2718 + me)
        expected = torch.empty(OUT, IN // 2).normal_(generator=own)
        assert torch.equal(layer.weight, expected)
        assert layer.master_weight is None
        expected.normal_(generator=own)  # the next layer goes on in the same sequence
        assert torch.equal(
            RowParallelLinear(IN, OUT, init_method=torch.nn.init.normal_).weight, expected
        )


def check_errors(rank, world):
    with model_parallel(world):
        options = {"use_cpu_initialization": True}
        both = {
            "no_async_tensor_model_parallel_allreduce": False,
            "sequence_parallel_enabled": True,
        }
        with pytest.raises(RuntimeError) as refused:
            ColumnParallelLinear(IN, OUT, **both, **options)
        assert str(refused.value) == (
            "`async_tensor_model_parallel_allreduce` and `sequence_parallel_enabled` cannot be "
            "enabled at the same time."
        )
        with pytest.raises(RuntimeError, match="pass input_is_parallel=True"):
            RowParallelLinear(IN, OUT, sequence_parallel_enabled=True, **options)
        layer = ColumnParallelLinear(IN, OUT, sequence_parallel_enabled=True, **options)
        with pytest.raises(RuntimeError, match="pass gather_output=False"):
            layer(torch.zeros(4, IN))
        linear = layers.linear_with_grad_accumulation_and_async_allreduce
        with pytest.raises(RuntimeError, match="async_grad_allreduce: must be False"):
            linear(torch.zeros(4, IN), layer.weight, None, False, True, True)
        layer = RowParallelLinear(IN, OUT, gradient_accumulation_fusion=True, **options)
        with pytest.raises(RuntimeError, match=r"Set weight.main_grad to a tensor of shape \[12"):
            layer(torch.zeros(4, IN))[0].sum().backward()
        assert layer.weight.grad is None


def test_initialisation_and_errors(two_ranks, four_ranks):
    four_ranks(check_initialisation)
    two_ranks(check_errors)


def test_alone(alone):
    """One rank is torch.nn.Linear, bit for bit, and needs no communication."""
    plain = torch.nn.Linear(IN, OUT)
    x = torch.randn(4, 3, IN, requires_grad=True)
    expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = filled(kind(IN, OUT, use_cpu_initialization=True), plain.weight, plain.bias)
        grads = torch.autograd.grad(layer(x)[0].square().sum(), [x, *layer.parameters()])
        assert all(map(torch.equal, grads, expected))
        assert "8 to 12" in repr(layer)
    with pytest.warns(UserWarning, match="needs more than one tensor-parallel rank"):
        layer = ColumnParallelLinear(
            IN, OUT, sequence_parallel_enabled=True, use_cpu_initialization=True
        )
    assert layer(x)[0].shape == (4, 3, OUT)
    layers.get_cuda_rng_tracker().reset()
    with pytest.raises(ValueError, match="call model_parallel_cuda_manual_seed"):
        ColumnParallelLinear(IN, OUT)


def test_attributes(alone):
    a, b = torch.zeros(3), torch.zeros(3)
    layers.set_tensor_model_parallel_attributes(a, True, 0, 2)
    with pytest.raises(RuntimeError, match="the tensor has tensor_model_parallel"):
        layers.set_tensor_model_parallel_attributes(a, True, 0, 2)
    layers.set_defaults_if_not_set_tensor_model_parallel_attributes(a)
    assert (a.tensor_model_parallel, a.partition_dim, a.partition_stride) == (True, 0, 2)
    layers.copy_tensor_model_parallel_attributes(b, a)
    assert (b.tensor_model_parallel, b.partition_dim, b.partition_stride) == (True, 0, 2)
    layers.set_defaults_if_not_set_tensor_model_parallel_attributes(c := torch.zeros(1))
    assert (c.tensor_model_parallel, c.partition_dim, c.partition_stride) == (False, -1, 1)
    parallel_state.set_tensor_model_parallel_rank(1)
    counted = [layers.param_is_not_tensor_parallel_duplicate(t) for t in (a, c, torch.zeros(1))]
    assert counted == [True, False, False]
    parallel_state.set_tensor_model_parallel_rank(0)
    assert layers.param_is_not_tensor_parallel_duplicate(c)
