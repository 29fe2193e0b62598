"""The errors that are told in one message, and what each kind means for the process."""

import errno


class UserError(ValueError):
    """A mistake in the user's input. Entry scripts print its text and exit with code 2, without a traceback.

    The text says what is wrong and what to do about it, with the command that mends it where there is one.
    """


class OtherProcessEnded(Exception):
    """Another process of the run has ended, so that this one cannot go on; its text says which one and why.

    Attributes:
        exit_code: what this process ends with.
    """

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


# What the user can mend about a file or folder, wherever it is met.
_MENDABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR)


def is_broken_collective(error: BaseException) -> bool:
    """Whether processes that compute together have lost each other, so that the reason is to be sought elsewhere."""
    return "Gloo" in str(error) or "NCCL" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left, in the words of XLA's allocators."""
    return "Out of memory while trying to allocate" in str(error) or "Out of memory allocating" in str(error)


def told(error: BaseException) -> tuple[str | None, int]:
    """(one message, exit code) of an error; no message where only a traceback helps.

    2 is a mistake to mend, 130 Ctrl-C, 1 anything unforeseen.
    """
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, OtherProcessEnded):
        return f"error: {error}", error.exit_code
    if isinstance(error, OSError) and error.errno in _MENDABLE and error.filename is not None:
        return (
            f"error: {error.filename}: {error.strerror}. Choose another folder, or mend its permissions or space.",
            2,
        )
    if is_out_of_memory(error):
        return (
            f"error: a device's memory is full ({str(error).splitlines()[0][:300]}). A step that fits by its size may "
            "not where what is free lies in pieces (XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async in the environment helps "
            "then), or another program holds some of it (nvidia-smi). Give a smaller --batch-size, --num-microbatches "
            "2, or --fsdp-devices with several devices; python scripts/plan.py says what fits.",
            2,
        )
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    return None, 1
