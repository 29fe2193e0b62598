"""Orbax's way to save a tree of arrays, but a write that fails is known at once.

Orbax tells of it when it is next waited for. Where there are several processes the waiting itself never ends: those
whose writes were fine wait for the one whose write has failed, and that one for them.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
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


def _whole_arrays() -> dict[str, Any]:
    """Of what lies on several devices in full, one sends it all. Orbax would let each send a part, cut out there: by a
    program for every shape and place, and into memory of the device. Between processes that divides the writing."""
    # A new handler would not write what Orbax's own writes beside the arrays, and cannot be told to.
    arrays = copy.copy(ocp.type_handlers.get_type_handler(jax.Array))
    arrays._use_replica_parallel = False
    return {"type_handler_registry": ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))}


class TreeSaveHandler(ocp.PyTreeCheckpointHandler):
    """Writes ocp.args.PyTreeSave as Orbax does; `on_failure` gets an error from a thread of the writer."""

    def __init__(self, on_failure: Callable[[Exception], object]) -> None:
        super().__init__(**_whole_arrays() if jax.process_count() == 1 else {})
        self._on_failure = on_failure

    @classmethod
    def typestr(cls) -> str:
        """The name that goes into the checkpoint: who reads it needs Orbax alone."""
        return str(ocp.PyTreeCheckpointHandler.typestr())

    async def async_save(self, *args: Any, **kwargs: Any) -> list[Any]:
        futures = await super().async_save(*args, **kwargs)
        return [_Watched(future, self._on_failure) for future in futures or []]
