"""A campaign of ci/gpu.py: unpack the variants, measure them in time, and tell who won.

A rehearsal has no GPU but the fake card of shared_csrc/tests/rtc: "NVRTC" is g++ there.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from ci import campaign_report, gpu_install, gpu_report, workspace
from ci.gpu_process import execute

ROOT = Path(__file__).resolve().parent.parent
FAKE_CARD = ROOT / "shared_csrc" / "tests" / "rtc"
PLAN = "campaign.json"
ENDING_S = 10  # for what measures to see that its time is over, and to end its processes


def run(archive: Path, device: str, out: Path, deadline: float) -> int:
    """Measure what an archive has; print the winners, and write ``<card>.campaign.json``.

    Returns:
        The exit status: 1 if a variant was wrong or failed, or nothing was measured.
    """
    try:
        gpu_install.check_device(device)
        return measure(archive, device, out, deadline)
    except gpu_install.InstallError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 1


def measure(archive: Path, device: str, out: Path, deadline: float) -> int:
    """Let a process of its own measure within the time, whatever happens to it."""
    with tempfile.TemporaryDirectory(prefix="apex-campaign-") as scratch:
        folder, record = Path(scratch, "variants"), Path(scratch, "record.json")
        unpack(archive, folder)
        variables = environment(Path(scratch), device)
        seconds = deadline - time.monotonic() - ENDING_S
        command = [sys.executable, str(ROOT / "ci" / "campaign_measure.py"), str(folder)]
        command += [str(seconds), str(record), device]
        outcome = execute(
            "campaign",
            command,
            variables,
            seconds + ENDING_S / 2,
            out / "logs" / "campaign.log",
            cwd=ROOT,
        )
        found = json.loads(record.read_text()) if record.is_file() else None
    print(outcome.line())
    if found is None:
        return 1
    machine = gpu_report.facts(device)
    name = re.sub(r"[^a-z0-9]+", "-", machine["card"].lower()).strip("-")
    (out / f"{name}.campaign.json").write_text(json.dumps({"machine": machine, **found}, indent=1))
    print("", campaign_report.table(found), sep="\n")
    return int(outcome.status != "passed" or not found["results"])


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the variants, and make of each an installation of the checkout's packages.

    Raises:
        InstallError: the archive was made from other sources than are here.
    """
    from ci.campaign import sources_digest

    shutil.unpack_archive(archive, folder, filter="data")
    plan = json.loads((folder / PLAN).read_text())
    if plan.get("sources") != sources_digest():
        raise gpu_install.InstallError(
            f"{archive} was made from other sources than this checkout has. Make it anew: "
            "nox -s gpu_wheels -- --campaign"
        )
    sources = workspace.merge_sources(folder / "sources", kernels=True)
    for variant in plan["variants"]:
        complete(folder / variant["folder"], sources)


def complete(site: Path, sources: Path) -> None:
    """Add what a variant has not of its own: its libraries and headers stay."""
    for shared in sources.glob("apex/*/_shared"):
        shutil.copytree(site / "include", site / shared.relative_to(sources) / "include")
    for file in sources.rglob("*"):
        own = site / file.relative_to(sources)
        if file.is_file() and not own.exists():
            own.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, own)


def environment(scratch: Path, device: str) -> dict[str, str]:
    """Return the variables of processes that measure: kernels are compiled when they are called."""
    own = {"APEX_JIT": "1", "APEX_CUDA_COMPILER": "nvrtc", "APEX_CACHE_DIR": str(scratch / "cache")}
    own["APEX_BENCH_SECONDS"] = os.environ.get("APEX_BENCH_SECONDS", "0.05")
    path = [ROOT, ROOT / "ci" / "testkit"]
    if device == "cpu":
        path.append(FAKE_CARD)
        sys.path.append(str(FAKE_CARD))
        import card

        (scratch / "card").mkdir()
        own |= card.build(scratch / "card", "nvidia")
    own |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    return os.environ | own
