"""Predicts step time, efficiency and memory on many GPUs. Nothing runs on a GPU, and none needs to be there.

From a step measured on one GPU, the bytes that the sharded step sends, link rates, and NCCL's table of latencies.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import TrainConfig
from openpi_accel.errors import UserError
from openpi_accel.tools.scaling.network import Links
from openpi_accel.tools.scaling.plan import Assumptions, OneGpu, Prediction, predict

# pi05_libero with 28 prompt tokens and 2 cameras on one H200 (docs/performance.md). off: upstream's arithmetic. opt:
# what run_opt.sh turns on; its memory is that of the first version, the last one's was not read.
PROFILES = {
    "off": OneGpu(batch_size=32, step_ms=665.4, peak_gib=65.8),
    "opt": OneGpu(batch_size=48, step_ms=707.8, peak_gib=108.7),
}
_VISION_PASSES = {"off": 2, "opt": 1}
_PROMPT_TOKENS = 28
_ITEMSIZES = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A weak-scaling result of others, per cent of one node's samples per second and GPU."""

    nodes: int
    gpus_per_node: int
    percent: float


# Of pi0.5 on nodes of 8 GPUs. Which GPUs, batch and network they had was not told with them.
PUBLISHED = (
    Published(nodes=2, gpus_per_node=8, percent=96.9),
    Published(nodes=32, gpus_per_node=8, percent=91.2),
)


def main(argv: Sequence[str]) -> None:
    """Prints a table, or JSON."""
    args = _parse(argv)
    config = get_preset(args.config)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, max_token_len=_PROMPT_TOKENS))
    if args.published:
        rows = compare_published(config, Links(nvlink_gb_s=args.nvlink_gb_s, network_gb_s=args.network_gb_s))
        print(json.dumps(rows) if args.json else _markdown(rows))
        return
    one, assumptions = _one_gpu(args), _assumptions(args)
    predictions = predict(
        config,
        one,
        assumptions,
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        fsdp_devices=args.fsdp_devices,
    )
    if args.json:
        content = {
            "one_gpu": dataclasses.asdict(one),
            "assumptions": dataclasses.asdict(assumptions),
            "predictions": [dataclasses.asdict(row) for row in predictions],
        }
        print(json.dumps(content))
        return
    print(
        f"{args.config}: one GPU {one.step_ms:g} ms at batch {one.batch_size}; NVLink {args.nvlink_gb_s:g} GB/s, "
        f"network {args.network_gb_s:g} GB/s per GPU; {args.precision} layers; hidden: {args.overlap}\n"
    )
    print(_markdown([_row(prediction) for prediction in predictions]))


def compare_published(config: TrainConfig, links: Links) -> list[dict[str, Any]]:
    """Each published point beside its prediction, with one set of constants for all: the profile `off`, data parallel,
    nothing hidden, layers' gradients in either precision."""
    rows = []
    for precision, itemsize in _ITEMSIZES.items():
        assumptions = Assumptions(
            links=links, layer_itemsize=itemsize, vision_passes=_VISION_PASSES["off"], overlap="none"
        )
        for point in PUBLISHED:
            (got,) = predict(
                config,
                PROFILES["off"],
                assumptions,
                nodes=[point.nodes],
                gpus_per_node=point.gpus_per_node,
                fsdp_devices=1,
            )
            percent = 100 * got.weak_scaling
            rows.append(
                {
                    "gradients": precision,
                    "nodes x GPUs": f"{point.nodes} x {point.gpus_per_node}",
                    "published %": f"{point.percent:.1f}",
                    "predicted %": f"{percent:.1f}",
                    "difference": f"{percent - point.percent:+.1f}",
                }
            )
    return rows


def _row(p: Prediction) -> dict[str, str]:
    return {
        "nodes": str(p.num_nodes),
        "GPUs": str(p.num_gpus),
        "fsdp": str(p.fsdp_devices),
        "ms/step": f"{p.step_ms:.1f}",
        "of it waiting": f"{p.exposed_ms:.1f}",
        "samples/s": f"{p.samples_per_s:.0f}",
        "of one GPU %": f"{100 * p.efficiency:.1f}",
        "of one node %": f"{100 * p.weak_scaling:.1f}",
        "sent GB": f"{p.sent_gb:.1f}",
        "GiB per GPU": f"{p.memory_gib:.1f}",
    }


def _markdown(rows: Sequence[dict[str, str]]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _one_gpu(args: argparse.Namespace) -> OneGpu:
    one = PROFILES[args.profile]
    given = {"batch_size": args.batch_per_gpu, "step_ms": args.step_ms, "peak_gib": args.peak_gib}
    if any(value is not None for value in given.values()) and None in given.values():
        raise UserError(
            "--batch-per-gpu, --step-ms and --peak-gib belong together: one measured step. scripts/bench.py prints "
            "batch_size, step_s and peak_memory_gib."
        )
    return OneGpu(**given) if args.step_ms is not None else one


def _assumptions(args: argparse.Namespace) -> Assumptions:
    return Assumptions(
        links=Links(nvlink_gb_s=args.nvlink_gb_s, network_gb_s=args.network_gb_s),
        layer_itemsize=_ITEMSIZES[args.precision],
        vision_passes=_VISION_PASSES[args.profile] if args.vision_passes is None else args.vision_passes,
        overlap=args.overlap,
    )


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python scripts/plan_scaling.py", description=__doc__)
    parser.add_argument("config", nargs="?", default="pi05_libero")
    parser.add_argument("--nodes", type=_count, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--gpus-per-node", type=_count, default=8)
    parser.add_argument("--fsdp-devices", type=_count, default=1)
    parser.add_argument("--profile", choices=list(PROFILES), default="opt", help="the step measured on one H200")
    parser.add_argument("--batch-per-gpu", type=_count, help="your own measurement, with --step-ms and --peak-gib")
    parser.add_argument("--step-ms", type=_positive)
    parser.add_argument("--peak-gib", type=_positive)
    parser.add_argument("--vision-passes", type=_count, help="1 with OPENPI_BATCH_CAMERAS, else the number of cameras")
    parser.add_argument(
        "--nvlink-gb-s", type=_positive, default=450.0, help="of a GPU, one direction (default: %(default)s)"
    )
    parser.add_argument(
        "--network-gb-s", type=_positive, default=50.0, help="per GPU (default: %(default)s, 400 Gbit/s)"
    )
    parser.add_argument(
        "--precision", choices=list(_ITEMSIZES), default="bfloat16", help="of layers' gathers and gradients"
    )
    parser.add_argument("--overlap", choices=["none", "backward"], default="none", help="what computation hides")
    parser.add_argument("--published", action="store_true", help="predict the published points instead")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)
