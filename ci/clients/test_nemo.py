"""NeMo 1.14, the last release whose language models are made of apex.transformer's layers.

Its files run unmodified. Its packages' ``__init__`` files do not: they import all of NeMo, which
needs torch 1.13. ``torch._six`` is what its files miss in today's torch.
"""

import importlib
import logging
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import apex
from apex.transformer import microbatches, parallel_state, tensor_parallel
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func, utils

FOLDER = Path(find_spec("nemo").submodule_search_locations[0]).parent
BARE = (
    *("nemo", "nemo.utils", "nemo.core", "nemo.core.classes", "nemo.collections"),
    *("nemo.collections.common", "nemo.collections.common.parts", "nemo.collections.nlp"),
    *("nemo.collections.nlp.modules", "nemo.collections.nlp.modules.common"),
    "nemo.collections.nlp.modules.common.megatron",
    "nemo.collections.nlp.modules.common.megatron.adapters",
    *("nemo.collections.nlp.models", "nemo.collections.nlp.models.language_modeling"),
    "nemo.collections.nlp.models.language_modeling.megatron",
)


def bare_package(name):
    """A package whose modules can be imported, without what its ``__init__`` imports."""
    package = types.ModuleType(name)
    package.__path__ = [str(FOLDER / name.replace(".", "/"))]
    sys.modules[name] = package


for name in BARE:
    bare_package(name)
sys.modules["torch._six"] = types.SimpleNamespace(inf=float("inf"))
sys.modules["nemo.utils"].logging = logging.getLogger("nemo")
sys.modules["nemo.utils"].AppState = importlib.import_module("nemo.utils.app_state").AppState
sys.modules["nemo.core"].adapter_mixins = importlib.import_module(
    "nemo.core.classes.mixins.adapter_mixins"
)
megatron = {
    name: importlib.import_module(f"nemo.collections.nlp.modules.common.megatron.{name}")
    for name in (
        *("clip_grads", "fused_layer_norm", "fused_softmax", "language_model", "layer_norm_1p"),
        *("megatron_init", "module", "transformer", "utils", "vocab_parallel_cross_entropy"),
    )
}
gpt = importlib.import_module("nemo.collections.nlp.models.language_modeling.megatron.gpt_model")

VOCABULARY, HIDDEN, LENGTH, MICRO_BATCH, BATCH, STEPS = 32, 16, 8, 2, 4, 3
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "max_position_embeddings": LENGTH,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 4 * HIDDEN,
    "hidden_dropout": 0.0,
    "precision": 32,
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,  # TorchScript
    "bias_dropout_add_fusion": False,
}


def test_finds_apex():
    for module in (*megatron.values(), gpt):
        assert module.HAVE_APEX, module
    assert megatron["megatron_init"].HAVE_INTERLEAVED
    norm = megatron["fused_layer_norm"].get_layer_norm(1024, 1e-5, persist_layer_norm=True)
    assert isinstance(norm, apex.transformer.layers.FastLayerNorm)
    norm = megatron["layer_norm_1p"].LayerNorm1P(16)  # weight + 1, by a private function of ours
    x = torch.randn(4, 16)
    expected = torch.nn.functional.layer_norm(x, (16,), norm.weight + 1, norm.bias)
    torch.testing.assert_close(norm(x), expected)


class GrowingMicroBatches(microbatches.NumMicroBatchesCalculator):
    """A calculator of a user, put in place as NeMo's own files do it."""

    def __init__(self, micro_batch_size):
        super().__init__()
        self.micro_batch_size = micro_batch_size
        self.update(0, False)

    def update(self, consumed_samples, consistency_check):
        self.num_micro_batches = 1 + consumed_samples // 8
        self.current_global_batch_size = self.num_micro_batches * self.micro_batch_size


def test_calculators(monkeypatch):
    """``initialize_model_parallel_for_nemo`` before there are processes, twice; then a subclass."""
    monkeypatch.setattr(utils, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    sizes |= {"micro_batch_size": 2, "global_batch_size": 16}
    try:
        for _ in range(2):
            megatron["megatron_init"].initialize_model_parallel_for_nemo(8, 5, 1, **sizes)
        assert not parallel_state.model_parallel_is_initialized()
        assert parallel_state.get_tensor_model_parallel_world_size() == 2
        assert parallel_state.get_tensor_model_parallel_rank() == 1
        assert parallel_state.get_pipeline_model_parallel_rank() == 1
        assert (utils.get_num_microbatches(), utils.get_micro_batch_size()) == (4, 2)
        assert logging.getLogger("apex").level == logging.WARNING
        assert not megatron["module"].parallel_state.is_pipeline_first_stage()
        with pytest.raises(AssertionError):  # NeMo's own: another batch size
            megatron["megatron_init"].initialize_model_parallel_for_nemo(
                8, 5, 1, **{**sizes, "global_batch_size": 32}
            )
        monkeypatch.setattr(utils, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", GrowingMicroBatches(2))
        utils.update_num_microbatches(consumed_samples=16)
        assert (utils.get_num_microbatches(), utils.get_current_global_batch_size()) == (3, 6)
        with pytest.raises(Exception, match="already initialized"):
            megatron["megatron_init"].initialize_model_parallel_for_nemo(8, 5, 1, **sizes)
    finally:
        parallel_state.destroy_model_parallel()
        megatron["megatron_init"].set_logging_level(logging.NOTSET)


def provider(pre_process=True, post_process=True, **options):
    return gpt.GPTModel(**SIZES, pre_process=pre_process, post_process=post_process, **options)


def forward_step(batch, model):
    tokens, labels = batch
    positions = torch.arange(LENGTH).expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def loss_func(output):
        loss = output.mean()
        return loss, loss.detach()

    return model(tokens, positions, mask, labels=labels), loss_func


def finish_gradients(model, sequence_parallel):
    """What NeMo's models do after the backward: sums over ranks, then its gradient clipping."""
    if sequence_parallel:  # small norms get it as `sequence_parallel_enbaled`, which does nothing
        for module in model.modules():
            if isinstance(module, apex.normalization.MixedFusedLayerNorm):
                module.weight.sequence_parallel_enabled = True
                module.bias.sequence_parallel_enabled = True
    for param in model.parameters():
        if sequence_parallel and getattr(param, "sequence_parallel_enabled", False):
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(param.grad, group=group)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        grad = model.word_embeddings_weight().grad
        dist.all_reduce(grad, group=parallel_state.get_embedding_group())
    return megatron["clip_grads"].clip_grad_norm_fp32(list(model.parameters()), 0.5)


def train(tensor, pipeline, sequence_parallel=False):
    """Losses and gradient norms of some steps of NeMo's GPT on this rank."""
    parallel_state.initialize_model_parallel(tensor, pipeline)
    utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None
    utils.setup_microbatch_calculator(0, None, BATCH, MICRO_BATCH, 1)
    try:
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        options = {"sequence_parallel": sequence_parallel}
        (model,) = build_model(provider, wrap_with_ddp=False, **options)
        load_weights(model, pipeline)
        if pipeline > 1:
            model.sync_initial_word_embeddings()
        optimizer = apex.optimizers.FusedAdam(model.parameters(), lr=0.01)
        batch = torch.randint(
            VOCABULARY, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(0)
        )
        losses, norms = [], []
        for _ in range(STEPS):
            optimizer.zero_grad()
            reduced = get_forward_backward_func(None, pipeline)(
                forward_step,
                list(batch),
                [model],
                forward_only=False,
                tensor_shape=(LENGTH, MICRO_BATCH, HIDDEN),
                sequence_parallel_enabled=sequence_parallel,
            )
            norms.append(finish_gradients(model, sequence_parallel))
            optimizer.step()
            losses.append(torch.stack(reduced).mean().item() if reduced else None)
        return losses, norms
    finally:
        parallel_state.destroy_model_parallel()


def load_weights(model, pipeline):
    """The same values in every layout, from a seed that the name determines; and no dropout."""
    for module in model.modules():  # GPTModel has no argument for that of attention
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    rank = parallel_state.get_tensor_model_parallel_rank()
    world = parallel_state.get_tensor_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for name, param in model.named_parameters():
        head, layers, tail = name.partition(".layers.")
        if layers and pipeline > 1:
            name = f"{head}{layers}{stage}.{tail.partition('.')[2]}"
        shape, dim = list(param.shape), param.partition_dim
        divided = param.tensor_model_parallel and world > 1
        if divided:
            shape[dim] *= world
        seed = sum(map(ord, name)) + 1000 * len(name)
        value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4
        if name == "word_embeddings.weight":
            value.zero_()  # the first stage's are added
        param.data.copy_(value.chunk(world, dim)[rank] if divided else value)


def check_layouts(rank, world):
    # NeMo's names of the GPU mean the CPU here; nothing else of it is replaced.
    torch.cuda.FloatTensor, torch.cuda.IntTensor = torch.FloatTensor, torch.IntTensor
    torch.cuda.current_device = lambda: "cpu"
    losses, norms = train(1, 1)  # two replicas, which see the same batch
    assert losses[-1] < losses[0] - 0.01
    for layout in ((2, 1), (2, 1, True), (1, 2)):
        found, found_norms = train(*layout)
        assert found_norms == pytest.approx(norms, rel=1e-4), layout
        if found[0] is not None:
            assert found == pytest.approx(losses, rel=1e-5), layout


def test_gpt_is_the_same_in_every_layout(two_ranks):
    two_ranks(check_layouts)
