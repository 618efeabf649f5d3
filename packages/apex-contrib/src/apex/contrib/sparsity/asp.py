"""ASP, automatic sparsity: prunes the weights of a trained network to two of four, and keeps it so.

Mishra et al. 2021, *Accelerating Sparse Deep Neural Networks* (https://arxiv.org/abs/2104.08378).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .ordered_norm import OrderedLocalResponseNorm
from .sparse_masklib import create_mask

__all__ = ["ASP", "eligible_modules"]

# What is pruned of each kind of module; subclasses are of their base's kind.
_SPARSE_NAMES: dict[type, Sequence[str]] = {
    nn.Linear: ("weight",),
    nn.Conv1d: ("weight",),
    nn.Conv2d: ("weight",),
    nn.Conv3d: ("weight",),
    nn.MultiheadAttention: ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight"),
}
# Sparse matrix instructions of NVIDIA GPUs work on tiles of this many rows and columns.
_ROWS, _COLUMNS = 8, 16


def eligible_modules(
    model: nn.Module,
    whitelist_layer_types: Iterable[type],
    allowed_layer_names: Sequence[str] | None,
    disallowed_layer_names: Sequence[str],
) -> list[tuple[str, nn.Module]]:
    """Names and modules of some types: of the allowed names (None: all) less the disallowed."""
    kinds = tuple(whitelist_layer_types)
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        and name not in disallowed_layer_names
        and (allowed_layer_names is None or name in allowed_layer_names)
    ]


@dataclass(frozen=True)
class _Pruned:
    """A parameter that is pruned. Its mask and the values it lost are buffers of its module."""

    module_name: str
    module: nn.Module
    name: str

    @property
    def title(self) -> str:
        return f"{self.module_name}.{self.name}".removeprefix(".")

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.module, self.name)

    @property
    def mask(self) -> Tensor:
        return getattr(self.module, f"__{self.name}_mma_mask")

    @property
    def lost(self) -> Tensor | None:
        return getattr(self.module, f"__{self.name}_mma_pruned_p", None)

    def add_buffers(self, keep_lost: bool) -> None:
        weights = self.parameter.detach()
        mask = torch.ones_like(weights, dtype=torch.bool)
        self.module.register_buffer(f"__{self.name}_mma_mask", mask)
        if keep_lost:
            lost = torch.zeros_like(weights, device="cpu")
            self.module.register_buffer(f"__{self.name}_mma_pruned_p", lost)

    def is_pruned(self) -> bool:
        return not bool(self.mask.all())

    def prune(self, mask: Tensor) -> None:
        weights = self.parameter
        if self.lost is not None:
            self.lost.copy_(torch.where(mask, 0, weights))
        weights.masked_fill_(~mask, 0)
        self.mask.copy_(mask)

    def restore(self) -> None:
        if self.is_pruned() and self.lost is not None:
            self.parameter.add_(self.lost.to(self.parameter.device))
            self.lost.zero_()
            self.mask.fill_(True)


class ASP:
    """Prunes one model of the process at a time; all methods are the class's.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> ASP.prune_trained_model(model, optimizer)  # then train as before
        >>> ASP.is_sparsity_enabled()
        True
        >>> ASP.reset()
    """

    _model: nn.Module | None = None
    _optimizer: torch.optim.Optimizer | None = None
    _own_step: Any = None  # what optimizer.__dict__ held as its step, if anything
    _parameters: tuple[_Pruned, ...] = ()
    _calculator: Callable[[Tensor], Tensor] = staticmethod(create_mask)
    _verbosity = 3
    _allow_recompute = False
    _allow_permutation = True

    @classmethod
    def init_model_for_pruning(
        cls,
        model: nn.Module,
        mask_calculator: str | Callable[[Tensor], Tensor] = "m4n2_1d",
        verbosity: int = 3,
        whitelist: Iterable[type] = (
            nn.Linear,
            nn.Conv1d,
            nn.Conv2d,
            nn.Conv3d,
            nn.MultiheadAttention,
        ),
        allowed_layer_names: Sequence[str] | None = None,
        disallowed_layer_names: Sequence[str] = (),
        allow_recompute_mask: bool = False,
        custom_layer_dict: Mapping[type, Sequence[str]] | None = None,
        allow_permutation: bool = True,
    ) -> None:
        """Choose the weights to prune, and give their modules masks, which keep everything yet.

        Masks are buffers ``__weight_mma_mask`` (bool), so checkpoints hold them: build the model,
        call this, and load its state.

        Args:
            model: the network, also wrapped in DistributedDataParallel.
            mask_calculator: a pattern of :func:`create_mask`, or a function of a weight that
                returns its mask.
            verbosity: 0 is silent; from 2 on it prints what is not pruned and why, from 3 on all.
            whitelist: types of layers, subclasses included.
            allowed_layer_names: take only layers of these names in ``model.named_modules()``; None:
                all.
            disallowed_layer_names: take no layers of these names.
            allow_recompute_mask: keep pruned values (in buffers ``__weight_mma_pruned_p`` on the
                CPU), so that masks can be computed again.
            custom_layer_dict: ``{type: [names of parameters]}``: other types, and what to prune of
                them.
            allow_permutation: let :meth:`compute_sparse_masks` look for an order of channels that
                loses less. The network computes the same.

        Weights are skipped, with a message, unless their first dimension is a multiple of 8 and the
        second of 16, as sparse matrix instructions want it; those without ``requires_grad`` too.

        Raises:
            RuntimeError: another model was initialized before; call :meth:`reset`.
            ValueError: a type of ``whitelist`` is not known, ``mask_calculator`` is no pattern, or
                a lazy layer has no weight yet. The model is as it was then.
        """
        if cls._model is not None:
            raise RuntimeError(
                "ASP.init_model_for_pruning was called before. ASP holds one model at a time; call "
                "ASP.reset() to go on with another one."
            )
        if not callable(mask_calculator):
            create_mask(torch.zeros(1, 16), pattern=mask_calculator)  # raises for what is none
        custom = dict(custom_layer_dict or {})
        names = _SPARSE_NAMES | custom
        kinds = (*whitelist, *custom)
        for kind in kinds:
            if not any(base in names for base in kind.__mro__):
                raise ValueError(
                    f"whitelist: it is not known which parameters of {kind.__name__} to prune; "
                    f"pass custom_layer_dict={{{kind.__name__}: [names]}}."
                )
        chosen: list[_Pruned] = []
        for name, module in eligible_modules(
            model, kinds, allowed_layer_names, disallowed_layer_names
        ):
            table = next(names[base] for base in type(module).__mro__ if base in names)
            chosen += cls._suitable(name, module, table, verbosity)
        unique = {id(pruned.parameter): pruned for pruned in reversed(chosen)}  # the first of tied
        for pruned in reversed(unique.values()):
            pruned.add_buffers(allow_recompute_mask)
        if allow_permutation:  # they load a checkpoint of permuted channels
            OrderedLocalResponseNorm.adopt_all(model)
        cls._model, cls._parameters = model, tuple(reversed(unique.values()))
        cls._calculator = (
            mask_calculator
            if callable(mask_calculator)
            else functools.partial(create_mask, pattern=mask_calculator)
        )
        cls._verbosity, cls._allow_recompute = verbosity, allow_recompute_mask
        cls._allow_permutation = allow_permutation

    @staticmethod
    def _suitable(
        name: str, module: nn.Module, table: Sequence[str], verbosity: int
    ) -> list[_Pruned]:
        found = []
        for own in table:
            parameter = module._parameters.get(own)
            if parameter is None or not parameter.requires_grad:
                continue
            if is_lazy(parameter):
                raise ValueError(
                    f"ASP.init_model_for_pruning: model: {name}.{own} of a {type(module).__name__} "
                    "has no shape yet, expected one. Run the model once on a batch first."
                )
            shape = tuple(parameter.shape)
            if len(shape) < 2 or shape[0] % _ROWS or shape[1] % _COLUMNS:
                if verbosity >= 2:
                    print(
                        f"[ASP] not pruned: {name}.{own} {shape}; the first two dimensions must be "
                        f"multiples of {_ROWS} and {_COLUMNS}"
                    )
                continue
            if verbosity >= 3:
                print(f"[ASP] to be pruned: {name}.{own} {shape} {parameter.dtype}")
            found.append(_Pruned(name, module, own))
        return found

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Whether :meth:`init_model_for_pruning` was called."""
        return cls._model is not None

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: torch.optim.Optimizer) -> None:
        """Make ``optimizer.step`` keep pruned weights 0.

        Gradients are multiplied by the masks before the step (after the closure, if there is one),
        and weights after it. Call it after :meth:`init_model_for_pruning`.

        Raises:
            RuntimeError: no model was initialized, or an optimizer was before.
        """
        cls._require_model("init_optimizer_for_pruning")
        if cls._optimizer is not None:
            raise RuntimeError(
                "ASP.init_optimizer_for_pruning was called before; ASP holds one optimizer."
            )
        cls._own_step = vars(optimizer).get("step")
        plain_step = optimizer.step

        @functools.wraps(plain_step)
        def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any):
            if closure is None:
                cls._mask_gradients()
                result = plain_step(*args, **kwargs)
            else:

                @functools.wraps(closure)
                def masked_closure() -> Any:
                    loss = closure()
                    cls._mask_gradients()
                    return loss

                result = plain_step(masked_closure, *args, **kwargs)
            with torch.no_grad():
                for pruned in cls._parameters:
                    pruned.parameter.mul_(pruned.mask)
            return result

        # A method, because torch's schedulers of learning rates take it apart.
        optimizer.step = types.MethodType(step, optimizer)
        cls._optimizer = optimizer

    @classmethod
    @torch.no_grad()
    def _mask_gradients(cls) -> None:
        for pruned in cls._parameters:
            if pruned.parameter.grad is not None:
                pruned.parameter.grad.mul_(pruned.mask)

    @classmethod
    @torch.no_grad()
    def compute_sparse_masks(cls) -> None:
        """Look for a better order of channels, if that is allowed, compute masks, and prune.

        Where masks were computed before, pruned values are put back first.

        Raises:
            RuntimeError: no model was initialized; or it is pruned, and ``allow_recompute_mask``
                was False. Nothing is changed then.
            ValueError: ``mask_calculator`` returned a mask of another shape; nothing is pruned.
        """
        model = cls._require_model("compute_sparse_masks")
        if not cls._allow_recompute and any(p.is_pruned() for p in cls._parameters):
            raise RuntimeError(
                "ASP.compute_sparse_masks: the model is pruned. To compute masks again, call "
                "init_model_for_pruning with allow_recompute_mask=True."
            )
        for pruned in cls._parameters:
            pruned.restore()
        if cls._allow_permutation:
            cls._permute(model)
        masks = []
        for pruned in cls._parameters:
            mask = torch.as_tensor(cls._calculator(pruned.parameter))
            if mask.shape != pruned.parameter.shape:
                raise ValueError(
                    f"mask_calculator: the mask of {pruned.title} must be "
                    f"{list(pruned.parameter.shape)}, got {list(mask.shape)}."
                )
            masks.append(mask.to(pruned.parameter.device) != 0)
        for pruned, mask in zip(cls._parameters, masks, strict=True):
            pruned.prune(mask)
            if cls._verbosity >= 3:
                print(f"[ASP] pruned: {pruned.title}, {float(mask.float().mean()):.1%} stay")

    @classmethod
    def _permute(cls, model: nn.Module) -> None:
        from .permutation_lib import Permutation

        model = getattr(model, "module", model)
        sparse = [
            (p.module_name, p.module, p.name, p.parameter, p.mask, p.lost) for p in cls._parameters
        ]
        everything = [*model.named_parameters(), *model.named_buffers()]
        Permutation.set_permutation_params_from_asp(
            model, sparse, everything, cls._verbosity, cls._optimizer
        )
        Permutation.permute_model(model)

    @classmethod
    @torch.no_grad()
    def restore_pruned_weights(cls) -> None:
        """Put pruned values back; masks keep everything then.

        Raises:
            RuntimeError: the model is pruned, and ``allow_recompute_mask`` was False.
        """
        cls._require_model("restore_pruned_weights")
        if not cls._allow_recompute and any(p.is_pruned() for p in cls._parameters):
            raise RuntimeError(
                "ASP.restore_pruned_weights: pruned values were not kept; call "
                "init_model_for_pruning with allow_recompute_mask=True."
            )
        for pruned in cls._parameters:
            pruned.restore()

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Whether the weights are pruned: True where every mask keeps at most half.

        Raises:
            RuntimeError: some are pruned, and some are not.
        """
        shares = {p.title: float(p.mask.count_nonzero()) / p.mask.numel() for p in cls._parameters}
        if all(share == 1 for share in shares.values()):
            return False
        if all(share <= 0.5 for share in shares.values()):
            return True
        more = {name: round(share, 3) for name, share in shares.items() if share > 0.5}
        raise RuntimeError(
            f"ASP: some masks keep more than half, and others do not: {more}. Call "
            "compute_sparse_masks, or load a checkpoint that has all masks."
        )

    @classmethod
    def prune_trained_model(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Prune linear layers, 2-D convolutions and attention of a trained model in one call.

        The three steps with their defaults: model, optimizer, masks. Then train it as before, with
        the same learning rates.
        """
        cls.init_model_for_pruning(
            model, "m4n2_1d", 2, (nn.Linear, nn.Conv2d, nn.MultiheadAttention)
        )
        cls.init_optimizer_for_pruning(optimizer)
        cls.compute_sparse_masks()

    @classmethod
    def set_permutation_saving_params(
        cls,
        allow_permutation: bool = True,
        save_permutation_graph: bool = False,
        permutation_output_dir: str = ".",
    ) -> None:
        """Allow or forbid permutations from now on, and say whether and where to save the graph."""
        from .permutation_lib import Permutation

        Permutation.set_permutation_saving_params(
            allow_permutation, save_permutation_graph, permutation_output_dir
        )

    @classmethod
    def reset(cls) -> None:
        """Forget the model, and give the optimizer its own step back. Weights and masks stay."""
        if cls._optimizer is not None:
            del cls._optimizer.step
            if cls._own_step is not None:
                cls._optimizer.step = cls._own_step
        cls._model = cls._optimizer = cls._own_step = None
        cls._parameters = ()

    @classmethod
    def _require_model(cls, who: str) -> nn.Module:
        if cls._model is None:
            raise RuntimeError(f"ASP.{who}: call ASP.init_model_for_pruning first.")
        return cls._model
