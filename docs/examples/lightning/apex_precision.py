"""apex.amp as a precision plugin of Lightning 2, in the place of the one that Lightning removed."""

from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor

from apex import amp

KEEP_FLOAT32 = ("O0", "O1", "O4")  # levels at which parameters keep their dtype


class ApexPrecision(Precision):
    """``Trainer(plugins=[ApexPrecision("O2")])``.

    Args:
        opt_level: ``"O0"`` to ``"O5"``, see :func:`apex.amp.initialize`.
        options: what else ``amp.initialize`` takes, such as ``loss_scale=128.0``.

    Raises:
        ValueError: the strategy has wrapped the model in torch's ``DistributedDataParallel``, whose
            buckets have the parameters' dtype, and the level would change it.
    """

    def __init__(self, opt_level: str = "O1", **options: Any) -> None:
        super().__init__()
        self.opt_level, self.options = opt_level, {"verbosity": 0, **options}

    def connect(
        self, model: torch.nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[torch.nn.Module, list[Any], list[Any]]:
        """Initialize amp; Lightning calls this when model and optimizers are on their device."""
        if not optimizers:  # validation, test, prediction: as they are
            return model, optimizers, lr_schedulers
        is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        if is_wrapped and self.opt_level not in KEEP_FLOAT32:
            raise ValueError(
                f"ApexPrecision: {self.opt_level} changes the dtype of parameters, which "
                f"DistributedDataParallel has wrapped already. Take one of {KEEP_FLOAT32}."
            )
        self.module = model.module if is_wrapped else model
        _, optimizers = amp.initialize(
            self.module, optimizers, opt_level=self.opt_level, **self.options
        )
        return model, optimizers, lr_schedulers

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kw: Any) -> None:
        """Scale the loss; gradients are unscaled at the end of the block."""
        optimizers = model.trainer.optimizers if optimizer is None else optimizer
        with amp.scale_loss(tensor, getattr(optimizers, "optimizer", optimizers)) as scaled_loss:
            super().backward(scaled_loss, model, optimizer, *args, **kw)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """amp skips a step whose gradients overflowed; it takes no closure."""
        loss = closure()
        self._after_closure(model, optimizer)  # hooks and clipping
        if loss is not None or not model.automatic_optimization:
            optimizer.step(**kwargs)
        return loss

    def main_params(self, optimizer: torch.optim.Optimizer) -> Any:
        """What Lightning clips: the float32 parameters that the optimizer updates."""
        return amp.master_params(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return amp.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        amp.load_state_dict(state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the weights once more: Lightning did before there were float32 masters of them."""
        strict = self.module.strict_loading
        self.module.load_state_dict(checkpoint["state_dict"], strict=strict)
