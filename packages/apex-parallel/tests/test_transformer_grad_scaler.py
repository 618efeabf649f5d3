"""GradScaler: all ranks of a model skip a step together, and only they."""

import pytest
import torch

from apex.transformer import parallel_state
from apex.transformer.amp import GradScaler
from apex.transformer.pipeline_parallel import get_forward_backward_func, utils
from apex_testkit.model_parallel import model_parallel


class Custom(torch.optim.SGD):
    """Unscales its gradients itself."""

    _custom_amp_unscale_grads = True

    def unscale_grads(self, inv_scale, found_inf, allow_fp16):
        assert not allow_fp16
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(inv_scale)
                found_inf.copy_((~p.grad.isfinite()).any())
        return {found_inf.device: found_inf}


class TakesScaler(Custom):
    """Decides itself whether to step, as DistributedFusedAdam does."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        found = grad_scaler._per_optimizer_states[id(self)]["found_inf_per_device"]
        if not found:  # nobody has called unscale_
            inv_scale = 1 / grad_scaler.get_scale()
            found |= self.unscale_grads(torch.tensor(inv_scale), torch.zeros(()), False)
        if not any(found.values()):
            super().step()


OPTIMIZERS = {
    "plain": lambda params: torch.optim.SGD(params, lr=1.0),
    "fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),  # is given the scale
    "custom": lambda params: Custom(params, lr=1.0),
    "takes the scaler": lambda params: TakesScaler(params, lr=1.0),
}


def step(scaler, optimizer, param, gradient, unscales=False):
    optimizer.zero_grad()
    scaler.scale((param * gradient).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
        torch.testing.assert_close(param.grad, gradient * torch.ones(3))
    scaler.step(optimizer)
    scaler.update()


def check_skips(rank, world, tensor, pipeline):
    """Rank 1 overflows in the second step: its model's ranks skip it, the others do not."""
    with model_parallel(tensor, pipeline):
        has_rank_1 = 1 in parallel_state._state.ranks["model_parallel"]
        for name, make in OPTIMIZERS.items():
            for unscales in (False, True):
                param = torch.nn.Parameter(torch.ones(3))
                optimizer, scaler = make([param]), GradScaler(2.0**8, growth_interval=100)
                step(scaler, optimizer, param, 1.0, unscales)
                bad = torch.inf if rank == 1 else 1.0
                step(scaler, optimizer, param, bad, unscales and rank != 1)
                expected = 0.0 if has_rank_1 else -1.0
                assert param.tolist() == [expected] * 3, name
                assert scaler.get_scale() == (2.0**7 if has_rank_1 else 2.0**8), name


def check_no_gradients(rank, world):
    """A rank whose optimizer has no gradients goes along with the others."""
    with model_parallel(1, world):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer, scaler = OPTIMIZERS["plain"]([param]), GradScaler(4.0)
        scaler.scale(torch.ones(1))
        if rank == 0:
            param.grad = torch.full((3,), torch.nan)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert param.tolist() == [1.0] * 3


class Stage(torch.nn.Linear):
    """A stage of a pipeline that multiplies by 1."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        torch.nn.init.ones_(self.weight)

    def set_input_tensor(self, tensors):
        (self.input,) = tensors

    def forward(self, x):
        return super().forward(x if self.input is None else self.input)


def check_pipeline(rank, world, chunks):
    """Stages without a loss never scale one, and step all the same; they skip with the others."""
    scalers = [GradScaler(2.0**8), torch.amp.GradScaler("cpu", 2.0**8)]
    for scaler in scalers:
        with model_parallel(1, world):
            if chunks > 1:
                parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
            utils._reconfigure_microbatch_calculator(1, None, world, 1, 1)
            stages = [Stage() for _ in range(chunks)]
            optimizer = torch.optim.SGD([stage.weight for stage in stages], lr=0.125)
            run = get_forward_backward_func(chunks if chunks > 1 else None, world)
            for number in range(2 if scaler is scalers[0] else 1):

                def step(batch, model, number=number):
                    output = model(batch)
                    if rank == 0 and number == 1:  # overflows in its own gradient alone
                        model.weight.register_hook(lambda grad: grad * torch.inf)
                    return output, lambda output: (output.sum(), None)

                optimizer.zero_grad()
                batch, shape = torch.ones(world, 1, 1), (1, 1, 1)
                options = {"tensor_shape": shape, "grad_scaler": scaler}
                run(step, batch, stages, forward_only=True, **options)
                run(step, batch, stages, forward_only=False, **options)
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                assert [stage.weight.item() for stage in stages] == [0.875] * chunks
            assert scaler.get_scale() == (2.0**7 if scaler is scalers[0] else 2.0**8)
    utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None


def test_pipeline(two_ranks, four_ranks):
    four_ranks(check_pipeline, chunks=1)
    two_ranks(check_pipeline, chunks=2)


def test_ranks_skip_together(two_ranks, four_ranks):
    four_ranks(check_skips, tensor=2, pipeline=1)
    four_ranks(check_skips, tensor=2, pipeline=2)
    four_ranks(check_skips, tensor=1, pipeline=2)
    two_ranks(check_no_gradients)


def test_alone_without_model_parallelism():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = OPTIMIZERS["plain"]([param]), GradScaler(4.0, growth_interval=1)
    step(scaler, optimizer, param, 1.0)
    assert (param.tolist(), scaler.get_scale()) == ([0.0] * 3, 8.0)
    step(scaler, optimizer, param, torch.inf)
    assert (param.tolist(), scaler.get_scale()) == ([0.0] * 3, 4.0)
    scaler.update(3.0)
    assert scaler.get_scale() == 3.0
    scaler.update(torch.tensor([5.0]))
    assert scaler.get_scale() == 5.0
    state = scaler.state_dict()
    other = GradScaler(device="cpu")
    other.load_state_dict(state)
    assert other.state_dict() == state
    off = GradScaler(enabled=False)
    assert off.scale(param) is param
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
