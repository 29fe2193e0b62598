"""The five stages of a step, from the times of its programs and of the loop."""

import dataclasses
from collections.abc import Mapping, Sequence

from openpi_accel.tools.profile.programs import DRAW, FORWARD, GRADIENT, STEP, UPDATE, median
from openpi_accel.tools.profile.real_loop import LoopTimes
from openpi_accel.tools.profile.sizes import Traffic

# The stages must add up to the loop's step within this share of it.
TOLERANCE = 0.05
FETCH, TO_DEVICE, FORWARD_LOSS, BACKWARD, OPTIMIZER = (
    "data fetch",
    "to device + preprocessing",
    "forward + loss",
    "backward + communication",
    "optimizer + average",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage.

    Attributes:
        name: one of the five.
        alone_s: seconds per step when nothing else runs.
        exposed_s: seconds of it that a step of the loop waits for.
        moved_bytes: per step; None where that is not counted.
        moved: what the bytes are.
        how: how the times were obtained.
    """

    name: str
    alone_s: float
    exposed_s: float
    moved_bytes: float | None
    moved: str
    how: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """The five stages and whether they account for the step.

    Attributes:
        stages: in the order in which a sample meets them.
        step_alone_s: the whole step on a batch that lies on the devices.
        update_alone_s: optimizer, average and norms as a program of their own, gradient handed in; to be compared with
            the stage, which is a difference.
        loop: of the short loop.
    """

    stages: Sequence[Stage]
    step_alone_s: float
    update_alone_s: float
    loop: LoopTimes

    @property
    def sum_s(self) -> float:
        """Of what is exposed."""
        return sum(stage.exposed_s for stage in self.stages)

    @property
    def gap_s(self) -> float:
        """What the loop's step takes beyond the stages; negative where it takes less."""
        return self.loop.step_s - self.sum_s

    @property
    def adds_up(self) -> bool:
        """Within TOLERANCE."""
        return abs(self.gap_s) <= TOLERANCE * self.loop.step_s

    @property
    def bound_by(self) -> Stage:
        """The stage of which most is exposed."""
        return max(self.stages, key=lambda stage: stage.exposed_s)


def cut_stages(
    programs: Mapping[str, list[float]],
    *,
    fetch_s: float | None,
    transfer_s: float,
    loop: LoopTimes,
    drawn_bytes: int,
    traffic: Traffic,
) -> Stages:
    """The stages.

    Args:
        programs: seconds of every program (`Programs.time`).
        fetch_s: of the loader alone, per batch; None where the data lie on the devices.
        transfer_s: of the transfer alone, per batch.
        loop: the short loop.
        drawn_bytes: of a batch after preprocessing.
        traffic: what the step moves.
    """
    draw_s, forward_s, gradient_s, step_s = (median(programs[name]) for name in (DRAW, FORWARD, GRADIENT, STEP))
    # The prefetch thread fetches and sends, one after the other, so its wait is shared between the two.
    fetch_share = 0.0 if fetch_s is None else fetch_s / (fetch_s + transfer_s)
    sent = None if traffic.collectives is None else sum(traffic.collectives.values())
    random = fetch_s is None
    return Stages(
        stages=(
            Stage(
                name=FETCH,
                alone_s=fetch_s or 0.0,
                exposed_s=loop.wait_s * fetch_share,
                moved_bytes=None if random else traffic.host_to_device,
                moved="made by the loader",
                how="none: the data lie on the devices"
                if random
                else "alone: the loader with nothing else running; exposed: the loop's wait for a batch, of which the "
                "transfer has its share by the times alone",
            ),
            Stage(
                name=TO_DEVICE,
                alone_s=draw_s + (0.0 if random else transfer_s),
                exposed_s=draw_s + loop.wait_s * (1 - fetch_share) * (not random),
                moved_bytes=drawn_bytes + (0 if random else traffic.host_to_device),
                moved="written by preprocessing" if random else "sent to the devices and written by preprocessing",
                how="augmentation, noise and time as a program of their own"
                + ("" if random else f" ({1e3 * draw_s:.2f} ms), plus the transfer alone ({1e3 * transfer_s:.2f} ms)"),
            ),
            Stage(
                name=FORWARD_LOSS,
                alone_s=forward_s - draw_s,
                exposed_s=forward_s - draw_s,
                moved_bytes=None,
                moved="",
                how="program of the loss, less preprocessing",
            ),
            Stage(
                name=BACKWARD,
                alone_s=gradient_s - forward_s,
                exposed_s=gradient_s - forward_s,
                moved_bytes=sent,
                moved="sent by a device in collectives of the whole step",
                how="program of loss and gradient, less that of the loss",
            ),
            Stage(
                name=OPTIMIZER,
                alone_s=step_s - gradient_s,
                exposed_s=step_s - gradient_s,
                moved_bytes=traffic.state_read + traffic.state_written,
                moved="state read and written by a device",
                how="the whole step, less the program of loss and gradient",
            ),
        ),
        step_alone_s=step_s,
        update_alone_s=median(programs[UPDATE]),
        loop=loop,
    )
