"""Parquet files, with errors that name the file."""

import contextlib
import pathlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from openpi_accel.errors import UserError


@contextlib.contextmanager
def explained(path: pathlib.Path) -> Iterator[None]:
    """Turns what pyarrow raises into a UserError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: the dataset is not complete. Fetch it again.") from error
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is damaged or cut short ({error}). Fetch it again.") from error


def open_parquet(path: pathlib.Path, footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """The file, memory-mapped; `footer` saves reading it again.

    Raises:
        UserError: missing or damaged.
    """
    with explained(path):
        return pq.ParquetFile(path, memory_map=True, metadata=footer)


def read_column(path: pathlib.Path, key: str, num_rows: int) -> np.ndarray:
    """One numeric, text or nested numeric column: (num_rows, ...), in its own dtype. Reads nothing else.

    Raises:
        UserError: missing file or column, damaged, of another length than the index says, or values of unequal shapes.
    """
    with contextlib.closing(open_parquet(path)) as file, explained(path):
        if key not in file.schema_arrow.names:
            raise UserError(f"{path} has no column {key!r}. Its columns are {', '.join(file.schema_arrow.names)}.")
        # By whole name: a dotted name would also be taken for a path into a struct.
        array = file.read(columns=[key], use_threads=False).column(key)
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # older pyarrow keeps zero or many chunks
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if len(array) != num_rows:
        raise UserError(
            f"{path} has {len(array)} rows, but the episodes' index says {num_rows}. Fetch the dataset again."
        )
    return _to_numpy(path, key, array)


def _to_numpy(path: pathlib.Path, key: str, array: pa.Array) -> np.ndarray:
    """Unnests fixed-size and variable lists of equal length into trailing axes."""
    shape = [len(array)]
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        if array.null_count:
            row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise UserError(
                f"{path}: column {key!r} has no value in row {row}. Fetch the dataset again, or leave it out."
            )
        if pa.types.is_fixed_size_list(array.type):
            size = array.type.list_size
        else:
            sizes = array.value_lengths().to_numpy()
            size = int(sizes[0]) if len(sizes) else 0
            if (sizes != size).any():
                row = int(np.flatnonzero(sizes != size)[0])
                raise UserError(
                    f"{path}: column {key!r} has {sizes[row]} values in row {row}, but {size} in row 0. Every frame "
                    "needs the same number."
                )
        shape.append(size)
        array = array.flatten()
    if array.null_count and not pa.types.is_floating(array.type):
        raise UserError(f"{path}: column {key!r} has {array.null_count} empty values. Fetch the dataset again.")
    values = array.to_numpy(zero_copy_only=False)
    return values.reshape(shape)
