"""Optimizers are imported when they are asked for, which nothing else can tell."""

import json
import pickle
import pydoc
import subprocess
import sys

import pytest

import apex.optimizers

NAMES = apex.optimizers.__all__
FORMS = [
    "from apex.optimizers import *; FusedAdam, FusedNovoGrad",
    "import apex.optimizers as o; assert o.fused_adam.FusedAdam is o.FusedAdam",
    "import apex.optimizers as o; assert {'FusedAdam', 'fused_adam'} <= set(dir(o))",
    "from apex.optimizers.fused_sgd import FusedSGD",
    "from apex.optimizers import fused_lamb; fused_lamb.FusedLAMB",
    "import apex; apex.optimizers.FusedAdagrad",
    f"import pickle; pickle.loads({pickle.dumps([getattr(apex.optimizers, n) for n in NAMES])!r})",
]
# Each form in a fork of its own, which has torch but nothing of Apex.
EACH_ALONE = """
import json, os, sys, torch
for form in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        try:
            exec(form, {})
        except BaseException as error:
            os.write(1, f"{form}: {error!r}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_every_form_of_import():
    done = subprocess.run(
        [sys.executable, "-c", EACH_ALONE, json.dumps(FORMS)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""


def test_help_lists_all():
    text = pydoc.plaintext.document(apex.optimizers)
    for name in NAMES:
        assert f"class {name}" in text


def test_what_is_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'FusedAdm'"):
        apex.optimizers.FusedAdm  # noqa: B018
