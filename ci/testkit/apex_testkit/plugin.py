"""The pytest plugin of every test run: devices, seeds, threads, no skip that hides a kernel."""

import os
import random
import re

import pytest
import torch

from .model_parallel import alone  # noqa: F401  (fixture)
from .ranks import doomed_ranks, four_doomed_ranks, four_ranks, two_ranks  # noqa: F401  (fixtures)

DEVICES = ("cpu", "cuda")
# A skip with one of these behind it hides a kernel that is missing or cannot be built.
_HIDING = (ImportError, NotImplementedError)
_HIDING_NAMES = ("BuildError",)
# pytest.importorskip leaves no exception behind, only this text.
_IMPORT_SKIP = re.compile(r"could not import '(?P<module>[\w.]+)'")
# Top-level modules of our wheels: a test must not be skipped for want of them.
_OUR_MODULES = re.compile(
    r"apex|\w+_cuda|amp_C|apex_C|syncbn|bnp|fast_layer_norm|fast_multihead_attn|fused_bias_swiglu"
    r"|fused_index_mul_2d|fused_conv_bias_relu|fused_rotary_positional_embedding"
    r"|_apex_nccl_allocator"
)


def pytest_addoption(parser):
    group = parser.getgroup("apex")
    group.addoption(
        "--device",
        action="append",
        default=[],
        metavar="DEVICE",
        help=f"run device tests on this device only ({', '.join(DEVICES)}; repeat for several); "
        "default: the apex_devices ini value, or every device that is there",
    )
    group.addoption(
        "--device-tests-only",
        action="store_true",
        help="leave out tests that would run the same without the devices: those that neither use "
        "the `device` fixture nor need a GPU",
    )
    parser.addini("apex_devices", "devices that device tests run on", type="args", default=[])
    parser.addini("apex_threads", "torch threads of the test process", default="2")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "needs_gpus(count): skipped where fewer than count GPUs are present"
    )
    config.addinivalue_line(
        "markers",
        "builds: compiles kernels at run time; skipping such a test is a failure, deselect it "
        'with -m "not builds" where building is forbidden',
    )
    config.addinivalue_line(
        "markers",
        "slow: takes seconds, and tells nothing new on another torch; not part of samples",
    )
    config.addinivalue_line(
        "markers",
        "every_torch: reaches into parts of torch that change; part of samples on every torch",
    )
    torch.set_num_threads(int(config.getini("apex_threads")))
    # By default cuDNN rounds the factors of float32 convolutions to TF32, which has 11 bits; tests
    # compare with float64. It is set here, and not around each test, because torch forbids to set
    # it once a test has imported torch.testing._internal.common_utils.
    torch.backends.cudnn.allow_tf32 = False
    config.stash[_devices_key] = _chosen_devices(config)


_devices_key = pytest.StashKey[list[str]]()


def _chosen_devices(config) -> list[str]:
    """Return the devices asked for, or all that are present; refuse one that is absent."""
    chosen = config.getoption("--device") or config.getini("apex_devices")
    present = [d for d in DEVICES if d == "cpu" or torch.cuda.is_available()]
    unknown = [d for d in chosen if d not in DEVICES]
    if unknown:
        raise pytest.UsageError(f"--device: expected one of {DEVICES}, got {unknown[0]!r}")
    absent = [d for d in chosen if d not in present]
    if absent:
        raise pytest.UsageError(
            f"--device: {absent[0]} was asked for; torch {torch.__version__} finds no such device"
        )
    return list(chosen) or present


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        devices = metafunc.config.stash[_devices_key]
        # Parametrized here, not in a fixture's params, because the command line decides.
        if not _is_parametrized_by_test(metafunc, "device"):
            metafunc.parametrize("device", devices, ids=devices, indirect=True)


def _is_parametrized_by_test(metafunc, name) -> bool:
    for marker in metafunc.definition.iter_markers("parametrize"):
        names = marker.args[0] if marker.args else marker.kwargs["argnames"]
        if name in (names.split(",") if isinstance(names, str) else names):
            return True
    return False


@pytest.fixture
def device(request) -> torch.device:
    """Each device that tests run on, in turn: cpu, and cuda where there is one."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded():
    """Give every test the same random numbers, whichever tests ran before."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _threads_restored():
    """Undo a test's change of torch's thread count."""
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--device-tests-only"):
        return
    kept = [i for i in items if "device" in i.fixturenames or i.get_closest_marker("needs_gpus")]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_setup(item):
    for marker in item.iter_markers("needs_gpus"):
        count = marker.args[0] if marker.args else 1
        present = torch.cuda.device_count()
        if present < count:
            needed = "a CUDA GPU" if count == 1 else f"{count} CUDA GPUs"
            pytest.skip(f"needs {needed}, {present} present")


def _hidden_cause(exception: BaseException | None) -> str | None:
    """Say why a skip hides a missing kernel, or return None for an honest one."""
    reason = str(exception)
    imported = _IMPORT_SKIP.search(reason)
    if imported and _OUR_MODULES.fullmatch(imported["module"].partition(".")[0]):
        return f"the module {imported['module']} is missing"
    behind = exception
    while behind is not None:
        behind = behind.__cause__ or behind.__context__
        if isinstance(behind, _HIDING) or type(behind).__name__ in _HIDING_NAMES:
            return f"{type(behind).__name__}: {behind}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and call.excinfo is not None:
        cause = _hidden_cause(call.excinfo.value)
        if cause is None and item.get_closest_marker("builds"):
            cause = "it is marked `builds`"
        if cause is not None:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} was skipped ({call.excinfo.value}), which hides a missing "
                f"kernel: {cause}"
            )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    call = getattr(report, "call", None)
    if report.outcome == "skipped" and call is not None and call.excinfo is not None:
        cause = _hidden_cause(call.excinfo.value)
        if cause is not None:
            report.outcome = "failed"
            report.longrepr = (
                f"{collector.nodeid} was skipped, which hides a missing kernel: {cause}"
            )
    return report


def pytest_report_header(config):
    devices = ", ".join(config.stash[_devices_key])
    jit = os.environ.get("APEX_JIT", "1")
    return (
        f"apex: torch {torch.__version__}, {devices}, {torch.get_num_threads()} threads, JIT {jit}"
    )
