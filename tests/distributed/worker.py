"""One process of a toy run, started by the tests: python -m tests.distributed.worker FOLDER STEPS [options].

Its cluster comes from MASTER_ADDR and the like.
"""

import argparse
import functools
import json
import os
import pathlib
import sys
import time

import jax
import numpy as np

from openpi_accel.orbax_tree import by_path
from openpi_accel.parallel import sharding
from openpi_accel.parallel.distributed import initialize
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.train.checkpoint import TextFiles, TextFilesHandler
from tests.unit import toy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("num_steps", type=int)
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of this process")
    parser.add_argument("--expect-devices", type=int, required=True, help="of all processes")
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--save-interval", type=int, default=1000)
    parser.add_argument("--hang-in-save", type=int, help="never finish the save of this step; write FOLDER/hanging")
    parser.add_argument("--dump", type=pathlib.Path, help="npz of this process's copy of the final state")
    parser.add_argument("--shares", type=pathlib.Path, help="read by rows; FILE gets a line per batch: [first, rows]")
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_threefry_partitionable", True)
    initialize(os.environ, timeout_s=60)
    assert jax.device_count() == args.expect_devices, jax.devices()

    hanging, folder = args.hang_in_save, args.folder
    if hanging is not None:
        save = TextFilesHandler.save

        def hang(self: TextFilesHandler, directory: object, args: TextFiles) -> None:
            save(self, directory, args)  # type: ignore[arg-type]
            if f"/{hanging}." in str(directory):
                (folder / "hanging").touch()
                time.sleep(600)

        TextFilesHandler.save = hang  # type: ignore[method-assign]

    def note(first: int, rows: np.ndarray) -> None:
        with args.shares.open("a") as file:
            print(json.dumps([first, rows.tolist()]), file=file)

    result, step = toy.train(
        args.folder,
        args.num_steps,
        resume=args.resume,
        mesh=make_mesh(args.fsdp),
        save_interval=args.save_interval,
        loader=functools.partial(toy.loaded_by_rows, note=note) if args.shares else None,
    )
    assert isinstance(step, jax.stages.Compiled)  # which traces no other program
    if args.dump:
        everywhere = jax.jit(lambda s: s, out_shardings=sharding.replicated(make_mesh(args.fsdp)))(result.state)
        np.savez(args.dump, **{name: np.asarray(leaf) for name, leaf in by_path(everywhere).items()})
    sys.exit(result.exit_code)


if __name__ == "__main__":
    main()
