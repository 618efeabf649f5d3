"""The loss over steps."""

from pathlib import Path

from matplotlib.figure import Figure


def plot_losses(path: Path, records: list[dict[str, float]]) -> None:
    """Draw training loss, its mean over 20 steps, and validation loss into a PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [r["step"] + 1 for r in records]
    losses = [r["loss"] for r in records]
    axes.plot(steps, losses, linewidth=0.5, alpha=0.5, label="training")
    means = [sum(losses[max(0, i - 19) : i + 1]) / min(20, i + 1) for i in range(len(losses))]
    axes.plot(steps, means, label="training, mean of 20 steps")
    held_out = [(r["step"] + 1, r["validation_loss"]) for r in records if "validation_loss" in r]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), marker="o", label="held-out text")
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
