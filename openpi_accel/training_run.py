"""One training run from configuration to the last checkpoint; what scripts/train.py and scripts/demo.py call."""

import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from openpi_accel.build.data import Data, build_data
from openpi_accel.build.files import base_weights, require_files
from openpi_accel.build.mixture import Mixture, build_mixture
from openpi_accel.build.training import Training, build_training
from openpi_accel.build.validation import build_validation
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.resumed import changed_options, with_absolute_paths
from openpi_accel.config.schema import TrainConfig
from openpi_accel.config.serialize import CONFIG_FILE, ENVIRONMENT_FILE, to_json
from openpi_accel.errors import UserError
from openpi_accel.models.freeze import format_counts
from openpi_accel.models.weights import WeightsReport, base_weights_fingerprint
from openpi_accel.parallel.exchange import together
from openpi_accel.parallel.mesh import check_batch_size, make_mesh
from openpi_accel.parallel.same_program import check_same, check_start, config_fields
from openpi_accel.parallel.shared_storage import check_shared_storage
from openpi_accel.train.checkpoint import CheckpointStore, Position, check_settings
from openpi_accel.train.disk_space import check_disk_space
from openpi_accel.train.guard import Guard
from openpi_accel.train.host_memory import made_for_saves
from openpi_accel.train.loop import RunResult, StepByStructure, abstract_batch, compile_ahead, run
from openpi_accel.train.memory import device_limit, require_memory, step_memory
from openpi_accel.train.metrics import MetricsWriter, WandbSettings
from openpi_accel.train.preemption import Preemption
from openpi_accel.train.prefetch import LoadedBatch
from openpi_accel.train.run_folder import (
    committed_steps,
    discard_replaced,
    discard_start,
    find_checkpoint,
    prepare_run_folder,
    replaced_folder,
    restore_replaced,
    surroundings,
)
from openpi_accel.train.watch import LoopConfig
from openpi_accel.train.watchdog import COMPILE
from openpi_accel.types import TrainState

_LESS_MEMORY = (
    "--remat.gemma full --remat.siglip full",
    "adapters: --model.paligemma-variant gemma_2b_lora --model.action-expert-variant gemma_300m_lora --ema-decay None",
)


def run_folder_of(config: TrainConfig) -> pathlib.Path:
    """<checkpoint-base-dir>/<config>/<exp_name>.

    Raises:
        UserError: no exp_name, or one that is no plain folder name.
    """
    name = config.exp_name
    if not name:
        raise UserError(
            "--exp-name is missing: the run needs a name, for example --exp-name=first_try (launchers: EXP_NAME)."
        )
    if name in (".", "..") or pathlib.PurePath(name).name != name:
        raise UserError(
            f"--exp-name {name!r} is no plain folder name. Leave out slashes, for example --exp-name=first_try."
        )
    return pathlib.Path(config.checkpoint_base_dir).expanduser() / config.name / name


def train(config: TrainConfig, acceleration: Acceleration, environment: Environment) -> RunResult:
    """Trains; on return every started save is complete.

    Where there are several processes and this one fails, the others are told and end too; it must then be ended by
    `peers.end_process`.

    Raises:
        UserError: anything that the user can mend. An older run that is overwritten is gone only once the new one has
            saved its first checkpoint.
        OtherProcessEnded: another process has ended.
    """
    with Guard(Preemption(config.grace_s, config.preempt_exit_code)) as guard:
        return _train(config, acceleration, environment, guard)


def _train(config: TrainConfig, acceleration: Acceleration, environment: Environment, guard: Guard) -> RunResult:
    main_process = jax.process_index() == 0
    say: Callable[..., None] = print if main_process else _silent
    check_start(config, acceleration)
    folder = run_folder_of(config)
    check_shared_storage(folder.parents[1], config.shared_storage_timeout_s)
    resume_from = find_checkpoint(
        folder, resume=config.resume, overwrite=config.overwrite, timeout_s=config.shared_storage_timeout_s
    )
    guard.committed = lambda: resume_from
    if resume_from is not None and resume_from + 1 >= config.num_train_steps:
        say(
            f"nothing left to train: {folder} has all of its {resume_from + 1} steps (--num-train-steps is "
            f"{config.num_train_steps}; raise it to go on)."
        )
        return RunResult(state=None, next_step=resume_from + 1, exit_code=0)
    mesh = make_mesh(config.fsdp_devices)
    check_batch_size(config.batch_size, mesh.size, jax.process_count())

    def find_and_open() -> Data | Mixture:
        if config.data.mixture is None:  # the parts of a mixture are looked at one by one
            require_files(config, environment, weights=resume_from is None)
        local = _with_local_weights(config, environment) if resume_from is None else config
        build = build_data if local.data.mixture is None else build_mixture
        opened = build(local, acceleration, environment)
        opened.loader().close()  # a batch that the data cannot fill shows here, and not after compiling
        return opened

    data = together(find_and_open)
    config, meaning = data.config, _meaning(data)
    check_same(_contents(data, meaning, resumed=resume_from is not None))
    _describe_data(data, say)
    training = build_training(config, acceleration, mesh)
    say(format_counts(training.counts))
    for note in training.notes:
        say(note)
    no_room = check_disk_space(
        folder,
        training.abstract,
        _loop_config(config),
        resume_from=resume_from,
        overwrite=config.overwrite,
        keep_period=config.keep_period,
    )
    if no_room:
        say(f"warning: {no_room}")
    settings = {**training.settings, **meaning}
    if resume_from is not None:
        check_settings(folder / str(resume_from), settings)
    with made_for_saves(training.abstract):
        with guard.clock.doing(COMPILE):
            step = _compile(config, data, training, mesh, say)
        fresh: TrainState | None = None
        if resume_from is None:
            fresh, weights = training.fresh_state()
            say(_describe_weights(weights, config))
    older = committed_steps(folder) if config.overwrite else []
    prepare_run_folder(folder, resume=config.resume, overwrite=config.overwrite)
    if older:
        say(
            f"{folder} held another run (last checkpoint: {older[-1]}). It lies in {replaced_folder(folder)} and is "
            "deleted once this one has saved a checkpoint. To go on with it instead, stop this one, then: "
            f"rm -r {folder} && mv {replaced_folder(folder)} {folder}"
        )
    if config.resume and resume_from is None:
        say(f"{folder} holds no checkpoint yet; its run starts again")
    store = CheckpointStore(
        folder,
        keep_period=config.keep_period,
        assets={f"{part.config.asset_id}/norm_stats.json": part.norm_stats_text for part in data.datasets},
        settings=settings,
    )
    try:
        try:
            state, position = fresh, None
            if resume_from is not None:
                state, position = store.restore(resume_from, training.abstract)
                by = f", with the options in its {CONFIG_FILE}" if (folder / CONFIG_FILE).is_file() else ""
                say(f"resumed {folder} after step {resume_from}{by}")
                if changed := changed_options(folder / CONFIG_FILE, config):
                    say(f"  but for: {', '.join(changed)}")
            assert state is not None
            if main_process:
                started = dataclasses.replace(with_absolute_paths(config), resume=False, overwrite=False)
                _write_aside(folder / CONFIG_FILE, to_json(started))
                _write_aside(folder / ENVIRONMENT_FILE, json.dumps(surroundings(acceleration), indent=2) + "\n")
            return _run(config, data, training, step, mesh, store, state, position, folder, guard)
        finally:
            store.close()
    except BaseException:
        if restore_replaced(folder):
            print(f"the run that was to be overwritten is back in {folder}", flush=True)
        elif not config.resume:
            discard_start(folder)
        raise


def _with_local_weights(config: TrainConfig, environment: Environment) -> TrainConfig:
    """The config with the folder of its base weights, which must be there."""
    found = base_weights(config, environment)
    if found is None:
        return config
    return dataclasses.replace(config, weight_loader=dataclasses.replace(config.weight_loader, params_path=str(found)))


def _meaning(data: Data | Mixture) -> dict[str, Any]:
    """What the numbers of a batch mean: a run that is resumed with another meaning would unlearn in silence."""
    model = dataclasses.asdict(data.config.model)
    del model["max_token_len"]  # padding only
    shared = {"model": model, "loss": dataclasses.asdict(data.config.loss)}
    if isinstance(data, Data):
        return shared | _meaning_of(data)
    parts = {name: _meaning_of(part) for name, part in zip(data.names, data.datasets, strict=True)}
    return shared | {"mixture": data.meaning(), "parts": parts}


def _meaning_of(data: Data) -> dict[str, Any]:
    kept = ("normalization", "delta_action_dims", "cameras", "state_key", "action_key", "default_prompt", "episodes")
    chosen = dataclasses.asdict(data.config.data)
    statistics = json.dumps(json.loads(data.norm_stats_text)["norm_stats"], sort_keys=True)
    return {
        "data": {name: chosen[name] for name in (*kept, "val_fraction")},
        "dataset": data.source.dataset.fingerprint(),
        "kept_frames": hashlib.sha256(data.rows.tobytes()).hexdigest() if data.config.data.keep_frames else None,
        "norm_stats": hashlib.sha256(statistics.encode()).hexdigest(),
    }


def _contents(data: Data | Mixture, meaning: Mapping[str, Any], *, resumed: bool) -> dict[str, Any]:
    """What the files of this node hold and the data have decided, to be the same on every node."""
    weights = None if resumed else data.config.weight_loader.params_path
    if isinstance(data, Data):
        contents = _contents_of(data, meaning)
    else:
        contents = {"mixture": meaning["mixture"]}
        for name, part in zip(data.names, data.datasets, strict=True):
            of_part = {"options": meaning["parts"][name]["data"]} | _contents_of(part, meaning["parts"][name])
            contents |= {f"{field} of part {name}": value for field, value in of_part.items()}
    return {
        **contents,
        "tokenizer": data.datasets[0].source.tokenizer.fingerprint(),
        "base weights": None if weights is None else base_weights_fingerprint(pathlib.Path(weights)),
        **config_fields(data.config),
    }


def _contents_of(data: Data, meaning: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "dataset": meaning["dataset"],
        "frames in use": hashlib.sha256(data.rows.tobytes() + b"|" + data.val_rows.tobytes()).hexdigest(),
        "norm statistics": meaning["norm_stats"],
    }


def _compile(
    config: TrainConfig, data: Data | Mixture, training: Training, mesh: jax.sharding.Mesh, say: Callable[..., None]
) -> jax.stages.Compiled | StepByStructure:
    """The step, which fits the devices, for every set of cameras that batches have; compiled before weights are loaded,
    so that no time is lost on one that does not, and so that no figure of speed counts it."""
    steps = []
    for first in together(data.first_batches):
        batch = abstract_batch(first, config.batch_size, mesh)
        started_s = time.perf_counter()
        step = compile_ahead(training.step, mesh, training.abstract, batch, training.train_rng)
        need = step_memory(step)
        say(
            f"step compiled in {time.perf_counter() - started_s:.1f} s"
            + (f"; it needs {need}" if need is not None else "")
            + (f" (batches with {', '.join(first.observation.images)})" if isinstance(data, Mixture) else "")
        )
        if need is not None:
            require_memory(
                need,
                device_limit(jax.local_devices()[0]),
                batch_size=config.batch_size,
                num_microbatches=config.num_microbatches,
                fsdp_devices=config.fsdp_devices,
                num_devices=mesh.size,
                further=(*_LESS_MEMORY, f"a setting that python scripts/plan.py {config.name} finds for this card"),
            )
        steps.append((batch, step))
    return steps[0][1] if len(steps) == 1 else StepByStructure(steps)


def _loop_config(config: TrainConfig) -> LoopConfig:
    return LoopConfig(
        num_train_steps=config.num_train_steps,
        batch_size=config.batch_size,
        log_interval=config.log_interval,
        save_interval=config.save_interval,
    )


def _run(
    config: TrainConfig,
    data: Data | Mixture,
    training: Training,
    step: jax.stages.Compiled | StepByStructure,
    mesh: jax.sharding.Mesh,
    store: CheckpointStore,
    state: TrainState,
    position: Position | None,
    folder: pathlib.Path,
    guard: Guard,
) -> RunResult:
    first_step = int(state.step)
    next_sample = first_step * config.batch_size
    if position is not None and position.next_sample is not None:
        next_sample = position.next_sample
    wandb = WandbSettings(project=config.project_name, name=config.exp_name, config=json.loads(to_json(config)))
    metrics = MetricsWriter(
        folder,
        resume_step=first_step,
        wandb=wandb if config.wandb_enabled else None,
        enabled=jax.process_index() == 0,
    )

    def save_pictures(loaded: LoadedBatch) -> None:
        images = {data.camera_name(slot): np.asarray(image) for slot, image in loaded.batch.observation.images.items()}
        # This process's share is the first part of the ids where pictures are written, in process 0.
        metrics.save_images(images, data.captions(loaded.sample_ids[: len(loaded.batch.actions)], loader.skipped))

    skipped = {int(sample): why for sample, why in position.skipped} if position is not None else {}
    with data.loader(start_sample=next_sample, skipped=skipped) as loader:
        try:
            return run(
                step,
                state,
                training.train_rng,
                loader,
                _loop_config(config),
                mesh,
                store,
                metrics,
                position=position,
                on_first_batch=save_pictures,
                on_saved=lambda: discard_replaced(folder),
                rows_of=data.rows_of,
                validation=build_validation(data, mesh),
                skipped=lambda: sorted(dict(loader.skipped).items()),  # a copy: its thread goes on
                show=jax.process_index() == 0,
                guard=guard,
            )
        finally:
            metrics.close()
            if loader.skipped and jax.process_index() == 0:
                print(f"{len(loader.skipped)} damaged samples were left out; the checkpoint's resume.json lists them")


def _describe_data(data: Data | Mixture, say: Callable[..., None]) -> None:
    for part in data.datasets:
        _describe_dataset(part, say)
    if isinstance(data, Mixture):
        say(f"mixture: {data.config.data.mixture}")
        for line in data.shares():
            say(f"  {line}")
    say(f"devices: {jax.device_count()} x {jax.devices()[0].device_kind}, processes: {jax.process_count()}")


def _describe_dataset(data: Data, say: Callable[..., None]) -> None:
    dataset, config, report = data.source.dataset, data.config, data.report
    say(
        f"dataset: {dataset.root} (LeRobot {dataset.version}, {dataset.num_episodes} episodes, "
        f"{report.num_frames} frames in use, {dataset.fps:g} fps)"
    )
    say(f"  {dataset.memory}")
    if len(data.val_rows):
        held_out = len(np.unique(dataset.episode_of(data.val_rows)))
        say(f"  {held_out} episodes ({len(data.val_rows)} frames) are held out for the validation loss")
    for note in data.source.mapping.notes:
        say(f"  {note}")
    feeds = config.data.cameras.as_dict()
    cameras = ", ".join(f"{slot} <- {feeds.get(slot, 'nothing (masked)')}" for slot in data.source.slots)
    say(f"cameras: {cameras}")
    say(
        f"prompts: {report.num_prompts} different, the longest takes {report.longest_prompt} of "
        f"{config.model.max_token_len} tokens"
    )
    for warning in report.warnings:
        say(f"warning: {warning}")


def _describe_weights(report: WeightsReport | None, config: TrainConfig) -> str:
    if report is None:
        return "weights: fresh (--weight-loader.params-path is None)"
    lines = [f"weights: {len(report.loaded)} leaves from {config.weight_loader.params_path}"]
    for what, names in (
        ("fresh, missing there", report.missing),
        ("left out, unknown to the model", report.unexpected),
    ):
        if names:
            lines += [f"  {what}:", *(f"    {name}" for name in names)]
    return "\n".join(lines)


def _write_aside(path: pathlib.Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text)
    os.replace(aside, path)


def _silent(*_: object) -> None:
    """Only the first process speaks."""
