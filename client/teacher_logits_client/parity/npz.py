"""A .npz as tensors, without NumPy: a zip of .npy, each a header and the bytes of an array.

Promises: nothing is unpickled; an array of objects is refused like any type that is no number.
The format: numpy.lib.format, versions 1 to 3. Either order of the axes is read.
"""

from __future__ import annotations

import ast
import math
import struct
import zipfile
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MAGIC = b"\x93NUMPY"
_TYPES = {
    "<f2": torch.float16,
    "<f4": torch.float32,
    "<f8": torch.float64,
    "<i2": torch.int16,
    "<i4": torch.int32,
    "<i8": torch.int64,
    "|i1": torch.int8,
    "|u1": torch.uint8,
    "|b1": torch.bool,
}


def read_npz(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the arrays of a .npz by name.

    Raises:
        ValueError, OSError, zipfile.BadZipFile: it is none, or holds what is no number.
    """
    with zipfile.ZipFile(path) as archive:
        return {
            name.removesuffix(".npy"): _array(bytearray(archive.read(name)), name)
            for name in archive.namelist()
        }


def _array(data: bytearray, name: str) -> torch.Tensor:
    if data[:6] != _MAGIC or len(data) < 12:
        raise ValueError(f"{name} is no .npy")
    short = data[6] == 1
    (size,) = struct.unpack_from("<H" if short else "<I", data, 8)
    start = (10 if short else 12) + size
    header = ast.literal_eval(data[start - size : start].decode("utf-8"))
    kind, shape, by_column = (header[key] for key in ("descr", "shape", "fortran_order"))
    dtype = _TYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        known = ", ".join(str(each).removeprefix("torch.") for each in _TYPES.values())
        raise ValueError(f"{name} is of type {kind!r}, which is none of {known}")
    count = math.prod(shape)
    if len(data) - start != count * dtype.itemsize:
        raise ValueError(f"{name} has {len(data) - start} bytes for {count} numbers of {kind!r}")
    if not count:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, offset=start)
    if by_column:
        return flat.view(shape[::-1]).permute(*reversed(range(len(shape))))
    return flat.view(shape)
