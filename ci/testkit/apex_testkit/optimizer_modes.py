"""The optimizers and their modes that random sequences go through, with the model of each."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from apex.optimizers import (
    CPUOffload,
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from apex_testkit import optimizer_models as models
from apex_testkit.simulated_link import LazyLink

REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ALL = (*REAL, torch.complex64, torch.complex128)
SHORT = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Mode:
    """An optimizer with options, and what the model has to know of them."""

    make: Callable[[list], Any]
    model: Callable[..., None]
    hyper: dict[str, Any]
    dtypes: tuple = ALL
    masters: tuple = ()  # dtypes of parameters that have masters
    capturable: bool = False
    counts: bool = True  # whether groups count steps
    takes_infinity: bool = True  # whether infinite parameters stay so without decay
    decoupled: bool = False
    resync: bool = False  # moments are kept in few bits: the model goes on from those
    loose: float = 0.0  # of what is kept, relative to the largest

    @property
    def keeps_remainders(self):
        return self.make.options.get("store_param_remainders", False)

    @property
    def master_dtype(self):
        return self.make.options.get("master_weight_dtype", torch.float32)

    @property
    def rounds_moments(self):
        return self.make.cls is FusedSGD

    @property
    def takes_limits(self):
        return self.make.cls is FusedAdam

    def gradient(self, param):
        return param.decoupled_grad if self.decoupled else param.grad

    def set_gradient(self, param, grad):
        if self.decoupled:
            param.decoupled_grad = grad
        else:
            param.grad = grad

    def gradient_dtype(self, param, pick):
        is_free = self.decoupled and not param.is_complex()
        return (torch.float32, *SHORT)[pick % 3] if is_free else param.dtype

    def moment(self, optimizer, param, name):
        if isinstance(optimizer, CPUOffload):
            host = optimizer.host_copy(param)
            host.data.copy_(param.detach())  # as the next step does; a remainder is a part of it
            optimizer, param = optimizer.host_optimizer, host
        if isinstance(optimizer, FusedAdam):
            return optimizer.get_unscaled_state(param, name)
        return optimizer.state[param][name]

    def kept_dtype(self, param):
        return param.dtype if self.make.cls is FusedSGD else torch.float32


@dataclasses.dataclass(frozen=True)
class Maker:
    cls: type
    options: dict[str, Any]
    offload_gradients: bool | None = None  # None: without CPUOffload

    def __call__(self, groups):
        if self.offload_gradients is not None:
            far = {"offload_gradients": self.offload_gradients, "link": LazyLink()}
            return CPUOffload(groups, self.cls, minimal_size=0, **far, **self.options)
        return self.cls(groups, **self.options)


ADAM = {"bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
LAMB = {**ADAM, "max_grad_norm": 1.0, "grad_averaging": True, "adam_w_mode": True}
NOVOGRAD = {**ADAM, "grad_averaging": True, "norm_type": 2, "init_zero": False}
NOVOGRAD["reg_inside_moment"] = False
MOMENTUM = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "wd_after_momentum": False}
LARS = {"momentum": 0.9, "nesterov": False, "trust_coefficient": 0.5, "eps": 1e-3}


def group_options(hyper):
    """What groups may differ in, as a part of a group."""
    return {key: hyper[key] for key in ("lr", "weight_decay")}


def adam(options=None, storage=None, **facts):
    hyper = {**ADAM, "adam_w_mode": True, **(options or {})}
    return Mode(Maker(FusedAdam, {**hyper, **(storage or {})}), models.adam, hyper, **facts)


def lamb(cls=FusedLAMB, options=None, storage=None, **facts):
    hyper = {**LAMB, "use_nvlamb": False, **(options or {})}
    facts.setdefault("takes_infinity", False)  # norms of all gradients and parameters
    return Mode(Maker(cls, {**hyper, **(storage or {})}), models.lamb, hyper, **facts)


def novograd(storage=None, **options):
    hyper = {**NOVOGRAD, **options}
    maker = Maker(FusedNovoGrad, {**hyper, **(storage or {})})
    return Mode(maker, models.novograd, hyper, capturable=bool(storage))


def adagrad(mode):
    hyper = {"eps": 1e-3, "weight_decay": 0.1, "adagrad_w_mode": mode}
    return Mode(Maker(FusedAdagrad, hyper), models.adagrad, hyper, counts=False)


def sgd(storage=None, dtypes=ALL, **options):
    hyper = {**MOMENTUM, **options}
    maker = Maker(FusedSGD, {"lr": 0.05, **hyper, **(storage or {})})
    return Mode(maker, models.sgd, hyper, dtypes, counts=False, resync=True)


def lars(**options):
    hyper = {**LARS, **options}
    maker = Maker(FusedLARS, {"lr": 0.05, **hyper})
    hyper = {**hyper, "is_skipped": False}
    return Mode(maker, models.lars, hyper, counts=False, takes_infinity=False)


def offloaded(mode, offload_gradients=False):
    """The same on the host, with parameters and gradients elsewhere."""
    make = dataclasses.replace(mode.make, offload_gradients=offload_gradients)
    return dataclasses.replace(mode, make=make)


NARROW = (*REAL[:3], torch.complex64)
FLOAT8 = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float16}
BFLOAT16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
ON_DEVICE = {"capturable": True}
WITH_MASTERS = {"master_weights": True}
HALF_MASTERS = {"master_weights": True, "master_weight_dtype": torch.float16}
AMSGRAD = {"amsgrad": True, "betas": (0.9, 0.5)}  # so that second moments often fall
REMAINDERS = {"master_weights": True, "store_param_remainders": True}
BY_CHANCE = {"stochastic_rounding": True, "rounding_seed": 3}
ROUNDED = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)
REDUCED = {"reduced_precision_dtype": torch.bfloat16}

MODES = {
    "adamw": adam(),
    "adam": adam({"adam_w_mode": False}),
    "adam_uncorrected": adam({"bias_correction": False}),
    "adam_capturable": adam(storage=ON_DEVICE, capturable=True),
    "adam_masters": adam(storage=WITH_MASTERS, masters=SHORT),
    "adam_capturable_masters": adam(
        storage={**ON_DEVICE, **WITH_MASTERS}, masters=SHORT, capturable=True
    ),
    "adam_half_masters": adam(storage=HALF_MASTERS, masters=SHORT),
    "adam_float8_half_masters": adam(
        {"adam_w_mode": False},
        {**FLOAT8, **HALF_MASTERS},
        dtypes=NARROW,
        masters=SHORT,
        resync=True,
        loose=0.07,
    ),
    "amsgrad": adam(AMSGRAD),
    "amsgrad_l2": adam({**AMSGRAD, "adam_w_mode": False, "bias_correction": False}),
    "amsgrad_capturable_masters": adam(
        AMSGRAD, {**ON_DEVICE, **WITH_MASTERS}, masters=SHORT, capturable=True
    ),
    "amsgrad_by_chance": adam(AMSGRAD, BY_CHANCE, dtypes=ROUNDED),
    "adam_remainders": adam(
        storage=REMAINDERS, masters=(torch.bfloat16,), dtypes=(torch.bfloat16,)
    ),
    "adam_float8": adam(storage=FLOAT8, dtypes=NARROW, resync=True, loose=0.07),
    "adam_bfloat16": adam({"adam_w_mode": False}, BFLOAT16, dtypes=NARROW, resync=True, loose=0.01),
    "adam_by_chance": adam(storage=BY_CHANCE, dtypes=ROUNDED),
    "adam_by_chance_capturable": adam(
        storage={**BY_CHANCE, **ON_DEVICE}, dtypes=ROUNDED, capturable=True
    ),
    "adam_decoupled": adam(storage={"use_decoupled_grad": True}, decoupled=True),
    "lamb": lamb(),
    "lamb_by_chance": lamb(storage=BY_CHANCE, dtypes=ROUNDED),
    "lamb_unclipped": lamb(options={"max_grad_norm": 0.0, "grad_averaging": False}),
    "nvlamb": lamb(options={"use_nvlamb": True, "adam_w_mode": False}),
    "lamb_capturable": lamb(storage=ON_DEVICE, capturable=True),
    "mp_lamb": lamb(FusedMixedPrecisionLamb, capturable=True),
    "mp_lamb_masters": lamb(
        FusedMixedPrecisionLamb, storage=REDUCED, masters=(torch.bfloat16,), capturable=True
    ),
    "novograd": novograd(),
    "novograd_inside": novograd(reg_inside_moment=True, init_zero=True, grad_averaging=False),
    "novograd_maximum": novograd(norm_type=0),
    "novograd_capturable": novograd(ON_DEVICE),
    "adagrad": adagrad(False),
    "adagradw": adagrad(True),
    "sgd": sgd(momentum=0.0),
    "sgd_momentum": sgd(dampening=0.1),
    "nesterov": sgd(nesterov=True),
    "sgd_by_chance": sgd(BY_CHANCE, ROUNDED),
    "sgd_late_decay": sgd(wd_after_momentum=True),
    "lars": lars(),
    "lars_nesterov": lars(nesterov=True),
}
MODES |= {
    "offloaded_masters": offloaded(MODES["adam_masters"]),
    "offloaded_float8": offloaded(MODES["adam_float8_half_masters"]),
    "offloaded_remainders": offloaded(MODES["adam_remainders"]),
    "offloaded_decoupled": offloaded(MODES["adam_decoupled"]),
    "offloaded_amsgrad": offloaded(MODES["amsgrad"]),
    "offloaded_lamb": offloaded(MODES["lamb"]),
    "offloaded_novograd": offloaded(MODES["novograd"]),
    "offloaded_adagrad": offloaded(MODES["adagrad"]),
    "offloaded_sgd": offloaded(MODES["sgd_momentum"]),
    "offloaded_lars": offloaded(MODES["lars"]),
    "offloaded_gradients": offloaded(MODES["adam_masters"], offload_gradients=True),
    "offloaded_gradients_sgd": offloaded(MODES["nesterov"], offload_gradients=True),
}
