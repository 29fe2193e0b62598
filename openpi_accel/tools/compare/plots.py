"""The pictures of a comparison, as PNG."""

import dataclasses
import io
import math
from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from openpi_accel.tools.compare.runs import Run
from openpi_accel.tools.compare.verdict import Bounds, Comparison, Distance

_A, _B, _CONTROL = "#1f5fa8", "#d1662b", "#7a7a7a"
_FEW = 40  # so many points are marked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """One picture: file name without its ending, title, one sentence on what it shows, and the PNG."""

    name: str
    title: str
    caption: str
    png: bytes


def draw_plots(comparison: Comparison, bounds: Bounds) -> Iterator[Plot]:
    """Yields every picture for which both or one of the runs has figures."""
    yield _curves(comparison, "loss", "loss", "Loss", "Mean loss of the steps since the row before.", held_out=True)
    yield _differences(comparison, bounds)
    for key, label, title, caption in (
        ("learning_rate", "learning rate", "Learning rate", "Of the step's update."),
        ("grad_norm", "gradient norm", "Gradient norm", "Global norm before clipping."),
        ("param_norm", "parameter norm", "Parameter norm", "Global norm after the update."),
        ("samples_per_s", "samples / s", "Throughput", "Over all devices, between two rows of the log."),
        (
            "data_wait_share",
            "share of the time",
            "Waiting for data",
            "Share of the time in which the devices had no batch.",
        ),
        ("device_memory_peak_gib", "GiB", "Device memory", "Highest use of one device so far."),
        ("host_memory_peak_gib", "GiB", "Host memory", "Highest resident memory of the training process so far."),
    ):
        if any(run.series(key)[0] for run in (comparison.a, comparison.b)):
            yield _curves(comparison, key, label, title, caption)


def _runs(comparison: Comparison) -> list[tuple[str, Run, str, str]]:
    runs = [("A", comparison.a, _A, "-"), ("B", comparison.b, _B, "--")]
    return runs if comparison.control is None else [("control", comparison.control, _CONTROL, ":"), *runs]


def _curves(comparison: Comparison, key: str, label: str, title: str, caption: str, *, held_out: bool = False) -> Plot:
    figure, axes = _figure()
    values: list[float] = []
    for name, run, colour, style in _runs(comparison):
        steps, series = run.series(key)
        if not steps:
            continue
        values += series
        axes.plot(steps, series, color=colour, linestyle=style, marker=_marker(steps), label=name, linewidth=1.6)
        if held_out and run.held_out:
            axes.plot(
                list(run.held_out), list(run.held_out.values()), color=colour, marker="o", linestyle="",
                label=f"{name}, held-out episodes",
            )  # fmt: skip
    if key in ("loss", "grad_norm") and all(value > 0 for value in values):
        axes.set_yscale("log")
    elif key != "learning_rate" and values and min(values) >= 0 and key != "param_norm":
        axes.set_ylim(bottom=0)
    if key == "data_wait_share":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return _finish(figure, axes, Plot(name=key, title=title, caption=caption, png=b""), label)


def _differences(comparison: Comparison, bounds: Bounds) -> Plot:
    figure, axes = _figure()
    distances: list[tuple[str, Distance | None, str]] = [
        ("A - control", comparison.control_distance, _CONTROL),
        ("A - B", comparison.distance, _B),
    ]
    shown = False
    for name, distance, colour in distances:
        if distance is None:
            continue
        pairs = [(w.step, abs(w.means["loss"][0] - w.means["loss"][1])) for w in distance.alignment.windows]
        pairs = [(step, apart) for step, apart in pairs if apart > 0 and math.isfinite(apart)]
        shown |= bool(pairs)
        steps = [step for step, _ in pairs]
        axes.plot(steps, [apart for _, apart in pairs], color=colour, marker=_marker(steps), label=name, linewidth=1.2)
    if shown:
        axes.set_yscale("log")
    if not bounds.equal and bounds.relative is None:
        axes.axhline(bounds.mean_difference, color="#b00020", linewidth=1, label="bound of the mean")
    if not shown:
        axes.text(0.5, 0.5, "no difference", transform=axes.transAxes, ha="center", color="#444444")
    caption = "Of single rows; rows without a difference are not drawn."
    return _finish(
        figure, axes, Plot(name="loss_difference", title="Loss difference", caption=caption, png=b""), "|difference|"
    )


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _finish(figure: Figure, axes: Axes, plot: Plot, label: str) -> Plot:
    axes.set(xlabel="step", ylabel=label)
    axes.grid(alpha=0.25, which="major")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return dataclasses.replace(plot, png=buffer.getvalue())


def _marker(steps: list[int]) -> str:
    return "." if len(steps) < _FEW else ""
