"""Statistics: the file format, normalising, and exact values."""

import dataclasses
import json
import re

import numpy as np
import pytest

from openpi_accel.data.norm_stats import (
    ComputedFor,
    NormStats,
    Statistics,
    check_computed_for,
    load_norm_stats,
    narrow_range_warnings,
    normalize,
    save_norm_stats,
    unnormalize,
    with_min_range,
)
from openpi_accel.data.statistics import action_statistics, fingerprint, moments, state_statistics, weighted_moments
from openpi_accel.errors import UserError
from tests.data_fakes import unit_stats

RECORD = ComputedFor(
    dataset="d",
    fingerprint="f",
    num_frames=9,
    action_horizon=10,
    delta_action_dims=6,
    state_key="state",
    action_key="actions",
)


def of(values):
    values = np.asarray(values, np.float64)
    return Statistics(mean=values, std=np.abs(values) + 0.5, q01=values - 1, q99=values + 3)


# The file


def test_round_trip_is_exact_and_upstream_reads_the_same_keys(tmp_path):
    stats = NormStats(state=of([0.1, 1 / 3]), actions=of([np.pi]), computed_for=RECORD)
    path = tmp_path / "a" / "norm_stats.json"
    save_norm_stats(path, stats)
    content = json.loads(path.read_text())
    assert set(content["norm_stats"]) == {"state", "actions"}
    assert set(content["norm_stats"]["state"]) == {"mean", "std", "q01", "q99"}
    loaded = load_norm_stats(path, command="mend")
    assert loaded.computed_for == RECORD
    for key in ("state", "actions"):
        for name in ("mean", "std", "q01", "q99"):
            np.testing.assert_array_equal(getattr(getattr(loaded, key), name), getattr(getattr(stats, key), name))
    assert [p.name for p in path.parent.iterdir()] == ["norm_stats.json"]


def test_the_published_file_is_shipped_and_read(repo):
    path = repo / "assets" / "pi05_libero" / "physical-intelligence" / "libero" / "norm_stats.json"
    stats = load_norm_stats(path, command="mend")
    assert stats.computed_for is None
    assert stats.state.mean.shape == (8,) and stats.actions.q99.shape == (7,)
    assert stats.actions.q99[6] == 0.9996 and stats.state.mean[0] == -0.046515364199876785
    assert narrow_range_warnings(stats, "quantile", command="again") == []


@pytest.mark.shared
def test_the_shipped_file_is_the_published_one(repo, shared):
    ours = repo / "assets" / "pi05_libero" / "physical-intelligence" / "libero" / "norm_stats.json"
    assert json.loads(ours.read_text()) == json.loads((shared / "libero" / "pi05_libero_norm_stats.json").read_text())


def test_a_file_with_more_than_we_know_is_read(tmp_path):
    key = {"mean": [0, 1], "std": [1, 1], "q01": None, "q99": None, "count": 3}
    record = dataclasses.asdict(RECORD) | {"later": 1}
    path = tmp_path / "norm_stats.json"
    path.write_text(json.dumps({"norm_stats": {"state": key, "actions": key, "other": {}}, "computed_for": record}))
    stats = load_norm_stats(path, command="mend")
    assert stats.state.q01 is None and stats.computed_for == RECORD
    with pytest.raises(UserError, match=r"no q01 and q99"):
        normalize(np.zeros(2), stats.state, "quantile")


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"norm_stats": {"state": {"mean": [1], "std": [1]}}}', '{"norm_stats": 3}']
    + [
        json.dumps({"norm_stats": dict.fromkeys(("state", "actions"), bad)})
        for bad in (
            {"mean": [1.0]},
            {"mean": [1.0], "std": [1.0, 2.0]},
            {"mean": [float("nan")], "std": [1.0]},
            {"mean": [[1.0]], "std": [[1.0]]},
            {"mean": ["a"], "std": [1.0]},
        )
    ],
)
def test_what_is_no_statistics_file_is_refused_with_the_command(tmp_path, text):
    path = tmp_path / "norm_stats.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"mend$"):
        load_norm_stats(path, command="mend")


def test_a_missing_file_names_the_command(tmp_path):
    with pytest.raises(UserError, match=r"(?s)no normalisation statistics at .*norm_stats.json.* mend$"):
        load_norm_stats(tmp_path / "norm_stats.json", command="mend")


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "norm_stats.json"
    save_norm_stats(path, unit_stats())
    before = path.read_text()
    with pytest.raises(ValueError):
        save_norm_stats(path, NormStats(state=of([np.nan]), actions=of([0.0])))
    assert path.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["norm_stats.json"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "norm_stats.json"
    save_norm_stats(path, unit_stats())
    before = path.read_text()
    with path.open() as reader:
        save_norm_stats(path, unit_stats(state_dim=2))
        assert reader.read() == before  # the old file was replaced, not written over
    assert path.read_text() != before


# Normalising


def test_quantile_and_zscore_are_upstreams_formulas_in_float64():
    stats = of([1.0, -2.0, 5.0])
    x = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    quantile = normalize(x, stats, "quantile")
    assert quantile.dtype == np.float64
    np.testing.assert_array_equal(quantile, (x - stats.q01[:2]) / (stats.q99[:2] - stats.q01[:2] + 1e-6) * 2.0 - 1.0)
    np.testing.assert_array_equal(normalize(x, stats, "zscore"), (x - stats.mean[:2]) / (stats.std[:2] + 1e-6))


@pytest.mark.parametrize("how", ["quantile", "zscore"])
def test_unnormalize_is_the_inverse(how):
    x = np.random.default_rng(0).normal(size=(3, 4, 2))
    np.testing.assert_allclose(unnormalize(normalize(x, of([1.0, -2.0]), how), of([1.0, -2.0]), how), x, atol=1e-13)


def test_statistics_shorter_than_the_data_are_refused():
    with pytest.raises(UserError, match=r"2 dimensions, but the data has 3"):
        normalize(np.zeros((1, 3)), of([0.0, 1.0]), "zscore")


# What they were computed for (user report 7)


def test_absolute_statistics_with_delta_actions_are_refused():
    stats = dataclasses.replace(unit_stats(), computed_for=RECORD)
    assert check_computed_for(stats, RECORD, command="mend") == []
    with pytest.raises(UserError, match=r"--data.delta-action-dims=6, but this run uses 0.*mend"):
        check_computed_for(stats, dataclasses.replace(RECORD, delta_action_dims=0), command="mend")
    warnings = check_computed_for(
        stats, dataclasses.replace(RECORD, action_horizon=50, fingerprint="g"), command="mend"
    )
    assert len(warnings) == 2 and "action_horizon 10, this run uses 50" in warnings[0] and "mend" in warnings[1]
    assert check_computed_for(unit_stats(), RECORD, command="mend") == []


def test_a_nearly_constant_dimension_is_named_with_its_range():
    values = np.array([[1.0, 0.001], [-1.0, -0.001]] * 50)
    narrow = state_statistics(values, np.arange(100))
    for how in ("quantile", "zscore"):
        (warning,) = narrow_range_warnings(NormStats(state=narrow, actions=of([1.0])), how, command="again")
        assert "state dimension 1" in warning and "again --min-state-range 1" in warning
        assert ("0.002" if how == "quantile" else "0.00465") in warning


@pytest.mark.parametrize("how", ["quantile", "zscore"])
def test_the_warning_of_a_constant_dimension_says_what_normalising_makes_of_it(how):
    values = np.full((100, 2), 0.7, np.float32)
    values[:, 1] = np.linspace(-1, 1, 100)
    stats = state_statistics(values, np.arange(100))
    constant = 0.7 if how == "quantile" else stats.mean[0]
    assert normalize(values[:1], stats, how)[0, 0] == pytest.approx(-1 if how == "quantile" else 0, abs=1e-6)
    off = normalize(np.array([[constant + 0.01, 0]]), stats, how)[0, 0]
    (warning,) = narrow_range_warnings(NormStats(state=of([1.0]), actions=stats), how, command="again")
    assert warning.startswith("actions dimension 0 is constant (0.7 in every frame): it becomes ")
    said = float(re.search(r"differs by 0.01 in other data becomes (\S+)\. Put", warning)[1])
    assert said == pytest.approx(off, rel=0.05) and said > 9000
    assert warning.endswith("Put a floor under it: again --min-action-range 1")
    floored = with_min_range(stats, 1.0)
    assert abs(normalize(np.array([[constant + 0.01, 0]]), floored, how)[0, 0]) < 0.1


def test_a_dimension_that_seldom_moves_is_not_called_constant():
    values = np.zeros((1000, 1))
    values[500:505] = 1.0  # a gripper that closes in half a percent of the frames: both quantiles are 0
    stats = state_statistics(values, np.arange(1000))
    assert normalize(values, stats, "quantile").max() > 1e6
    (warning,) = narrow_range_warnings(NormStats(state=of([1.0]), actions=stats), "quantile", command="again")
    assert "nearly constant: its range" in warning and "is 0 (below 0.01)" in warning and "rules the loss" in warning


def test_the_floor_widens_around_the_middle():
    stats = Statistics(mean=np.array([5.0, 0]), std=np.array([0.0, 2]), q01=np.array([4.9, -3]), q99=np.array([5.0, 3]))
    floored = with_min_range(stats, 1.0)
    np.testing.assert_allclose(floored.q99 - floored.q01, [1.0, 6.0])
    np.testing.assert_allclose(floored.q01 + floored.q99, [9.9, 0.0])
    assert floored.std[1] == 2 and 0.2 < floored.std[0] < 0.22
    assert narrow_range_warnings(NormStats(state=floored, actions=floored), "quantile", command="again") == []


# Exact values


@pytest.mark.shared
@pytest.mark.parametrize("name", ["gauss", "skew"])
def test_golden_mean_and_std(shared, name):
    golden = np.load(shared / "goldens" / "norm_stats.npz")
    x = golden[f"{name}/x"].reshape(-1, 7)
    stats = state_statistics(x, np.arange(len(x)))
    # The reference was taken before x was rounded to the float32 of the file: 6e-8 / sqrt(12800 values) remains.
    np.testing.assert_allclose(stats.mean, golden[f"{name}/mean"], rtol=2e-9)
    np.testing.assert_allclose(stats.std, golden[f"{name}/std"], rtol=2e-9)
    np.testing.assert_allclose(stats.mean, x.astype(np.float64).mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(stats.std, x.astype(np.float64).std(axis=0), rtol=1e-13)
    np.testing.assert_array_equal(stats.q01, np.quantile(x.astype(np.float64), 0.01, axis=0))
    # Upstream's histogram has 5000 bins over the range and loses counts as it grows; ours is near it, not at it.
    spread = np.ptp(x, axis=0)
    np.testing.assert_allclose(stats.q99, golden[f"{name}/upstream_q99"], atol=0.05 * spread.max())


@pytest.mark.parametrize("seed", range(20))
def test_weighted_equals_the_repeated_multiset(seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=rng.integers(1, 300)).astype(np.float32).round(int(rng.integers(1, 6)))
    weights = rng.integers(0, 12, len(values))
    weights[0] = 1
    repeated = np.repeat(values, weights).astype(np.float64)
    expected = [repeated.mean(), repeated.std(), *np.quantile(repeated, [0.01, 0.99])]
    np.testing.assert_allclose(weighted_moments(values, weights), expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(weighted_moments(values, weights)[2:], expected[2:])
    np.testing.assert_allclose(moments(repeated.copy()), expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(moments(repeated.copy())[2:], expected[2:])


def test_quantiles_survive_a_growing_range():
    # User report 5: a histogram that is rebinned when the range grows loses the first counts.
    values = np.array([0.0] * 99 + [1.0] + [2.0])
    assert moments(values.copy())[2:] == tuple(np.quantile(values, [0.01, 0.99]))
    assert moments(values.copy())[3] == 1.0


def test_std_survives_an_offset():
    # User report 6: E[x^2] - E[x]^2 in float32 gives 0 here.
    x = np.random.default_rng(0).normal(10, 0.001, 10_000).astype(np.float32)
    assert moments(x.copy())[1] == pytest.approx(0.001, rel=0.02)
    assert weighted_moments(x, np.ones(len(x), np.int64))[1] == pytest.approx(x.astype(np.float64).std(), rel=1e-12)


@pytest.mark.parametrize("delta_dims", [0, 2, 3])
@pytest.mark.parametrize("horizon", [1, 4, 50])
@pytest.mark.parametrize("subset", [False, True])
def test_action_statistics_are_those_of_the_written_out_chunks(delta_dims, horizon, subset):
    rng = np.random.default_rng(0)
    starts = np.array([0, 5, 6, 20])
    state, actions = rng.normal(size=(20, 4)).astype(np.float32), rng.normal(size=(20, 3)).astype(np.float32)
    rows = np.array([0, 4, 5, 7, 19]) if subset else np.arange(20)
    last = starts[np.searchsorted(starts, rows, side="right")] - 1
    chunks = actions[np.minimum(rows[:, None] + np.arange(horizon), last[:, None])]
    chunks[..., :delta_dims] -= state[rows, None, :delta_dims]
    flat = chunks.reshape(-1, 3).astype(np.float64)
    ours = action_statistics(actions, state, rows, starts, horizon=horizon, delta_dims=delta_dims, num_threads=2)
    np.testing.assert_allclose(ours.mean, flat.mean(axis=0), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(ours.std, flat.std(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(ours.q01, np.quantile(flat, 0.01, axis=0))
    np.testing.assert_array_equal(ours.q99, np.quantile(flat, 0.99, axis=0))


def test_the_fingerprint_follows_every_number():
    state, actions = np.zeros((4, 2), np.float32), np.zeros((4, 3), np.float32)
    changed = actions.copy()
    changed[3, 2] = 1e-3
    assert fingerprint(state, actions) == fingerprint(state.copy(), actions.copy())
    assert len({fingerprint(state, actions), fingerprint(state, changed), fingerprint(state[:2], actions)}) == 3
