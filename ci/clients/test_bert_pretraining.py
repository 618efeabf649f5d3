"""The step of BERT pretraining: amp O2, FusedLAMB, and one float16 all-reduce of all gradients.

Such scripts unscale and reduce by hand, with ``amp_C`` and ``apex_C``, and give amp's loss scaler
an overflow buffer of their own.
"""

import contextlib
import io

import amp_C
import apex_C
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from apex import amp
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedLAMB
from apex.parallel.distributed import flat_dist_call

WORDS, WIDTH, LENGTH, BATCH, MICRO_BATCHES = 20, 32, 6, 8, 2
STEPS, SAVED_AFTER, OVERFLOW_AT = 14, 8, 5
FIRST_SCALE = 2.0**12


class Encoder(nn.Module):
    """Predicts each word from all words."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.norms = nn.ModuleList([FusedLayerNorm(WIDTH) for _ in range(2)])
        self.feed = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WORDS))
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, words):
        x = self.words(words)
        q, k, v = self.attention(x).chunk(3, dim=-1)
        x = self.norms[0](x + F.scaled_dot_product_attention(q, k, v))
        x = self.norms[1](x + self.feed(x))
        return F.linear(x, self.words.weight, self.bias)  # the weight is shared, as in BERT


def make():
    torch.manual_seed(0)
    model = Encoder()
    plain = {name for name, _ in model.named_parameters() if "bias" in name or "norms" in name}
    groups = [
        {"params": [p for n, p in model.named_parameters() if n not in plain], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n in plain], "weight_decay": 0.0},
    ]
    return model, FusedLAMB(groups, lr=0.02)


def loss_of(model, step, micro_batch, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    words = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    logits = model(words).float()
    return F.cross_entropy(logits.view(-1, WORDS), ((words + 1) % WORDS).view(-1))


def masters_with_gradients(optimizer):
    return [p for p in amp.master_params(optimizer) if p.grad is not None]


def take_optimizer_step(model, optimizer, overflow_buf, dtype):
    """Reduce the unscaled gradients of all micro-batches, and step; True if there was an overflow.

    They are scaled again for the way: float16 would lose small ones.
    """
    scaler = amp._amp_state.loss_scalers[0]
    scale, parts = scaler.loss_scale(), dist.get_world_size() * MICRO_BATCHES
    grads = [p.grad for p in masters_with_gradients(optimizer)]
    flat = torch.empty(sum(g.numel() for g in grads), dtype=dtype)
    views = apex_C.unflatten(flat, grads)
    overflow_buf.zero_()
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow_buf, [grads, views], scale / parts)
    dist.all_reduce(flat)
    overflow_buf.zero_()
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow_buf, [views, grads], 1.0 / scale)

    before = scaler._overflow_buf
    scaler._overflow_buf = overflow_buf
    had_overflow = scaler.update_scale()
    scaler._overflow_buf = before
    if had_overflow:
        if dist.get_rank() == 0:
            print(
                "Rank 0 :: Gradient overflow.  Skipping step, "
                f"reducing loss scale to {scaler.loss_scale()}"
            )
        for master in optimizer._amp_stash.all_fp32_from_fp16_params:
            master.grad = None
    else:
        optimizer.step()
    for param in model.parameters():
        param.grad = None
    return had_overflow


def mixed_precision():
    """As such scripts begin: initialize, set the first scale, send rank 0's weights to all."""
    model, optimizer = make()
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0
    )
    amp._amp_state.loss_scalers[0]._loss_scale = FIRST_SCALE
    flat_dist_call([p.data for p in model.parameters()], dist.broadcast, (0,))
    return model, optimizer


def save(model, optimizer, step, path):
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state | {"master params": masters, "amp": amp.state_dict()}, path)


def resume(path):
    model, optimizer = mixed_precision()
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(state["optimizer"])
    for param, saved in zip(amp.master_params(optimizer), state["master params"], strict=True):
        param.data.copy_(saved.data)
    amp.load_state_dict(state["amp"])
    return model, optimizer, state["step"]


def train(model, optimizer, steps, dtype, path=None):
    """Return each step's loss, averaged over ranks, and the steps that were skipped."""
    rank, losses, skipped = dist.get_rank(), [], []
    overflow_buf = torch.zeros(1, dtype=torch.int32)
    for step in steps:
        total = torch.zeros(1)
        for micro_batch in range(MICRO_BATCHES):
            loss = loss_of(model, step, micro_batch, rank)
            total += loss.detach() / MICRO_BATCHES
            if (step, micro_batch, rank) == (OVERFLOW_AT, 0, 1):
                loss = loss * 1e8  # on one rank alone
            with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled_loss:
                scaled_loss.backward()
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        if take_optimizer_step(model, optimizer, overflow_buf, dtype):
            skipped.append(step)
            assert all(map(torch.equal, amp.master_params(optimizer), before))
        assert not masters_with_gradients(optimizer)
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        if step == SAVED_AFTER and path is not None and rank == 0:
            save(model, optimizer, step + 1, path)
    return losses, skipped


def plain_losses(world):
    """The same training in one process, without amp, of whole batches."""
    model, optimizer = make()
    losses = []
    for step in range(STEPS):
        parts = [loss_of(model, step, m, r) for m in range(MICRO_BATCHES) for r in range(world)]
        loss = sum(parts) / len(parts)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if step != OVERFLOW_AT:
            optimizer.step()
    return losses


def check_training(rank, world, dtype, folder):
    path = f"{folder}/{dtype}.pt"
    expected = plain_losses(world)
    model, optimizer = mixed_precision()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        losses, skipped = train(model, optimizer, range(STEPS), dtype, path)
    assert skipped == [OVERFLOW_AT]  # on all ranks
    message = f"Gradient overflow.  Skipping step, reducing loss scale to {FIRST_SCALE / 2}\n"
    assert printed.getvalue() == ("Rank 0 :: " + message if rank == 0 else "")
    assert amp._amp_state.loss_scalers[0].loss_scale() == FIRST_SCALE / 2
    assert expected[-1] < expected[0] - 0.5, expected
    torch.testing.assert_close(losses, expected, rtol=0.02, atol=0.0)
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    for master in masters:  # the same on all ranks
        mine = master.clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, master)

    model, optimizer, step = resume(path)
    again, skipped = train(model, optimizer, range(step, STEPS), dtype)
    assert not skipped
    assert again == losses[SAVED_AFTER + 1 :]
    assert all(map(torch.equal, amp.master_params(optimizer), masters))
    amp._amp_state.handle._deactivate()


def test_pretraining_in_float16(two_ranks, tmp_path):
    """Gradients travel in float16, where each rank's own unscaling has found nothing yet."""
    two_ranks(check_training, dtype=torch.float16, folder=str(tmp_path))


def test_pretraining_with_float32_reduction(two_ranks, tmp_path):
    two_ranks(check_training, dtype=torch.float32, folder=str(tmp_path))
