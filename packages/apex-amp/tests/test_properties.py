"""The table of opt levels, and which option goes with which level."""

import itertools

import pytest
import torch

from apex.amp import _amp_state
from apex.amp.frontend import Properties, opt_levels

half, bfloat16 = torch.float16, torch.bfloat16
NAMES = (
    *("enabled", "opt_level", "cast_model_type", "patch_torch_functions"),
    *("patch_torch_functions_type", "keep_batchnorm_fp32", "master_weights", "loss_scale"),
)
TABLE = {
    "O0": (True, "O0", torch.float32, False, None, None, False, 1.0),
    "O1": (True, "O1", None, True, half, None, None, "dynamic"),
    "O2": (True, "O2", half, False, None, True, True, "dynamic"),
    "O3": (True, "O3", half, False, None, False, False, 1.0),
    "O4": (True, "O4", None, True, bfloat16, None, None, 1.0),
    "O5": (True, "O5", bfloat16, False, None, True, True, 1.0),
}
ERROR = object()
PATCHING, CASTING = ("O1", "O4"), ("O0", "O2", "O3", "O5")
RULES = [
    *[("cast_model_type", PATCHING, value, ERROR) for value in (half, bfloat16)],
    *[("cast_model_type", PATCHING, value, value) for value in (None, False, torch.float32)],
    *[("cast_model_type", CASTING, value, value) for value in (None, False, half, torch.float64)],
    *[("patch_torch_functions", PATCHING, value, value) for value in (True, False)],
    ("patch_torch_functions", CASTING, True, ERROR),
    ("patch_torch_functions", CASTING, False, False),
    ("patch_torch_functions_type", ("O1",), half, half),
    ("patch_torch_functions_type", ("O1",), bfloat16, ERROR),
    ("patch_torch_functions_type", ("O4",), bfloat16, bfloat16),
    ("patch_torch_functions_type", ("O4",), half, ERROR),
    ("patch_torch_functions_type", CASTING, half, ERROR),
    ("patch_torch_functions_type", CASTING, None, None),
    *[("keep_batchnorm_fp32", PATCHING, value, ERROR) for value in (True, False, "True")],
    ("keep_batchnorm_fp32", PATCHING, None, None),
    *[("keep_batchnorm_fp32", CASTING, value, value) for value in (True, False, None)],
    ("keep_batchnorm_fp32", CASTING, "True", True),
    ("keep_batchnorm_fp32", CASTING, "False", False),
    *[("master_weights", PATCHING, value, ERROR) for value in (True, False)],
    *[("master_weights", CASTING, value, value) for value in (True, False, None)],
    ("loss_scale", tuple(TABLE), "dynamic", "dynamic"),
    ("loss_scale", tuple(TABLE), "128.0", 128.0),
    ("loss_scale", tuple(TABLE), 64, 64.0),
    ("enabled", tuple(TABLE), False, False),
]
CASES = [(n, level, v, e) for n, levels, v, e in RULES for level in levels]


def make(level):
    return opt_levels[level](Properties())


def test_constructor_defaults():
    expected = (False, None, None, False, None, None, None, 1.0)
    assert Properties().options == dict(zip(NAMES, expected, strict=True))
    assert tuple(Properties().options) == NAMES


@pytest.mark.parametrize("level", TABLE)
def test_level_defaults(level):
    assert make(level).options == dict(zip(NAMES, TABLE[level], strict=True))


def test_levels_have_texts():
    assert sorted(opt_levels) == sorted(TABLE)
    for name, level in opt_levels.items():
        assert level.brief.startswith(f"{name}:")
        assert isinstance(level.more, str)
    assert opt_levels["O0"].brief == "O0:  Pure FP32 training.\n"
    assert opt_levels["O3"].brief == "O3:  Pure FP16 training."


@pytest.mark.parametrize(("name", "level", "value", "expected"), CASES)
def test_override(name, level, value, expected):
    properties = make(level)
    before = properties.options[name]
    if expected is not ERROR:
        setattr(properties, name, value)
        assert getattr(properties, name) is expected or getattr(properties, name) == expected
        return
    with pytest.raises(RuntimeError, match=f"(?s){name}.*{level}"):
        setattr(properties, name, value)
    assert properties.options[name] is before


@pytest.mark.parametrize(
    ("name", "level", "value", "expected"), [c for c in CASES if c[3] is ERROR]
)
def test_hard_override_warns_and_stores(name, level, value, expected, capsys):
    _amp_state.hard_override = True
    properties = make(level)
    before = properties.options[name]
    setattr(properties, name, value)
    assert "Warning" in capsys.readouterr().out
    is_stored = name != "patch_torch_functions_type"
    assert properties.options[name] == (value if is_stored else before)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("keep_batchnorm_fp32", "yes", AssertionError),
        ("keep_batchnorm_fp32", 1, AssertionError),
        ("keep_batchnorm_fp32", [], AssertionError),
        ("loss_scale", "high", ValueError),
        ("cast_model_type", "half", TypeError),
        ("cast_model_type", torch.int32, TypeError),
    ],
)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_wrong_values(level, name, value, error):
    properties = make(level)
    before = dict(properties.options)
    with pytest.raises(error):
        setattr(properties, name, value)
    assert properties.options == before


def test_unknown_names():
    properties = Properties()
    with pytest.raises(AttributeError, match="nonsense"):
        properties.nonsense  # noqa: B018
    with pytest.raises(ValueError, match="nonsense"):
        properties._update_options_dict({"loss_scale": 2.0, "nonsense": 1})
    assert properties.loss_scale == 1.0
    properties._update_options_dict({"loss_scale": 2.0})
    assert properties.loss_scale == 2.0


def test_levels_do_not_share_state():
    first, second = make("O2"), make("O2")
    first.loss_scale = 4.0
    assert second.loss_scale == "dynamic"
    assert len({id(p.options) for p in itertools.chain([first, second])}) == 2
