"""States of FusedAdam in fewer bits: how they are made, saved in float32, and loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..stepping.buckets import MASTER
from ..stepping.checkpoints import outside_inference_mode
from ..stepping.optimizer import FusedOptimizer
from .moments import (
    LARGEST,
    MOMENTS,
    SCALED,
    SCALES,
    chosen_dtype,
    exported,
    is_scaled,
    remainder_of,
    store_state,
    unscaled,
    whole_master,
)


class CompactStates(FusedOptimizer):
    """Moments of chosen dtypes, masters of 16 bits, and gradients in another attribute."""

    def set_storage(
        self,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        master_weight_dtype: torch.dtype,
        store_param_remainders: bool,
        use_decoupled_grad: bool,
    ) -> None:
        """Keep the constructor's arguments of these names; called before parameters are added."""
        self.exp_avg_dtype = chosen_dtype("exp_avg_dtype", exp_avg_dtype)
        self.exp_avg_sq_dtype = chosen_dtype("exp_avg_sq_dtype", exp_avg_sq_dtype)
        self.store_param_remainders = store_param_remainders
        self.use_decoupled_grad = use_decoupled_grad
        self.master_weight_dtype = master_weight_dtype
        self._check_masters()
        if self.capturable and not self._is_plain:
            raise RuntimeError(
                "FusedAdam: capturable=True needs float32 moments and masters, and gradients in "
                ".grad: leave exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype, "
                "store_param_remainders and use_decoupled_grad at their defaults."
            )
        if use_decoupled_grad:
            self.layout = dataclasses.replace(
                self.layout, grad_name="decoupled_grad", any_grad_dtype=True
            )

    def _check_masters(self) -> None:
        dtype = self.master_weight_dtype
        if dtype not in (torch.float32, torch.float16):
            raise ValueError(
                f"FusedAdam: master_weight_dtype must be torch.float32 or float16, got {dtype}."
            )
        if dtype == torch.float16 and self.store_param_remainders:
            raise ValueError(
                "FusedAdam: store_param_remainders=True stores float32 masters, so it cannot be "
                "combined with master_weight_dtype=torch.float16. Choose one of both."
            )
        if self.master_weights:
            return
        if self.store_param_remainders:
            raise ValueError(
                "FusedAdam: store_param_remainders=True stores masters in 16 bits, so it needs "
                "master_weights=True."
            )
        if dtype != torch.float32:
            raise ValueError(
                f"FusedAdam: master_weight_dtype is {dtype}, but there are no masters: it needs "
                "master_weights=True."
            )

    @property
    def _is_plain(self) -> bool:
        """Whether all states are float32, and gradients are where torch puts them."""
        dtypes = {self.exp_avg_dtype, self.exp_avg_sq_dtype, self.master_weight_dtype}
        is_wide = dtypes == {torch.float32} and not self.store_param_remainders
        return is_wide and not self.use_decoupled_grad

    def check_amsgrad(self, where: str, group: dict[str, Any]) -> None:
        """Raise ValueError where a group's ``amsgrad`` cannot be had with the states kept here."""
        if group.get("amsgrad") and not self._is_plain:
            raise ValueError(
                f"{where}: amsgrad=True needs float32 moments and masters, and gradients in .grad: "
                "leave exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype, "
                "store_param_remainders and use_decoupled_grad at their defaults."
            )

    def set_rounding(self, stochastic_rounding: bool) -> None:
        """Keep the constructor's argument; called after :meth:`set_storage`."""
        self.stochastic_rounding = stochastic_rounding
        if stochastic_rounding and (self.master_weights or not self._is_plain):
            raise ValueError(
                "FusedAdam: stochastic_rounding=True keeps no masters, and needs float32 moments "
                "and gradients in .grad: leave master_weights, exp_avg_dtype, exp_avg_sq_dtype and "
                "use_decoupled_grad at their defaults."
            )

    def kept_dtype(self, key: str, param: Tensor) -> torch.dtype:
        if key == MASTER:
            return torch.int16 if self._keeps_remainder(param) else self.master_weight_dtype
        wide = super().kept_dtype(key, param)
        may_be_small = wide == torch.float32 and key != LARGEST
        return getattr(self, f"{key}_dtype") if may_be_small else wide

    def init_state(self, group: dict[str, Any], param: Tensor) -> int:
        state = self.state[param]
        kept = SCALED if self.needs_master(param) else MOMENTS
        if is_scaled(tuple(self.kept_dtype(key, param) for key in kept)):
            state.setdefault(SCALES, _no_scales(param))
        if self.needs_master(param) and MASTER not in state:
            like = torch.zeros_like(
                param, dtype=self.kept_dtype(MASTER, param), requires_grad=False
            )
            if like.dtype == torch.int16:  # nothing remains
                state[MASTER] = like
            else:
                store_state(state, MASTER, param.detach(), like)
        return super().init_state(group, param)

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Make the state of a parameter before its first step, as TransformerEngine does.

        Args:
            param: one of the optimizer's.
            store_param_remainders: if given, must equal the constructor's argument.

        Raises:
            ValueError: ``param`` is not the optimizer's, or ``store_param_remainders`` is wrong.
        """
        if store_param_remainders not in (None, self._keeps_remainder(param)):
            raise ValueError(
                "FusedAdam.initialize_state: store_param_remainders is "
                f"{store_param_remainders}, but the optimizer keeps "
                f"{'remainders' if self._keeps_remainder(param) else 'none'} for this parameter."
            )
        for group in self.param_groups:
            if any(own is param for own in group["params"]):
                with outside_inference_mode():
                    count = float(self.init_state(group, param))
                    step = torch.tensor(count, dtype=torch.float32, device="cpu")
                self.state[param]["step"] = step
                return
        raise ValueError("FusedAdam.initialize_state: param is not one of the optimizer's.")

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """``exp_avg``, ``exp_avg_sq`` or ``master_param`` in float32, whatever it is kept in."""
        return self.stored_value(param, state_name)

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Keep ``unscaled_state`` as ``exp_avg``, ``exp_avg_sq`` or ``master_param``, rounded."""
        self.restore_moment(param, state_name, unscaled_state)

    def stored_value(self, param: Tensor, key: str) -> Tensor:
        state = self.state[param]
        return whole_master(param, state) if key == MASTER else unscaled(state, key)

    def restore_moment(self, param: Tensor, key: str, value: Tensor) -> None:
        if key == MASTER and value.dtype == torch.int16:
            raise ValueError(
                "FusedAdam: a master must be given in full, as float32, not as int16 remainders. "
                "get_unscaled_state() returns it in full."
            )
        state, dtype, value = self.state[param], self.kept_dtype(key, param), value.to(param.device)
        if dtype == torch.int16:
            rest = remainder_of(param, value)
            state[MASTER] = torch.empty_like(rest).copy_(rest)
            return
        if is_scaled((dtype,)):
            state.setdefault(SCALES, _no_scales(param))
        like = torch.empty_like(param, dtype=dtype, requires_grad=False)
        store_state(state, key, value, like)

    def conform_state(self, group: dict[str, Any], param: Tensor) -> None:
        super().conform_state(group, param)
        state = self.state.get(param, {})
        if SCALES in state and not is_scaled(tuple(state[k].dtype for k in SCALED if k in state)):
            del state[SCALES]  # the parameter had another dtype before

    def _keeps_remainder(self, param: Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none)
        if self.use_decoupled_grad:
            for group in self.param_groups:
                for param in group["params"]:
                    param.decoupled_grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state in float32, loadable by this class and by ``torch.optim.AdamW`` and ``Adam``.

        Moments and masters that are kept in fewer bits are given in float32, exactly.
        """
        result = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        state = {
            index: exported(params[index], entry) if isinstance(index, int) else entry
            for index, entry in result["state"].items()
        }
        # By this torch.optim.Adam and AdamW know which of the two they are.
        mode = {"decoupled_weight_decay": bool(self.adam_w_mode)}
        groups = [{**group, **mode} for group in result["param_groups"]]
        return {**result, "state": state, "param_groups": groups}


def _no_scales(param: Tensor) -> Tensor:
    return torch.ones(len(SCALED), dtype=torch.float32, device=param.device)
