"""Prompts to tokens: PaliGemma's SentencePiece model, upstream's prompt format. L is max_token_len."""

import collections
import dataclasses
import hashlib
import pathlib
import shlex
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece

from openpi_accel.config.environment import Environment
from openpi_accel.errors import UserError

NUM_STATE_BINS = 256
_BIN_EDGES = np.linspace(-1, 1, NUM_STATE_BINS + 1)[:-1]
_MULTIPLE = 4
_HUB_MODELS = "models--google--paligemma*/snapshots/*/tokenizer.model"


def find_tokenizer(
    tokenizer_path: str | None, environment: Environment, *, option: str = "--data.tokenizer-path"
) -> pathlib.Path:
    """The SentencePiece model file: the given one, else PaliGemma's on this machine. Downloads nothing.

    Args:
        tokenizer_path: the file, if it is known.
        environment: where to look.
        option: by which the tool's user names the file, for messages.

    Raises:
        UserError: not found; says where it was looked for and which command fetches it.
    """
    if tokenizer_path is not None:
        path = pathlib.Path(tokenizer_path).expanduser()
        if not path.is_file():
            raise UserError(f"{option} is {tokenizer_path}, where there is no file.")
        return path
    usual = environment.openpi_data_home / "big_vision" / "paligemma_tokenizer.model"
    if usual.is_file():
        return usual
    in_hub_cache = sorted(environment.hf_hub_cache.glob(_HUB_MODELS))
    if in_hub_cache:
        return in_hub_cache[-1]
    target = shlex.quote(str(usual))
    raise UserError(
        f"PaliGemma's tokenizer is neither at {usual}\nnor in the Hub cache {environment.hf_hub_cache}.\n"
        "Fetch it once (4 MB, public):\n"
        f"    curl -fL --create-dirs -o {target} https://storage.googleapis.com/big_vision/paligemma_tokenizer.model\n"
        f"or: gcloud storage cp gs://big_vision/paligemma_tokenizer.model {target}\n"
        f"Or name a SentencePiece model file: {option}."
    )


class Tally:
    """Named counts that several threads add to."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def __reduce__(self) -> tuple[type["Tally"], tuple[()]]:
        return Tally, ()  # a lock does not travel; another process counts for itself


def bin_state(state: np.ndarray) -> tuple[np.ndarray, int]:
    """Bins of a normalised state over [-1, 1], clipped to 0..255 (upstream lets -1 through).

    Args:
        state: D, normalised, unpadded.

    Returns:
        D int bins, and how many values lay outside [-1, 1].

    Raises:
        UserError: NaN.
    """
    if np.isnan(state).any():
        raise UserError(
            f"The state holds NaN in dimensions {np.flatnonzero(np.isnan(state)).tolist()}; it cannot be written into "
            "the prompt. scripts/inspect_dataset.py --check names the frames."
        )
    bins = np.digitize(state, bins=_BIN_EDGES) - 1
    return np.clip(bins, 0, NUM_STATE_BINS - 1), int(np.count_nonzero((state < -1) | (state > 1)))


class PromptTokenizer:
    """Turns a prompt, with or without the robot's state, into L tokens and their mask. Safe to share by threads.

    Attributes:
        max_token_len: L, or None while it is being found out (then only `ids` works).
        allow_truncation: cut prompts longer than L instead of refusing them.
        tally: counts "clipped_state_values" and "truncated_prompts".
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        *,
        max_token_len: int | None,
        vocab_size: int,
        allow_truncation: bool = False,
    ) -> None:
        """Reads the model file.

        Args:
            path: SentencePiece model file.
            max_token_len: L.
            vocab_size: rows of the model's embedding table.
            allow_truncation: see the class.

        Raises:
            UserError: the file is no SentencePiece model, or has more pieces than the embedding has rows.
        """
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=pathlib.Path(path).read_bytes())
        except (RuntimeError, OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read as a SentencePiece model ({error}). Fetch it anew, or name another "
                "with --data.tokenizer-path."
            ) from error
        size = self._pieces.get_piece_size()
        if size > vocab_size:
            raise UserError(
                f"The tokenizer {path} has {size} pieces, but the model's embedding has {vocab_size} rows "
                "(--model.vocab-size). Take the tokenizer that belongs to the model with --data.tokenizer-path."
            )
        if self._pieces.bos_id() < 0:
            raise UserError(f"The tokenizer {path} has no token for the beginning of a text, which prompts start with.")
        self.max_token_len = max_token_len
        self.allow_truncation = allow_truncation
        self.tally = Tally()

    def fingerprint(self) -> str:
        """A hash of the SentencePiece model."""
        return hashlib.sha256(self._pieces.serialized_model_proto()).hexdigest()

    def ids(self, prompt: str, state: np.ndarray | None = None) -> list[int]:
        """The tokens of a prompt, whole and unpadded; see `encode`."""
        text = prompt.strip().replace("_", " ").replace("\n", " ")
        if state is None:
            # The newline is encoded apart: it starts the answer in PaliGemma's prompt format.
            return [*self._pieces.encode(text, add_bos=True), *self._pieces.encode("\n")]
        bins, num_clipped = bin_state(state)
        self.tally.add("clipped_state_values", num_clipped)
        return self._pieces.encode(f"Task: {text}, State: {' '.join(map(str, bins))};\nAction: ", add_bos=True)

    def encode(self, prompt: str, state: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and mask.

        Args:
            prompt: the task's text.
            state: D normalised unpadded state to write into the prompt, or None.

        Returns:
            L int32 zero-padded, L bool.

        Raises:
            UserError: longer than L (unless allow_truncation), or a NaN state.
        """
        if self.max_token_len is None:
            raise RuntimeError("max_token_len is not settled yet")
        ids = self.ids(prompt, state)
        if len(ids) > self.max_token_len:
            if not self.allow_truncation:
                raise UserError(
                    f"A prompt takes {len(ids)} tokens, --model.max-token-len is {self.max_token_len}: "
                    f"{shorten(prompt)}. Set --model.max-token-len={round_up(len(ids))}, "
                    "or cut prompts with --data.allow-truncation."
                )
            self.tally.add("truncated_prompts")
            ids = ids[: self.max_token_len]
        tokens, mask = np.zeros(self.max_token_len, np.int32), np.zeros(self.max_token_len, bool)
        tokens[: len(ids)], mask[: len(ids)] = ids, True
        return tokens, mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptScan:
    """Token counts of a set of prompts.

    Attributes:
        longest: tokens of the longest prompt.
        longest_prompt: its text.
        lengths: prompt -> tokens.
    """

    longest: int
    longest_prompt: str
    lengths: dict[str, int]

    def too_long(self, max_token_len: int) -> list[str]:
        """The prompts of more than max_token_len tokens."""
        return [prompt for prompt, length in self.lengths.items() if length > max_token_len]


def scan_prompt_lengths(tokenizer: PromptTokenizer, prompts: Iterable[str], state_dim: int | None) -> PromptScan:
    """Tokens of each distinct prompt.

    With a state in the prompt this is the length with the bin that costs most tokens in every dimension. Where the
    model splits digits and words, as PaliGemma's does, no state takes more, also none that the policy will meet later.

    Args:
        tokenizer: its max_token_len is not looked at.
        prompts: texts of the task table.
        state_dim: D, or None where the state is not in the prompt.
    """
    state = None if state_dim is None else np.full(state_dim, _costliest_state_value(tokenizer))
    lengths = {prompt: len(tokenizer.ids(prompt, state)) for prompt in dict.fromkeys(prompts)}
    if not lengths:
        raise UserError("There is no prompt at all: the dataset has no task text. Give one with --data.default-prompt.")
    longest_prompt = max(lengths, key=lengths.__getitem__)
    return PromptScan(longest=lengths[longest_prompt], longest_prompt=longest_prompt, lengths=lengths)


def count_too_long(tokenizer: PromptTokenizer, prompts: Sequence[str], states: np.ndarray, max_token_len: int) -> int:
    """Exact number of frames whose prompt with their own state has more than max_token_len tokens.

    Args:
        prompts: N texts.
        states: N D, normalised, unpadded.
        max_token_len: L.
    """
    return sum(len(tokenizer.ids(p, s)) > max_token_len for p, s in zip(prompts, states, strict=True))


def shorten(prompt: str, limit: int = 80) -> str:
    """The prompt in quotes, cut where a message would drown in it."""
    return repr(prompt if len(prompt) <= limit else prompt[: limit - 1] + "…")


def round_up(length: int) -> int:
    """To the multiple of 4 that `max_token_len auto` takes."""
    return -(-length // _MULTIPLE) * _MULTIPLE


def _costliest_state_value(tokenizer: PromptTokenizer) -> float:
    """A normalised value inside the bin whose number takes most tokens."""
    centres = (np.arange(NUM_STATE_BINS) + 0.5) * (2 / NUM_STATE_BINS) - 1
    # Three dimensions: the first and the last number stand next to other characters than those in between.
    return float(max(centres, key=lambda value: len(tokenizer.ids("", np.full(3, value)))))
