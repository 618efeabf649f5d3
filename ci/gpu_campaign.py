"""A campaign of ci/gpu.py: unpack the variants, measure them in time, and tell who won."""

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
PLAN = "campaign.json"
BACKENDS = {"cuda": "cuda", "cpu": "emu"}
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
        unpack(archive, device, folder)
        seconds = deadline - time.monotonic() - ENDING_S
        command = [sys.executable, str(ROOT / "ci" / "campaign_measure.py"), str(folder)]
        command += [str(seconds), str(record), device]
        outcome = execute(
            "campaign",
            command,
            environment(Path(scratch, "site"), device),
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


def unpack(archive: Path, device: str, folder: Path) -> None:
    """Unpack the variants of this kind of device.

    Raises:
        InstallError: they are another device's.
    """
    shutil.unpack_archive(archive, folder, filter="data")
    built = json.loads((folder / PLAN).read_text())["backend"]
    if built != BACKENDS[device]:
        raise gpu_install.InstallError(
            f"{archive} has kernels for {built}, and --device {device} needs {BACKENDS[device]}"
        )


def environment(site: Path, device: str) -> dict[str, str]:
    """Return the variables of processes that find the checkout's packages, without kernels."""
    workspace.merge_sources(site)
    path = os.pathsep.join(map(str, [site, ROOT, ROOT / "ci" / "testkit"]))
    own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "APEX_JIT": "0"}
    own["APEX_BENCH_SECONDS"] = os.environ.get("APEX_BENCH_SECONDS", "0.05")
    if device == "cpu":
        own["APEX_EMULATE"] = os.environ.get("APEX_EMULATE", "32")
    return os.environ | own
