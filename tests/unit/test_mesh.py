"""The mesh, and what cannot be split over it."""

import types
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

from openpi_accel.errors import UserError
from openpi_accel.parallel.mesh import arrange, check_batch_size, make_mesh


@pytest.mark.parametrize(("fsdp", "shape"), [(1, (8, 1)), (4, (2, 4)), (8, (1, 8))])
def test_mesh_has_all_devices_and_automatic_axes(fsdp: int, shape: tuple[int, int]) -> None:
    assert jax.device_count() == 8
    mesh = make_mesh(fsdp)
    assert mesh.axis_names == ("batch", "fsdp")
    assert mesh.devices.shape == shape
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert {device.id for device in mesh.devices.flat} == set(range(8))


def test_indivisible_fsdp_devices_name_the_choices() -> None:
    with pytest.raises(UserError, match=r"--fsdp-devices is 3, but there are 8 .* 1, 2, 4, 8\."):
        make_mesh(3)


def fakes(*devices_of_process: int) -> list[Any]:
    """Devices of several processes, numbered as JAX does, in an order that means nothing."""
    processes = [process for process, number in enumerate(devices_of_process) for _ in range(number)]
    devices = [types.SimpleNamespace(process_index=process, id=i) for i, process in enumerate(processes)]
    return devices[::2] + devices[1::2]


def groups(devices: list[Any], fsdp: int) -> list[list[tuple[int, int]]]:
    return [[(device.process_index, device.id) for device in row] for row in arrange(devices, fsdp)]


def test_groups_lie_within_a_node() -> None:
    two_nodes = fakes(4, 4)
    assert groups(two_nodes, 4) == [[(0, 0), (0, 1), (0, 2), (0, 3)], [(1, 4), (1, 5), (1, 6), (1, 7)]]
    assert groups(two_nodes, 2) == [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(1, 4), (1, 5)], [(1, 6), (1, 7)]]
    assert groups(two_nodes, 1) == [[(i // 4, i)] for i in range(8)]


def test_larger_groups_fill_whole_nodes() -> None:
    rows = groups(fakes(2, 2, 2, 2), 4)
    assert [{process for process, _ in row} for row in rows] == [{0, 1}, {2, 3}]
    assert groups(fakes(2, 2), 4) == [[(0, 0), (0, 1), (1, 2), (1, 3)]]


def test_groups_that_would_straddle_nodes_are_refused() -> None:
    with pytest.raises(UserError, match=r"is 4, but there are 12 devices on 2 nodes of 6.*straddles.*1, 2, 3, 6, 12\."):
        arrange(fakes(6, 6), 4)
    with pytest.raises(UserError, match=r"16 devices on 2 nodes of 8.* 1, 2, 4, 8, 16\."):
        arrange(fakes(8, 8), 32)


def test_batch_size_suggestions() -> None:
    check_batch_size(32, 8)
    with pytest.raises(UserError, match=r"--batch-size 32 .* 3 devices\. Use --batch-size=30 or --batch-size=33\."):
        check_batch_size(32, 3)
    with pytest.raises(UserError, match=r"Use --batch-size=8\."):
        check_batch_size(4, 8)
    with pytest.raises(UserError, match="of 3 processes"):
        check_batch_size(8, 8, 3)
