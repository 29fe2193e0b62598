"""Entry points: what the user can mend is one message and exit code 2."""

import errno

import jax
import pytest

from openpi_accel import cli
from openpi_accel.errors import UserError


def _exit(error: BaseException) -> int:
    def main() -> int:
        raise error

    with pytest.raises(SystemExit) as caught:
        cli.run(main)
    return int(str(caught.value.code))


def test_a_users_mistake_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit(UserError("give --exp-name")) == 2
    assert capsys.readouterr().err == "error: give --exp-name\n"
    assert _exit(KeyboardInterrupt()) == 130


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOTDIR, errno.EACCES, errno.ENOSPC])
def test_a_path_that_cannot_be_used_is_named(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit(OSError(number, "no", "some/folder")) == 2
    assert "some/folder" in capsys.readouterr().err


def test_a_full_device_is_told_with_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    words = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 75.38GiB with allocator GPU_0_bfc on device 0."
    assert _exit(jax.errors.JaxRuntimeError(f"{words}\n[more]")) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: a device's memory is full ({words})") and "--num-microbatches 2" in shown
    assert "Traceback" not in shown and "[more]" not in shown


def test_a_fault_of_the_program_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit(OSError(errno.ECONNRESET, "connection", None)) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and shown.count("connection") == 1


def test_another_way_to_end_gets_the_code() -> None:
    codes: list[int] = []
    cli.run(lambda: 143, codes.append)
    assert codes == [143]
