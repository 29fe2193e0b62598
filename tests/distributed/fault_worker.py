"""One process of a toy run to which things happen, started by the tests: python -m tests.distributed.fault_worker.

It writes FOLDER/held-RANK when it has come to where it is to be held; from there it does not go on.
"""

import argparse
import os
import pathlib
import resource
import time
from collections.abc import Iterator
from typing import Any

import jax

from openpi_accel import cli
from openpi_accel.errors import UserError
from openpi_accel.parallel import peers
from openpi_accel.parallel.distributed import initialize
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.train import guard, loop, watchdog
from openpi_accel.train.checkpoint import TextFiles, TextFilesHandler
from openpi_accel.train.preemption import Preemption
from tests.unit import toy

RAISED = {
    "corrupt": UserError("episode 3, frame 17 cannot be decoded"),
    "fault": KeyError("an unforeseen fault"),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("num_steps", type=int)
    parser.add_argument("--save-interval", type=int, default=5)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--at", type=int, default=8, help="the step at which it happens")
    parser.add_argument("--hold", choices=["data", "compile", "save"], help="stop there for good")
    parser.add_argument("--raise", choices=list(RAISED), dest="raised", help="what the loader raises")
    parser.add_argument("--full-disk", action="store_true", help="no file may grow")
    parser.add_argument("--slow-disk-s", type=float, help="seconds that this process's part of a save takes")
    parser.add_argument("--pace-s", type=float, default=0.0, help="seconds that each later batch takes")
    parser.add_argument("--grace-s", type=float, default=60.0)
    parser.add_argument("--exit-code", type=int, default=143)
    parser.add_argument("--heartbeat-timeout-s", type=int, default=10)
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_threefry_partitionable", True)
    initialize(os.environ, timeout_s=60, heartbeat_timeout_s=args.heartbeat_timeout_s)
    assert jax.device_count() == 2, jax.devices()
    watchdog.SLOW_S = 2.0
    guard.SILENT_S = watchdog.SILENT_S = 4.0
    guard._OWN_WORDS_S = 2.0

    def held() -> None:
        (args.folder / f"held-{jax.process_index()}").touch()
        time.sleep(600)

    def batches() -> Iterator[toy.Loaded]:
        first = 6 * toy.BATCH if args.resume else 0
        for loaded in toy.batches(first):
            if loaded.next_sample == (args.at + 1) * toy.BATCH:
                if args.hold == "data":
                    held()
                if args.raised:
                    raise RAISED[args.raised]
                if args.full_disk:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
            if loaded.next_sample > (args.at + 1) * toy.BATCH:
                time.sleep(args.pace_s)
            yield loaded

    if args.hold == "compile":
        loop.compile_ahead = lambda *_: held()  # type: ignore[assignment, return-value]
    if args.hold == "save" or args.slow_disk_s:
        save, slow_disk_s = TextFilesHandler.save, args.slow_disk_s

        def hold_save(self: TextFilesHandler, directory: Any, args: TextFiles) -> None:
            save(self, directory, args)
            if slow_disk_s:
                time.sleep(slow_disk_s)
            else:
                held()

        TextFilesHandler.save = hold_save  # type: ignore[method-assign]

    with guard.Guard(Preemption(args.grace_s, args.exit_code)) as watching:
        result, _ = toy.train(
            args.folder,
            args.num_steps,
            keep_period=5,
            resume=args.resume,
            mesh=make_mesh(2),  # so that each of them writes half of what is saved
            save_interval=args.save_interval,
            loader=batches(),
            guard=watching,
        )
    if result.unsaved:
        print(f"stopped: {result.unsaved}", flush=True)
    return result.exit_code


if __name__ == "__main__":
    cli.run(main, peers.end_process)
