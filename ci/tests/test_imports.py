"""What an import loads: of torch and the standard library nothing new, of Apex what is needed."""

import json

import pytest

# What the builder is made of; it is imported when a kernel is first called.
BUILDER = ("build", "jit", "targets", "toolchain", "switches", "prebuilt", "hatch_hook")
# Statement: the modules of Apex that it may load. Each takes 0.1 to 0.3 ms, and an operator that it
# defines 0.15 ms; raise a number for what the statement needs at once, and for nothing else.
MODULES = {
    "import apex": 1,
    "import apex.amp": 53,
    "import apex.fp16_utils": 61,
    "import apex.optimizers": 2,
    "import apex.multi_tensor_apply": 18,
    "from apex.optimizers import FusedAdam": 33,
    "from apex.optimizers import FusedLAMB": 34,
    "from apex.optimizers import FusedSGD": 30,
    "import apex.normalization": 32,
    "import apex.parallel": 40,
    "import apex.transformer": 3,
    "import apex.transformer.parallel_state": 5,
    "import apex.transformer.pipeline_parallel": 23,
    "import apex.transformer.tensor_parallel": 59,
    "from apex.transformer.functional import FusedScaleMaskSoftmax": 54,
    "import apex.contrib": 2,
    "from apex.contrib.xentropy import SoftmaxCrossEntropyLoss": 20,
    "from apex.contrib.index_mul_2d import index_mul_2d": 20,
    "from apex.contrib.clip_grad import clip_grad_norm_": 17,
    "from apex.contrib.focal_loss import focal_loss": 20,
    "from apex.contrib.layer_norm import FastLayerNorm": 22,
    "from apex.contrib.group_norm import GroupNorm": 23,
    "from apex.contrib.transducer import TransducerLoss": 27,
    "from apex.contrib.openfold_triton import AttnTri": 46,
    "from apex.contrib.optimizers import FusedAdam": 23,
    "from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam": 43,
    "from apex.contrib.sparsity import ASP": 6,
}
LOADED = """
import json, sys
before = set(sys.modules)
{statement}
raise Exception(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, source_wheels):
    """The modules that each statement loads in a process that has imported torch alone."""
    from environments import Environment

    environment = Environment(tmp_path_factory.mktemp("imports") / "venv")
    environment.install(*source_wheels.values())
    answers = environment.results(*(LOADED.format(statement=s) for s in MODULES))
    environment.close()
    return {
        statement: json.loads(answer.removeprefix("Exception: "))
        for statement, answer in zip(MODULES, answers, strict=True)
    }


@pytest.mark.parametrize("statement", MODULES)
def test_nothing_is_loaded_that_can_wait(statement, loaded):
    modules = loaded[statement]
    assert [name for name in modules if name.partition(".")[0] != "apex"] == []
    assert [name for name in modules if name.rpartition(".")[2] in BUILDER] == []
    assert len(modules) <= MODULES[statement], modules
