"""The cast lists of ``torch.nn.functional``."""

import torch.nn.functional

MODULE = torch.nn.functional

FP16_FUNCS = [
    *("conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("conv_tbc", "linear"),
]
BFLOAT16_FUNCS = list(FP16_FUNCS)

FP32_FUNCS = [
    # Positions and pixels: 11 bits do not number them.
    *("interpolate", "grid_sample"),
    # Exponentials and other functions that need the range of float32.
    *("softplus", "softmin", "log_softmax", "softmax", "gelu"),
    # Sums of many terms.
    *("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity"),
    *("poisson_nll_loss", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss"),
    *("kl_div", "l1_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss"),
    *("multilabel_soft_margin_loss", "multi_margin_loss", "nll_loss"),
    *("binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss"),
    *("triplet_margin_loss", "ctc_loss"),
]

# (name, text of the error)
BANNED_FUNCS = [
    (
        "binary_cross_entropy",
        "amp does not work out-of-the-box with torch.nn.functional.binary_cross_entropy or "
        "torch.nn.BCELoss: a sigmoid computed in 16 bits rounds to 0 or 1, and its logarithm is "
        "infinite. Use BCEWithLogitsLoss on the values before the sigmoid; or have the sigmoid run "
        'in float32 with amp.register_float_function(torch, "sigmoid") before amp.initialize; or, '
        "if the 16-bit values are known to be safe, call amp.init(allow_banned=True).",
    )
]
