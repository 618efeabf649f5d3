"""Measure variants of kernels side by side: a process for each, which take turns at every case.

python ci/campaign_measure.py FOLDER SECONDS RECORD DEVICE

FOLDER has an installation of each variant, see ci/gpu_campaign.py. The processes are there from the
beginning to the end, because starting torch takes longer than measuring a case. All of them prepare
a case side by side: NVRTC compiles its kernels, and its result is compared with float64; then one
after the other measures it, and again in the opposite order. A process that dies or hangs is told
of, and the others go on. RECORD is written after every case, so that nothing is lost when time runs
out. Exit status: 1 if a variant was wrong or failed.
"""

import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci" / "testkit")]

from ci import campaign_report  # noqa: E402

PLAN = "campaign.json"
FIRST_ANSWER_S, ANSWER_S = 150, 60  # a process imports torch and the packages before its first
PASSES = 2


def serve(connection: Connection, folder: str, device: str) -> None:
    """What a variant's process does: take its packages, and answer until the connection ends."""
    sys.path.insert(0, folder)
    name = Path(folder).name
    import torch

    from apex_testkit.bench import compare
    from ci import campaign_cases

    if device == "cpu":
        import card

        card.insert()
    prepared: campaign_cases.Made | None = None
    while request := connection.recv():
        word, case = request
        case = campaign_cases.Case(*case)
        answer: dict = {}
        try:
            if word == "prepare":
                prepared = None
                prepared = campaign_cases.make(case, device)
                prepared.check()
                torch.cuda.empty_cache()  # of float64: there are many processes on one card
            else:
                (record,) = compare(name, case.name(), device=device, apex=prepared.call)
                answer = {name: record[name] for name in ("median_us", "low_us", "high_us")}
        except AssertionError as error:
            answer = {"wrong": str(error)}
        except Exception as error:  # which one is up to the kernels
            answer = {"failed": f"{type(error).__name__}: {error}"}
        connection.send(answer)


@dataclass
class Worker:
    """The process of one variant, and what is known of it."""

    variant: dict
    process: multiprocessing.Process | None = None
    connection: Connection | None = None
    patience: float = FIRST_ANSWER_S
    died: str = ""  # why, if it did

    def start(self, folder: Path, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, str(folder / self.variant["folder"]), device)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, word: str, case: tuple) -> None:
        with contextlib.suppress(OSError):  # it has ended, as answer() will see
            self.connection.send((word, case))

    def answer(self, deadline: float) -> dict:
        """Wait for what was asked, at most until the deadline; a process that is late is ended."""
        if self.died:
            return {"failed": self.died}
        left, patience = max(0.0, deadline - time.monotonic()), self.patience
        self.patience = ANSWER_S
        try:
            if self.connection.poll(min(left, patience)):
                return self.connection.recv()
            self.end(f"no answer in {patience:.0f} s" if patience < left else "")
        except (EOFError, OSError):
            self.process.join(5)
            self.end(f"its process has ended with {self.process.exitcode}")
        return {"failed": self.died} if self.died else {"left out": "time ran out"}

    def end(self, why: str = "") -> None:
        self.died = why
        if self.process is not None:
            self.process.kill()
            self.process.join()


def run(
    plan: dict, cases: list, workers: list[Worker], deadline: float, save: Callable[[dict], None]
) -> dict:
    """Measure case by case until the time is over; return, and save after each, the record."""
    record = {"variants": plan["variants"], "results": [], "left_out": []}
    for index, (engine, case) in enumerate(cases):
        started = time.monotonic()
        own = [w for w in workers if w.variant["engine"] == engine and not w.died]
        measured = measure(case, own, deadline)
        if measured is None:
            record["left_out"] = [each.name() for _, each in cases[index:]]
            break
        record["results"].append({"engine": engine, **asdict(case), **measured})
        save(record)
        took = time.monotonic() - started
        if index + 1 < len(cases) and time.monotonic() + 0.5 * took > deadline:
            record["left_out"] = [each.name() for _, each in cases[index + 1 :]]
            break
    save(record)
    return record


def measure(case, workers: list[Worker], deadline: float) -> dict | None:
    """Return what each variant took, or why it has no time; None where time ran out.

    With them, what it took until all had compiled the kernels and compared the result.
    """
    started = time.monotonic()
    fields = tuple(asdict(case).values())
    for worker in workers:
        worker.ask("prepare", fields)
    answers = [worker.answer(deadline) for worker in workers]
    prepared_s = time.monotonic() - started
    right = [worker for worker, answer in zip(workers, answers, strict=True) if not answer]
    times: dict[str, list[dict]] = {worker.variant["folder"]: [] for worker in right}
    for turn in range(PASSES):
        for worker in right if turn % 2 == 0 else reversed(right):
            worker.ask("measure", fields)
            times[worker.variant["folder"]].append(worker.answer(deadline))
    answers = [
        merged(times[worker.variant["folder"]]) if worker in right else answer
        for worker, answer in zip(workers, answers, strict=True)
    ]
    if any("left out" in answer for answer in answers):
        return None
    variants = [
        {"constants": worker.variant["constants"], **answer}
        for worker, answer in zip(workers, answers, strict=True)
    ]
    return {"prepared_s": prepared_s, "variants": variants}


def merged(answers: list[dict]) -> dict:
    """Return the middle of several turns; the first answer that is no time instead of it."""
    for answer in answers:
        if "median_us" not in answer:
            return answer
    return {name: statistics.median(a[name] for a in answers) for name in answers[0]}


def cases_in_turn(plan: dict, device: str) -> Iterator[tuple[str, object]]:
    """Yield engines and cases, the most telling ones first: one of each op, then the next."""
    from ci import campaign_cases

    ops = {op: v["engine"] for v in plan["variants"] for op in v["ops"]}
    in_turn = itertools.zip_longest(*(campaign_cases.cases_of(op, device) for op in ops))
    for turn in in_turn:
        yield from ((ops[case.op], case) for case in turn if case is not None)


def main(folder: Path, seconds: float, record: Path, device: str) -> int:
    deadline = time.monotonic() + seconds
    plan = json.loads((folder / PLAN).read_text())
    workers = [Worker(variant) for variant in plan["variants"]]
    for worker in workers:
        worker.start(folder, device)

    def save(found: dict) -> None:
        record.write_text(json.dumps(found, indent=1))

    try:
        found = run(plan, list(cases_in_turn(plan, device)), workers, deadline, save)
    finally:
        for worker in workers:
            worker.end()
    complaints = campaign_report.complaints(found)
    print("\n".join(complaints))
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
