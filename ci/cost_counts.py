"""Count what public calls cost on the emulated GPU; ci/costs.py runs this in processes of its own.

python ci/cost_counts.py OUTPUT OP...

Without the emulated GPU it counts the functions of Python and C alone, with the CPU's kernels.

Launches, and their loads and stores, are lines of the emulator's trace (ci/launches.py). What torch
does for the call, beside our kernels, is told by its profiler: each operator of torch counts as one
launch, unless it is in one of the lists below.
"""

import gc
import json
import os
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ci import cost_peers, launches  # noqa: E402

COUNTS = ("launches", "memsets", "copies", "allocations", "synchronizations")
# Torch's operators by what they do to a GPU. Those that call others count as these, unless they are
# listed, since the CPU's implementation calls other operators than a GPU's.
OPERATORS = {
    (): """alias as_strided detach diagonal expand lift_fresh movedim permute promote_types
        result_type select set_ size slice split squeeze stride t transpose unbind unfold unsqueeze
        view _unsafe_view _reshape_alias resolve_conj resolve_neg resize_ split_with_sizes
        record_stream""",
    ("allocations",): "empty empty_like empty_strided new_empty new_empty_strided",
    ("memsets",): "zero_ fill_",
    ("allocations", "memsets"): """full full_like new_full new_ones new_zeros ones ones_like zeros
        zeros_like""",
    ("copies",): "copy_",
    ("allocations", "copies"): "_to_copy clone",
    ("copies", "synchronizations"): "_local_scalar_dense nonzero",
    ("launches", "allocations"): """add addmm all any arange bmm cat cumsum div exp index
        linalg_vector_norm log max mean min mm mul neg norm pow prod rsqrt rsub softmax sqrt stack
        sub sum topk var_mean where""",
}
_OF_OPERATORS = {name: counts for counts, names in OPERATORS.items() for name in names.split()}
# Nothing, unless they are seen to call others.
PERHAPS = {"chunk", "contiguous", "expand_as", "flatten", "item", "narrow", "reshape", "to"}
PERHAPS |= {"type_as", "unflatten", "view_as"}
# What optimizers do with a counter of steps, which is on the host.
OF_COUNTERS = {"fill_", "_local_scalar_dense"}
ALLOCATION = "allocation"  # a line of the trace
WARM_CALLS = 5  # of Python, until nothing is looked up for the first time


def main(output: str, *ops: str) -> None:
    import torch

    from ci.cost_steps import CASES  # those of ci/cost_cases.py too

    # A GPU multiplies 16-bit numbers; what is done on a CPU that cannot is no cost of it.
    torch.ops.mkldnn._is_mkldnn_fp16_supported = lambda: True
    torch.cpu._is_amx_tile_supported = lambda: True
    torch.set_num_threads(1)
    trace = Path(f"{output}.trace")
    os.environ |= {launches.TRACE: str(trace), "APEX_EMULATE_COUNTS": "1"}
    is_emulated = bool(os.environ.get("APEX_EMULATE"))
    found = []
    for op in ops:
        torch.manual_seed(0)
        for case in (case for case in CASES[op]() if is_emulated or case.is_smallest):
            for part, function in parts_of(case):
                facts = {"op": op, "call": case.name, "part": part}
                if is_emulated:
                    facts |= count(function, trace, case.has_state)
                if case.is_smallest:
                    facts |= count_python(function)
                if case.peer and is_emulated:
                    facts |= cost_peers.count(case.peer, case.inputs)[part]
                found.append(facts)
    trace.unlink(missing_ok=True)
    Path(output).write_text(json.dumps(found))


def parts_of(case) -> list[tuple]:
    """Return a case's forward and, where it has one, backward, each after a first call."""
    import torch

    if case.is_warmed:
        case.call()
    if not case.has_backward:
        return [("call", case.call)]
    outputs = case.call()
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    outputs = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    grads = [torch.randn_like(t) for t in outputs]

    def backward():
        return torch.autograd.grad(outputs, case.inputs, grads, retain_graph=True)

    if case.is_warmed:
        backward()
    return [("forward", case.call), ("backward", backward)]


def count(function, trace: Path, has_counters: bool = False) -> dict:
    """Call once, and return the counts of the call and of each of its kernels."""
    from torch.profiler import ProfilerActivity, profile

    trace.unlink(missing_ok=True)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True, record_shapes=True) as seen:
        function()
    lines = trace.read_text().splitlines() if trace.exists() else []
    launched = [launches.Launch.parse(line) for line in lines if line != ALLOCATION]
    counts = dict.fromkeys(COUNTS, 0) | {"allocations": len(lines) - len(launched)}
    torch_kernels: dict[str, int] = defaultdict(int)
    for event in seen.events():
        if event.cpu_parent is None:
            add_operators(event, counts, torch_kernels, has_counters)
    counts["launches"] += len(launched)
    return counts | memory(launched) | {"kernels": kernels(launched), "torch": torch_kernels}


def add_operators(event, counts: dict, torch_kernels: dict, has_counters: bool = False) -> None:
    """Add what an operator of torch, or the parts of it, does to a GPU."""
    name = event.name.removeprefix("aten::")
    if has_counters and name in OF_COUNTERS and event.input_shapes[0] == []:
        return
    if name.endswith("_blaslt"):  # ours: one product by a library, which the emulator stands for
        counts["launches"] += 1
        return
    known = _OF_OPERATORS.get(name) if name != event.name else None
    if known is None and name in PERHAPS and not event.cpu_children:
        return
    if known is None and name != event.name and not event.cpu_children:
        is_in_place = name.endswith(("_", "out"))
        known = ("launches",) if is_in_place else ("launches", "allocations")
    if known is None:
        for child in event.cpu_children:
            add_operators(child, counts, torch_kernels, has_counters)
        return
    for what in known:
        counts[what] += 1
    if "launches" in known:
        torch_kernels[name] += 1


def memory(launched: list[launches.Launch]) -> dict[str, int]:
    """Return the bytes that launches move, and the bytes of their operands, each counted once.

    What a launch reads twice comes from a cache the second time, and counts once.
    """
    moved, read, written = 0, defaultdict(int), defaultdict(int)
    for launch in launched:
        moved += launch.counted.loads.distinct + launch.counted.stores.distinct
        for operand, (loaded, stored) in launch.counted.operands.items():
            read[operand] = max(read[operand], loaded)
            written[operand] = max(written[operand], stored)
    return {"moved": moved, "operands": sum(read.values()) + sum(written.values())}


def kernels(launched: list[launches.Launch]) -> list[dict]:
    """Sum the launches of each kernel, in the order in which they came."""
    found: dict[tuple, dict] = {}
    for launch in launched:
        counted = launch.counted
        block = launch.block[0] * launch.block[1] * launch.block[2]
        blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
        library_op = launches.op_of(launch.library)
        name = launches.name_of(launch)
        new = {"op": library_op, "kernel": name}
        new |= dict.fromkeys(("launches", "blocks", "block", "shared", "threads", "touching"), 0)
        new |= {"loads": [0] * 5, "stores": [0] * 5}
        sums = found.setdefault(f"{library_op} {name}", new)
        sums["launches"] += 1
        sums["blocks"] += blocks
        sums["block"] = max(sums["block"], block)
        sums["shared"] = max(sums["shared"], counted.shared_bytes)
        sums["threads"] += block * blocks
        sums["touching"] += counted.touching
        for what in ("loads", "stores"):
            traffic = vars(getattr(counted, what)).values()
            sums[what] = [a + b for a, b in zip(sums[what], traffic, strict=True)]
    return list(found.values())


def count_python(function) -> dict[str, int]:
    """Return how many functions of Python and of C a call enters."""
    for _ in range(WARM_CALLS):
        function()
    seen = {"call": 0, "c_call": 0}

    def note(frame, event, arg):
        if event in seen:
            seen[event] += 1

    gc.collect()
    gc.disable()  # it would call others' finalizers at some time
    sys.setprofile(note)
    function()
    sys.setprofile(None)
    gc.enable()
    return {"python": seen["call"], "c": seen["c_call"] - 1}  # but setprofile itself


if __name__ == "__main__":
    main(*sys.argv[1:])
