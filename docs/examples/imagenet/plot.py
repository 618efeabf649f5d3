"""Curves of loss and accuracy over epochs."""

from pathlib import Path

import matplotlib
from checkpoint import write_atomically
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SCORES = {"loss": "loss", "top1": "top-1 accuracy, %"}


def plot_histories(path: Path, rows: dict[str, dict[str, list[dict]]]) -> None:
    """Draw the scores of runs into a PNG, loss on the left and accuracy on the right.

    ``rows`` maps a row's title to its runs, and a run's label to the records of its epochs, as
    ``main_amp.py --history`` writes them.
    """
    figure = Figure(figsize=(11, 4 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(SCORES), squeeze=False)
    for axes_row, (title, runs) in zip(grid, rows.items(), strict=True):
        for axes, (score, label) in zip(axes_row, SCORES.items(), strict=True):
            _draw(axes, runs, score)
            axes.set(title=title, xlabel="epochs", ylabel=label)
        axes_row[0].set_yscale("log")
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))


def _draw(axes: Axes, runs: dict[str, list[dict]], score: str) -> None:
    colours = matplotlib.colormaps["tab10"].colors
    for index, (label, records) in enumerate(runs.items()):
        colour = colours[index % len(colours)]
        epochs = [record["epoch"] + 1 for record in records]
        validation = [record[f"val_{score}"] for record in records]
        training = [record[f"train_{score}"] for record in records]
        axes.plot(epochs, validation, color=colour, label=f"{label} validation", marker=".")
        axes.plot(epochs, training, color=colour, label=f"{label} training", linestyle=":")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", ncols=2)
