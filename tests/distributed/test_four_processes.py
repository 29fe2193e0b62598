"""Four processes of one device each, in two groups of two: trained, saved, and gone on with by two."""

import json
import pathlib
from collections.abc import Mapping

import numpy as np
import pytest

from openpi_accel.data.order import SampleOrder
from openpi_accel.data.synthetic import SyntheticConfig, write_dataset
from openpi_accel.tools import compute_norm_stats
from openpi_accel.tools.demo import TOKENIZER
from openpi_accel.train.run_folder import committed_steps
from tests.distributed.test_devices import assert_close, cluster_of, dumped, finish, losses, run_worker
from tests.unit import toy

MOVED, ALL = 3, 6  # steps until the number of processes changes, and in all


def shares(path: pathlib.Path) -> dict[int, list[int]]:
    """First sample of a batch -> the rows that one process took of it."""
    return dict(json.loads(line) for line in path.read_text().splitlines())


def test_four_processes_train_and_save_and_two_go_on_as_one_would(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    for size, num_steps, extra in ((4, MOVED, ()), (2, ALL, ("--resume",))):
        options = ("--devices", 1, "--expect-devices", size, "--fsdp", 2, *extra)
        finish(
            *(
                run_worker(
                    *(run, num_steps, *options, "--shares", tmp_path / f"shares-{size}-{rank}"),
                    *("--dump", tmp_path / f"state-{size}-{rank}.npz"),
                    env=env,
                )
                for rank, env in enumerate(cluster_of(size))
            )
        )
        assert committed_steps(run)[-1] == num_steps - 1
        first, *others = (dumped(tmp_path / f"state-{size}-{rank}.npz") for rank in range(size))
        for other in others:  # both groups hold the same
            for name, leaf in first.items():
                np.testing.assert_array_equal(other[name], leaf, err_msg=name)

    straight: dict[int, list[int]] = {}
    toy.train(
        tmp_path / "straight",
        ALL,
        loader=lambda begin: toy.loaded_by_rows(begin, lambda at, rows: straight.__setitem__(at, rows.tolist())),
    )
    # Within rounding: a sum over devices is taken in another order than on one.
    assert_close(losses(run), losses(tmp_path / "straight"))
    assert len(losses(run)) == ALL

    order = SampleOrder(20, 7)
    for at, rows in straight.items():
        assert rows == order.rows(at, toy.BATCH).tolist()
    assert_union(tmp_path, straight)


def assert_union(folder: pathlib.Path, straight: Mapping[int, list[int]]) -> None:
    """What the processes took together is what one takes, in its order."""
    for size, begin, after in ((4, 0, MOVED), (2, MOVED, ALL)):
        taken = [shares(folder / f"shares-{size}-{rank}") for rank in range(size)]
        # The very next batch; the first of all is also read for its shapes.
        assert min(at for of_rank in taken for at in of_rank if at or not begin) == begin * toy.BATCH
        for at in range(begin * toy.BATCH, after * toy.BATCH, toy.BATCH):
            assert all(len(of_rank[at]) == toy.BATCH // size for of_rank in taken)
            union = [row for of_rank in taken for row in of_rank[at]]
            assert union == straight[at]


@pytest.mark.long
def test_the_tiny_model_trains_on_four_and_goes_on_with_two_as_one_would(tmp_path: pathlib.Path) -> None:
    """All of scripts/train.py but its command line: data, checks, compilation, steps, checkpoints."""
    write_dataset(tmp_path / "data", SyntheticConfig(num_episodes=2))
    files = [f"--data.path={tmp_path / 'data'}", f"--assets-base-dir={tmp_path / 'assets'}"]
    assert compute_norm_stats.main(["--config-name=pi05_demo", *files], {}) == 0
    model = ["--model.paligemma-variant=tiny", "--model.action-expert-variant=tiny_expert", f"--batch-size={toy.BATCH}"]
    common = ["pi05_demo", *files, *model, f"--data.tokenizer-path={TOKENIZER}", "--log-interval=1"]

    def train(name: str, size: int, num_steps: int, *options: str) -> None:
        run = [f"--exp-name={name}", f"--checkpoint-base-dir={tmp_path}", f"--num-train-steps={num_steps}"]
        finish(
            *(
                run_worker(tmp_path / f"shares-{size}-{rank}", *common, *run, *options, env=env, module="train_worker")
                for rank, env in enumerate(cluster_of(size))
            ),
            within_s=600,
        )

    train("moved", 4, MOVED, "--fsdp-devices=2")
    train("moved", 2, ALL, "--fsdp-devices=2", "--resume")
    train("one", 1, ALL)
    moved, one = (losses(tmp_path / "pi05_demo" / name) for name in ("moved", "one"))
    assert_close(moved, one)
    assert len(moved) == ALL
    assert_union(tmp_path, shares(tmp_path / "shares-1-0"))
