"""What a campaign has found: winners by op, dtype and size, each variant as a whole, and faults."""

import math
from collections import defaultdict

# A variant that is not faster by so much is as fast as what is there, which stays.
LEAST_GAIN = 1.02
AS_IT_IS = "as it is"


def name_of(constants: dict) -> str:
    """Return a variant's numbers as the source has them."""
    return ", ".join(f"{k} = {str(v).lower()}" for k, v in constants.items()) or AS_IT_IS


def times_of(result: dict) -> dict[str, float]:
    """Return the microseconds of a case's variants, but for those that were wrong or failed."""
    return {name_of(v["constants"]): v["median_us"] for v in result["variants"] if "median_us" in v}


def winner(result: dict) -> tuple[str, float] | None:
    """Return the fastest right variant of a case, and what it gains; None where none is right.

    The gain is the time of what is there divided by the winner's; nan where that is wrong.
    """
    times = times_of(result)
    if not times:
        return None
    best = min(times, key=times.__getitem__)
    if AS_IT_IS not in times:
        return best, math.nan
    gain = times[AS_IT_IS] / times[best]
    return (best, gain) if gain >= LEAST_GAIN else (AS_IT_IS, 1.0)


def table(record: dict) -> str:
    """Return the page: winners, variants over all their cases, faults, what there was no time for.

    A gain above 1 is faster than the source as it is.
    """
    lines = ["| op | dtype | size | winner | us | as it is, us | gain |"]
    lines.append("|---|---|---|---|---:|---:|---:|")
    for result in record["results"]:
        times, won = times_of(result), winner(result)
        what = f"| {result['kind']} | {result['dtype']} | {result['size']} "
        if won is None:
            lines.append(f"{what}| none is right | | | |")
            continue
        here = f"{times[AS_IT_IS]:.1f}" if AS_IT_IS in times else ""
        gain = "" if math.isnan(won[1]) else f"{won[1]:.2f}"
        lines.append(f"{what}| {won[0]} | {times[won[0]]:.1f} | {here} | {gain} |")
    lines += ["", *variants(record), ""]
    if faults := complaints(record):
        lines += ["Wrong or failed, and so out of the race:", "", *(f"- {f}" for f in faults), ""]
    prepared = sum(result["prepared_s"] for result in record["results"])
    lines += [f"To start, to compile kernels and to compare results took {prepared:.0f} s.", ""]
    if left_out := record["left_out"]:
        lines += [f"No time was left for {len(left_out)} cases: {'; '.join(left_out)}.", ""]
    return "\n".join(lines)


def variants(record: dict) -> list[str]:
    """Return a table of the variants, each against the source as it is over all its cases."""
    gains: dict[tuple[str, str], list[float]] = defaultdict(list)
    for result in record["results"]:
        times = times_of(result)
        for name, us in times.items():
            if name != AS_IT_IS and AS_IT_IS in times:
                gains[result["engine"], name].append(times[AS_IT_IS] / us)
    lines = ["| engine | numbers | cases | gain, geometric mean | worst | best |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for (engine, name), own in sorted(gains.items(), key=lambda g: (g[0][0], -mean(g[1]))):
        figures = f"{mean(own):.3f} | {min(own):.2f} | {max(own):.2f}"
        lines.append(f"| {engine} | {name} | {len(own)} | {figures} |")
    return lines


def mean(gains: list[float]) -> float:
    return math.exp(sum(map(math.log, gains)) / len(gains))


def complaints(record: dict) -> list[str]:
    """Return a line for each variant of a case that was wrong, or failed, and why."""
    return [
        f"{result['engine']}, {name_of(variant['constants'])}: {result['kind']}, "
        f"{result['dtype']}, {result['size']}: {what}: {told(variant[what])}"
        for result in record["results"]
        for variant in result["variants"]
        for what in ("wrong", "failed")
        if what in variant
    ]


def told(text: str) -> str:
    """Return the first line, and the first error of a compiler where more follow."""
    first, *others = text.splitlines()
    return " ".join([first, *[line for line in others if "error: " in line][:1]])
