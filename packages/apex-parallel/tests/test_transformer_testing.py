"""apex.transformer.testing and apex.distributed_testing: toy models, arguments, test cases."""

import importlib
import re
import subprocess
import sys
import textwrap
import unittest

import pytest
import torch
import torch.distributed as dist

from apex.testing import common_utils
from apex.transformer.pipeline_parallel.schedules import get_forward_backward_func
from apex.transformer.pipeline_parallel.utils import _reconfigure_microbatch_calculator
from apex.transformer.testing import arguments, commons, global_vars
from apex_testkit.model_parallel import model_parallel

REQUIRED = {
    "num-layers": 4,
    "hidden-size": 64,
    "num-attention-heads": 8,
    "max-position-embeddings": 32,
    "micro-batch-size": 2,
}
DEFAULTS = {
    "ffn_hidden_size": 256,
    "kv_channels": 8,
    "layernorm_epsilon": 1e-5,
    "make_vocab_size_divisible_by": 128,
    "attention_dropout": 0.1,
    "weight_decay": 0.01,
    "start_weight_decay": 0.01,
    "weight_decay_incr_style": "constant",
    "clip_grad": 1.0,
    "adam_beta2": 0.999,
    "sgd_momentum": 0.9,
    "log_interval": 100,
    "optimizer": "adam",
    "seed": 1234,
    "init_method_std": 0.02,
    "lr_decay_style": "linear",
    "min_lr": 0.0,
    "initial_loss_scale": 2**32,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "tensor_model_parallel_size": 1,
    "distributed_backend": "nccl",
    "DDP_impl": "local",
    "masked_softmax_fusion": True,
    "gradient_accumulation_fusion": True,
    "bert_binary_head": True,
    "apply_query_key_layer_scaling": True,
    "cpu_offload": False,
    "params_dtype": torch.float32,
    "global_batch_size": 2,
    "data_parallel_size": 1,
    "rank": 0,
    "world_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "no_async_tensor_model_parallel_allreduce": False,
    "dataloader_type": "single",
}


@pytest.fixture
def command(monkeypatch):
    """Sets the command line, and the ranks that a launcher would announce."""

    def set_command(*extra, world=1, **values):
        given = {**REQUIRED, **{k.replace("_", "-"): v for k, v in values.items()}}
        given = [f"--{name}={value}" for name, value in given.items() if value is not None]
        monkeypatch.setattr(sys, "argv", ["script", *given, *extra])
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("RANK", str(world - 1))

    return set_command


def test_defaults(command, capsys):
    command()
    args = arguments.parse_args()
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS
    assert re.search(r"hidden_size \.+ 64", capsys.readouterr().out)


def test_derived(command):
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}
    command(
        *("--bf16", "--sequence-parallel", "--no-masked-softmax-fusion"),
        *("--rampup-batch-size", "4", "4", "100"),
        world=16,
        num_layers=16,
        num_layers_per_virtual_pipeline_stage=2,
        seq_length=32,
        **sizes,
    )
    args = arguments.parse_args()
    assert (args.data_parallel_size, args.global_batch_size, args.rank) == (2, 4, 15)
    assert args.virtual_pipeline_model_parallel_size == 2
    assert args.params_dtype == torch.bfloat16
    assert args.accumulate_allreduce_grads_in_fp32
    assert args.no_async_tensor_model_parallel_allreduce
    assert not args.masked_softmax_fusion
    assert args.rampup_batch_size == [4, 4, 100]
    assert args.encoder_seq_length == 32
    command("--fp16", world=2, **sizes)  # more than there are ranks
    args = arguments.parse_args()
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 1)
    assert args.params_dtype == torch.float16


def test_defaults_extras_and_unknown_ones(command, capsys):
    def provider(parser):
        parser.add_argument("--mine", type=int)
        return parser

    command("--mine=3", "--whose=4", lr=0.5)
    args = arguments.parse_args(provider, {"lr": 1.0, "seq_length": 16}, ignore_unknown_args=True)
    assert (args.mine, args.lr, args.seq_length) == (3, 0.5, 16)
    assert "WARNING: lr is 0.5, not its default 1.0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        arguments.parse_args(provider)
    assert "unrecognized arguments: --whose=4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "values", "text"),
    [
        ((), {"num_layers": None}, "num_layers: this argument is required"),
        ((), {"micro_batch_size": None}, "micro_batch_size: this argument is required"),
        (("--fp16", "--bf16"), {}, "fp16, bf16: give one"),
        (("--fp32-residual-connection",), {}, "needs fp16 or bf16"),
        ((), {"num_attention_heads": 7}, "hidden_size: 64 is not divisible by 7"),
        ((), {"seq_length": 64}, "expected seq_length, 64, or more, got 32"),
        ((), {"train_iters": 1, "train_samples": 1}, "train_iters, train_samples: give one"),
        ((), {"num_layers_per_virtual_pipeline_stage": 1}, "needs more than 2 stages"),
        (("--distribute-saved-activations",), {}, "needs several tensor-parallel ranks"),
    ],
)
def test_arguments_that_do_not_fit(command, extra, values, text):
    command(*extra, **values)
    with pytest.raises(ValueError, match=text):
        arguments.parse_args()


def test_global_variables(command, monkeypatch, tmp_path):
    monkeypatch.setattr(global_vars, "_values", {})
    for getter in (global_vars.get_args, global_vars.get_num_microbatches, global_vars.get_timers):
        with pytest.raises(RuntimeError, match="call set_global_variables first"):
            getter()
    (tmp_path / "userlib").mkdir()
    (tmp_path / "userlib" / "auto_resume.py").write_text("class AutoResume: pass\n")
    monkeypatch.setenv("SUBMIT_SCRIPTS", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    command(
        *("--adlr-autoresume", "--rampup-batch-size", "4", "4", "8"), world=2, global_batch_size=12
    )
    args = global_vars.set_global_variables()
    assert global_vars.get_args() is args
    assert global_vars.get_current_global_batch_size() == 4
    assert global_vars.get_num_microbatches() == 1
    global_vars.update_num_microbatches(100, consistency_check=True)
    assert global_vars.get_num_microbatches() == 3
    assert type(global_vars.get_adlr_autoresume()).__name__ == "AutoResume"
    assert global_vars.get_tensorboard_writer() is None
    timer = global_vars.get_timers()("step")
    assert isinstance(timer, global_vars._Timer)
    with pytest.raises(RuntimeError, match="called before"):
        global_vars.set_global_variables()


def check_toy_models(rank, world):
    """A step of each schedule on the toy models; the MLP is the same however it is divided."""
    losses = {}
    x = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(1))
    for tensor, divided in ((1, False), (2, False), (2, True)):
        with model_parallel(tensor):
            data = world // tensor
            _reconfigure_microbatch_calculator(rank, None, 4 * data, 4, data)
            commons.set_random_seed(5)
            model = commons.mlp_provider_func(6, True, True, sequence_parallel_enabled=divided)
            step = get_forward_backward_func(None, 1)
            step_func = commons.ToyParallelMLPFwdBwdStepFunc(sequence_parallel_enabled=divided)
            reduced = step(step_func, [x], [model], forward_only=False, tensor_shape=(4, 2, 6))
            losses[tensor, divided] = reduced[0]["avg"].item()
            for p in model.parameters():
                assert p.grad is not None
            plain = commons.model_provider_func(6, True, True)
            reduced = step(commons.fwd_step_func, [x], [plain], forward_only=False)
            torch.testing.assert_close(reduced[0]["avg"].item(), plain(x).sum().item())
            with pytest.raises(ValueError, match="neither a batch nor"):
                plain(None)
            plain.set_input_tensor([x])
            assert torch.equal(plain(None), plain.layer(x))
    first = losses.pop((1, False))
    assert list(losses.values()) == pytest.approx([first] * 2, rel=1e-5)


def test_toy_models(two_ranks):
    two_ranks(check_toy_models)


def test_beginning_of_a_script(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    commons.initialize_distributed()
    try:
        assert dist.get_backend() == ("nccl" if torch.cuda.is_available() else "gloo")
        commons.print_separator("title")
        out = capsys.readouterr().out
        assert "- title -" in out
        assert torch.cuda.is_available() or "the backend is gloo" in out
        with model_parallel():
            commons.set_random_seed(4)
            weight = commons.IdentityLayer((2, 3), scale=2.0)()
            torch.manual_seed(4)
            assert torch.equal(weight, 2.0 * torch.randn(2, 3))
    finally:
        dist.destroy_process_group()


def test_skipped_tests(monkeypatch):
    """The decorators of ROCm's Apex, with what the test returns."""

    def test_something(x):
        """Doc."""
        return x + 1

    names = {"TEST_WITH_ROCM": "skipIfRocm", "SKIP_FLAKY_TEST": "skipFlakyTest"}
    for switch, decorator in names.items():
        decorated = getattr(common_utils, decorator)(test_something)
        assert decorated.__doc__ == "Doc."
        monkeypatch.setattr(common_utils, switch, False)
        assert decorated(x=1) == 2
        monkeypatch.setattr(common_utils, switch, True)
        with pytest.raises(unittest.SkipTest, match="test_something"):
            decorated(1)
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("APEX_TEST_WITH_ROCM", value)
        monkeypatch.setenv("APEX_SKIP_FLAKY_TEST", value)
        fresh = importlib.reload(common_utils)
        assert fresh.TEST_WITH_ROCM is expected
        assert fresh.SKIP_FLAKY_TEST is expected


CASES = """
    import torch, torch.distributed as dist
    from torch.testing._internal import common_utils
    from apex.transformer.testing.distributed_test_base import (
        DistributedTestBase, GlooDistributedTestBase, NcclDistributedTestBase,
        UccDistributedTestBase, HAS_TORCH_UCC, HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER,
    )
    assert HAS_TORCH_UCC in (True, False) and HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER in (True, False)

    class Sums:
        def test_sum(self):
            self.assertEqual(dist.get_backend(), self.DISTRIBUTED_BACKEND)
            device = "cuda" if self.DISTRIBUTED_BACKEND == "nccl" else "cpu"
            x = torch.full((2,), self.rank + 1.0, device=device, requires_grad=True)
            x.sum().backward()  # needs autograd's threads
            total = x.detach().clone()
            dist.all_reduce(total)
            self.assertEqual(total, torch.full_like(total, sum(range(self.world_size + 1))))

    class Any(Sums, DistributedTestBase): pass
    class Gloo(Sums, GlooDistributedTestBase): pass
    class Nccl(Sums, NcclDistributedTestBase): pass
    class Ucc(Sums, UccDistributedTestBase): pass

    class Fails(GlooDistributedTestBase):
        def test_failure(self):
            self.assertLess(self.rank, 1, "this rank fails")

    if __name__ == "__main__":
        torch.ones(1, requires_grad=True).sum().backward()  # forked processes could not do so
        common_utils.run_tests()
"""


def test_cases_on_several_processes(tmp_path, monkeypatch):
    script = tmp_path / "cases.py"
    script.write_text(textwrap.dedent(CASES))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("CI", raising=False)  # there torch's run_tests writes XML, by xmlrunner
    command = [sys.executable, script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode != 0
    # Python 3.12.1 does not count what is skipped.
    assert re.search("Ran [35] tests", ran.stderr), ran.stderr
    without_gpu = "" if torch.cuda.is_available() else ", skipped=2"
    assert re.search(rf"FAILED \((errors|failures)=1{without_gpu}\)", ran.stderr), ran.stderr
    assert "this rank fails" in ran.stderr + ran.stdout


def test_what_is_missing_is_named(monkeypatch):
    import torch.testing._internal as internal

    monkeypatch.delattr(internal, "common_distributed", raising=False)
    monkeypatch.setitem(sys.modules, "torch.testing._internal.common_distributed", None)
    name = "apex.distributed_testing.distributed_test_base"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match="pip install expecttest"):
        importlib.import_module(name)
