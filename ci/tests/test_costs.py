"""The table of costs: what is read from machine code, and what turns the check red."""

import copy
from collections import defaultdict

import pytest
import torch
from environments import ROOT

from ci import cost_counts, cost_host, cost_peers, costs, sass, workspace
from ci.cost_steps import CASES

# A loop of two loads of 16 bytes; in the other, the second waits for the first.
TOGETHER = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.128 R8, desc[UR4][R2.64+0x200] ;
        /*0030*/                   FADD R12, R4, R8 ;
        /*0040*/               @P0 BRA 0x10 ;
        /*0050*/                   STG.E desc[UR4][R16.64], R12 ;
        /*0060*/                   EXIT ;
"""
WAITING = TOGETHER.replace(
    "        /*0020*/", "        /*0018*/   FADD R12, R4, R12 ;\n        /*0020*/"
)
NARROW = TOGETHER.replace("LDG.E.128", "LDG.E.U16")
KERNEL = "column_packs<Sums<BFloat16>, 8>"


def facts(code, registers=32, spilled=0):
    """Return the table's entry for a kernel of this code."""
    resources = {"kernel": KERNEL, "registers": registers, "shared_bytes": 0}
    resources |= {"spill_store_bytes": spilled, "spill_load_bytes": 0}
    wanted = {("norm", KERNEL): {"block": 256, "shared": 0}}
    (found,) = costs.machine_code(["other", "norm"], [resources], [(KERNEL, code)], wanted)
    return found


def test_what_is_under_way():
    assert sass.hot_loop(KERNEL, TOGETHER) == sass.HotLoop(4, 32, 1)
    found = facts(TOGETHER)
    assert (found["resident_warps"], found["kib_under_way"]) == (64, 64.0)
    # Of 220 registers an SM holds 8 warps: one block of 256 threads.
    crowded = facts(TOGETHER, registers=220)
    assert (crowded["resident_warps"], crowded["kib_under_way"]) == (8, 8.0)


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        (facts(WAITING), "kib_under_way: 64.0 in gpu_costs.toml, 32.0 now"),
        (facts(WAITING), "rounds: 1 in gpu_costs.toml, 2 now"),
        (facts(NARROW), "hot_bytes: 32 in gpu_costs.toml, 4 now"),
        (facts(TOGETHER, registers=220), "registers: 32 in gpu_costs.toml, 220 now"),
        (facts(TOGETHER, spilled=8), "spilled: 0 in gpu_costs.toml, 8 now"),
    ],
    ids=["a load that waits", "its rounds", "a 2-byte lane", "registers", "a spill"],
)
def test_dearer_machine_code_turns_the_check_red(planted, told, tmp_path):
    table = costs.Table(tmp_path / "gpu_costs.toml")
    table.tools, table.kernels = {"nvrtc": "13.0"}, {("norm", KERNEL): facts(TOGETHER)}
    assert costs.check_kernels([facts(TOGETHER)], ["norm"], "13.0", table) == []
    wrong = costs.check_kernels([planted], ["norm"], "13.0", table)
    assert any(f"norm: {KERNEL}: {told}" in line for line in wrong), wrong


def test_another_compiler_is_not_compared(tmp_path, capsys):
    table = costs.Table(tmp_path / "gpu_costs.toml")
    table.tools, table.kernels = {"nvrtc": "13.0"}, {("norm", KERNEL): facts(TOGETHER)}
    assert costs.check_kernels([facts(WAITING)], ["norm"], "13.1", table) == []
    assert "not compared: NVRTC 13.1" in capsys.readouterr().out


def test_straight_code_counts_the_way_of_whole_packs():
    """A foreach kernel loads once a thread: from the first wide load to the first store."""
    code = TOGETHER.replace("@P0 BRA 0x10", "NOP").replace(
        "/*0030*/", "/*0028*/ LDG.E.U16 R20, desc[UR4][R2.64] ;\n/*0030*/"
    )
    found = sass.hot_loop("foreach_kernel<Scale<float>>", code)
    assert (found.loaded_bytes, found.rounds) == (32, 1)


@pytest.fixture
def table(tmp_path):
    """Return a written and read table of one call."""
    written = costs.Table(tmp_path / "gpu_costs.toml")
    kernel = {"op": "norm", "kernel": KERNEL, "launches": 1, "blocks": 2, "block": 256, "shared": 8}
    kernel |= {"threads": 512, "touching": 512, "loads": [1, 16, 1, 1, 16], "stores": [0] * 5}
    call = {"op": "norm", "call": 'norm "a" 1x4', "part": "forward", "launches": 2, "moved": 32}
    call |= {"memsets": 0, "copies": 1, "kernels": [kernel], "torch": {"add_": 1}}
    written.calls, written.tools = {costs.call_key(call): call}, {"python": "3.11"}
    written.write()
    return costs.Table(written.file)


def test_the_table_is_read_as_it_was_written(table):
    (call,) = table.calls.values()
    assert call["kernels"][0]["loads"] == [1, 16, 1, 1, 16]
    assert call["torch"] == {"add_": 1}
    assert table.tools == {"python": "3.11"}
    assert table.launched() == {("norm", KERNEL): {"block": 256, "shared": 8}}


def test_every_number_of_a_call_is_compared(table):
    ((key, recorded),) = table.calls.items()
    assert costs.compare("call", key, recorded, copy.deepcopy(recorded)) == []
    found = copy.deepcopy(recorded) | {"launches": 3, "torch": {"add_": 1, "lerp_": 1}}
    found["kernels"][0]["stores"] = [0, 0, 2, 1, 0]
    found["kernels"].append(found["kernels"][0] | {"kernel": "another"})
    wrong = costs.compare("call", key, recorded, found)
    assert 'norm: norm "a" 1x4: forward: launches: 2 in gpu_costs.toml, 3 now' in wrong
    assert any("torch: lerp_: none in gpu_costs.toml, 1 now" in line for line in wrong)
    assert any(f"{KERNEL}: stores: sectors: 0 in" in line for line in wrong)
    assert any("another: launches: none in gpu_costs.toml, 1 now" in line for line in wrong)


def test_a_call_or_kernel_that_the_table_lacks_or_has_too_many(table, monkeypatch):
    monkeypatch.setattr(costs, "count_calls", lambda ops, **_: [])
    monkeypatch.setattr(costs, "host_tools", lambda: table.tools)
    (wrong,) = costs.check_calls(["norm"], table)
    assert "is no case of ci/cost_" in wrong
    assert costs.check_calls(["other"], table) == []
    (call,) = table.calls.values()
    monkeypatch.setattr(costs, "count_calls", lambda ops, **_: [call | {"part": "backward"}])
    assert "backward is not in gpu_costs.toml" in costs.check_calls(["norm"], table)[0]


class Event:
    """Of torch's profiler."""

    def __init__(self, name, *children, shape=(1,)):
        self.name, self.cpu_children, self.input_shapes = name, children, [list(shape)]


READ = {"copies": 1, "synchronizations": 1}


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Event("aten::view"), {}),
        (Event("aten::to"), {}),
        (Event("aten::to", Event("aten::_to_copy")), {"allocations": 1, "copies": 1}),
        (Event("aten::zeros", Event("aten::zero_")), {"allocations": 1, "memsets": 1}),
        (Event("aten::lerp_"), {"launches": 1}),
        (Event("aten::sum", Event("aten::fill_")), {"launches": 1, "allocations": 1}),
        (Event("aten::item", Event("aten::_local_scalar_dense")), READ),
        (Event("apex_contrib::op", Event("aten::empty")), {"allocations": 1}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_torchs_own_operators(event, expected):
    counts = dict.fromkeys(cost_counts.COUNTS, 0)
    cost_counts.add_operators(event, counts, defaultdict(int))
    assert {name: count for name, count in counts.items() if count} == expected


def test_the_hosts_counter_of_steps_is_no_synchronization():
    event = Event("aten::item", Event("aten::_local_scalar_dense", shape=()))
    counts = dict.fromkeys(cost_counts.COUNTS, 0)
    cost_counts.add_operators(event, counts, {}, has_counters=True)
    assert counts["synchronizations"] == 0
    cost_counts.add_operators(event, counts, {})
    assert counts["synchronizations"] == 1


def test_every_op_has_cases_and_the_file_has_them_all():
    assert set(CASES) == set(workspace.ops())
    table = costs.Table()
    counted = {op for op, _, _ in table.calls}
    assert sorted([*counted, *table.uncounted]) == sorted(CASES)


def test_calls_of_all_ops_enter_as_many_functions_as_the_file_says():
    """One number of the file is planted, so that the only complaint is of that one."""
    table = costs.Table()
    if "python" in costs.unlike(table, costs.host_tools()):
        pytest.skip("needs the Python and the torch of gpu_costs.toml")
    planted = table.calls["fused_adam", "adamw_step float32 1 of 64", "call"]
    planted["python"] += 1
    line = f"call: python: {planted['python']} in gpu_costs.toml, {planted['python'] - 1} now"
    wrong = costs.check_python(table)
    assert wrong[:-1] == [f"fused_adam: adamw_step float32 1 of 64: {line}"], "\n".join(wrong)


def test_machine_code_of_the_table_is_that_of_the_nvrtc_that_ci_installs():
    newest = workspace.MATRIX["cuda"]["nvrtc"][1]
    assert newest.startswith(f"nvidia-cuda-nvrtc=={costs.Table().tools['nvrtc']}.")


def test_the_guide_names_the_file():
    assert costs.TABLE.name in (ROOT / "docs" / "guides" / "gpu-costs.md").read_text()


def test_torchs_launches_and_bytes():
    """By hand: a layer norm, whose backward reads dy and x twice, and lists in chunks."""
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((16, 64), 64, 64))
    peer = lambda: torch.nn.functional.layer_norm(x, (64,), weight, bias)
    found = cost_peers.count(peer, [x, weight, bias])
    statistics, vector, whole = 16 * 4, 64 * 4, 16 * 64 * 4
    forward = 2 * whole + 2 * vector + 2 * statistics
    assert found["forward"] == {"torch_launches": 1, "torch_moved": forward}
    backward = 2 * (2 * whole + 2 * vector + 2 * statistics) + whole + 2 * vector
    assert found["backward"] == {"torch_launches": 2, "torch_moved": backward}
    lists = [torch.zeros(1) for _ in range(1000)]
    scaled = cost_peers.count(lambda: torch._foreach_mul_(lists, 2.0), [])
    assert scaled == {"call": {"torch_launches": 10, "torch_moved": 8000}}
    norm = cost_peers.count(lambda: torch.nn.utils.get_total_norm(lists, foreach=True), [])
    # 10 of chunks, 3 that add them, 8 that put 1,000 norms side by side, and the norm of these.
    assert norm["call"]["torch_launches"] == 10 + 3 + 8 + 1


VALGRIND = """#!/bin/sh
for word in "$@"; do case $word in --callgrind-out-file=*) out=${word#*=} ;; esac; done
for at in 1 2 10; do printf 'events: Ir\\nsummary: %s000\\n' $at > "$out.$at"; done
echo "a word of the compiler"
echo "norm: layer_norm 1x64: forward"
echo "norm: layer_norm 1x64: backward"
"""


def test_instructions_of_the_host(tmp_path, monkeypatch):
    """Callgrind dumps after each call by ctypes, those of imports first."""
    program = tmp_path / "valgrind"
    program.write_text(VALGRIND)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    lines = cost_host.measure("norm")
    expected = ["forward: 2,000", "backward: 10,000"]
    assert lines == [f"norm: layer_norm 1x64: {text}" for text in expected]
    program.write_text("#!/bin/sh\necho no room >&2; exit 3\n")
    with pytest.raises(SystemExit, match="no room"):
        cost_host.measure("norm")


def test_without_valgrind(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match="valgrind was not found"):
        cost_host.main("fused_adam")
