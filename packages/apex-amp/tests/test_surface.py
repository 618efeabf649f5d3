"""Every name that scripts import from amp's modules, and the signatures that they rely on."""

import copy
import importlib
import inspect
import sys
import types

import pytest
import torch

from apex import amp
from apex.amp._process_optimizer import AmpOptimizerState
from apex.amp.scaler import LossScaler

MODULES = {
    "amp": "initialize scale_loss master_params disable_casts state_dict load_state_dict init "
    "half_function bfloat16_function float_function promote_function register_half_function "
    "register_bfloat16_function register_float_function register_promote_function _amp_state",
    "amp.frontend": "Properties O0 O1 O2 O3 O4 O5 opt_levels initialize state_dict load_state_dict",
    "amp._amp_state": "AmpState _amp_state warn_or_err maybe_print master_params",
    "amp._initialize": "to_type applier check_models check_params_fp32 check_optimizers "
    "O2StateDictHook _initialize",
    "amp._process_optimizer": "AmpOptimizerState lazy_init_with_master_weights "
    "lazy_init_no_master_weights prepare_backward_with_master_weights "
    "prepare_backward_no_master_weights post_backward_models_are_masters "
    "post_backward_with_master_weights post_backward_no_master_weights "
    "prepare_backward_with_master_weights_FusedSGD prepare_backward_no_master_weights_FusedSGD "
    "post_backward_with_master_weights_FusedSGD post_backward_no_master_weights_FusedSGD "
    "_amp_lazy_init _master_params_to_model_params _process_optimizer",
    "amp.handle": "scale_loss disable_casts AmpHandle NoOpHandle",
    "amp.scaler": "LossScaler scale_check_overflow_python axpby_check_overflow_python",
    "amp.opt": "OptimWrapper",
    "amp.amp": "init half_function bfloat16_function float_function promote_function "
    "register_half_function register_bfloat16_function register_float_function "
    "register_promote_function _DECORATOR_HANDLE _decorator_helper _USER_CAST_REGISTRY "
    "_USER_PROMOTE_REGISTRY",
    "amp.wrap": "make_cast_wrapper cached_cast make_promote_wrapper promote sequence_promote "
    "promote_match_arg0 err_if_any_half err_if_arg0_half rnn_cast new_rnn_cast disable_casts",
    "amp.utils": "is_cuda_enabled get_cuda_version is_fp_tensor is_nested should_cache "
    "collect_fp_tensor_types type_string maybe_half maybe_bfloat16 maybe_float casted_args "
    "cached_cast verbosify as_inplace has_func get_func set_func set_func_save "
    "synthesize_flattened_rnn_weights new_synthesize_flattened_rnn_weights",
    "amp.compat": "variable_is_tensor tensor_is_variable tensor_is_float_tensor is_tensor_like "
    "is_floating_point scalar_python_val filter_attrs",
    "amp.rnn_compat": "RNN_NAMES VariableFunctionsShim has_old_rnns whitelist_rnn_cells",
    "amp.lists.functional_overrides": "MODULE FP16_FUNCS BFLOAT16_FUNCS FP32_FUNCS BANNED_FUNCS",
    "amp.lists.torch_overrides": "MODULE FP16_FUNCS BFLOAT16_FUNCS FP32_FUNCS CASTS SEQUENCE_CASTS "
    "version_strings version_major version_minor version_num",
    "amp.lists.tensor_overrides": "MODULE FP16_FUNCS BFLOAT16_FUNCS FP32_FUNCS CASTS",
    "_autocast_utils": "_cast_if_autocast_enabled _get_autocast_dtypes _get_current_dtype",
    "amp.__version__": "VERSION __version__",
    "RNN": "LSTM GRU ReLU Tanh mLSTM models",
    "RNN.RNNBackend": "RNNCell stackedRNN bidirectionalRNN is_iterable flatten_list",
    "RNN.cells": "mLSTMRNNCell mLSTMCell",
    "RNN.models": "LSTM GRU ReLU Tanh mLSTM toRNNBackend",
    "fp16_utils.fp16_optimizer": "FP16_Optimizer",
    "fp16_utils.loss_scaler": "LossScaler DynamicLossScaler to_python_float",
    "fp16_utils.fp16util": "tofp16 BN_convert_float network_to_half convert_module "
    "convert_network FP16Model backwards_debug_hook prep_param_lists clip_grad_norm "
    "model_grads_to_master_grads master_params_to_model_params to_python_float "
    "TORCH_MAJOR TORCH_MINOR",
}
SIGNATURES = {
    "amp.scale_loss": "loss optimizers loss_id=0 model=None delay_unscale=False "
    "delay_overflow_check=False",
    "amp.state_dict": "destination=None",
    "amp.load_state_dict": "state_dict",
    "amp.master_params": "optimizer",
    "amp.disable_casts": "",
    "amp.init": "enabled=True loss_scale='dynamic' patch_type=torch.float16 enable_caching=True "
    "verbose=False allow_banned=False",
    "amp.initialize": "models optimizers=None enabled=True opt_level='O1' cast_model_type=None "
    "patch_torch_functions=None keep_batchnorm_fp32=None master_weights=None loss_scale=None "
    "cast_model_outputs=None num_losses=1 verbosity=1 min_loss_scale=None "
    "max_loss_scale=16777216.0",
    "amp.scaler.LossScaler": "loss_scale init_scale=65536.0 scale_factor=2.0 scale_window=2000 "
    "min_loss_scale=None max_loss_scale=16777216.0",
    "amp.scaler.LossScaler.unscale": "self model_grads master_grads unused_scale=None "
    "models_are_masters=False scale_override=None",
    "amp.scaler.LossScaler.unscale_with_stashed": "self model_grads stashed_master_grads "
    "master_grads scale_override=None",
    "amp.rnn_compat.whitelist_rnn_cells": "cast_fn handle verbose=False",
    "amp.utils.synthesize_flattened_rnn_weights": "fp32_weights fp16_flat_tensor rnn_fn='' "
    "verbose=False",
    "amp.utils.new_synthesize_flattened_rnn_weights": "fp32_weights fp16_flat_tensor rnn_fn='' "
    "dtype=torch.float16 verbose=False",
    "amp.wrap.rnn_cast": "backend fn handle verbose=False",
    "amp.wrap.new_rnn_cast": "fn cast_fn handle verbose=False",
    "amp.handle.AmpHandle": "loss_scale='dynamic' enable_caching=True verbose=False",
    "amp.handle.AmpHandle.wrap_optimizer": "self optimizer num_loss=1",
    "amp.opt.OptimWrapper": "optimizer amp_handle num_loss",
    "fp16_utils.FP16_Optimizer": "init_optimizer static_loss_scale=1.0 dynamic_loss_scale=False "
    "dynamic_loss_args=None verbose=True",
    "fp16_utils.DynamicLossScaler": "init_scale=4294967296 scale_factor=2.0 scale_window=1000",
    "fp16_utils.prep_param_lists": "model flat_master=False",
    "RNN.LSTM": "input_size hidden_size num_layers bias=True batch_first=False dropout=0 "
    "bidirectional=False output_size=None",
    "RNN.RNNBackend.RNNCell": "gate_multiplier input_size hidden_size cell n_hidden_states=2 "
    "bias=False output_size=None",
    "RNN.RNNBackend.stackedRNN.forward": "self input collect_hidden=False reverse=False",
}


def resolve(path):
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module("apex." + ".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise AssertionError(path)


@pytest.mark.parametrize("module", MODULES)
def test_names(module):
    amp.init(enabled=False)
    loaded = importlib.import_module(f"apex.{module}")
    missing = [name for name in MODULES[module].split() if not hasattr(loaded, name)]
    assert missing == []
    assert [n for n in getattr(loaded, "__all__", ()) if not hasattr(loaded, n)] == []


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path):
    """What can be passed by position; keywords of our own come after a star."""
    parameters = inspect.signature(resolve(path)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in positional]
    assert shown == SIGNATURES[path].split()


def test_decorator_handle_is_the_last():
    module = importlib.import_module("apex.amp.amp")
    function = amp.half_function(lambda x: x.dtype)
    handle = amp.init()
    assert module._DECORATOR_HANDLE is handle
    assert function(torch.ones(1)) is torch.float16
    nothing = amp.init(enabled=False)
    assert module._DECORATOR_HANDLE is nothing
    assert function(torch.ones(1)) is torch.float32
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16  # still in force
    amp.init()
    assert function(torch.ones(1)) is torch.float16


def test_decorator_helper_asks_at_the_call():
    from apex.amp.amp import _decorator_helper
    from apex.amp.utils import maybe_float
    from apex.amp.wrap import make_cast_wrapper

    dtype_of = _decorator_helper(lambda x: x.dtype, maybe_float, make_cast_wrapper)
    x = torch.ones(2).half()
    assert dtype_of(x) is torch.float16
    handle = amp.init()
    assert dtype_of(x) is torch.float32
    handle._deactivate()
    assert dtype_of(x) is torch.float16


def test_version():
    assert amp.__version__ == "0.1.0"
    assert amp.VERSION == (0, 1, 0)


def test_version_of_torch():
    lists = importlib.import_module("apex.amp.lists.torch_overrides")
    assert ".".join(lists.version_strings) == torch.__version__
    assert f"{lists.version_major}.{lists.version_minor}" == ".".join(lists.version_strings[:2])
    assert 2.09 < lists.version_num < 3  # 2.10 comes after 2.9


def test_functions_of_amp_c(monkeypatch):
    """Attributes where apex-optimizers is installed, and none elsewhere."""
    stash = AmpOptimizerState()
    assert stash.dummy_overflow_buf.tolist() == [0]
    assert stash.dummy_overflow_buf.dtype is torch.int32
    assert stash.dummy_overflow_buf is stash.dummy_overflow_buf
    module = types.ModuleType("amp_C")
    for name in ("multi_tensor_scale", "multi_tensor_axpby", "multi_tensor_l2norm"):
        setattr(module, name, lambda name=name: name)
    monkeypatch.setitem(sys.modules, "amp_C", module)
    assert LossScaler.multi_tensor_scale_cuda() == "multi_tensor_scale"
    assert LossScaler(1.0).multi_tensor_axpby_cuda() == "multi_tensor_axpby"
    assert stash.multi_tensor_scale() == "multi_tensor_scale"
    assert stash.multi_tensor_l2norm() == "multi_tensor_l2norm"
    monkeypatch.setitem(sys.modules, "amp_C", None)
    assert not hasattr(LossScaler, "multi_tensor_scale_cuda")
    with pytest.raises(AttributeError, match="pip install apex-optimizers"):
        _ = stash.multi_tensor_l2norm
    copy.deepcopy(stash)


def test_import_changes_nothing_in_torch():
    assert not torch.is_autocast_enabled("cpu")
    assert "cpu" not in vars(torch.Tensor)
