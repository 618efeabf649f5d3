"""Random calls of the raw operators of sharded and older optimizers: refusals change nothing."""

import torch

from apex.contrib.optimizers.distributed_adam import distributed_adam_step
from apex.contrib.optimizers.legacy_sgd import sgd_with_copies
from apex.contrib.optimizers.sharded_lamb import lamb_apply, lamb_step, lamb_terms
from apex_testkit.raw_calls import Call, run_random_calls
