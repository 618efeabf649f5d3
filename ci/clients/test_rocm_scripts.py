"""What scripts for ROCm's Apex do: bfloat16 levels, LARS, its extension modules, a divided GPT."""

import importlib
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apex import amp
from apex.optimizers import FusedLARS
from apex.parallel import DistributedDataParallel, convert_syncbn_model

pytestmark = pytest.mark.usefixtures("amp_ends")


@pytest.mark.parametrize(("level", "dtype"), [("O4", torch.float32), ("O5", torch.bfloat16)])
@pytest.mark.usefixtures("one_process")
def test_imagenet_in_bfloat16(level, dtype):
    """The recipe of ROCm's MLPerf ResNet: LARS without decay of norms and biases, O4 or O5."""
    torch.manual_seed(0)
    model = convert_syncbn_model(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
        )
    )
    x, y = torch.randn(16, 3, 8, 8), torch.randint(4, (16,))
    one_dimensional = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    groups = [
        {"params": one_dimensional, "weight_decay": 0.0, "is_skipped": True},
        {"params": others, "weight_decay": 5e-5, "is_skipped": False},
    ]
    optimizer = FusedLARS(groups, lr=2.0, momentum=0.9, trust_coefficient=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model = DistributedDataParallel(model)
    losses = []
    for _ in range(20):
        output = model(x)
        assert next(p for p in model.parameters() if p.dim() == 4).dtype == dtype
        loss = F.cross_entropy(output.float(), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            assert scaled_loss.item() == loss.item()  # bfloat16 needs no scale
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


class SwiGLU(torch.autograd.Function):
    """Around the extension module, as its users write it: Apex has no Python function."""

    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return importlib.import_module("fused_bias_swiglu").forward(x, bias)

    @staticmethod
    def backward(ctx, dy):
        dx = importlib.import_module("fused_bias_swiglu").backward(dy, *ctx.saved_tensors)
        return dx, dx.sum(0)


def test_swiglu_by_the_extension_module():
    x = torch.randn(6, 16, requires_grad=True)
    bias = torch.randn(16, requires_grad=True)
    a, b = (x + bias).chunk(2, -1)
    expected, actual = F.silu(a) * b, SwiGLU.apply(x, bias)
    torch.testing.assert_close(actual, expected)
    dy = torch.randn_like(expected)
    grads = [torch.autograd.grad(y, (x, bias), dy) for y in (actual, expected)]
    torch.testing.assert_close(*grads)


ROPE = """
    from apex.transformer.functional import fused_rope, fused_apply_rotary_pos_emb
    import fused_rotary_positional_embedding as extension
    import torch
    assert not fused_rope.USE_ROCM_AITER_ROPE_BACKEND
    t, freqs = torch.randn(8, 2, 4, 16), torch.randn(8, 1, 1, 16)
    y = fused_apply_rotary_pos_emb(t, freqs)
    assert torch.equal(y, extension.forward(t, freqs, False))
    assert torch.equal(y, fused_rope.FusedRoPEFuncApex.apply(t, freqs))
"""


def run(script, tmp_path, *launcher, **environment):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    command = [sys.executable, *launcher, str(file)]
    environment = {**os.environ, **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("switch", ["0", "1"])
def test_switch_of_the_rope_backend(switch, tmp_path):
    run(ROPE, tmp_path, USE_ROCM_AITER_ROPE_BACKEND=switch)


GPT = """
    import sys
    import torch
    from apex.optimizers import FusedAdam
    from apex.transformer import parallel_state
    from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func
    from apex.transformer.pipeline_parallel.utils import (
        average_losses_across_data_parallel_group,
        get_ltor_masks_and_position_ids,
        setup_microbatch_calculator,
    )
    from apex.transformer.testing import global_vars
    from apex.transformer.testing.commons import (
        TEST_SUCCESS_MESSAGE,
        initialize_distributed,
        set_random_seed,
    )
    from apex.transformer.testing.standalone_gpt import gpt_model_provider

    sys.argv += "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16".split()
    sys.argv += "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4".split()
    sys.argv += "--hidden-dropout 0 --attention-dropout 0 --lr 0.01 --sequence-parallel".split()
    sys.argv += "--no-gradient-accumulation-fusion --tensor-model-parallel-size 2".split()
    sys.argv += ["--use-cpu-initialization"]

    initialize_distributed()
    global_vars.set_global_variables()
    args = global_vars.get_args()
    args.padded_vocab_size = 64
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size)
    set_random_seed(args.seed)
    sizes = args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    setup_microbatch_calculator(args.rank, args.rampup_batch_size, *sizes)
    tokens = torch.randint(64, (4, 17))

    def forward_step(batch, model):
        ids, labels = batch[0][:, :-1].contiguous(), batch[0][:, 1:].contiguous()
        mask, loss_mask, positions = get_ltor_masks_and_position_ids(ids, 0, False, False, False)

        def loss_func(output):
            loss = (output * loss_mask).sum() / loss_mask.sum()
            return loss, {"avg": average_losses_across_data_parallel_group([loss])}

        return model(ids, positions, mask, labels), loss_func

    model = build_model(gpt_model_provider, wrap_with_ddp=True, cpu_offload=args.cpu_offload)
    optimizer = FusedAdam([p for part in model for p in part.parameters()], lr=args.lr)
    run = get_forward_backward_func(None, 1)
    shape = args.seq_length, args.micro_batch_size, args.hidden_size
    for step in range(8):
        optimizer.zero_grad()
        losses = run(forward_step, [tokens], model, forward_only=False, tensor_shape=shape,
                     sequence_parallel_enabled=True)
        for part in model:
            for p in part.parameters():
                if getattr(p, "sequence_parallel_enabled", False):
                    group = parallel_state.get_tensor_model_parallel_group()
                    torch.distributed.all_reduce(p.grad, group=group)
        optimizer.step()
        if args.rank == 0:
            print(f"loss {sum(l['avg'].item() for l in losses) / len(losses):.3f}")
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    print(TEST_SUCCESS_MESSAGE)
"""


def test_gpt_script(tmp_path):
    """A script like those of its tests and scaling runs, started by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    out = run(GPT, tmp_path, *launcher)
    assert out.count(">> passed the test :-)") == 2
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", out, re.M)]
    assert len(losses) == 8
    assert losses[0] == pytest.approx(4.16, abs=0.1)  # log(64)
    assert losses[-1] < losses[0] - 0.5
