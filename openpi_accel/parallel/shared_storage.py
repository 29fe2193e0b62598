"""Is the checkpoint folder one folder that all processes share? Tried out, as paths do not tell."""

import json
import pathlib
import secrets
import shutil
import socket
import time
from collections.abc import Mapping

import jax

from openpi_accel.errors import UserError
from openpi_accel.parallel.exchange import from_first, gather_texts

_POLL_S = 0.5
_NOT_WRITABLE = "it cannot be written to"


def check_shared_storage(folder: pathlib.Path, timeout_s: float) -> None:
    """Rank 0 writes a token below `folder`, which it makes if need be; every rank must see it, and write beside it.

    Nothing is done where there is one process. All ranks look at the same times, so that none waits long in a
    collective, and rank 0's clock decides.

    Args:
        folder: the checkpoint folder.
        timeout_s: how long a rank may need to see the token; network file systems cache what they have looked up.

    Raises:
        UserError: on every process alike; names the ranks that do not see the token, or cannot write.
    """
    if jax.process_count() == 1:
        return
    folder = folder.absolute()
    # A name that was never looked up is in no cache of absent files.
    name, content = from_first(lambda: f".shared-{secrets.token_hex(8)} {secrets.token_hex(16)}").split(" ")
    token = folder / name / "token"  # in a folder of its own, as a checkpoint is that rank 0 makes and all write to
    own = token.with_name(f"rank-{jax.process_index()}")
    not_written = ""
    try:
        if jax.process_index() == 0:
            not_written = _write(token, content)
        deadline_s = time.monotonic() + timeout_s
        while True:
            problem = not_written or _look(token, content) or _write(own, content)
            over = bool(not_written) or time.monotonic() >= deadline_s
            view = {"problem": problem, "where": f"{socket.gethostname()}:{folder}", "over": over}
            views = [json.loads(text) for text in gather_texts(json.dumps(view))]
            if views[0]["over"] or not any(view["problem"] for view in views):
                break
            time.sleep(_POLL_S)
    finally:
        if jax.process_index() == 0:
            shutil.rmtree(token.parent, ignore_errors=True)  # where it was never written
    message = complaint(dict(enumerate(views)), timeout_s)
    if message:
        raise UserError(message)


def complaint(views: Mapping[int, Mapping[str, str]], timeout_s: float) -> str:
    """What to tell the user; empty where every rank sees the token. Pure.

    Args:
        views: rank -> problem (empty: the token was seen) and where (host:folder).
        timeout_s: how long they looked.
    """
    blind = [
        f"\n    rank {rank}, {view['where']}: {view['problem']}" for rank, view in views.items() if view["problem"]
    ]
    if not blind:
        return ""
    if views[0]["problem"]:
        return (
            f"Rank 0 cannot use the checkpoint folder:{blind[0]}\nChoose another --checkpoint-base-dir, or mend its "
            "permissions or space."
        )
    if all(view["problem"].startswith(_NOT_WRITABLE) for view in views.values() if view["problem"]):
        return (
            "The checkpoint folder is shared, but not every process can write to what rank 0 makes there:"
            + "".join(blind)
            + "\nEvery process writes its part of a checkpoint, so start all of them as the same user, or mend the "
            "permissions (on NFS: is root squashed?), the quota or the mount, which may be read-only there."
        )
    return (
        f"The checkpoint folder is not shared: what rank 0 wrote to {views[0]['where']} was not seen within "
        f"{timeout_s:g} s by"
        + "".join(blind)
        + "\nEvery process writes its part of a checkpoint, so --checkpoint-base-dir must be one folder on storage "
        "that all nodes share; with a folder of its own on each node, a save hangs or loses parts. Name such a folder. "
        "If it is shared and only slow to show new files, raise --shared-storage-timeout-s."
    )


def _write(token: pathlib.Path, content: str) -> str:
    """Writes it; the reason if it cannot be."""
    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.write_text(content)
    except OSError as error:
        return f"{_NOT_WRITABLE} ({error.strerror})"
    return ""


def _look(token: pathlib.Path, content: str) -> str:
    """Why the token is not seen; empty where it is."""
    try:
        found = token.read_text()
    except OSError as error:
        return f"no file {token.parent.name}/{token.name} ({error.strerror})"
    return "" if found == content else f"{token.parent.name}/{token.name} has other content"
