"""flash-attention's tensor-parallel modules, with Apex's groups and regions, as its tests use them.

Its modules for several processes are Python; their files run unmodified, on gloo. The package's
``__init__`` wants its CUDA kernels, so it does not run, and the one kernel that these modules call,
the gradients of a weight and a bias, is two lines of torch here.
"""

import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.tensor_parallel import mappings
from apex_testkit.model_parallel import model_parallel

FOLDER = Path(find_spec("flash_attn").submodule_search_locations[0])
for name in ("flash_attn", "flash_attn.modules", "flash_attn.ops", "flash_attn.utils"):
    package = types.ModuleType(name)
    package.__path__ = [str(FOLDER.parent / name.replace(".", "/"))]
    sys.modules[name] = package
sys.modules["fused_dense_lib"] = types.SimpleNamespace(
    linear_bias_wgrad=lambda x, dy, has_bias: (dy.t() @ x, dy.sum(0) if has_bias else None)
)

from flash_attn.modules import embedding  # noqa: E402
from flash_attn.ops import fused_dense  # noqa: E402
from flash_attn.utils import distributed  # noqa: E402

SEQUENCE, BATCH, FEATURES, OUTPUTS, VOCABULARY = 6, 2, 8, 12, 10


def check_regions(rank, world):
    """flash-attention's collectives and our regions do the same, forward and backward."""
    with model_parallel(world):
        group = parallel_state.get_tensor_model_parallel_group()
        pairs = {
            distributed.all_gather: mappings.gather_from_sequence_parallel_region,
            distributed.reduce_scatter: mappings.reduce_scatter_to_sequence_parallel_region,
            distributed.all_reduce: tensor_parallel.reduce_from_tensor_model_parallel_region,
        }
        for theirs, ours in pairs.items():
            torch.manual_seed(rank)
            x = torch.randn(4, 3, requires_grad=True)
            expected, actual = theirs(x.clone(), group), ours(x)  # theirs adds in place
            dy = torch.randn_like(expected)
            assert torch.equal(actual, expected)
            grads = (torch.autograd.grad(y, x, dy)[0] for y in (expected, actual))
            torch.testing.assert_close(*grads)


def check_linear_layers(rank, world, sequence_parallel):
    """As in its tests: inputs from our regions, layers on our group, against plain layers."""
    with model_parallel(world):
        assert rank == parallel_state.get_tensor_model_parallel_rank()
        group = parallel_state.get_tensor_model_parallel_group()
        torch.manual_seed(0)
        plain = torch.nn.Linear(FEATURES, OUTPUTS), torch.nn.Linear(OUTPUTS, FEATURES)
        x_plain = torch.randn(SEQUENCE * BATCH, FEATURES, requires_grad=True)
        x = x_plain.detach().clone().requires_grad_()
        options = {"process_group": group, "sequence_parallel": sequence_parallel}
        column = fused_dense.ColumnParallelLinear(FEATURES, OUTPUTS, **options)
        row = fused_dense.RowParallelLinear(OUTPUTS, FEATURES, **options)
        with torch.no_grad():
            column.weight.copy_(plain[0].weight.chunk(world)[rank])
            column.bias.copy_(plain[0].bias.chunk(world)[rank])
            row.weight.copy_(plain[1].weight.chunk(world, 1)[rank])
            if rank == 0:
                row.bias.copy_(plain[1].bias)
        mine = x
        if sequence_parallel:
            mine = tensor_parallel.scatter_to_sequence_parallel_region(x)
        # What the column layer does on a GPU; its own forward refuses a group on the CPU.
        given = mine, column.weight, column.bias, False, group, sequence_parallel
        out = row(fused_dense.FusedDenseFunc.apply(*given))
        whole = out
        if sequence_parallel:
            whole = mappings.gather_from_sequence_parallel_region(out, False)
        expected = plain[1](plain[0](x_plain))
        torch.testing.assert_close(whole, expected)
        dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        whole.backward(dy)
        expected.backward(dy)
        torch.testing.assert_close(x.grad, x_plain.grad)
        grads = plain[0].weight.grad.chunk(world)[rank], plain[1].weight.grad.chunk(world, 1)[rank]
        torch.testing.assert_close((column.weight.grad, row.weight.grad), grads)


def check_embeddings(rank, world, sequence_parallel):
    with model_parallel(world):
        group = parallel_state.get_tensor_model_parallel_group()
        torch.manual_seed(0)
        plain = embedding.GPT2Embeddings(FEATURES, VOCABULARY, SEQUENCE)
        sizes = VOCABULARY, FEATURES
        ours = tensor_parallel.VocabParallelEmbedding(*sizes, use_cpu_initialization=True)
        theirs = embedding.ParallelGPT2Embeddings(
            FEATURES, VOCABULARY, SEQUENCE, group, sequence_parallel=sequence_parallel
        )
        with torch.no_grad():
            part = plain.word_embeddings.weight.chunk(world)[rank]
            theirs.word_embeddings.weight.copy_(part)
            ours.weight.copy_(part)
            positions = plain.position_embeddings.weight.chunk(world, 1)[rank]
            theirs.position_embeddings.weight.copy_(positions)
        ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
        expected = plain(ids).flatten(0, 1)
        out = theirs(ids, combine_batch_seqlen_dim=True)
        if sequence_parallel:
            out = mappings.gather_from_sequence_parallel_region(out, False)
        torch.testing.assert_close(out.view_as(expected), expected)
        torch.testing.assert_close(ours(ids), plain.word_embeddings(ids))
        dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        out.backward(dy.view_as(out))
        expected.backward(dy)
        grad = plain.word_embeddings.weight.grad.chunk(world)[rank]
        torch.testing.assert_close(theirs.word_embeddings.weight.grad, grad)


def test_regions(two_ranks):
    two_ranks(check_regions)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("check", [check_linear_layers, check_embeddings])
def test_modules(two_ranks, check, sequence_parallel):
    two_ranks(check, sequence_parallel=sequence_parallel)
