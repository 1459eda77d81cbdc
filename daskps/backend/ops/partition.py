"""Keys dealt into P parts, such as the devices of a node; owners go by `Placement` of the disk tier.

In: uint64 keys, the number of parts, a salt that names the level (so that levels are independent of each other), or
plain modulo. Out: the stable order of the keys by part, and where each part starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskps.backend.check import check_array, check_int32_count
from daskps.backend.device import Array, CpuDevice, Device
from daskps.errors import ArgumentError

OWNER_SALT = 0x8EBC6AF09C88C6E3  # where no level is named; independent of the devices' and of the disk tier's


@dataclass(frozen=True, slots=True)
class Partition:
    """Part p holds ``keys[order[starts[p]:starts[p + 1]]]``, in their order."""

    order: Array  # (n,) int32
    starts: np.ndarray[tuple[int], np.dtype[np.int64]]  # (parts + 1,) on the host


def parts_of(device: Device, *, keys: Array, parts: int, salt: int = OWNER_SALT, modulo: bool = False) -> Array:
    """The part of each key, int32."""
    _check("parts_of", device, keys, parts)
    part = device.empty(len(keys), np.int32)
    device.launch(
        "partition_parts", len(keys), keys=keys, n=len(keys), parts=parts, salt=salt, modulo=modulo, part=part
    )
    return part


def partition(device: Device, *, keys: Array, parts: int, salt: int = OWNER_SALT, modulo: bool = False) -> Partition:
    """The stable order of `keys` by part: by mixed bits, or by ``key % parts``."""
    _check("partition", device, keys, parts)
    n = len(keys)
    starts = np.zeros(parts + 1, np.int64)
    if not isinstance(device, CpuDevice):
        part = parts_of(device, keys=keys, parts=parts, salt=salt, modulo=modulo)
        with device.active():
            starts[1:] = np.cumsum(device.to_host(device.xp.bincount(part, minlength=parts)))
            return Partition(device.xp.argsort(part, kind="stable").astype(np.int32), starts)
    counts = np.zeros((device.shares(n), parts), np.int32)
    values = {"keys": keys, "n": n, "parts": parts, "salt": salt, "modulo": modulo}
    device.launch("partition_count", n, **values, counts=counts)
    starts[1:] = np.cumsum(counts.sum(axis=0))
    before = np.zeros_like(counts)
    np.cumsum(counts[:-1], axis=0, out=before[1:])
    order = device.empty(n, np.int32)
    device.launch("partition_deal", n, **values, next=before + starts[:-1].astype(np.int32), order=order)
    return Partition(order, starts)


def _check(call: str, device: Device, keys: Array, parts: int) -> None:
    check_array(call, "keys", keys, device, np.uint64, (None,))
    check_int32_count(call, "keys", len(keys))
    if not 1 <= parts <= 2**16:
        raise ArgumentError(f"{call}: parts must be from 1 to 65536, got {parts}")
