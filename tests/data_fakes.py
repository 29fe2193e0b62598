"""A dataset held in memory, with the reader's interface, and a tiny SentencePiece model."""

import functools
import io
import pathlib
import threading

import numpy as np
import sentencepiece

from openpi_accel.data.lerobot.features import Camera, Feature
from openpi_accel.data.norm_stats import NormStats, Statistics

_TEXTS = [
    "pick up the red cube",
    "put the bowl on the plate",
    "Task: open the drawer, State: 0 12 255 128 7 64;\nAction: ",
    "Task: lift the blue mug, State: 1 2 3 4 5 6 78 90 101 234 199;\nAction: ",
]


class FakeDataset:
    """Episodes of given lengths; frame pixels, states and actions tell their row."""

    def __init__(
        self,
        lengths=(5, 3),
        *,
        state_dim=4,
        action_dim=3,
        cameras=("observation.images.base", "observation.images.wrist"),
        tasks=("lift the cube", "open the drawer"),
        state_key="observation.state",
        action_key="action",
        size=(16, 24),
    ):
        self.root = pathlib.Path("fake-dataset")
        self.version, self.fps = "v2.1", 10.0
        self.num_episodes, self.num_frames = len(lengths), sum(lengths)
        self.episode_starts = np.concatenate([[0], np.cumsum(lengths)])
        self.episode_ids = np.arange(len(lengths))
        self.cameras = {key: Camera("image", *size) for key in cameras}
        self.features = {key: Feature("image", (*size, 3)) for key in cameras}
        self.features |= {
            state_key: Feature("float32", (state_dim,)),
            action_key: Feature("float32", (action_dim,)),
            "timestamp": Feature("float32", (1,)),
            "task_index": Feature("int64", (1,)),
        }
        self.tasks = dict(enumerate(tasks))
        rng = np.random.default_rng(0)
        n = self.num_frames
        self.columns = {
            state_key: rng.normal(size=(n, state_dim)).astype(np.float32),
            action_key: rng.normal(size=(n, action_dim)).astype(np.float32),
            "task_index": self.episode_of(np.arange(n)) % len(tasks),
        }
        self.decoded: list[tuple[str, int]] = []
        self._size, self._lock = size, threading.Lock()

    def column(self, key):
        return self.columns[key]

    def episode_of(self, rows):
        return np.searchsorted(self.episode_starts, rows, side="right") - 1

    def task_of(self, rows):
        return [self.tasks[int(i)] for i in self.columns["task_index"][rows]]

    def chunk(self, key, rows, horizon):
        last = self.episode_starts[self.episode_of(rows) + 1] - 1
        wanted = np.asarray(rows)[:, None] + np.arange(horizon)
        return self.columns[key][np.minimum(wanted, last[:, None])], wanted > last[:, None]

    def frames(self, camera, rows):
        with self._lock:
            self.decoded += [(camera, int(row)) for row in rows]
        number = list(self.cameras).index(camera)
        return [np.full((*self._size, 3), 10 + 40 * number + row, np.uint8) for row in rows]


def unit_stats(state_dim=4, action_dim=3) -> NormStats:
    """Statistics under which normalising changes next to nothing: q01 = -1, q99 = 1, mean 0, std 1."""
    return NormStats(
        **{
            key: Statistics(mean=np.zeros(d), std=np.ones(d), q01=-np.ones(d), q99=np.ones(d))
            for key, d in (("state", state_dim), ("actions", action_dim))
        }
    )


@functools.cache
def tokenizer_model() -> bytes:
    """A SentencePiece model of a few dozen pieces, with PaliGemma's special ids (pad 0, eos 1, bos 2, unk 3)."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_TEXTS * 4),
        model_writer=model,
        vocab_size=110,
        hard_vocab_limit=False,
        model_type="bpe",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        user_defined_symbols=["\n"],
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def write_tokenizer(folder: pathlib.Path) -> pathlib.Path:
    """The model as a file."""
    path = folder / "tokenizer.model"
    path.write_bytes(tokenizer_model())
    return path
