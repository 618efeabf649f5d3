"""Megatron's command-line arguments: by group, each as name, type or kind, default, choices."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Argument:
    """One argument; ``kind`` is a type, "flag" (off unless given), or "off" (on unless given).

    An "off" argument ``--no-something`` clears ``something``, or ``dest``.
    """

    name: str
    kind: Any = str
    default: Any = None
    choices: tuple[Any, ...] | None = None
    nargs: str | None = None
    dest: str | None = None

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        flag = f"--{self.name}"
        if self.kind == "flag":
            group.add_argument(flag, action="store_true", default=self.default or False)
        elif self.kind == "off":
            dest = self.dest or self.name.removeprefix("no-").replace("-", "_")
            group.add_argument(flag, action="store_false", dest=dest)
        else:
            choices, nargs = self.choices, self.nargs
            group.add_argument(
                flag, type=self.kind, default=self.default, choices=choices, nargs=nargs
            )


def _flags(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, "flag") for name in names)


def _values(kind: type, *names: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, kind) for name in names)


def _yes(text: str) -> bool:
    return text.lower() in ("1", "true", "yes")


_A = Argument
GROUPS: dict[str, tuple[Argument, ...]] = {
    "network size": (
        *_values(int, "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads"),
        *_values(int, "kv-channels", "max-position-embeddings", "num-experts"),
        _A("make-vocab-size-divisible-by", int, 128),
        _A("layernorm-epsilon", float, 1e-5),
        *_flags("apply-residual-connection-post-layernorm", "openai-gelu"),
        _A("onnx-safe", _yes),
        _A("bert-no-binary-head", "off", dest="bert_binary_head"),
    ),
    "logging": (
        *_flags("log-params-norm", "log-num-zeros-in-grad", "log-timers-to-tensorboard"),
        *_flags("log-batch-size-to-tensorboard", "log-validation-ppl-to-tensorboard"),
        *_flags("log-memory-to-tensorboard", "log-world-size-to-tensorboard"),
        _A("tensorboard-log-interval", int, 1),
        _A("tensorboard-queue-size", int, 1000),
        _A("no-log-learnig-rate-to-tensorboard", "off", dest="log_learning_rate_to_tensorboard"),
        _A("no-log-loss-scale-to-tensorboard", "off"),
    ),
    "inference": (_A("inference-batch-times-seqlen-threshold", int, 512),),
    "regularization": (
        _A("attention-dropout", float, 0.1),
        _A("hidden-dropout", float, 0.1),
        _A("weight-decay", float, 0.01),
        *_values(float, "start-weight-decay", "end-weight-decay"),
        _A("weight-decay-incr-style", str, "constant", ("constant", "linear", "cosine")),
        _A("clip-grad", float, 1.0),
        _A("adam-beta1", float, 0.9),
        _A("adam-beta2", float, 0.999),
        _A("adam-eps", float, 1e-8),
        _A("sgd-momentum", float, 0.9),
    ),
    "training": (
        *_values(int, "micro-batch-size", "global-batch-size", "train-iters", "train-samples"),
        *_values(int, "exit-interval", "exit-duration-in-mins"),
        _A("rampup-batch-size", int, nargs="*"),
        *_flags("recompute-activations", "distribute-saved-activations", "exit-signal-handler"),
        _A("recompute-granularity", str, None, ("full", "selective")),
        _A("recompute-method", str, None, ("uniform", "block")),
        _A("recompute-num-layers", int, 1),
        _A("log-interval", int, 100),
        _A("tensorboard-dir"),
        _A("no-masked-softmax-fusion", "off"),
        _A("no-bias-gelu-fusion", "off"),
        _A("no-bias-dropout-fusion", "off"),
        _A("optimizer", str, "adam", ("adam", "sgd")),
        _A("dataloader-type", str, None, ("single", "cyclic")),
        *_flags("no-async-tensor-model-parallel-allreduce", "no-persist-layer-norm"),
        *_flags("sequence-parallel", "cpu-offload"),
        _A("no-gradient-accumulation-fusion", "off"),
    ),
    "initialization": (
        _A("seed", int, 1234),
        _A("init-method-std", float, 0.02),
        *_flags("data-parallel-random-init", "init-method-xavier-uniform"),
    ),
    "learning rate": (
        _A("lr", float),
        _A("lr-decay-style", str, "linear", ("constant", "linear", "cosine")),
        *_values(int, "lr-decay-iters", "lr-decay-samples"),
        _A("lr-warmup-fraction", float),
        _A("lr-warmup-iters", int, 0),
        _A("lr-warmup-samples", int, 0),
        _A("min-lr", float, 0.0),
        *_flags("override-opt_param-scheduler", "use-checkpoint-opt_param-scheduler"),
    ),
    "checkpointing": (
        *_values(str, "save", "load"),
        _A("save-interval", int),
        *_flags("no-save-optim", "no-save-rng", "no-load-optim", "no-load-rng", "finetune"),
    ),
    "mixed precision": (
        *_flags("fp16", "bf16", "fp32-residual-connection", "attention-softmax-in-fp32"),
        *_flags("accumulate-allreduce-grads-in-fp32", "fp16-lm-cross-entropy"),
        _A("loss-scale", float),
        _A("initial-loss-scale", float, 2**32),
        _A("min-loss-scale", float, 1.0),
        _A("loss-scale-window", float, 1000),
        _A("hysteresis", int, 2),
        _A("no-query-key-layer-scaling", "off", dest="apply_query_key_layer_scaling"),
    ),
    "distributed": (
        _A("tensor-model-parallel-size", int, 1),
        _A("pipeline-model-parallel-size", int, 1),
        *_values(int, "pipeline-model-parallel-split-rank"),
        *_values(int, "num-layers-per-virtual-pipeline-stage"),
        _A("distributed-backend", str, "nccl", ("nccl", "gloo")),
        _A("DDP-impl", str, "local", ("local", "torch")),
        _A("no-contiguous-buffers-in-local-ddp", "off", dest="use_contiguous_buffers_in_local_ddp"),
        _A("no-scatter-gather-tensors-in-pipeline", "off"),
        *_flags("use-ring-exchange-p2p", "use-cpu-initialization", "standalone-embedding-stage"),
        _A("local_rank", int),
        _A("lazy-mpu-init", _yes),
        _A("empty-unused-memory-level", int, 0, (0, 1, 2)),
    ),
    "validation": (_A("eval-iters", int, 100), _A("eval-interval", int, 1000)),
    "data and dataloader": (
        _A("data-path", nargs="*"),
        _A("split", str, "969, 30, 1"),
        *_values(str, "vocab-file", "merge-file", "tokenizer-type"),
        _A("vocab-extra-ids", int, 0),
        *_values(int, "seq-length", "encoder-seq-length", "decoder-seq-length"),
        _A("retriever-seq-length", int, 256),
        _A("sample-rate", float, 1.0),
        _A("mask-prob", float, 0.15),
        _A("short-seq-prob", float, 0.1),
        _A("num-workers", int, 2),
        _A("data-impl", str, "infer", ("lazy", "cached", "mmap", "infer")),
        *_flags("mmap-warmup", "reset-position-ids", "reset-attention-mask", "eod-mask-loss"),
    ),
    "autoresume": (
        *_flags("adlr-autoresume"),
        _A("adlr-autoresume-interval", int, 1000),
    ),
    "biencoder": (
        _A("ict-head-size", int),
        _A("biencoder-projection-dim", int, 0),
        *_flags("biencoder-shared-query-context-model", "use-one-sent-docs"),
        *_values(str, "ict-load", "bert-load", "titles-data-path", "evidence-data-path"),
        *_values(str, "block-data-path", "embedding-path"),
        _A("query-in-block-prob", float, 0.1),
        _A("retriever-report-topk-accuracies", int, [], nargs="+"),
        *_flags("retriever-score-scaling"),
        _A("indexer-batch-size", int, 128),
        _A("indexer-log-interval", int, 1000),
    ),
    "vision": (
        _A("num-classes", int, 1000),
        _A("img-h", int, 224),
        _A("img-w", int, 224),
        _A("num-channels", int, 3),
        _A("patch-dim", int, 16),
        _A("classes-fraction", float, 1.0),
        _A("data-per-class-fraction", float, 1.0),
        _A("no-data-sharding", "off"),
        _A("head-lr-mult", float, 1.0),
        *_flags("vision-pretraining"),
        _A("vision-pretraining-type", str, "classify", ("classify", "inpaint", "dino")),
        _A("vision-backbone-type", str, "vit", ("vit", "mit", "swin")),
        _A("swin-backbone-type", str, "tiny", ("tiny", "base", "h3")),
        _A("mask-type", str, "random", ("random", "row")),
        _A("mask-factor", float, 1.0),
        _A("iter-per-epoch", int, 1250),
    ),
}
