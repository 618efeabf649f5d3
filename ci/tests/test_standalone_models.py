"""apex.transformer.testing's GPT and BERT are as accurate as plain PyTorch in every layout."""

import io
import sys
import zlib
from contextlib import contextmanager, redirect_stdout

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from apex.transformer import AttnMaskType, LayerType, parallel_state
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func, utils
from apex.transformer.testing import commons, global_vars
from apex.transformer.testing.standalone_bert import bert_model_provider
from apex.transformer.testing.standalone_gpt import GPTModel, gpt_model_provider
from apex.transformer.testing.standalone_transformer_lm import (
    ParallelTransformerLayer,
    get_language_model,
    get_num_layers,
    module_size,
)
from apex_testkit.model_parallel import model_parallel

HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH, MICRO_BATCH, MICROBATCHES = 16, 4, 4, 24, 6, 2, 2
SIZES = {
    "num-layers": LAYERS,
    "hidden-size": HIDDEN,
    "num-attention-heads": HEADS,
    "max-position-embeddings": LENGTH,
    "micro-batch-size": MICRO_BATCH,
    "global-batch-size": MICRO_BATCH * MICROBATCHES,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
}
EMBEDDING = "language_model.embedding.word_embeddings.weight"
PROVIDERS = {"gpt": gpt_model_provider, "bert": bert_model_provider}
LAYOUTS = {  # tensor-parallel ranks, stages, sequence parallel, chunks
    "TP": (2, 1, False, 1),
    "TP, sequence parallel": (2, 1, True, 1),
    "PP": (1, 2, False, 1),
    "PP, interleaved": (1, 2, False, 2),
}


@contextmanager
def arguments(*flags, world=1, **sizes):
    """The global arguments of a script, as if from the command line."""
    given = {**SIZES, **{name.replace("_", "-"): value for name, value in sizes.items()}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_vars, "_values", {})
        patch.setenv("WORLD_SIZE", str(world))
        options = [f"--{name}={value}" for name, value in given.items()]
        flags = ("--no-gradient-accumulation-fusion", *flags)
        patch.setattr(sys, "argv", ["script", *flags, *options])
        with redirect_stdout(io.StringIO()):
            args = global_vars.set_global_variables()
        args.padded_vocab_size = VOCABULARY
        yield args


def named_parameters(chunks):
    """The parameters of this rank, with their names in the whole model."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    here = LAYERS // stages // len(chunks)
    for chunk, model in enumerate(chunks):
        for name, param in model.named_parameters():
            head, layers, tail = name.partition(".layers.")
            index, _, rest = tail.partition(".")
            if name == "word_embeddings.weight":
                yield EMBEDDING, param
            elif layers:
                yield f"{head}{layers}{int(index) + (chunk * stages + stage) * here}.{rest}", param
            else:
                yield name, param


def whole_value(name, shape):
    """What a parameter of this name is in every layout, from a seed that the name determines."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator) / 3
    return values + 1 if "norm.weight" in name else values


def share(whole, param):
    """This rank's part of a whole parameter or of its gradient."""
    if not param.tensor_model_parallel:
        return whole
    world = parallel_state.get_tensor_model_parallel_world_size()
    parts = whole.chunk(world, param.partition_dim)
    return parts[parallel_state.get_tensor_model_parallel_rank()]


def whole_shape(param):
    shape = list(param.shape)
    if param.tensor_model_parallel:
        world = parallel_state.get_tensor_model_parallel_world_size()
        shape[param.partition_dim] *= world
    return shape


def samples(kind):
    generator = torch.Generator().manual_seed(3)
    shape = MICRO_BATCH * MICROBATCHES, LENGTH
    tokens, labels = torch.randint(VOCABULARY, (2, *shape), generator=generator)
    words = torch.ones(shape, dtype=torch.long)
    words[1, 4:] = 0
    follows = torch.randint(2, shape[:1], generator=generator)
    return [tokens, labels, words, (tokens > 9).long(), follows]


class Plain:
    """The whole model in plain PyTorch; ``w`` are its weights by Megatron's names."""

    def __init__(self, w):
        self.w = w

    def norm(self, x, name):
        return F.layer_norm(x, (HIDDEN,), self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def linear(self, x, name):
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def attention(self, q, k, v, name, mask):
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(2, 3) / (HIDDEN // HEADS) ** 0.5
        seen = scores.masked_fill(mask, -10000.0).softmax(-1) @ v
        return self.linear(seen.transpose(1, 2).flatten(2), f"{name}.dense")

    def layer(self, x, name, mask, encoded=None):
        mixed = self.linear(
            self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attention.query_key_value"
        )
        q, k, v = (t.flatten(2) for t in mixed.unflatten(2, (HEADS, -1)).chunk(3, -1))
        x = x + self.attention(q, k, v, f"{name}.self_attention", mask)
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        if encoded is not None:
            mixed = self.linear(encoded, f"{name}.inter_attention.key_value")
            k, v = (t.flatten(2) for t in mixed.unflatten(2, (HEADS, -1)).chunk(2, -1))
            q = self.linear(normed, f"{name}.inter_attention.query")
            nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
            x = x + self.attention(q, k, v, f"{name}.inter_attention", nothing)
            normed = self.norm(x, f"{name}.post_inter_attention_layernorm")
        hidden = F.gelu(self.linear(normed, f"{name}.mlp.dense_h_to_4h"))
        return x + self.linear(hidden, f"{name}.mlp.dense_4h_to_h")

    def loss(self, kind, tokens, labels, words, types, follows):
        embedding = self.w[EMBEDDING]
        positions = self.w["language_model.embedding.position_embeddings.weight"]
        x = embedding[tokens] + positions[: tokens.shape[1]]
        if kind == "bert":
            x = x + self.w["language_model.embedding.tokentype_embeddings.weight"][types]
            mask = words[:, None, :, None] * words[:, None, None, :] == 0
        else:
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for i in range(LAYERS):
            x = self.layer(x, f"language_model.encoder.layers.{i}", mask)
        x = self.norm(x, "language_model.encoder.final_layernorm")
        if kind == "gpt":
            return F.cross_entropy((x @ embedding.T).flatten(0, 1), labels.flatten())
        features = self.norm(F.gelu(self.linear(x, "lm_head.dense")), "lm_head.layernorm")
        logits = features @ embedding.T + self.w["lm_head.bias"]
        pooled = torch.tanh(self.linear(x[:, 0], "language_model.pooler.dense"))
        binary = F.cross_entropy(self.linear(pooled, "binary_head"), follows)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + binary


def plain_gradients(kind, weights, dtype):
    """The loss, and gradients by name."""
    w = {n: value.detach().to(dtype, copy=True).requires_grad_() for n, value in weights.items()}
    loss = Plain(w).loss(kind, *samples(kind))
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in w.items()}


def forward_step(kind):
    def step(batch, model):
        tokens, labels, words, types, follows = batch
        if kind == "gpt":
            positions = torch.arange(LENGTH).expand_as(tokens)
            output = model(tokens, positions, None, labels=labels)
        else:
            output = model(tokens, words, types, lm_labels=labels)

        def loss_func(output):
            if kind == "bert":
                output, binary = output
                loss = output.mean() + F.cross_entropy(binary, follows)
            else:
                loss = output.mean()
            return loss, loss.detach()

        return output, loss_func

    return step


def check_accuracy(actual, plain32, truth, what):
    """Root mean squares: the largest of some dozen errors differs by more than 2 by chance."""
    error = (plain32.double() - truth).norm()
    allowed = 2 * error + 4 * torch.finfo(torch.float32).eps * truth.norm()
    assert (actual.double() - truth).norm() <= allowed, what


def weights_of_the_whole(kind):
    """By name, from a model of one process."""
    model = PROVIDERS[kind]()
    return {name: whole_value(name, p.shape) for name, p in model.named_parameters()}


def train_step(kind, pipeline, divided, chunks):
    """The models of this rank with gradients, and the micro-batches' losses."""
    virtual = chunks if chunks > 1 else None
    models = build_model(PROVIDERS[kind], False, virtual)
    ends = [m for m in models if m.pre_process or m.post_process]
    if pipeline > 1:
        first, last = (torch.empty(VOCABULARY, HIDDEN) for _ in range(2))
        shared = ends[0].word_embeddings_weight().detach()
        dist.all_gather([first, last], shared, group=parallel_state.get_embedding_group())
        assert first.std() > 0.01
        assert torch.equal(first, last)
    for name, param in named_parameters(models):
        param.data.copy_(share(whole_value(name, whole_shape(param)), param))
    utils._reconfigure_microbatch_calculator(1, None, MICRO_BATCH * MICROBATCHES, MICRO_BATCH, 1)
    losses = get_forward_backward_func(virtual, pipeline)(
        forward_step(kind),
        samples(kind),
        models,
        forward_only=False,
        tensor_shape=(LENGTH, MICRO_BATCH, HIDDEN),
        sequence_parallel_enabled=divided,
    )
    for _, param in named_parameters(models):  # what a trainer does
        if divided and getattr(param, "sequence_parallel_enabled", False):
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(param.grad, group=group)
    if pipeline > 1:
        grad = ends[0].word_embeddings_weight().grad
        dist.all_reduce(grad, group=parallel_state.get_embedding_group())
    return models, losses


def check_model(rank, world, kind, layout):
    tensor, pipeline, divided, chunks = LAYOUTS.get(layout, (1, 1, False, 1))
    flags = ["--sequence-parallel"] if divided else []
    with model_parallel(1), arguments(world=1):
        commons.set_random_seed(1)
        weights = weights_of_the_whole(kind)
    (loss32, grads32), (loss64, grads64) = (
        plain_gradients(kind, weights, dtype) for dtype in (torch.float32, torch.float64)
    )
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    with model_parallel(tensor, pipeline), arguments(*flags, world=world, **sizes):
        commons.set_random_seed(1)
        models, losses = train_step(kind, pipeline, divided, chunks)
        if losses:
            check_accuracy(torch.stack(losses).mean(), loss32, loss64, "loss")
        found = set()
        for name, param in named_parameters(models):
            found.add(name)
            wholes = (share(grads[name], param) for grads in (grads32, grads64))
            check_accuracy(param.grad, *wholes, name)
        assert pipeline > 1 or found == set(weights)


@pytest.mark.parametrize("kind", PROVIDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_divided_model(two_ranks, kind, layout):
    two_ranks(check_model, kind=kind, layout=layout)


@pytest.fixture
def one_rank():
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", PROVIDERS)
@pytest.mark.usefixtures("one_rank")
def test_whole_model(kind):
    check_model(0, 1, kind, None)


def gpt_gradients(*flags, offload=False, **sizes):
    with arguments(*flags, attention_dropout=0.2, hidden_dropout=0.1, **sizes) as args:
        args.cpu_offload = offload
        commons.set_random_seed(7)
        model = gpt_model_provider(cpu_offload=offload)
        tokens, labels, *_ = samples("gpt")
        model(tokens, torch.arange(LENGTH).expand_as(tokens), None, labels).mean().backward()
        return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        {"recompute_granularity": "full", "recompute_method": "block"},
        {"offload": True},
    ],
    ids=["selective", "uniform", "block", "offload"],
)
@pytest.mark.usefixtures("alone")
def test_what_saves_memory_draws_the_same_dropout(options):
    for actual, expected in zip(gpt_gradients(**options), gpt_gradients(), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("alone")
def test_bfloat16_by_autocast_is_close():
    with arguments("--bf16"):
        commons.set_random_seed(1)
        model = gpt_model_provider()
        assert model.word_embeddings_weight().dtype == torch.bfloat16
        tokens, labels, *_ = samples("gpt")
        given = tokens, torch.arange(LENGTH).expand_as(tokens), None, labels
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = model(*given)
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses, model.float()(*given), atol=0.05, rtol=0.01)


@pytest.mark.usefixtures("alone")
def test_decoder_layer_attends_to_the_encoder():
    with arguments():
        commons.set_random_seed(1)
        init = torch.nn.init.normal_
        layer = ParallelTransformerLayer(init, init, 1, LayerType.decoder, AttnMaskType.causal)
        x, encoded = (torch.randn(n, 2, HIDDEN, requires_grad=True) for n in (LENGTH, 9))
        y = layer(x, None, encoded)
        w = {f"layer.{name}": p.double() for name, p in layer.named_parameters()}
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        rows = (t.double().transpose(0, 1) for t in (x, encoded))
        expected = Plain(w).layer(next(rows), "layer", mask, next(rows)).transpose(0, 1)
        torch.testing.assert_close(y.double(), expected, atol=1e-3, rtol=1e-4)
        dy = torch.randn_like(y)
        actual = torch.autograd.grad(y, (x, encoded), dy)
        expected = torch.autograd.grad(expected, (x, encoded), dy.double())
        torch.testing.assert_close(actual, expected, atol=1e-2, rtol=1e-3)


@pytest.mark.usefixtures("alone")
def test_encoder_and_decoder():
    """A token of the decoder depends on those before it, and on all of the encoder."""
    with arguments():
        commons.set_random_seed(1)
        model, key = get_language_model(0, True, AttnMaskType.padding, add_decoder=True)
        assert key == "language_model"
        tokens, others, *_ = samples("gpt")
        positions = torch.arange(LENGTH).expand_as(tokens)
        decoded, encoded, pooled = model(tokens, positions, None, others, positions, None)
        assert decoded.shape == encoded.shape == (LENGTH, len(tokens), HIDDEN)
        assert pooled.shape == (len(tokens), HIDDEN)
        others[:, 3] = (others[:, 3] + 1) % VOCABULARY
        again = model(None, None, None, others, positions, None, enc_hidden_states=encoded)[0]
        assert torch.equal(again[:3], decoded[:3])
        assert (again[3:] != decoded[3:]).any(-1).all()
        tokens[:, 0] = (tokens[:, 0] + 1) % VOCABULARY
        other = model(tokens, positions, None, others, positions, None)[0]
        assert (other != again).any(-1).all()


@pytest.mark.usefixtures("alone")
def test_checkpoints_of_bert():
    with arguments("--bert-no-binary-head"):
        commons.set_random_seed(1)
        first, second = bert_model_provider(), bert_model_provider()
        saved = first.state_dict_for_save_checkpoint()
        assert set(saved) == {"language_model", "lm_head"}
        for state in (saved, first.state_dict()):
            commons.set_random_seed(2)
            second = bert_model_provider()
            second.load_state_dict(state)
            for a, b in zip(first.parameters(), second.parameters(), strict=True):
                assert torch.equal(a, b)
        assert module_size(first) == sum(p.numel() for p in first.parameters())
        del saved["lm_head"]
        with pytest.raises(RuntimeError, match=r"lm_head\.bias"):
            second.load_state_dict(saved)


@pytest.mark.usefixtures("alone")
def test_what_does_not_fit():
    tokens, *_ = samples("gpt")
    positions = torch.arange(LENGTH).expand_as(tokens)
    with arguments():
        commons.set_random_seed(1)
        model = GPTModel(parallel_output=False)
        assert model(tokens, positions, None).shape == (*tokens.shape, VOCABULARY)
        with pytest.raises(ValueError, match="tokentype_ids: expected none"):
            model(tokens, positions, None, tokentype_ids=tokens)
        with pytest.raises(ValueError, match="tokentype_ids: expected some"):
            GPTModel(num_tokentypes=2)(tokens, positions, None)
        with pytest.raises(NotImplementedError, match="inference_params"):
            model(tokens, positions, None, inference_params={})


def check_numbers_of_layers(rank, world):
    with model_parallel(1, 2), arguments("--standalone-embedding-stage", world=2) as args:
        assert get_num_layers(args, False) == (0, LAYERS)[rank]
        args.standalone_embedding_stage, args.num_layers = False, 3
        with pytest.raises(ValueError, match="3 is not divisible by 2"):
            get_num_layers(args, False)
        with pytest.raises(RuntimeError, match="split rank"):
            get_num_layers(args, True)
        parallel_state.set_pipeline_model_parallel_split_rank(1)
        assert get_num_layers(args, True) == 3


def test_numbers_of_layers(two_ranks):
    two_ranks(check_numbers_of_layers)
