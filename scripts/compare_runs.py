"""Compares two runs step by step: python scripts/compare_runs.py FOLDER FOLDER [--max-mean-difference X] [--json].

Exit code 1 where the learning rates differ or the mean loss difference is not below X.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import _entry

from openpi_accel.tools.compare_runs import compare_runs


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs=2, type=pathlib.Path)
    parser.add_argument("--max-mean-difference", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = compare_runs(*arguments.folders)
    failures = result.failures(arguments.max_mean_difference)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(result) | {"failures": failures}))
    else:
        for name, value in dataclasses.asdict(result).items():
            print(f"{name:<20} {value}")
        print("\n".join(f"FAILED: {failure}" for failure in failures) or "within the contract")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    _entry.run(main)
