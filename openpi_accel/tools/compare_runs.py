"""Two runs of the same data and seed, step by step: the learning rate to the bit, the loss within a bound."""

import dataclasses
import pathlib

from openpi_accel.errors import UserError
from openpi_accel.train.metrics import METRICS_FILE, read_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What differs.

    Attributes:
        num_steps: rows compared.
        first_loss, last_loss: of both runs.
        mean_difference, max_difference: of |loss a - loss b| over the rows.
        same_learning_rate: equal to the bit in every row.
    """

    num_steps: int
    first_loss: tuple[float, float]
    last_loss: tuple[float, float]
    mean_difference: float
    max_difference: float
    same_learning_rate: bool

    def failures(self, max_mean_difference: float) -> list[str]:
        """What breaks the contract."""
        wrong = []
        if not self.same_learning_rate:
            wrong.append("the learning rates differ")
        if not self.mean_difference < max_mean_difference:  # NaN fails too
            wrong.append(f"the mean loss difference is {self.mean_difference:.2e}, not below {max_mean_difference:g}")
        return wrong


def compare_runs(first: pathlib.Path, second: pathlib.Path) -> Comparison:
    """Compares the metrics of two run folders.

    Raises:
        UserError: a folder without metrics, or other steps in one than in the other.
    """
    a, b = (_rows(folder) for folder in (first, second))
    if list(a) != list(b):
        raise UserError(
            f"{first} logged {len(a)} steps and {second} {len(b)}, or other ones: give both the same "
            "--num-train-steps and --log-interval."
        )
    pairs = [(a[step]["loss"], b[step]["loss"]) for step in a]
    differences = [abs(x - y) for x, y in pairs]
    return Comparison(
        num_steps=len(pairs),
        first_loss=pairs[0],
        last_loss=pairs[-1],
        mean_difference=sum(differences) / len(differences),
        max_difference=max(differences),
        same_learning_rate=all(a[step]["learning_rate"] == b[step]["learning_rate"] for step in a),
    )


def _rows(folder: pathlib.Path) -> dict[int, dict[str, float]]:
    path = folder / METRICS_FILE
    rows = {row["step"]: row for row in read_rows(path) if "loss" in row} if path.exists() else {}
    if not rows:
        raise UserError(f"{path} holds no step: give the folder of a run, checkpoints/<config>/<exp name>.")
    return rows
