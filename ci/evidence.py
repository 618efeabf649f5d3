"""What machine code shows of kernels: registers, spills, 16-byte accesses, costs; what is wrong.

ci/nvrtc.py compiles them. Figures of every kernel go to .nox/kernels/evidence/kernels.json. A spill
or a narrow kernel is a complaint unless ci/accepted_kernels.toml names it; and so is a number that
differs from ci/gpu_costs.toml.
"""

import json
import os

from ci import costs, ptxas, sass
from ci.workspace import MATRIX, ROOT, tomllib

ARCH = MATRIX["cuda"]["evidence"]
VERBOSE = "--ptxas-options=-v"  # an option of NVRTC, which then says what ptxas.parse reads
FOLDER = ROOT / ".nox" / "kernels" / "evidence"
MACHINE_CODE = FOLDER / "costs.json"  # what ci/costs.py writes to its table


def of_unit(
    op: str, compiled: list[tuple[str, bytes, str]], ops: list[str], launched: dict
) -> dict:
    """Return what the kernels of a source take.

    Args:
        op: whose source it is.
        compiled: of each kernel its symbol, its machine code, and what NVRTC said.
        ops: all those that may launch the kernels: a library lists each kernel for one of them.
        launched: the kernels that calls are known to launch.
    """
    lines = [line for _, _, said in compiled for line in said.splitlines()]
    resources = [vars(each) for each in ptxas.parse(lines, ARCH)]
    names = {each["symbol"]: each["kernel"] for each in resources}
    codes = sass.disassemble([sass.code_of(image, symbol) for symbol, image, _ in compiled], ARCH)
    kernels = [(names[symbol], code) for (symbol, *_), code in zip(compiled, codes, strict=True)]
    return {
        "op": op,
        "resources": resources,
        "accesses": [vars(accesses) for accesses in sass.accesses(kernels)],
        "costs": costs.machine_code(ops, resources, kernels, launched),
    }


def judge(found: dict[str, dict], ops: list[str], listed: set[tuple[str, str]], nvrtc: str):
    """Print a table, write all figures, and return what is wrong with them.

    Args:
        found: of each unit, what :func:`of_unit` gives.
        ops: those of which kernels were compiled.
        listed: op and short name of each of their kernels, also of those that were not compiled.
        nvrtc: its version.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    figures = [kernel for unit in found.values() for kernel in unit.pop("costs")]
    MACHINE_CODE.write_text(json.dumps(figures, indent=1))
    (FOLDER / "kernels.json").write_text(json.dumps(found, indent=1))
    print(table(found))
    complaints = unaccepted(found, ops, listed)
    if not os.environ.get(costs.WRITES):
        complaints += costs.with_advice(costs.check_kernels(figures, ops, nvrtc))
    return complaints


def unaccepted(found: dict[str, dict], ops: list[str], listed: set[tuple[str, str]]) -> list[str]:
    """Return spills and narrow accesses without an acceptance, and acceptances without a kernel."""
    accepted = tomllib.loads((ROOT / "ci" / "accepted_kernels.toml").read_text())
    spills, narrow = accepted.get("spill", []), accepted.get("narrow", [])
    complaints = []
    for unit in found.values():
        op, resources = unit["op"], unit["resources"]
        complaints += ptxas.unaccepted_spills(op, resources, spills)
        complaints += sass.narrow_kernels(op, unit["accesses"], narrow)
    for entry in [*spills, *narrow]:
        if entry["op"] not in ops:
            continue  # not compiled
        if not entry.get("reason"):
            complaints.append(f"ci/accepted_kernels.toml: {entry['kernel']} has no reason")
        if not any(ptxas.names(entry, *kernel) for kernel in listed):
            complaints.append(f"ci/accepted_kernels.toml: there is no kernel {entry['kernel']}")
    return complaints


def table(found: dict[str, dict]) -> str:
    """Return a row per unit with its worst figures."""
    title = f"op, {ARCH}"
    heads = ("kernels", "registers", "shared B", "spilled B", "16-byte loads", "and stores")
    lines = [f"{title:<44}" + "".join(f"{head:>15}" for head in heads)]
    for name, unit in found.items():
        kernels = unit["resources"]
        figures = [
            len(kernels),
            max(k["registers"] for k in kernels),
            max(k["shared_bytes"] for k in kernels),
            max(k["spill_store_bytes"] + k["spill_load_bytes"] for k in kernels),
            *(sum(a[f"wide_{what}"] > 0 for a in unit["accesses"]) for what in ("loads", "stores")),
        ]
        lines.append(f"{name:<44}" + "".join(f"{figure:>15}" for figure in figures))
    lines.append("The last two columns count kernels that have such instructions.")
    return "\n".join(lines)
