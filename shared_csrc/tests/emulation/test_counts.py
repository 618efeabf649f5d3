"""What a launch costs is counted, and each kind of planted regression turns the check red."""

import os
import subprocess

import pytest

from ci import cost_counts, costs, launches

# Of the dear twin and of the other: launches, accesses, bytes, sectors and needed sectors of loads.
LOADS = {
    "one_launch_more": ((2, 1024, 4096, 128, 128), (1, 512, 2048, 64, 64)),
    "re_read": ((1, 1280, 5120, 192, 160), (1, 512, 2048, 64, 64)),
    "two_byte_lane": ((1, 512, 1024, 32, 32), (1, 64, 1024, 32, 32)),
    "scattered_lanes": ((1, 512, 2048, 512, 64), (1, 512, 2048, 64, 64)),
    "idle_threads": ((1, 32, 128, 4, 4), (1, 32, 128, 4, 4)),
}
# Which number of the table tells of it.
TOLD_BY = {
    "one_launch_more": "launches: 1 in gpu_costs.toml, 2 now",
    "re_read": "loads: bytes: 2048 in gpu_costs.toml, 5120 now",
    "two_byte_lane": "loads: accesses: 64 in gpu_costs.toml, 512 now",
    "scattered_lanes": "loads: sectors: 64 in gpu_costs.toml, 512 now",
    "idle_threads": "threads: 32 in gpu_costs.toml, 256 now",
}


@pytest.fixture
def counted(planted, tmp_path, monkeypatch):
    """Return a function that gives the launches of a twin, as the table has them."""
    monkeypatch.setattr(launches, "op_of", lambda library: "planted")

    def run(name, variant, **environment):
        trace = tmp_path / "trace"
        trace.unlink(missing_ok=True)
        environment = {"APEX_EMULATE": "32", "APEX_EMULATE_COUNTS": "1"} | environment
        environment |= {launches.TRACE: str(trace)}
        command = [str(planted), name, variant]
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "passed\n"
        launched = [launches.Launch.parse(line) for line in trace.read_text().splitlines()]
        facts = {"launches": len(launched)} | cost_counts.memory(launched)
        kernels = cost_counts.kernels(launched)
        for kernel in kernels:  # the twin's name is another
            kernel["kernel"] = kernel["kernel"].partition("<")[0]
        return facts | {"kernels": kernels}

    return run


@pytest.mark.builds
@pytest.mark.parametrize("name", LOADS)
def test_loads(counted, name):
    for variant, expected in zip(("broken", "correct"), LOADS[name], strict=True):
        (kernel,) = counted(name, variant)["kernels"]
        assert (kernel["launches"], *kernel["loads"][:4]) == expected


@pytest.mark.builds
@pytest.mark.parametrize("name", TOLD_BY)
def test_a_dearer_kernel_turns_the_check_red(counted, name):
    recorded, found = counted(name, "correct"), counted(name, "broken")
    key = ("planted", name, "call")
    assert costs.compare("call", key, recorded, counted(name, "correct")) == []
    wrong = costs.compare("call", key, recorded, found)
    assert any(TOLD_BY[name] in line for line in wrong), wrong


@pytest.mark.builds
def test_operands_and_the_order_of_threads(counted):
    facts = counted("re_read", "broken")
    assert facts["operands"] == 2 * 4 * 512
    assert facts["moved"] == 32 * (64 + 64)
    (kernel,) = facts["kernels"]
    assert (kernel["threads"], kernel["touching"], kernel["blocks"]) == (512, 512, 8)
    again = counted("re_read", "broken", APEX_EMULATE_SEED="7", APEX_EMULATE_ORDERS="2")
    assert again == facts
    (idle,) = counted("idle_threads", "broken")["kernels"]
    assert (idle["threads"], idle["touching"]) == (256, 32)
