"""DTensors on two gloo processes: rows stay where they are, gradients of weights are summed."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedRMSNorm,
    fused_add_layer_norm,
)
from apex.normalization.fused_layer_norm import fused_layer_norm_affine

COLUMNS = 6
# Input placements, and whether they make processes exchange the input.
PLACEMENTS = {
    "batch": (Shard(0), False),
    "sequence": (Shard(1), False),  # 3 rows for 2 processes: shards of different sizes
    "replicated": (Replicate(), False),
    "columns": (Shard(2), True),
    "last": (Shard(-1), True),
}
KINDS = [FusedLayerNorm, FusedRMSNorm, MixedFusedRMSNorm]


def make(kind, **options):
    torch.manual_seed(0)
    module = kind(COLUMNS, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def tensors(count):
    torch.manual_seed(1)
    return torch.randn(count, 4, 3, COLUMNS).unbind()


def distributed(module, mesh, placement):
    """The same module with DTensors as parameters, which stay as they are placed."""
    for name, parameter in module.named_parameters():
        placed = distribute_tensor(parameter.detach(), mesh, [placement])
        setattr(module, name, nn.Parameter(placed))
    return module


def check_module(rank, world_size, kind, placement, weights, options):
    mesh = init_device_mesh("cpu", (world_size,))
    input_placement, exchanges = PLACEMENTS[placement]
    x, dy = tensors(2)
    whole, sharded = make(kind, **options), distributed(make(kind, **options), mesh, weights)
    x.requires_grad_()
    y = whole(x)
    y.backward(dy)

    shards = distribute_tensor(x.detach(), mesh, [input_placement]).requires_grad_()
    with CommDebugMode() as communication:
        actual = sharded(shards)
    assert bool(communication.get_total_counts()) == (exchanges or weights != Replicate())
    assert isinstance(actual, DTensor)
    assert actual.placements == ((Replicate(),) if exchanges else (input_placement,))
    torch.testing.assert_close(actual.full_tensor(), y.detach())
    with torch.no_grad():
        assert torch.equal(sharded(shards).full_tensor(), actual.full_tensor())
    actual.backward(distribute_tensor(dy, mesh, actual.placements))
    torch.testing.assert_close(shards.grad.full_tensor(), x.grad)
    for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert q.grad.placements == (weights,)
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements(placement, two_ranks):
    two_ranks(
        check_module,
        kind=FusedLayerNorm,
        placement=placement,
        weights=Replicate(),
        options={},
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_kinds(kind, memory_efficient, two_ranks):
    options = {"memory_efficient": memory_efficient}
    arguments = {"placement": "sequence", "weights": Shard(0), "options": options}
    two_ranks(check_module, kind=kind, **arguments)


def check_two_dimensions(rank, world_size):
    """Normalized together: rows are whole where batches are apart, else they are gathered."""
    mesh = init_device_mesh("cpu", (world_size,))
    x, dy = tensors(2)
    weight, bias = torch.randn(2, 3, COLUMNS)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    y = fused_layer_norm_affine(*inputs, (3, COLUMNS))
    expected = torch.autograd.grad(y, inputs, dy)
    for placement in (Shard(0), Shard(1), Shard(2)):
        placed = [distribute_tensor(x.detach(), mesh, [placement])]
        placed += [distribute_tensor(t.detach(), mesh, [Replicate()]) for t in inputs[1:]]
        placed = [t.requires_grad_() for t in placed]
        actual = fused_layer_norm_affine(*placed, (3, COLUMNS))
        torch.testing.assert_close(actual.full_tensor(), y.detach())
        cotangent = distribute_tensor(dy, mesh, actual.placements)
        for a, e in zip(torch.autograd.grad(actual, placed, cotangent), expected, strict=True):
            torch.testing.assert_close(a.full_tensor(), e)


def test_two_dimensions(two_ranks):
    two_ranks(check_two_dimensions)


def check_sequence_parallel(rank, world_size):
    """torch's own plan for sequence parallelism, which makes parameters DTensors."""
    mesh = init_device_mesh("cpu", (world_size,))
    x, dy = tensors(2)
    whole, sharded = (nn.Sequential(make(FusedRMSNorm)) for _ in range(2))
    parallelize_module(sharded, mesh, {"0": SequenceParallel(sequence_dim=1)})
    y = whole(x)
    y.backward(dy)
    local = x.tensor_split(world_size, dim=1)[rank]
    # Of equal size: the plan takes local tensors.
    local, dy = (t[:, :1] for t in (local, dy.tensor_split(world_size, dim=1)[rank]))
    actual = sharded(local)
    torch.testing.assert_close(actual.to_local(), y.tensor_split(world_size, dim=1)[rank][:, :1])
    actual.to_local().backward(dy)
    assert sharded[0].weight.grad.placements == (Replicate(),)


def check_fsdp(rank, world_size):
    """FSDP2 gathers the shards before the forward; gradients come back as shards."""
    mesh = init_device_mesh("cpu", (world_size,))
    x, dy = tensors(2)
    whole, sharded = make(FusedLayerNorm), make(FusedLayerNorm)
    fully_shard(sharded, mesh=mesh)
    for module in (whole, sharded):
        module(x).backward(dy)
    for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)


def check_add_and_refusals(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x, residual, dy, dsum = tensors(4)
    module = make(FusedLayerNorm)
    inputs = [x.requires_grad_(), residual.requires_grad_(), module.weight, module.bias]
    y, total = fused_add_layer_norm(*inputs, prenorm=True)
    expected = torch.autograd.grad((y, total), inputs, (dy, dsum))
    # The residual is moved to where x is.
    placed = zip(inputs, (Shard(1), Replicate(), Replicate(), Replicate()), strict=True)
    shards = [distribute_tensor(t.detach(), mesh, [p]).requires_grad_() for t, p in placed]
    actual = fused_add_layer_norm(*shards, prenorm=True)
    assert [t.placements for t in actual] == [(Shard(1),)] * 2
    for a, e in zip(actual, (y, total), strict=True):
        torch.testing.assert_close(a.full_tensor(), e)
    cotangents = [distribute_tensor(t, mesh, [Shard(1)]) for t in (dy, dsum)]
    for a, e in zip(torch.autograd.grad(actual, shards, cotangents), expected, strict=True):
        torch.testing.assert_close(a.full_tensor(), e)

    # What is not yet summed is summed first, and not normalized part by part.
    parts = DTensor.from_local(x.detach() / world_size, mesh, [Partial()])
    whole = distributed(make(FusedLayerNorm), mesh, Replicate())(parts)
    torch.testing.assert_close(whole.full_tensor(), module(x).detach())
    with pytest.raises(TypeError, match="if one operand is a DTensor, all must be"):
        module(shards[0])
    other = init_device_mesh("cpu", (1, world_size))
    with pytest.raises(ValueError, match="operands must be on one device mesh"):
        distributed(make(FusedLayerNorm), mesh, Replicate())(
            distribute_tensor(x.detach(), other, [Replicate(), Shard(0)])
        )


def test_sequence_parallel(two_ranks):
    two_ranks(check_sequence_parallel)


def test_fsdp(two_ranks):
    two_ranks(check_fsdp)


def test_add_and_refusals(two_ranks):
    two_ranks(check_add_and_refusals)
