"""The namespace that the five Apex wheels share; every wheel ships this file, byte for byte.

It finds subpackages in every folder of the path (``pkgutil`` style: wheels, editable installs and
mixtures), imports them on attribute access (``import apex; apex.amp``), says which wheel to
install for one that is missing, and warns where another project's ``apex`` is mixed in.
"""

import importlib
import os as _os
import sys as _sys
from importlib.util import find_spec as _find_spec
from pkgutil import extend_path as _extend_path

__path__ = _extend_path(__path__, __name__)

# Names and the wheel to install for them. For messages only: whatever is installed is found.
_WHEELS = {
    **dict.fromkeys(
        ("apex.amp", "apex.fp16_utils", "apex.RNN", "apex._autocast_utils"),
        "apex-amp",
    ),
    **dict.fromkeys(("apex.optimizers", "apex.multi_tensor_apply", "amp_C"), "apex-optimizers"),
    **dict.fromkeys(("apex.normalization", "fused_layer_norm_cuda"), "apex-normalization"),
    **dict.fromkeys(
        (
            *("apex.parallel", "apex_C", "syncbn", "apex.transformer"),
            *("apex.transformer.amp", "apex.transformer.layers", "apex.transformer.microbatches"),
            *("apex.transformer.parallel_state", "apex.transformer.pipeline_parallel"),
            *("apex.transformer.tensor_parallel", "apex.transformer.testing"),
            *("apex.transformer.utils", "apex.distributed_testing", "apex.testing"),
            *("scaled_softmax_cuda", "scaled_masked_softmax_cuda"),
            *("generic_scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"),
            *("fused_rotary_positional_embedding", "fused_weight_gradient_mlp_cuda"),
        ),
        "apex-parallel",
    ),
    **dict.fromkeys(
        (
            *("apex.contrib", "apex.contrib.xentropy", "xentropy_cuda"),
            *("apex.fused_bias_swiglu", "fused_bias_swiglu"),
            *("apex.mlp", "mlp_cuda", "apex.fused_dense", "fused_dense_cuda"),
            *("apex.contrib.index_mul_2d", "fused_index_mul_2d", "apex.contrib.clip_grad"),
            *("apex.contrib.transducer", "transducer_joint_cuda", "transducer_loss_cuda"),
            *("apex.contrib.focal_loss", "focal_loss_cuda"),
            *("apex.contrib.layer_norm", "fast_layer_norm"),
            *("apex.contrib.group_norm", "group_norm_cuda", "group_norm_v2_cuda"),
            *("apex.contrib.multihead_attn", "fast_multihead_attn"),
            *("apex.contrib.fmha", "fmhalib"),
            *("apex.contrib.optimizers", "fused_adam_cuda", "fused_lamb_cuda"),
            *("distributed_adam_cuda", "distributed_lamb_cuda"),
            *("apex.contrib.conv_bias_relu", "fused_conv_bias_relu"),
            *("apex.contrib.groupbn", "bnp", "apex.contrib.cudnn_gbn", "cudnn_gbn_lib"),
            *("apex.contrib.bottleneck", "fast_bottleneck", "nccl_p2p_cuda", "_nccl_version"),
            *("apex.contrib.peer_memory", "peer_memory_cuda"),
            *("apex.contrib.nccl_allocator", "_apex_nccl_allocator"),
            *("apex.contrib.sparsity", "permutation_search_cuda", "apex.contrib.torchsched"),
            *("apex.contrib.gpu_direct_storage", "_apex_gpu_direct_storage"),
            "apex.contrib.openfold_triton",
        ),
        "apex-contrib",
    ),
}
# The same for what no release has yet.
_NOT_BUILT = {
    "apex.transformer.context_parallel": "apex-parallel",
}
# Names that the wheels will not have, and what to use instead.
_REPLACED = {
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
}


def __getattr__(name: str):
    """Import an installed subpackage on first use."""
    full_name = f"{__name__}.{name}"
    if not name.startswith("_") and _find_spec(full_name) is not None:
        return importlib.import_module(full_name)
    advice = _advice(full_name)
    if advice is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # `from apex import amp` asks hasattr() before it imports, and would replace any
    # AttributeError by one that does not name the wheel; an ImportError it passes on.
    if _sys._getframe(1).f_code.co_name == "_handle_fromlist":
        raise ModuleNotFoundError(advice, name=full_name)
    raise AttributeError(advice, name=name)


def __dir__():
    from pkgutil import iter_modules

    return sorted({*globals(), *(module.name for module in iter_modules(__path__))})


def _advice(name: str) -> str | None:
    """Say what to do where ``name`` cannot be imported; None for a name that is not Apex's."""
    if name in _REPLACED:
        return f"{name} is not part of the Apex wheels. Use {_REPLACED[name]} instead."
    wheel = _WHEELS.get(name) or _NOT_BUILT.get(name)
    if wheel is None:
        return None
    from importlib.metadata import PackageNotFoundError, version

    try:
        there = version(wheel)
    except PackageNotFoundError:
        if name in _NOT_BUILT:
            return f"{name} is not built yet: no known release of {wheel} has it."
        return f"{name} is not installed. It is part of {wheel}: pip install {wheel}"
    if name == wheel.replace("-", "."):
        return (
            f"{name} is missing, though {wheel} {there} is installed. Run `pip install "
            f"--force-reinstall --no-deps {wheel}`; with --target, add --upgrade, and name all "
            "Apex wheels in one command."
        )
    return (
        f"{name} is not in {wheel} {there}, which is installed; a later release may have it: "
        f"pip install --upgrade {wheel}"
    )


class _MissingWheel:
    """The last finder: gives ``import apex.amp`` a message that names the wheel, or torch."""

    @staticmethod
    def find_spec(full_name: str, path=None, target=None):
        ours = full_name in _WHEELS or full_name in _NOT_BUILT or full_name in _REPLACED
        if not ours and full_name != "torch":
            return
        frame, callers = _sys._getframe(2), []
        while frame is not None and len(callers) < 4:
            callers.append(frame)
            frame = frame.f_back
        names = [caller.f_code.co_name for caller in callers]
        # importlib.util.find_spec() goes through here too: to that, "not found" is an answer.
        if names[0] != "_find_and_load_unlocked":
            return
        if ours:
            # `from apex.contrib import focal_loss` drops an error that has the module's name.
            name = None if names[-1] == "_handle_fromlist" else full_name
            raise ModuleNotFoundError(_advice(full_name), name=name)
        # `import torch.distributed` goes through more frames of importlib than `import torch`.
        frame = callers[0]
        while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back
        importer = "" if frame is None else frame.f_globals.get("__name__", "")
        if importer in _WHEELS or importer.startswith("apex."):
            text = f"No module named 'torch', which {importer} imports: pip install torch"
            raise ModuleNotFoundError(text, name=full_name)


def _warn_of_foreign_files() -> None:
    """Warn where a distribution named apex (NVIDIA's, ROCm's or another) lies in the same path."""
    for site in filter(_os.path.isdir, map(_os.path.dirname, __path__)):
        for entry in _os.listdir(site):
            if entry.startswith(("apex-", "apex.")) and entry.endswith(_METADATA):
                import warnings

                warnings.warn(
                    f"{_os.path.join(site, entry)}: another project's apex is installed besides "
                    "the Apex wheels. Their files mix, and which are imported depends on the order "
                    "of installing. Run `pip uninstall apex`, then install the Apex wheels again "
                    "with `pip install --force-reinstall --no-deps`.",
                    RuntimeWarning,
                    stacklevel=3,
                )


_METADATA = (".dist-info", ".egg-info", ".egg-link")
_warn_of_foreign_files()
if not any(getattr(finder, "__module__", None) == __name__ for finder in _sys.meta_path):
    _sys.meta_path.append(_MissingWheel)
