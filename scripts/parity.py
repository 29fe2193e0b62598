"""Compares this model with upstream's own numbers: python scripts/parity.py GOLDEN.npz [--only GROUP] [--json]."""

import argparse
import dataclasses
import json

import _entry
import jax

from openpi_accel.errors import UserError
from openpi_accel.tools.golden import load_golden
from openpi_accel.tools.parity import GROUPS, GroupResult, Parity


def main() -> int:
    """Prints one line per group; 1 when a group is out of tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("golden", nargs="+", help=".npz file of upstream's numbers; of several, later ones win")
    parser.add_argument("--only", action="append", choices=list(GROUPS), help="compare this group alone (repeatable)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="compute dtype; default: the golden's")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()

    # Upstream's random streams, and products that are float32 also where the device has a faster, coarser default.
    jax.config.update("jax_threefry_partitionable", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    golden = load_golden(args.golden)
    parity = Parity(golden, args.dtype)
    groups = args.only or list(GROUPS)
    if not args.json:
        print(
            f"{golden.name}: {'pi0.5' if parity.arch.pi05 else 'pi0'} in {parity.arch.dtype}, "
            f"upstream's in {golden.dtype}"
        )
        print(f"{'group':<15}{'status':<18}{'leaves':>6}  {'error':>9}  {'tolerance':>9}  worst leaf")
    results = []
    for group in groups:
        results.append(parity.run(group))
        if not args.json:
            print(_line(results[-1]), flush=True)
    if all(r.status == "absent" for r in results):
        raise UserError(f"{golden.name} holds none of the groups {', '.join(groups)}, so nothing was compared.")
    ok = all(r.status in ("ok", "absent") for r in results)
    if args.json:
        rows = [dataclasses.asdict(r) for r in results]
        print(json.dumps({"golden": golden.name, "dtype": parity.arch.dtype, "ok": ok, "groups": rows}))
    else:
        print("within tolerance" if ok else "OUT OF TOLERANCE")
    return 0 if ok else 1


def _line(r: GroupResult) -> str:
    if r.status == "absent":
        return f"{r.group:<15}{r.status:<18}"
    return f"{r.group:<15}{r.status:<18}{r.num_leaves:>6}  {r.error:>9.1e}  {r.tolerance:>9.1e}  {r.leaf}" + (
        f" ({r.num_by_slack} entries pass by the slack of Adam's first update)" if r.num_by_slack else ""
    )


if __name__ == "__main__":
    _entry.run(main)
