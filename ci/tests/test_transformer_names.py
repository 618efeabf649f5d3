"""Every name that scripts import from modules of apex.transformer, private ones too.

Some of these modules need another wheel, so that all five are wanted.
"""

import argparse
import importlib

import pytest
import torch

from apex.transformer.functional import fused_rope
from apex.transformer.testing import argument_groups, arguments, global_vars

# Behind apex.transformer. The test classes of testing.distributed_test_base need a package of
# torch's own tests; their tests have their names.
MODULES = {
    "_ucc_util": "HAS_UCC",
    "_data._batchsampler": "_Base MegatronPretrainingSampler MegatronPretrainingRandomSampler",
    "amp.grad_scaler": "GradScaler",
    "enums": "LayerType AttnType AttnMaskType ModelType",
    "functional.fused_rope": (
        "check_if_rocm_pytorch FusedRoPEFunc FusedRoPEFuncApex FusedRoPEFuncAiter "
        "fused_apply_rotary_pos_emb FusedRoPECachedFunc FusedRoPECachedFuncApex "
        "FusedRoPECachedFuncAiter fused_apply_rotary_pos_emb_cached FusedRoPETHDFunc "
        "FusedRoPETHDFuncApex FusedRoPETHDFuncAiter fused_apply_rotary_pos_emb_thd "
        "FusedRoPE2DFunc FusedRoPE2DFuncApex FusedRoPE2DFuncAiter fused_apply_rotary_pos_emb_2d "
        "AITER_ROPE_BACKEND IS_ROCM_PYTORCH TORCH_MAJOR TORCH_MINOR USE_ROCM_AITER_ROPE_BACKEND"
    ),
    "functional.fused_softmax": (
        "ScaledUpperTriangMaskedSoftmax scaled_upper_triang_masked_softmax ScaledMaskedSoftmax "
        "scaled_masked_softmax GenericScaledMaskedSoftmax generic_scaled_masked_softmax "
        "ScaledSoftmax FusedScaleMaskSoftmax"
    ),
    "layers.layer_norm": (
        "_set_sequence_parallel_enabled FusedLayerNorm MixedFusedLayerNorm FastLayerNorm"
    ),
    "log_util": "get_transformer_logger set_logging_level",
    "microbatches": (
        "build_num_microbatches_calculator NumMicroBatchesCalculator ConstantNumMicroBatches "
        "RampupBatchsizeNumMicroBatches"
    ),
    "parallel_state": (
        "is_unitialized initialize_model_parallel get_rank_info model_parallel_is_initialized "
        "get_model_parallel_group get_tensor_model_parallel_group "
        "get_pipeline_model_parallel_group get_data_parallel_group get_embedding_group "
        "get_position_embedding_group get_encoder_relative_position_embedding_group "
        "get_decoder_relative_position_embedding_group is_rank_in_embedding_group "
        "is_rank_in_position_embedding_group is_rank_in_encoder_relative_position_embedding_group "
        "is_rank_in_decoder_relative_position_embedding_group is_pipeline_stage_before_split "
        "is_pipeline_stage_after_split is_pipeline_stage_at_split "
        "set_tensor_model_parallel_world_size set_pipeline_model_parallel_world_size "
        "get_tensor_model_parallel_world_size get_pipeline_model_parallel_world_size "
        "set_tensor_model_parallel_rank set_pipeline_model_parallel_rank "
        "get_tensor_model_parallel_rank get_pipeline_model_parallel_rank "
        "get_pipeline_model_parallel_split_rank set_pipeline_model_parallel_split_rank "
        "is_pipeline_first_stage is_pipeline_last_stage get_virtual_pipeline_model_parallel_rank "
        "set_virtual_pipeline_model_parallel_rank get_virtual_pipeline_model_parallel_world_size "
        "set_virtual_pipeline_model_parallel_world_size get_tensor_model_parallel_src_rank "
        "get_data_parallel_src_rank get_pipeline_model_parallel_first_rank "
        "get_pipeline_model_parallel_last_rank get_pipeline_model_parallel_next_rank "
        "get_pipeline_model_parallel_prev_rank get_data_parallel_world_size "
        "get_data_parallel_rank destroy_model_parallel ExperimentalWarning "
        "check_torch_ucc_availability"
    ),
    "pipeline_parallel._timers": "_Timer _Timers",
    "pipeline_parallel.p2p_communication": (
        "FutureTensor _run_p2pops _communicate recv_forward recv_backward send_forward "
        "send_backward send_forward_recv_backward send_backward_recv_forward "
        "send_forward_recv_forward send_backward_recv_backward "
        "send_forward_backward_recv_forward_backward"
    ),
    "pipeline_parallel.schedules": "ExperimentalWarning get_forward_backward_func",
    "pipeline_parallel.schedules.common": (
        "build_model _calc_number_of_params _get_params_for_weight_decay_optimization "
        "free_output_tensor custom_backward forward_step backward_step Batch FwdStepFunc LossFunc"
    ),
    "pipeline_parallel.schedules.fwd_bwd_no_pipelining": (
        "placeholder_handler forward_backward_no_pipelining"
    ),
    "pipeline_parallel.schedules.fwd_bwd_pipelining_with_interleaving": (
        "_forward_backward_pipelining_with_interleaving"
    ),
    "pipeline_parallel.schedules.fwd_bwd_pipelining_without_interleaving": (
        "get_tensor_shapes recv_forward recv_backward send_forward send_backward "
        "send_forward_recv_backward send_backward_recv_forward "
        "forward_backward_pipelining_without_interleaving"
    ),
    "pipeline_parallel.utils": (
        "listify_model _ensure_var_is_initialized _ensure_var_is_not_initialized "
        "setup_microbatch_calculator _reconfigure_microbatch_calculator get_micro_batch_size "
        "get_num_microbatches get_current_global_batch_size update_num_microbatches "
        "_split_batch_into_microbatch get_kth_microbatch get_autoresume _set_timers get_timers "
        "print_rank_0 is_last_rank print_rank_last param_is_not_shared unwrap_model "
        "get_model_type calc_params_l2_norm average_losses_across_data_parallel_group "
        "report_memory print_params_min_max_norm get_ltor_masks_and_position_ids Shape"
    ),
    "tensor_parallel.cross_entropy": "_VocabParallelCrossEntropy vocab_parallel_cross_entropy",
    "tensor_parallel.data": "_check_data_types _build_key_size_numel_dictionaries broadcast_data",
    "tensor_parallel.layers": (
        "param_is_not_tensor_parallel_duplicate set_tensor_model_parallel_attributes "
        "set_defaults_if_not_set_tensor_model_parallel_attributes "
        "copy_tensor_model_parallel_attributes _initialize_affine_weight_gpu "
        "_initialize_affine_weight_cpu VocabParallelEmbedding "
        "LinearWithGradAccumulationAndAsyncCommunication "
        "linear_with_grad_accumulation_and_async_allreduce "
        "linear_with_grad_accumulation_and_async_allreduce_in16bit ColumnParallelLinear "
        "RowParallelLinear"
    ),
    "tensor_parallel.mappings": (
        "_reduce _split_along_last_dim _split_along_first_dim _gather_along_last_dim "
        "_gather_along_first_dim _reduce_scatter_along_first_dim _CopyToModelParallelRegion "
        "_ReduceFromModelParallelRegion _ScatterToModelParallelRegion "
        "_GatherFromModelParallelRegion _ScatterToSequenceParallelRegion "
        "_GatherFromSequenceParallelRegion _ReduceScatterToSequenceParallelRegion "
        "copy_to_tensor_model_parallel_region reduce_from_tensor_model_parallel_region "
        "scatter_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region "
        "scatter_to_sequence_parallel_region gather_from_sequence_parallel_region "
        "reduce_scatter_to_sequence_parallel_region"
    ),
    "tensor_parallel.memory": "allocate_mem_buff get_mem_buff MemoryBuffer RingMemBuffer",
    "tensor_parallel.random": (
        "init_checkpointed_activations_memory_buffer reset_checkpointed_activations_memory_buffer "
        "_set_cuda_rng_state CudaRNGStatesTracker get_cuda_rng_tracker "
        "model_parallel_cuda_manual_seed CheckpointFunction checkpoint"
    ),
    "tensor_parallel.utils": "split_tensor_along_last_dim VocabUtility",
    "testing.arguments": (
        "parse_args _print_args _check_arg_is_not_none _add_inference_args _add_network_size_args "
        "_add_logging_args _add_regularization_args _add_training_args _add_initialization_args "
        "_add_learning_rate_args _add_checkpointing_args _add_mixed_precision_args "
        "_add_distributed_args _add_validation_args _add_data_args _add_autoresume_args "
        "_add_biencoder_args _add_vision_args"
    ),
    "testing.commons": (
        "MyLayer MyModel ToyParallelMLP model_provider_func mlp_provider_func process_batch "
        "fwd_step_func ToyParallelMLPFwdBwdStepFunc IdentityLayer set_random_seed "
        "initialize_distributed print_separator TEST_SUCCESS_MESSAGE"
    ),
    "testing.global_vars": (
        "get_args get_num_microbatches get_current_global_batch_size update_num_microbatches "
        "get_tensorboard_writer get_adlr_autoresume get_timers set_global_variables _parse_args "
        "_build_num_microbatches_calculator _set_tensorboard_writer _set_adlr_autoresume "
        "_set_timers _ensure_var_is_initialized _ensure_var_is_not_initialized _Timer Timers"
    ),
    "testing.standalone_bert": (
        "bert_extended_attention_mask bert_position_ids BertLMHead post_language_model_processing "
        "BertModel bert_model_provider"
    ),
    "testing.standalone_gpt": "gpt_model_provider GPTModel",
    "testing.standalone_transformer_lm": (
        "param_is_not_shared MegatronModule get_linear_layer attention_mask_func "
        "init_method_normal scaled_init_method_normal ParallelMLP CoreAttention ParallelAttention "
        "bias_dropout_add get_bias_dropout_add ParallelTransformerLayer ParallelTransformer "
        "get_num_layers NoopTransformerLayer parallel_lm_logits get_language_model Pooler "
        "Embedding TransformerLanguageModel post_language_model_processing module_size"
    ),
    "utils": "ensure_divisibility divide split_tensor_into_1d_equal_chunks gather_split_1d_tensor",
}


@pytest.mark.parametrize("module", MODULES)
def test_module_has_apex_names(module):
    found = importlib.import_module(f"apex.transformer.{module}")
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []


def test_every_group_of_arguments_is_added_by_one_function():
    adders = [name for name in vars(arguments) if name.startswith("_add_") and name != "_add_group"]
    together = argparse.ArgumentParser(allow_abbrev=False)
    titles = []
    for name in adders:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        assert getattr(arguments, name)(parser) is parser
        assert getattr(arguments, name)(together) is together
        titles.append(parser._action_groups[-1].title)
    assert sorted(titles) == sorted(argument_groups.GROUPS)
    given = ["--hidden-size=8", "--fp16", "--no-bias-gelu-fusion", "--tensorboard-log-interval=3"]
    args = together.parse_args(given)
    assert (args.hidden_size, args.fp16, args.tensorboard_log_interval) == (8, True, 3)
    assert not args.bias_gelu_fusion


def test_versions_of_torch():
    assert torch.__version__.startswith(f"{fused_rope.TORCH_MAJOR}.{fused_rope.TORCH_MINOR}.")
    assert fused_rope.check_if_rocm_pytorch() is fused_rope.IS_ROCM_PYTORCH
    assert fused_rope.IS_ROCM_PYTORCH is (torch.version.hip is not None)


def test_global_variables_one_by_one(monkeypatch):
    monkeypatch.setattr(global_vars, "_values", {})
    sizes = {"num-layers": 2, "hidden-size": 8, "num-attention-heads": 2}
    sizes |= {"max-position-embeddings": 4, "micro-batch-size": 2, "global-batch-size": 6}
    monkeypatch.setattr("sys.argv", ["script", *(f"--{k}={v}" for k, v in sizes.items())])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = global_vars._parse_args()
    assert global_vars.get_args() is args
    with pytest.raises(RuntimeError, match="num microbatches calculator: call set_global_var"):
        global_vars.get_num_microbatches()
    global_vars._build_num_microbatches_calculator(args)
    assert global_vars.get_num_microbatches() == 3
    global_vars._set_tensorboard_writer(args)
    global_vars._set_adlr_autoresume(args)
    assert global_vars.get_tensorboard_writer() is None
    assert global_vars.get_adlr_autoresume() is None
    global_vars._set_timers()
    assert isinstance(global_vars.get_timers(), global_vars.Timers)
    for again in (global_vars._parse_args, global_vars._set_timers):
        with pytest.raises(RuntimeError, match="it was set before"):
            again()
    assert global_vars.get_args() is args


def test_global_variables_that_failed_can_be_set_again(monkeypatch):
    monkeypatch.setattr(global_vars, "_values", {})
    sizes = ["--num-layers=2", "--hidden-size=8", "--num-attention-heads=2"]
    sizes += ["--max-position-embeddings=4", "--micro-batch-size=2"]
    monkeypatch.setattr("sys.argv", ["script", *sizes, "--global-batch-size=5"])
    with pytest.raises(ValueError, match="global_batch_size: expected a multiple of 2"):
        global_vars.set_global_variables()
    monkeypatch.setattr("sys.argv", ["script", *sizes])
    args = global_vars.set_global_variables()
    assert global_vars.get_args() is args
