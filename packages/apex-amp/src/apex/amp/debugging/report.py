"""What ``amp.debug`` gathers: dtypes of modules, first infs and NaNs, and the loss scales."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_PLOT_NEEDS = (
    "amp.debug: report.plot() draws with matplotlib, which is not installed: pip install matplotlib"
)


@dataclass
class ModuleRecord:
    """One module of the watched models.

    Attributes:
        name: as in ``model.named_modules()``; "" is the model itself.
        kind: name of its class.
        parameters: dtypes of its own parameters, without those of its submodules.
        computes: dtype -> number of operations on tensors of this dtype that the module itself
            did; copies, casts and views are not counted.
        outputs: dtypes of the tensors that it returned.
        calls: how often it ran.
    """

    name: str
    kind: str
    parameters: tuple[torch.dtype, ...]
    computes: Counter = field(default_factory=Counter)
    outputs: Counter = field(default_factory=Counter)
    calls: int = 0

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of most of its operations; None if it did none itself."""
        return self.computes.most_common(1)[0][0] if self.computes else None


@dataclass(frozen=True)
class NonFinite:
    """Where the first inf or NaN arose between the ends of two ``scale_loss`` blocks.

    Attributes:
        module: name of the module; None if it was outside of the watched models.
        direction: "forward" or "backward".
        kind: "inf" or "NaN".
        what: a description of the tensor it was in.
    """

    module: str | None
    direction: str
    kind: str
    what: str

    def __str__(self) -> str:
        place = "outside of the models" if self.module is None else _shown(self.module)
        return f"{self.kind} in {self.direction}: {place}, {self.what}"


@dataclass(frozen=True)
class Iteration:
    """One ``scale_loss`` block.

    Attributes:
        loss_id: its loss scaler.
        loss_scale: the factor of this loss.
        is_skipped: the next step was cancelled.
        first_nonfinite: where the first inf or NaN of the iteration arose, forward pass included.
    """

    loss_id: int
    loss_scale: float
    is_skipped: bool
    first_nonfinite: NonFinite | None


class DebugReport:
    """What was seen so far; ``print(report)`` shows it.

    Attributes:
        modules: name -> :class:`ModuleRecord`, in the order of ``named_modules()``.
        iterations: an :class:`Iteration` for every ``scale_loss`` block that has ended.
    """

    def __init__(self) -> None:
        self.modules: dict[str, ModuleRecord] = {}
        self.iterations: list[Iteration] = []

    def loss_scales(self, loss_id: int = 0) -> list[float]:
        """The loss scale of each iteration of one loss."""
        return [it.loss_scale for it in self.iterations if it.loss_id == loss_id]

    def nonfinite(self) -> list[tuple[int, NonFinite]]:
        """(index of the iteration, where it arose) for iterations with an inf or NaN."""
        found = ((i, it.first_nonfinite) for i, it in enumerate(self.iterations))
        return [(i, place) for i, place in found if place is not None]

    def __str__(self) -> str:
        rows = [("module", "class", "parameters", "computes in", "returns", "calls")]
        for record in self.modules.values():
            if record.calls:
                rows.append(_row(record))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        silent = sum(record.calls == 0 for record in self.modules.values())
        if silent:
            table.append(f"{silent} modules did not run, or ran compiled.")
        return "\n".join([*table, "", *self._scale_lines(), "", *self._nonfinite_lines()])

    def _scale_lines(self) -> list[str]:
        lines = []
        for loss_id in sorted({it.loss_id for it in self.iterations}):
            scales = self.loss_scales(loss_id)
            skipped = sum(it.is_skipped for it in self.iterations if it.loss_id == loss_id)
            lines.append(
                f"loss {loss_id}: {len(scales)} iterations, scale {scales[0]:g} to {scales[-1]:g}, "
                f"{skipped} steps skipped"
            )
        return lines or ["no scale_loss block has ended"]

    def _nonfinite_lines(self) -> list[str]:
        lines = [f"iteration {i}: {place}" for i, place in self.nonfinite()]
        return lines or ["no inf or NaN"]

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the loss scales, with a mark at each skipped step.

        Args:
            path: file to write, such as ``"scales.png"``; None writes none.

        Returns:
            The ``matplotlib.figure.Figure``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(_PLOT_NEEDS) from error
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="iteration", ylabel="loss scale")
        axes.set_yscale("log", base=2)
        for loss_id in sorted({it.loss_id for it in self.iterations}):
            own = [(i, it) for i, it in enumerate(self.iterations) if it.loss_id == loss_id]
            (line,) = axes.step(
                *([i for i, _ in own], [it.loss_scale for _, it in own]),
                where="post",
                label=f"loss {loss_id}",
            )
            skipped = [(i, it.loss_scale) for i, it in own if it.is_skipped]
            if skipped:
                label = f"loss {loss_id}: skipped step"
                axes.plot(*zip(*skipped, strict=True), "x", color=line.get_color(), label=label)
        if self.iterations:
            axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure


def _shown(name: str) -> str:
    return name or "(the model itself)"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _row(record: ModuleRecord) -> tuple[str, ...]:
    computes = ", ".join(f"{_short(d)}" for d, _ in record.computes.most_common())
    return (
        _shown(record.name),
        record.kind,
        ", ".join(map(_short, record.parameters)) or "-",
        computes or "-",
        ", ".join(_short(d) for d, _ in record.outputs.most_common()) or "-",
        str(record.calls),
    )
