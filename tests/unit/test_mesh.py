"""The mesh, and what cannot be split over it."""

import jax
import pytest
from jax.sharding import AxisType

from openpi_accel.errors import UserError
from openpi_accel.parallel.mesh import check_batch_size, make_mesh


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


def test_batch_size_suggestions() -> None:
    check_batch_size(32, 8)
    with pytest.raises(UserError, match=r"--batch-size 32 .* 3 devices\. Use --batch-size=30 or --batch-size=33\."):
        check_batch_size(32, 3)
    with pytest.raises(UserError, match=r"Use --batch-size=8\."):
        check_batch_size(4, 8)
    with pytest.raises(UserError, match="of 3 processes"):
        check_batch_size(8, 8, 3)
