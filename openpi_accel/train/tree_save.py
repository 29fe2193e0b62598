"""Orbax's way to save a tree of arrays, but a write that fails is known at once.

Orbax tells of it when it is next waited for. Where there are several processes the waiting itself never ends: those
whose writes were fine wait for the one whose write has failed, and that one for them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp


@dataclasses.dataclass(frozen=True)
class _Watched:
    """A future of Orbax's whose failure is passed on."""

    future: Any
    on_failure: Callable[[Exception], object]

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self.future.result(timeout)
        except Exception as error:
            self.on_failure(error)
            raise

    def cancel(self) -> bool | None:
        return self.future.cancel()


class TreeSaveHandler(ocp.PyTreeCheckpointHandler):
    """Writes ocp.args.PyTreeSave as Orbax does; `on_failure` gets an error from a thread of the writer."""

    def __init__(self, on_failure: Callable[[Exception], object]) -> None:
        super().__init__()
        self._on_failure = on_failure

    @classmethod
    def typestr(cls) -> str:
        """The name that goes into the checkpoint: who reads it needs Orbax alone."""
        return str(ocp.PyTreeCheckpointHandler.typestr())

    async def async_save(self, *args: Any, **kwargs: Any) -> list[Any]:
        futures = await super().async_save(*args, **kwargs)
        return [_Watched(future, self._on_failure) for future in futures or []]
