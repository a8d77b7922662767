"""Tables that lie on several devices: each adds up its own rows, and only the sums travel.

A table is sharded by JAX's own means, rows over the devices of a mesh::

    mesh = jax.make_mesh((len(jax.devices()),), ("rows",))
    X = jax.device_put(X, jax.NamedSharding(mesh, jax.P("rows")))

Sums over rows are integers (see `numpyro_dp.privacy.clipping`), so their total is the same on any number of devices, in
any order. Noise is drawn once, on the host, and added to the total. Where devices belong to several processes, all of
which run the same program (`jax.distributed`), that is the host of the first one.

Proof: docs/proofs/clipping.md.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_dp.privacy.clipping import ClippedSum, UnclippedSum, normalize


class Layout(NamedTuple):
    """How the rows of a table are spread over devices.

    :ivar mesh: the devices.
    :ivar axes: axes of the mesh over which rows are spread.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def num_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def num_processes(self) -> int:
        """How many processes these devices belong to."""
        return len({device.process_index for device in self.mesh.devices.flat})

    def map(self, of_rows: Callable[[Any], Any], rows: Any) -> Any:
        """From each device's rows to arrays for `sum`, each device's stacked on the leading axis, whatever that is."""
        spread = PartitionSpec(self.axes)
        mapped = jax.shard_map(of_rows, mesh=self.mesh, in_specs=spread, out_specs=spread, check_vma=False)
        return jax.jit(mapped)(rows)

    def sum(self, of_rows: Callable[[Any], Any], rows: Any) -> Any:
        """The total of what `of_rows`, a `ClippedSum` or an `UnclippedSum`, makes of each device's rows.

        :param rows: arrays whose leading axis is spread: rows, or what `map` made of them.
        """

        # What `of_rows` closes over is handed over as an argument: inside of `shard_map` it would be of another mesh.
        own = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // self.num_shards, *x.shape[1:]), x.dtype), rows)
        of_rows, outside = jax.closure_convert(of_rows, own)

        def total(rows: Any, *outside: Any) -> Any:
            part = of_rows(rows, *outside)
            if isinstance(part, UnclippedSum):
                return UnclippedSum(jax.lax.psum(part.value, self.axes))
            # At once, since each exchange takes time; their sums fit into int32 for up to 2**19 devices.
            limbs = jnp.stack([part.hi, part.lo >> 12, part.lo & 4095])
            high, middle, low = jax.lax.psum(limbs, self.axes)
            hi, lo = normalize(middle, low)
            return ClippedSum(high + hi, lo, part.bound)

        specs = (PartitionSpec(self.axes), *(PartitionSpec() for _ in outside))
        summed = jax.shard_map(total, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        return summed(rows, *outside)


def layout_of(rows: Iterable[Any]) -> Layout | None:
    """How a table lies on devices; None for one on a single device.

    :raises ValueError: if its arrays do not all lie alike, rows on the leading axis and nothing else spread.
    """
    layouts, shapes = set(), []
    for row in rows:
        sharding = getattr(row, "sharding", None)
        spec: tuple = ()
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            spec = tuple(sharding.spec)
        first = spec[0] if spec else None
        axes = (first,) if isinstance(first, str) else tuple(first or ())
        sizes = ["rows", *map(str, jnp.shape(row)[1:])]  # how many rows may be private
        shapes.append(f"({', '.join(sizes)}) spread as {spec}")
        if any(axis is not None for axis in spec[1:]):
            raise ValueError(f"only the rows of a table can be spread over devices, got an array of shape {shapes[-1]}")
        layouts.add(Layout(sharding.mesh, axes) if axes else None)  # type: ignore[union-attr, arg-type]
    if len(layouts) > 1:
        raise ValueError(
            "all arrays of the table must be spread over the same devices in the same way, "
            f"`jax.device_put(x, sharding)` for each of them; got {', '.join(shapes)}"
        )
    return layouts.pop() if layouts else None
