"""Pictures of recorded actions beside predicted chunks. Letters: T frames, C chunks, A action horizon, D dimensions."""

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_episode(
    path: pathlib.Path,
    recorded: np.ndarray,
    predicted: np.ndarray,
    starts: np.ndarray,
    dim_names: Sequence[str],
    title: str,
) -> None:
    """One panel per dimension.

    Args:
        path: PNG file.
        recorded: T D, actions of one episode.
        predicted: C A D, chunks.
        starts: C, the frame at which each chunk begins.
        dim_names: D names.
        title: above the panels.
    """
    num_dims = recorded.shape[1]
    columns = min(num_dims, 3)
    rows = -(-num_dims // columns)
    figure = Figure(figsize=(4.2 * columns, 2.4 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.atleast_1d(figure.subplots(rows, columns, sharex=True)).ravel()
    for panel in panels[num_dims:]:
        panel.set_visible(False)
    for i, name in enumerate(dim_names):
        panels[i].plot(recorded[:, i], color="black", linewidth=1.5, label="recorded")
        for number, (chunk, start) in enumerate(zip(predicted, starts, strict=True)):
            steps = np.arange(start, min(start + len(chunk), len(recorded)))
            label = "predicted" if number == 0 else None
            panels[i].plot(steps, chunk[: len(steps), i], color="tab:orange", marker=".", linewidth=1, label=label)
            panels[i].axvline(start, color="0.85", linewidth=0.8, zorder=0)
        panels[i].set_title(name, fontsize=9)
        panels[i].tick_params(labelsize=8)
    panels[0].legend(fontsize=8)
    figure.supxlabel("frame", fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
