"""Stored weights -> device arrays, each shard read straight to where it lives."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pie_xla.errors import PieError
from pie_xla.hub.arrays import ArrayReader
from pie_xla.hub.disk import human_bytes
from pie_xla.hub.manifest import ParamRecord
from pie_xla.hub.store import ModelEntry
from pie_xla.progress import SILENT, Progress

if TYPE_CHECKING:
    import jax

    from poem.spec import Leaf, Place

_IN_FLIGHT_BYTES = 64 << 20  # read ahead: keeps both cores busy, and is all the host memory that loading adds


def load_params(
    entry: ModelEntry,
    leaves: Mapping[str, Leaf],
    *,
    place: Place | None = None,
    device: jax.Device | None = None,
    available: int | None = None,
    progress: Progress = SILENT,
) -> dict[str, jax.Array]:
    """The parameters of a stored model, cast to the leaves' dtypes.

    Args:
        entry: the model.
        leaves: path -> what is wanted (`LoweredModel.stored`).
        place: sharding of each leaf; without it everything goes to `device` (by default JAX's first).
        available: bytes of memory that may be used; by default what the devices (or this machine) have free.

    Returns:
        path -> array, in the order of `leaves`.

    Raises:
        PieError: not enough memory (computed before anything is read), or a store that does not fit the model.
    """
    import jax
    from jax.sharding import SingleDeviceSharding

    records = {record.path: record for record in entry.manifest.params}
    for path, leaf in leaves.items():
        _check(entry, records.get(path), path, leaf)
    single = SingleDeviceSharding(device or jax.local_devices()[0])
    shardings = {path: single if place is None else place(leaf) for path, leaf in leaves.items()}
    required = required_bytes(leaves, shardings)
    require_memory(entry.name, required, available if available is not None else available_bytes(shardings.values()))
    reader = ArrayReader(entry.weights_path)
    loaded: dict[str, jax.Array] = {}
    waiting: deque[tuple[str, int, Callable[[], jax.Array]]] = deque()
    ahead = 0
    with progress.task(f"load {entry.name}", sum(leaf.nbytes for leaf in leaves.values())) as task:

        def settle() -> None:
            nonlocal ahead
            path, size, finish = waiting.popleft()
            try:
                loaded[path] = finish()
            except (ValueError, OSError) as error:  # tensorstore's errors
                raise PieError(
                    f"the store of model {entry.name!r} is damaged: {path} cannot be read ({error})",
                    f"remove the model and import it again: pie-xla model remove {entry.name}",
                ) from error
            ahead -= size
            task.advance(leaves[path].nbytes)

        for path, leaf in leaves.items():
            record = records[path]
            while waiting and ahead + record.bytes > _IN_FLIGHT_BYTES:
                settle()
            waiting.append((path, record.bytes, _start(reader, record, leaf, shardings[path])))
            ahead += record.bytes
        while waiting:
            settle()
    return loaded


def _start(
    reader: ArrayReader, record: ParamRecord, leaf: Leaf, sharding: jax.sharding.Sharding
) -> Callable[[], jax.Array]:
    """Begin reading the slices that this host's devices need, each once; the result waits for them and places them."""
    import jax

    slices = sharding.addressable_devices_indices_map(leaf.shape)
    distinct = {_key(index): index or () for index in slices.values()}
    pending = {
        key: reader.read(record.path, record.shape, record.dtype, index, leaf.dtype) for key, index in distinct.items()
    }

    def finish() -> jax.Array:
        values = {key: wait() for key, wait in pending.items()}
        shards = [jax.device_put(values[_key(index)], device) for device, index in slices.items()]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

    return finish


def _key(index: tuple[slice, ...] | None) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((part.start, part.stop) for part in index or ())


def _check(entry: ModelEntry, record: ParamRecord | None, path: str, leaf: Leaf) -> None:
    hint = f"import it again: pie-xla model remove {entry.name}, then pie-xla model import {entry.manifest.source}"
    if record is None:
        raise PieError(
            f"the stored model {entry.name!r} has no parameter {path}: it was imported by another version", hint
        )
    if record.shape != leaf.shape:
        raise PieError(
            f"parameter {path} of the stored model {entry.name!r} has shape {list(record.shape)}, "
            f"the model wants {list(leaf.shape)}",
            hint,
        )


def required_bytes(leaves: Mapping[str, Leaf], shardings: Mapping[str, jax.sharding.Sharding]) -> int:
    """Bytes on this host's devices, replicas counted, and the largest array once more while it is placed."""
    total = largest = 0
    for path, leaf in leaves.items():
        shard = math.prod(shardings[path].shard_shape(leaf.shape)) * leaf.nbytes // max(leaf.size, 1)
        total += shard * len(shardings[path].addressable_devices)
        largest = max(largest, leaf.nbytes)
    return total + largest


def require_memory(name: str, required: int, available: int | None) -> None:
    """Refuse to load what does not fit.

    Args:
        available: bytes, or None where nobody knows.
    """
    if available is not None and required > available:
        raise PieError(
            f"not enough memory for {name}: its weights need {human_bytes(required)}, "
            f"{human_bytes(available)} are available",
            "free some memory, choose a smaller dtype (bfloat16), or a smaller model",
        )


def available_bytes(shardings: Any) -> int | None:
    """Free memory of the devices that hold the arrays, or of this machine for CPU devices; None where nobody knows."""
    devices = {device for sharding in shardings for device in sharding.addressable_devices}
    if all(device.platform == "cpu" for device in devices):
        return machine_available_bytes()
    free = 0
    for device in devices:
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        free += stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return free


def machine_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """MemAvailable of Linux: what can be taken without swapping. None on other systems."""
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None
