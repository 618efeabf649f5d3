"""A pipeline of tensor-parallel stages, as accurate as plain PyTorch in one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from apex.transformer import parallel_state
from apex.transformer.pipeline_parallel import (
    build_model,
    get_forward_backward_func,
    p2p_communication,
    utils,
)
from apex.transformer.testing import commons
from apex_testkit.model_parallel import model_parallel

SHAPE = 6, 2, 8  # sequence, micro-batch, hidden
MICROBATCHES = 3


def weights_of(stage):
    """Whole weights and biases of a stage: columns, then rows."""
    generator = torch.Generator().manual_seed(stage)
    hidden = SHAPE[-1]
    shapes = [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,)]
    return [torch.randn(shape, generator=generator) / 3 for shape in shapes]


def plain(samples, dtype):
    """Losses, and gradients by stage, of the whole model in one process."""
    stages = [[w.to(dtype).requires_grad_() for w in weights_of(stage)] for stage in range(2)]
    losses = []
    for x in samples.to(dtype).split(SHAPE[1]):
        for first, first_bias, second, second_bias in stages:
            x = F.linear(F.gelu(F.linear(x, first, first_bias)), second, second_bias)
        losses.append(x.sum())
    (sum(losses) / MICROBATCHES).backward()
    return [loss.detach() for loss in losses], [[w.grad for w in stage] for stage in stages]


def share_of(whole, rank):
    """This tensor-parallel rank's part of a stage's tensors."""
    first, first_bias, second, second_bias = whole
    return [first.chunk(2)[rank], first_bias.chunk(2)[rank], second.chunk(2, 1)[rank], second_bias]


def check_accuracy(actual, plain32, truth):
    """Root mean squares: the largest of some dozen errors differs by more than 2 by chance."""
    error = (plain32.double() - truth).norm()
    allowed = 2 * error + 4 * torch.finfo(torch.float32).eps * truth.norm()
    assert (actual.double() - truth).norm() <= allowed


def test_accuracy_that_is_not_enough():
    """Three millionths beside the truth are found."""
    truth = torch.randn(8, 32, dtype=torch.float64)
    check_accuracy(truth.float(), truth.float(), truth)
    with pytest.raises(AssertionError):
        check_accuracy(truth.float() * (1 + 3e-6), truth.float(), truth)


def check_stages(rank, world, divided):
    generator = torch.Generator().manual_seed(9)
    samples = torch.randn(MICROBATCHES * SHAPE[1], SHAPE[0], SHAPE[2], generator=generator)
    expected, truth = plain(samples, torch.float32), plain(samples, torch.float64)
    with model_parallel(2, 2):
        stage = parallel_state.get_pipeline_model_parallel_rank()
        share = parallel_state.get_tensor_model_parallel_rank()
        utils.setup_microbatch_calculator(1, None, len(samples), SHAPE[1], 1)
        keywords = {"hidden_size": SHAPE[-1], "sequence_parallel_enabled": divided}
        models = build_model(commons.mlp_provider_func, **keywords)
        params = list(models[0].parameters())
        for param, value in zip(params, share_of(weights_of(stage), share), strict=True):
            param.data.copy_(value)
        step = commons.ToyParallelMLPFwdBwdStepFunc(sequence_parallel_enabled=divided)

        def sequence_first(batch, model):
            return step([batch[0].transpose(0, 1).contiguous()], model)

        losses = get_forward_backward_func(None, 2)(
            sequence_first,
            [samples],
            models,
            forward_only=False,
            tensor_shape=SHAPE,
            sequence_parallel_enabled=divided,
            deallocate_pipeline_outputs=True,
        )
        if stage == 1:
            actual = torch.cat([entry["avg"] for entry in losses])
            check_accuracy(actual, *(torch.stack(whole[0]) for whole in (expected, truth)))
        if divided:  # each rank has the bias's gradient of its part of the sequence
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(params[-1].grad, group=group)
        wholes = [share_of(whole[1][stage], share) for whole in (expected, truth)]
        for param, grad32, grad64 in zip(params, *wholes, strict=True):
            check_accuracy(param.grad, grad32, grad64)
    utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "sequence parallel"])
def test_tensor_parallel_stages(four_ranks, divided):
    four_ranks(check_stages, divided=divided)


def sent(call, *arguments, **options):
    """What a function of p2p_communication returns, and the numbers of elements it sends."""
    numels, begin = [], p2p_communication.Transfers

    def watched(messages):
        numels.extend(m.tensor.numel() for m in messages if m.sends)
        return begin(messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p_communication, "Transfers", watched)
        result = call(*arguments, **options)
    is_future = isinstance(result, p2p_communication.FutureTensor)
    return result.get() if is_future else result, numels


def check_shares(rank, world, is_async):
    """Every tensor-parallel rank sends its share, and the other stage has the whole tensor."""
    ring, options = p2p_communication.send_forward_recv_forward, {"async_comm": is_async}
    with model_parallel(2, 2):
        stage = parallel_state.get_pipeline_model_parallel_rank()
        cases = [  # shape, options, number of elements that are sent
            ((4, 2, 3), {"scatter_gather_tensors_in_pipeline": True}, 12),
            ((5, 1, 3), {"scatter_gather_tensors_in_pipeline": True}, 15),
            ((4, 2, 3), {}, 24),
            ((4, 2, 3), dict.fromkeys(SWITCHES, True), 24),
        ]
        for shape, more, numel in cases:
            x = torch.arange(24.0)[: shape[0] * shape[1] * shape[2]].view(shape)
            given = x + 100 * stage, True, shape
            received, numels = sent(ring, *given, **options, **more)
            assert numels == [numel], (shape, more)
            assert torch.equal(received.detach(), x + 100 * (1 - stage))
            assert received.requires_grad
        # On the way forward alone, where the functions have an argument that switches it off.
        x, shape = torch.arange(24.0).view(4, 2, 3), (4, 2, 3)
        for whole, numel in ((False, 12), (True, 24)):
            more = {**options, "scatter_gather_tensors_in_pipeline": True}
            if stage == 0:
                numels = sent(p2p_communication.send_forward, x, whole, shape, **more)[1]
                assert numels == [numel]
            else:
                received, _ = sent(p2p_communication.recv_forward, shape, whole, **more)
                assert torch.equal(received.detach(), x)
        with pytest.raises(TypeError, match="unexpected keyword argument 'asynchronous'"):
            ring(x, True, shape, asynchronous=True)


SWITCHES = "scatter_gather_tensors_in_pipeline", "sequence_parallel_enabled"


@pytest.mark.parametrize("is_async", [False, True])
def test_shares_of_what_all_tensor_parallel_ranks_have(four_ranks, is_async):
    four_ranks(check_shares, is_async=is_async)
