"""Prompts to tokens: upstream's text, our refusals."""

import pickle

import numpy as np
import pytest
import sentencepiece

from openpi_accel.config.environment import Environment
from openpi_accel.data.tokenizer import (
    PromptTokenizer,
    bin_state,
    count_too_long,
    find_tokenizer,
    round_up,
    scan_prompt_lengths,
)
from openpi_accel.errors import UserError
from tests.conftest import REPO
from tests.data_fakes import tokenizer_model, write_tokenizer

DEMO_TOKENIZER = REPO / "assets" / "demo" / "tokenizer.model"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def pieces():
    return sentencepiece.SentencePieceProcessor(model_proto=tokenizer_model())


def make(path, **options):
    return PromptTokenizer(path, **({"max_token_len": 64, "vocab_size": 512} | options))


def test_without_state_the_newline_follows_the_cleaned_text(path, pieces):
    tokens, mask = make(path).encode("  pick_up the\nred cube ")
    expected = [pieces.bos_id(), *pieces.encode("pick up the red cube"), *pieces.encode("\n")]
    assert tokens.dtype == np.int32 and mask.dtype == bool and tokens.shape == mask.shape == (64,)
    assert tokens[mask].tolist() == expected
    assert mask[: len(expected)].all() and not tokens[len(expected) :].any()


def test_with_state_the_bins_are_written_out(path, pieces):
    tokens, mask = make(path).encode("lift the cube", np.array([-1.0, 0.0, 0.999, 0.5]))
    text = "Task: lift the cube, State: 0 128 255 192;\nAction: "
    assert tokens[mask].tolist() == [pieces.bos_id(), *pieces.encode(text)]
    assert pieces.decode(tokens[mask].tolist()) == text


def test_states_beyond_the_bins_are_clipped_and_counted_and_nan_is_refused(path):
    tokenizer = make(path)
    # User report 8: upstream writes the token "-1" for the first and bin 255 for NaN.
    assert bin_state(np.array([-1.2, 1.7]))[0].tolist() == [0, 255]
    tokenizer.encode("lift", np.array([-1.2, 1.7, 0.0]))
    assert tokenizer.tally["clipped_state_values"] == 2
    with pytest.raises(UserError, match=r"NaN in dimensions \[2\]"):
        tokenizer.encode("lift", np.array([-1.2, 1.7, np.nan]))


def test_bins_are_upstreams_inside_the_range():
    values = np.linspace(-1, 1, 4001)
    expected = np.digitize(values, bins=np.linspace(-1, 1, 256 + 1)[:-1]) - 1
    np.testing.assert_array_equal(bin_state(values)[0], expected)
    assert bin_state(values)[1] == 0


def test_a_prompt_too_long_is_refused_or_cut_with_a_count(path):
    long_prompt = "pick up the cube " * 300
    with pytest.raises(
        UserError, match=r"tokens, --model.max-token-len is 64.*pick up the cube.*--data.allow-truncation"
    ):
        make(path).encode(long_prompt)
    tokenizer = make(path, allow_truncation=True)
    tokens, mask = tokenizer.encode(long_prompt)
    assert mask.all() and tokens.tolist() == make(path).ids(long_prompt)[:64]
    assert tokenizer.tally["truncated_prompts"] == 1


def test_exactly_full_is_not_too_long(path):
    length = len(make(path).ids("open the drawer"))
    assert make(path, max_token_len=length).encode("open the drawer")[1].all()
    with pytest.raises(UserError, match=r"tokens"):
        make(path, max_token_len=length - 1).encode("open the drawer")


def test_the_scan_bounds_every_state(path):
    tokenizer = make(path, max_token_len=None)
    prompts = ["lift the cube", "open the drawer", "lift the cube"]
    scan = scan_prompt_lengths(tokenizer, prompts, 8)
    assert len(scan.lengths) == 2 and scan.longest_prompt in prompts
    states = np.random.default_rng(0).uniform(-1.2, 1.2, (500, 8))
    lengths = [len(tokenizer.ids(scan.longest_prompt, state)) for state in states]
    assert max(lengths) <= scan.longest
    assert count_too_long(tokenizer, [scan.longest_prompt] * 500, states, max(lengths)) == 0
    assert count_too_long(tokenizer, [scan.longest_prompt] * 500, states, min(lengths)) == sum(
        length > min(lengths) for length in lengths
    )


def test_the_scan_without_state_is_exact_and_says_which_are_too_long(path):
    tokenizer = make(path, max_token_len=None)
    scan = scan_prompt_lengths(tokenizer, ["lift", "open the drawer and lift the blue mug"], None)
    assert scan.longest == len(tokenizer.ids(scan.longest_prompt)) == max(scan.lengths.values())
    assert scan.too_long(scan.longest) == []
    assert scan.too_long(scan.longest - 1) == ["open the drawer and lift the blue mug"]
    with pytest.raises(UserError, match=r"--data.default-prompt"):
        scan_prompt_lengths(tokenizer, [], None)


def test_auto_rounds_up_to_fours():
    assert [round_up(n) for n in (1, 4, 5, 22)] == [4, 4, 8, 24]


def test_a_damaged_file_and_a_vocabulary_too_large_are_refused(path, tmp_path):
    damaged = tmp_path / "damaged.model"
    damaged.write_bytes(tokenizer_model()[:100])
    for bad in (damaged, tmp_path / "absent.model", tmp_path):
        with pytest.raises(UserError, match=r"cannot be read as a SentencePiece model"):
            make(bad)
    with pytest.raises(UserError, match=r"20 rows"):
        make(path, vocab_size=20)


def test_it_travels_to_another_process_and_counts_anew(path):
    tokenizer = make(path)
    tokenizer.encode("lift", np.array([3.0]))
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.ids("open the drawer") == tokenizer.ids("open the drawer")
    assert copy.tally["clipped_state_values"] == 0
    assert copy.fingerprint() == tokenizer.fingerprint() != make(DEMO_TOKENIZER).fingerprint()


def test_the_file_is_found_by_path_then_data_home_then_hub_cache(tmp_path):
    environment = Environment.from_env({"HOME": str(tmp_path)})
    with pytest.raises(UserError, match=r"curl -fL .*big_vision/paligemma_tokenizer.model"):
        find_tokenizer(None, environment)
    in_hub = environment.hf_hub_cache / "models--google--paligemma-3b-pt-224" / "snapshots" / "abc" / "tokenizer.model"
    in_home = environment.openpi_data_home / "big_vision" / "paligemma_tokenizer.model"
    given = tmp_path / "mine.model"
    for file in (in_hub, in_home, given):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
        assert find_tokenizer(str(given) if file == given else None, environment) == file
    with pytest.raises(UserError, match=r"--data.tokenizer-path is"):
        find_tokenizer(str(tmp_path / "nowhere"), environment)
