"""One process that joins and then waits for the others, started by the tests: python -m tests.distributed.waiter.

Its cluster comes from the environment. Rank 0 waits in a collective that no other process enters.
"""

import argparse
import os
import time

import jax
from jax.experimental import multihost_utils

from openpi_accel import cli
from openpi_accel.parallel.distributed import initialize


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--start-timeout-s", type=int, default=30)
    parser.add_argument("--heartbeat-timeout-s", type=int, default=30)
    args = parser.parse_args()
    initialize(os.environ, timeout_s=args.start_timeout_s, heartbeat_timeout_s=args.heartbeat_timeout_s)
    multihost_utils.sync_global_devices("all are here")
    print(f"joined as {jax.process_index()} of {jax.process_count()}", flush=True)
    if jax.process_index() == 0:
        multihost_utils.sync_global_devices("nobody else comes")
    time.sleep(600)


if __name__ == "__main__":
    cli.run(main)
