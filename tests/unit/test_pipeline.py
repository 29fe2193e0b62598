"""Rows to batches, and what is checked before training."""

import concurrent.futures
import dataclasses

import jax
import numpy as np
import pytest

from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import CameraKeys, DataConfig, ModelConfig
from openpi_accel.data.lerobot.dataset import open_dataset
from openpi_accel.data.lerobot.frames import FrameError
from openpi_accel.data.mapping import resolve_mapping
from openpi_accel.data.norm_stats import ComputedFor, NormStats, Statistics, load_norm_stats
from openpi_accel.data.pipeline import BatchSource, settle_max_token_len
from openpi_accel.data.resize import resize_with_pad
from openpi_accel.data.rows import reached_rows, rows_of_episodes, training_rows
from openpi_accel.data.statistics import fingerprint
from openpi_accel.data.tokenizer import PromptTokenizer
from openpi_accel.data.validation import validate_before_training, without_bad_rows
from openpi_accel.errors import UserError
from tests.data_fakes import FakeDataset, unit_stats, write_tokenizer

MODEL = ModelConfig(action_horizon=4, max_token_len=48, discrete_state_input=False)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make(tokenizer_path):
    def make(dataset=None, *, model=MODEL, data=None, norm_stats=None, **options):
        dataset = dataset or FakeDataset()
        data = data or DataConfig(repo_id="fake")
        mapping = resolve_mapping(data, dataset)
        tokenizer = PromptTokenizer(
            tokenizer_path,
            max_token_len=model.max_token_len,
            vocab_size=512,
            allow_truncation=data.allow_truncation,
        )
        if norm_stats is None:
            norm_stats = unit_stats(mapping.state_dim, mapping.action_dim)
        return BatchSource(
            dataset=dataset,
            mapping=mapping,
            norm_stats=norm_stats,
            tokenizer=tokenizer,
            model=model,
            data=data,
            **options,
        )

    return make


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def test_shapes_dtypes_and_slots(make):
    batch = make().load_batch(np.array([6, 0, 4]))
    o = batch.observation
    assert list(o.images) == list(o.image_masks) == ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
    for image in o.images.values():
        assert image.shape == (3, 224, 224, 3) and image.dtype == np.uint8
    assert [mask.tolist() for mask in o.image_masks.values()] == [[True] * 3, [True] * 3, [False] * 3]
    assert not o.images["right_wrist_0_rgb"].any()
    assert o.state.shape == (3, 32) and batch.actions.shape == (3, 4, 32)
    assert o.state.dtype == batch.actions.dtype == np.float32
    assert o.tokenized_prompt.shape == (3, 48) and o.tokenized_prompt.dtype == np.int32


def test_each_row_gets_its_own_frame_state_chunk_and_prompt(make):
    source = make()
    rows = np.array([6, 0, 4, 7])
    batch = source.load_batch(rows)
    o, dataset = batch.observation, source.dataset
    assert o.images["base_0_rgb"][:, 112, 112, 0].tolist() == (10 + rows).tolist()
    assert o.images["left_wrist_0_rgb"][:, 112, 112, 0].tolist() == (50 + rows).tolist()
    scale = 2 / (2 + 1e-6)
    state, action = dataset.columns["observation.state"].astype(float), dataset.columns["action"].astype(float)
    np.testing.assert_allclose(o.state[:, :4], (state[rows] + 1) * scale - 1, rtol=1e-6)
    # Rows 4 and 7 end their episodes: the last action repeats.
    chunk_rows = np.array([[6, 7, 7, 7], [0, 1, 2, 3], [4, 4, 4, 4], [7, 7, 7, 7]])
    np.testing.assert_allclose(batch.actions[..., :3], (action[chunk_rows] + 1) * scale - 1, rtol=1e-6)
    assert not o.state[:, 4:].any() and not batch.actions[..., 3:].any()
    for i, row in enumerate(rows):
        tokens, mask = source.tokenizer.encode("lift the cube" if row < 5 else "open the drawer")
        np.testing.assert_array_equal(o.tokenized_prompt[i], tokens)
        np.testing.assert_array_equal(o.tokenized_prompt_mask[i], mask)
    np.testing.assert_allclose(source.restore_actions(batch.actions, rows), action[chunk_rows], atol=1e-6)


def test_the_state_goes_into_the_prompt_normalised_and_unpadded(make):
    source = make(model=dataclasses.replace(MODEL, discrete_state_input=True, max_token_len=80))
    source.dataset.columns["observation.state"][3] = [-3, 0.5, 0.999, 3]
    o = source.load_batch(np.array([3])).observation
    tokens, mask = source.tokenizer.encode(
        "lift the cube", source.numbers.normalize_state(np.array([-3, 0.5, 0.999, 3]))
    )
    np.testing.assert_array_equal(o.tokenized_prompt[0], tokens)
    text = source.tokenizer._pieces.decode(tokens[mask].tolist())
    assert text == "Task: lift the cube, State: 0 191 255 255;\nAction: "
    assert o.state[0, 0] == pytest.approx(-3, rel=1e-5)  # only the prompt is clipped


def test_delta_actions_are_normalised_after_the_subtraction(make):
    source = make(data=DataConfig(repo_id="fake", delta_action_dims=2, normalization="zscore"))
    rows = np.array([1, 6])
    batch = source.load_batch(rows)
    state, action = source.dataset.columns["observation.state"], source.dataset.columns["action"]
    np.testing.assert_allclose(batch.actions[:, 0, :2], (action[rows] - state[rows, :3])[:, :2] / (1 + 1e-6), rtol=1e-6)
    np.testing.assert_allclose(batch.actions[:, 0, 2], action[rows, 2], rtol=2e-6)
    np.testing.assert_allclose(source.restore_actions(batch.actions, rows)[:, 0], action[rows], atol=1e-6)


def test_decoding_only_what_is_consumed_gives_equal_batches(make):
    data = DataConfig(repo_id="fake", cameras=CameraKeys(left_wrist_0_rgb="wrist"))
    cameras, rows = ("front", "wrist", "side"), np.array([5, 2, 2])
    every, consumed = FakeDataset(cameras=cameras), FakeDataset(cameras=cameras)
    assert_equal_trees(
        make(every, data=data).load_batch(rows), make(consumed, data=data, only_consumed=True).load_batch(rows)
    )
    assert {camera for camera, _ in every.decoded} == set(cameras) and len(every.decoded) == 9
    assert consumed.decoded == [("wrist", 5), ("wrist", 2), ("wrist", 2)]


def test_skipped_slots_are_left_out_and_nothing_else_changes(make):
    rows = np.array([0, 7])
    whole = make().load_batch(rows)
    for skip in (("right_wrist_0_rgb",), ("auto",)):
        short = make(skip_images=skip).load_batch(rows)
        assert (
            list(short.observation.images) == list(short.observation.image_masks) == ["base_0_rgb", "left_wrist_0_rgb"]
        )
        del_slot = {slot: image for slot, image in whole.observation.images.items() if slot != "right_wrist_0_rgb"}
        assert_equal_trees(short.observation.images, del_slot)
        assert_equal_trees(short.actions, whole.actions)
        assert_equal_trees(short.observation.tokenized_prompt, whole.observation.tokenized_prompt)


def test_a_skipped_slot_that_has_a_camera_is_refused(make):
    with pytest.raises(
        UserError, match=r"leaves out left_wrist_0_rgb, but the dataset's camera 'observation.images.wrist'"
    ):
        make(skip_images=("left_wrist_0_rgb",))


def test_one_camera_may_feed_two_slots_and_is_decoded_once(make):
    source = make(data=DataConfig(repo_id="f", cameras=CameraKeys(base_0_rgb="cam", right_wrist_0_rgb="cam")),
                  dataset=FakeDataset(cameras=("cam",)))  # fmt: skip
    o = source.load_batch(np.array([2])).observation
    np.testing.assert_array_equal(o.images["base_0_rgb"], o.images["right_wrist_0_rgb"])
    assert source.dataset.decoded == [("cam", 2)] and not o.image_masks["left_wrist_0_rgb"].any()


@pytest.mark.parametrize(
    ("column", "row", "rows", "where"),
    [
        ("observation.state", 6, [0, 6], "episode 1 frame 1"),
        ("action", 6, [0, 5], "episode 1 frame 1"),  # inside the chunk that starts at row 5
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_names_dataset_column_episode_and_frame(make, column, row, rows, where, bad):
    source = make()
    source.dataset.columns[column][row, 1] = bad
    with pytest.raises(UserError, match=f"fake-dataset: column '{column}' holds NaN or infinity in 1 frames: {where}"):
        source.load_batch(np.array(rows))
    assert source.load_batch(np.array([0, 1])).actions.shape == (2, 4, 32)
    with pytest.raises(UserError, match=where):
        validate_before_training(source, np.arange(8), command="mend")
    with pytest.raises(UserError, match=r"these 2 episodes"):
        source.dataset.columns[column][0] = bad
        validate_before_training(source, np.arange(8), command="mend")


def test_several_threads_may_load_at_once(make):
    source, reference = make(), make()
    batches = [np.random.default_rng(i).integers(0, 8, 4) for i in range(24)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for rows, batch in zip(batches, pool.map(source.load_batch, batches), strict=True):
            assert_equal_trees(batch, reference.load_batch(rows))


def test_rows_without_a_task_take_the_default_prompt_or_are_refused(make):
    dataset = FakeDataset(tasks=("lift the cube", " "))
    with pytest.raises(UserError, match=r"1 of 2 frames have no task text.*--data.default-prompt"):
        make(dataset).load_batch(np.array([0, 5]))
    with pytest.raises(UserError, match=r"3 of 8 frames have no task text"):
        validate_before_training(make(dataset), np.arange(8), command="mend")
    source = make(dataset, data=DataConfig(repo_id="f", default_prompt="open the drawer"))
    expected = make().load_batch(np.array([0, 5])).observation.tokenized_prompt
    np.testing.assert_array_equal(source.load_batch(np.array([0, 5])).observation.tokenized_prompt, expected)


def test_more_dimensions_than_the_model_takes_are_refused(make):
    with pytest.raises(UserError, match=r"actions have 33 dimensions, the model takes 32"):
        make(FakeDataset(action_dim=33))


def test_a_state_of_one_dimension_may_come_without_its_axis(make):
    dataset = FakeDataset(state_dim=1)
    dataset.columns["observation.state"] = dataset.columns["observation.state"][:, 0]
    state = make(dataset).load_batch(np.array([3])).observation.state
    assert state.shape == (1, 32) and np.count_nonzero(state) == 1


def test_max_token_len_auto_holds_every_prompt_and_state(make, tokenizer_path):
    dataset = FakeDataset()
    tokenizer = PromptTokenizer(tokenizer_path, max_token_len=None, vocab_size=512)
    for discrete in (False, True):
        model = dataclasses.replace(MODEL, max_token_len="auto", discrete_state_input=discrete)
        data = DataConfig(repo_id="fake")
        length = settle_max_token_len(dataset, resolve_mapping(data, dataset), tokenizer, model, data)
        assert length % 4 == 0
        source = make(dataset, model=dataclasses.replace(model, max_token_len=length))
        longest = validate_before_training(source, np.arange(8), command="mend").longest_prompt
        assert length - 4 < longest <= length
    assert settle_max_token_len(dataset, resolve_mapping(data, dataset), tokenizer, MODEL, data) == 48


# Before training


def test_prompts_too_long_are_counted_before_training(make):
    dataset = FakeDataset(tasks=("lift the cube", "pick up the red cube " * 60))
    with pytest.raises(
        UserError, match=r"3 of 8 frames have a prompt longer than --model.max-token-len=48 \(1 of 2 tasks"
    ):
        validate_before_training(make(dataset), np.arange(8), command="mend")
    assert validate_before_training(make(dataset), np.arange(5), command="mend").num_prompts == 1
    source = make(dataset, data=DataConfig(repo_id="f", allow_truncation=True))
    report = validate_before_training(source, np.arange(8), command="mend")
    assert any("3 of 8 frames" in warning and "are cut" in warning for warning in report.warnings)


def test_with_32_state_dimensions_the_states_that_occur_decide(make):
    # User report 9.
    model = dataclasses.replace(MODEL, discrete_state_input=True)
    dataset = FakeDataset(state_dim=32)
    source = make(dataset, model=dataclasses.replace(model, max_token_len=64))
    with pytest.raises(UserError, match=r"8 of 8 frames have a prompt longer than --model.max-token-len=64"):
        validate_before_training(source, np.arange(8), command="mend")
    dataset.columns["observation.state"][:] = -1  # bin 0 in every dimension: shorter than the bound over all states
    occurring = len(source.tokenizer.ids("open the drawer", np.full(32, -1.0)))
    report = validate_before_training(
        make(dataset, model=dataclasses.replace(model, max_token_len=occurring)), np.arange(8), command="mend"
    )
    assert report.longest_prompt > occurring


def test_states_out_of_range_are_counted_for_the_discrete_prompt(make):
    dataset = FakeDataset()
    dataset.columns["observation.state"][:] = 0
    dataset.columns["observation.state"][2] = [1.7, -1.2, 0, 0]
    model = dataclasses.replace(MODEL, discrete_state_input=True, max_token_len=96)
    report = validate_before_training(make(dataset, model=model), np.arange(8), command="mend")
    assert report.num_clipped_state_values == 2
    assert any(
        warning.startswith("6.2 % of the state values (2 of 32) lie outside [-1, 1]") and "leave out 2 %" in warning
        for warning in report.warnings
    )
    assert validate_before_training(make(dataset), np.arange(8), command="mend").num_clipped_state_values == 0


def test_what_the_quantiles_leave_out_is_no_warning(make):
    dataset = FakeDataset(lengths=(300, 300))
    state = np.random.default_rng(0).normal(0, 0.2, (600, 4))
    dataset.columns["observation.state"] = state
    model = dataclasses.replace(MODEL, discrete_state_input=True, max_token_len=96)
    actions = dataset.chunk("action", np.arange(600), 4)[0]
    source = make(dataset, model=model, norm_stats=stats_of(state=state, actions=actions))
    report = validate_before_training(source, np.arange(600), command="mend")
    assert report.num_clipped_state_values == 48  # six at either end of four columns: exactly 2 %
    assert not any("state values" in warning for warning in report.warnings)
    data = DataConfig(repo_id="f", normalization="zscore")
    source = make(dataset, model=model, data=data, norm_stats=stats_of(state=state, actions=actions))
    report = validate_before_training(source, np.arange(600), command="mend")
    assert any("a third of normal data" in warning for warning in report.warnings)


def stats_of(*, state, actions):
    def one(values):
        flat = values.reshape(-1, values.shape[-1]).astype(np.float64)
        q01, q99 = np.quantile(flat, [0.01, 0.99], axis=0)
        return Statistics(mean=flat.mean(0), std=flat.std(0), q01=q01, q99=q99)

    return NormStats(state=one(state), actions=one(actions))


@pytest.mark.parametrize("normalization", ["quantile", "zscore"])
def test_swapped_statistics_are_noticed_even_without_a_record(make, normalization):
    # User report 7: joint positions far from zero that move little from one chunk's start to its end.
    dataset = FakeDataset(lengths=(300, 300), state_dim=3)
    walk = np.cumsum(np.random.default_rng(0).normal(0, 0.02, (600, 3)), axis=0) + [2.0, -1.0, 0.5]
    dataset.columns["observation.state"], dataset.columns["action"] = walk, walk + 0.01
    chunks, _ = dataset.chunk("action", np.arange(600), 4)
    absolute = stats_of(state=walk, actions=chunks)
    delta = stats_of(state=walk, actions=chunks - walk[:, None])
    for dims, right, wrong in ((0, absolute, delta), (3, delta, absolute)):
        data = DataConfig(repo_id="f", delta_action_dims=dims, normalization=normalization)
        good = validate_before_training(make(dataset, data=data, norm_stats=right), np.arange(600), command="mend")
        assert not [w for w in good.warnings if "may belong to other data" in w]
        bad = validate_before_training(make(dataset, data=data, norm_stats=wrong), np.arange(600), command="mend")
        assert len([w for w in bad.warnings if w.startswith("actions") and "may belong to other data" in w]) == 3


def test_statistics_that_record_other_settings_are_refused(make):
    source = make()
    record = ComputedFor(
        dataset="fake",
        fingerprint=fingerprint(source.dataset.columns["observation.state"], source.dataset.columns["action"]),
        num_frames=8,
        action_horizon=4,
        delta_action_dims=0,
        state_key="observation.state",
        action_key="action",
    )
    stats = dataclasses.replace(unit_stats(), computed_for=record)
    good = validate_before_training(make(norm_stats=stats), np.arange(8), command="mend")
    assert not [w for w in good.warnings if "were computed for" in w]
    delta = DataConfig(repo_id="fake", delta_action_dims=2)
    with pytest.raises(UserError, match=r"--data.delta-action-dims=0, but this run uses 2.*mend"):
        validate_before_training(make(norm_stats=stats, data=delta), np.arange(8), command="mend")


def test_rows_of_episodes_go_by_the_datasets_own_numbers():
    dataset = FakeDataset(lengths=(2, 3, 1))
    dataset.episode_ids = np.array([0, 4, 7])
    assert rows_of_episodes(dataset, None).tolist() == [0, 1, 2, 3, 4, 5]
    assert rows_of_episodes(dataset, (7, 0)).tolist() == [0, 1, 5]
    for wrong in ((1,), ()):
        with pytest.raises(UserError, match=r"3 episodes, 0 to 7"):
            rows_of_episodes(dataset, wrong)


def test_a_file_says_which_frames_are_kept(tmp_path):
    dataset = FakeDataset(lengths=(2, 5, 3))
    dataset.episode_ids = np.array([0, 4, 7])
    file = tmp_path / "keep.json"

    def rows(content, episodes=None):
        file.write_text(content)
        return training_rows(dataset, episodes, str(file)).tolist()

    assert rows("{}") == list(range(10)) == training_rows(dataset, None, None).tolist()
    assert rows('{"4": [[3, 5], [0, 1]], "7": []}') == [0, 1, 2, 5, 6]
    assert rows('{"4": [[3, 5], [0, 1]]}', episodes=(7, 4)) == [2, 5, 6, 7, 8, 9]
    for content, message in {
        '{"4": [[3, 6]]}': r"episode 4 has frames 0 to 4, so \[3, 6\]",
        '{"4": [[3, 3]]}': r"is no range",
        '{"4": [[-1, 3]]}': r"is no range",
        '{"1": [[0, 1]]}': r"names episode 1, which",
        '{"4": [[0.5, 3]]}': r"0.5 is no frame number",
        '{"4": [3]}': r"episode number, then ranges",
        "[1]": r"episode number, then ranges",
        "{": r"is no list of frames",
        '{"0": [], "4": [], "7": []}': r"keeps none",
    }.items():
        with pytest.raises(UserError, match=message):
            rows(content)
    with pytest.raises(UserError, match="could not be read"):
        training_rows(dataset, None, str(tmp_path / "absent.json"))


def test_reached_rows_stop_at_the_episodes_end():
    assert reached_rows(np.array([0, 5, 8]), np.array([1, 4, 6]), 3).tolist() == [1, 2, 3, 4, 6, 7]
    assert reached_rows(np.array([0, 5, 8]), np.arange(8), 50).tolist() == list(range(8))


# Real datasets


def real(shared, repo, tokenizer_path, name, config, stats, **options):
    dataset = open_dataset(shared / "datasets" / name)
    mapping = resolve_mapping(config.data, dataset)
    tokenizer = PromptTokenizer(tokenizer_path, max_token_len=config.model.max_token_len, vocab_size=257152)
    return BatchSource(
        dataset=dataset, mapping=mapping, norm_stats=stats, tokenizer=tokenizer, model=config.model, data=config.data,
        **options,
    )  # fmt: skip


@pytest.mark.shared
def test_libero_with_the_published_statistics(shared, repo, tokenizer_path):
    config = get_preset("pi05_libero")
    stats = load_norm_stats(repo / "assets" / config.name / config.asset_id / "norm_stats.json", command="mend")
    source = real(shared, repo, tokenizer_path, "libero_shaped_v20", config, stats)
    expected = np.load(shared / "datasets" / "expected" / "libero_shaped_v20.npz")
    rows = expected["index"]
    batch = source.load_batch(rows)
    for ours, key, of_key in (
        (batch.observation.state, "state", stats.state),
        (batch.actions, "action", stats.actions),
    ):
        raw = expected[key].astype(np.float64)
        by_hand = (raw - of_key.q01) / (of_key.q99 - of_key.q01 + 1e-6) * 2 - 1
        np.testing.assert_array_equal(ours[..., : raw.shape[-1]], by_hand.astype(np.float32))
        assert not ours[..., raw.shape[-1] :].any()
    for slot, camera in (("base_0_rgb", "image"), ("left_wrist_0_rgb", "wrist_image")):
        first = expected[f"first_frame/{camera}"]
        np.testing.assert_array_equal(batch.observation.images[slot][0], resize_with_pad(first))
    assert [m.all() for m in batch.observation.image_masks.values()] == [True, True, False]
    for i, task in enumerate(expected["task"]):
        np.testing.assert_array_equal(batch.observation.tokenized_prompt[i], source.tokenizer.encode(str(task))[0])
    fast = real(
        shared, repo, tokenizer_path, "libero_shaped_v20", config, stats, skip_images=("auto",), only_consumed=True
    )
    short = fast.load_batch(rows[:4])
    assert list(short.observation.images) == ["base_0_rgb", "left_wrist_0_rgb"]
    np.testing.assert_array_equal(short.observation.images["base_0_rgb"], batch.observation.images["base_0_rgb"][:4])


@pytest.mark.shared
def test_recorded_demonstrations_through_key_mapping(shared, repo, tokenizer_path):
    preset = get_preset("pi05_lerobot")
    config = dataclasses.replace(preset, model=dataclasses.replace(preset.model, max_token_len=80))
    source = real(shared, repo, tokenizer_path, "robosuite_lift_v30", config, unit_stats(8, 7), only_consumed=True)
    expected = np.load(shared / "datasets" / "expected" / "robosuite_lift_v30.npz")
    at = [0, len(expected["index"]) - 1]
    batch = source.load_batch(expected["index"][at])
    np.testing.assert_allclose(
        source.restore_actions(batch.actions, expected["index"][at]), expected["action"][at], atol=1e-5
    )
    assert batch.observation.images["base_0_rgb"].mean() > 10
    first = resize_with_pad(expected["first_frame/observation.images.image"])
    np.testing.assert_array_equal(batch.observation.images["base_0_rgb"][0], first)


def test_bad_rows_are_left_out_on_request(make):
    dataset = FakeDataset((6, 4, 3), tasks=("lift", "", "open"))
    dataset.columns["observation.state"][1, 2] = np.nan
    dataset.columns["action"][5, 0] = np.inf  # the end of episode 0: chunks of 4 from frame 2 on reach it
    source = make(dataset)
    rows, lines = without_bad_rows(source, np.arange(13))
    assert rows.tolist() == [0, 10, 11, 12]
    assert [line.split(":")[0] for line in lines] == [
        "1 frames are left out, NaN or infinity in 'observation.state'",
        "4 frames are left out, NaN or infinity in 'action' within the chunk",
        "4 frames are left out, no task text",
    ]
    assert "episode 0 frame 1" in lines[0]
    source.load_batch(rows)
    dataset.columns["action"][:] = np.nan
    with pytest.raises(UserError, match="every frame is bad"):
        without_bad_rows(source, np.arange(13))
    clean = make(FakeDataset())
    assert without_bad_rows(clean, np.arange(8))[1] == []


def test_a_frame_of_another_shape_is_named(make):
    dataset = FakeDataset()
    dataset.frames = lambda camera, rows: [np.zeros((8, 8, 1), np.uint8) for _ in rows]
    dataset.frame_error = lambda camera, row, why: FrameError(dataset.root, row, 0, row, camera, why)
    with pytest.raises(FrameError, match=r"frame 2, camera .*three channels") as caught:
        make(dataset).load_batch(np.array([2]))
    assert caught.value.row == 2
