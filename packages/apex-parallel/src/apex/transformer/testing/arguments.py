"""Megatron's command line: what it accepts, what follows, and what does not fit together."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from .argument_groups import GROUPS

__all__ = ["parse_args"]

_REQUIRED = "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"


def parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    defaults: Mapping[str, Any] = {},
    ignore_unknown_args: bool = False,
) -> argparse.Namespace:
    """Read ``sys.argv``, ``RANK`` and ``WORLD_SIZE``, and derive what follows from them.

    Args:
        extra_args_provider: adds arguments to the parser, and returns it.
        defaults: values by name, for arguments that were not given.
        ignore_unknown_args: pass over arguments that nobody knows, instead of an error.

    Derived: ``rank``, ``world_size``, ``data_parallel_size``, ``params_dtype``,
    ``virtual_pipeline_model_parallel_size`` and sizes that default to others.

    Raises:
        ValueError: an argument is missing, or some do not fit together.
    """
    parser = argparse.ArgumentParser(description="Megatron's arguments", allow_abbrev=False)
    for title in GROUPS:
        _add_group(title, parser)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    args.rank = int(os.getenv("RANK", "0"))
    args.world_size = int(os.getenv("WORLD_SIZE", "1"))
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
        elif args.rank == 0:
            print(f"WARNING: {name} is {getattr(args, name)}, not its default {value}", flush=True)
    _derive_parallelism(args)
    _derive_batches(args)
    _derive_dtypes(args)
    _derive_model(args)
    _derive_recomputation(args)
    _print_args(args)
    return args


def _add_group(title: str, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(title=title)
    for argument in GROUPS[title]:
        argument.add_to(group)
    return parser


# Apex's names of the groups, for scripts that put together a parser of their own. Each adds one
# group to the parser that it is given, and returns it.
_add_network_size_args = partial(_add_group, "network size")
_add_logging_args = partial(_add_group, "logging")
_add_inference_args = partial(_add_group, "inference")
_add_regularization_args = partial(_add_group, "regularization")
_add_training_args = partial(_add_group, "training")
_add_initialization_args = partial(_add_group, "initialization")
_add_learning_rate_args = partial(_add_group, "learning rate")
_add_checkpointing_args = partial(_add_group, "checkpointing")
_add_mixed_precision_args = partial(_add_group, "mixed precision")
_add_distributed_args = partial(_add_group, "distributed")
_add_validation_args = partial(_add_group, "validation")
_add_data_args = partial(_add_group, "data and dataloader")
_add_autoresume_args = partial(_add_group, "autoresume")
_add_biencoder_args = partial(_add_group, "biencoder")
_add_vision_args = partial(_add_group, "vision")


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_arg_is_not_none(args: argparse.Namespace, arg: str) -> None:
    _require(getattr(args, arg) is not None, f"{arg}: this argument is required")


def _derive_parallelism(args: argparse.Namespace) -> None:
    args.tensor_model_parallel_size = min(args.tensor_model_parallel_size, args.world_size)
    _require(
        args.world_size % args.tensor_model_parallel_size == 0,
        f"tensor_model_parallel_size: {args.tensor_model_parallel_size} does not divide "
        f"{args.world_size} ranks",
    )
    stages = args.world_size // args.tensor_model_parallel_size
    args.pipeline_model_parallel_size = min(args.pipeline_model_parallel_size, stages)
    # Without the stage that holds nothing but the embedding.
    args.transformer_pipeline_model_parallel_size = (
        args.pipeline_model_parallel_size - args.standalone_embedding_stage
    )
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    _require(
        args.world_size % model == 0,
        f"{args.world_size} ranks are not divisible by {args.tensor_model_parallel_size} "
        f"tensor-parallel ranks x {args.pipeline_model_parallel_size} pipeline stages",
    )
    args.data_parallel_size = args.world_size // model
    split = args.pipeline_model_parallel_split_rank
    _require(
        split is None or split < args.pipeline_model_parallel_size,
        f"pipeline_model_parallel_split_rank: expected less than "
        f"{args.pipeline_model_parallel_size} stages, got {split}",
    )
    if args.sequence_parallel:  # it adds the input's gradients over the ranks itself
        args.no_async_tensor_model_parallel_allreduce = True
    # Megatron's name of the same.
    args.async_tensor_model_parallel_allreduce = not args.no_async_tensor_model_parallel_allreduce


def _derive_batches(args: argparse.Namespace) -> None:
    _check_arg_is_not_none(args, "micro_batch_size")
    _require(args.micro_batch_size > 0, "micro_batch_size: expected at least 1")
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    _require(args.global_batch_size > 0, "global_batch_size: expected at least 1")
    if args.train_samples is not None:
        _require(args.train_iters is None, "train_iters, train_samples: give one of them")
    if args.dataloader_type is None:
        args.dataloader_type = "single"
    args.consumed_train_samples = args.consumed_valid_samples = 0


def _derive_dtypes(args: argparse.Namespace) -> None:
    _require(not (args.fp16 and args.bf16), "fp16, bf16: give one of them")
    args.params_dtype = torch.float32
    if args.fp16:
        args.params_dtype = torch.half
    if args.bf16:
        args.params_dtype = torch.bfloat16
        args.accumulate_allreduce_grads_in_fp32 = True
    _require(
        not args.fp32_residual_connection or args.fp16 or args.bf16,
        "fp32_residual_connection: needs fp16 or bf16",
    )
    _require(
        not args.fp16_lm_cross_entropy or args.fp16, "fp16_lm_cross_entropy: needs fp16 as well"
    )


def _derive_model(args: argparse.Namespace) -> None:
    for name in _REQUIRED:
        _check_arg_is_not_none(args, name)
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = 4 * args.hidden_size
    if args.kv_channels is None:
        _require(
            args.hidden_size % args.num_attention_heads == 0,
            f"hidden_size: {args.hidden_size} is not divisible by {args.num_attention_heads} "
            "num_attention_heads",
        )
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.seq_length is None:
        args.seq_length = args.encoder_seq_length
    elif args.encoder_seq_length is None:
        args.encoder_seq_length = args.seq_length
    _require(
        args.seq_length is None or args.max_position_embeddings >= args.seq_length,
        f"max_position_embeddings: expected seq_length, {args.seq_length}, or more, "
        f"got {args.max_position_embeddings}",
    )
    for name in ("start_weight_decay", "end_weight_decay"):
        if getattr(args, name) is None:
            setattr(args, name, args.weight_decay)
    args.virtual_pipeline_model_parallel_size = None
    per_chunk = args.num_layers_per_virtual_pipeline_stage
    if per_chunk is not None:
        stages = args.pipeline_model_parallel_size
        _require(stages > 2, "num_layers_per_virtual_pipeline_stage: needs more than 2 stages")
        _require(
            args.num_layers % (stages * per_chunk) == 0,
            f"num_layers: {args.num_layers} are not divisible by {stages} stages x {per_chunk} "
            "num_layers_per_virtual_pipeline_stage",
        )
        args.virtual_pipeline_model_parallel_size = args.num_layers // stages // per_chunk


def _derive_recomputation(args: argparse.Namespace) -> None:
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    if args.distribute_saved_activations:
        _require(
            args.tensor_model_parallel_size > 1 and args.recompute_granularity == "full",
            "distribute_saved_activations: needs several tensor-parallel ranks and "
            "recompute_granularity full",
        )
    if args.recompute_granularity == "selective":
        _require(args.recompute_method is None, "recompute_method: needs granularity full")


def _print_args(args: argparse.Namespace) -> None:
    if args.rank == 0:
        print("------------------------ arguments ------------------------", flush=True)
        for name, value in sorted(vars(args).items(), key=lambda item: item[0].lower()):
            print(f"  {name} {'.' * (48 - len(name))} {value}", flush=True)
        print("-------------------- end of arguments ---------------------", flush=True)
