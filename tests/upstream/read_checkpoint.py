"""Reads one of our checkpoints the way upstream's loader does, and compares it with what was to be stored.

Standalone, for upstream's own environment: Python 3.11 with jax 0.5.3, flax 0.10.2, orbax-checkpoint 0.11.13, numpy.

    python tests/upstream/read_checkpoint.py CHECKPOINT_STEP_FOLDER EXPECTED.npz

EXPECTED.npz holds params/<path> for params/, and optionally train_state/<path> for train_state/. Exit code 1 where
anything differs.
"""

import pathlib
import sys

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp


def read_params(folder):
    """params/ as numpy arrays by path, without the last key `value`."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder)
        item = {"params": metadata["params"]}
        restore_args = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(restore_type=np.ndarray), item)
        tree = checkpointer.restore(folder, ocp.args.PyTreeRestore(item=item, restore_args=restore_args))["params"]
    flat = flax.traverse_util.flatten_dict(tree)
    if all(path[-1] == "value" for path in flat):
        flat = {path[:-1]: leaf for path, leaf in flat.items()}
    return {"params/" + "/".join(path): leaf for path, leaf in flat.items()}


def read_train_state(run_folder, step, expected):
    """train_state/ through a CheckpointManager, as a resuming run reads it: a target tree decides what is read."""
    target = {}
    for name, leaf in expected.items():
        *parents, last = name.split("/")[1:]
        node = target
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = jnp.zeros(leaf.shape, leaf.dtype)
    target["opt_state"] = (None, (target["opt_state"]["1"]["0"], None, target["opt_state"]["1"]["2"]))
    target |= {"model_def": None, "ema_params": None}
    manager = ocp.CheckpointManager(
        run_folder,
        item_handlers={"params": ocp.PyTreeCheckpointHandler(), "train_state": ocp.PyTreeCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(max_to_keep=1, create=False),
    )
    assert step in manager.all_steps(), (step, manager.all_steps())
    restored = manager.restore(step, items={"train_state": target})["train_state"]
    flat, _ = jax.tree_util.tree_flatten_with_path(restored)
    return {"train_state/" + "/".join(str(key)[1:-1].strip("'") for key in path): leaf for path, leaf in flat}


def main(folder, expected_file):
    folder = pathlib.Path(folder).resolve()
    expected = dict(np.load(expected_file))
    got = read_params(folder / "params")
    train_state = {name: leaf for name, leaf in expected.items() if name.startswith("train_state/")}
    if train_state:
        got |= read_train_state(folder.parent, int(folder.name), train_state)
    faults = [f"only one of both has {name}" for name in sorted(set(got) ^ set(expected))]
    for name in sorted(set(got) & set(expected)):
        leaf = np.asarray(got[name])
        if leaf.dtype.name == "bfloat16":  # npz has no such type: stored as float32, exactly
            leaf = leaf.astype(np.float32)
        if leaf.shape != expected[name].shape or leaf.dtype != expected[name].dtype:
            faults.append(f"{name}: {leaf.dtype} {leaf.shape}, expected {expected[name].dtype} {expected[name].shape}")
        elif not np.array_equal(leaf, expected[name]):
            faults.append(f"{name}: differs by up to {np.abs(leaf - expected[name]).max()}")
    stats = list((folder / "assets").rglob("norm_stats.json"))
    if not stats:
        faults.append(f"{folder}/assets holds no norm_stats.json")
    print(f"jax {jax.__version__}, orbax {ocp.__version__}: {len(got)} arrays, {len(stats)} norm_stats.json")
    print(f"{len(faults)} faults")
    for fault in faults:
        print("  " + fault)
    return 1 if faults or not expected else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
