"""Leave to make releases: opaque draws of noise, each good for one.

A draw holds its noise where no name without an underscore leads. It is no JAX type, so that it cannot be kept, sent or
looped over, and it is refused the second time, and wherever a program could come by twice: in a loop, a map or a
derivative that it was not made in. `Draw.scan`, `Draw.split` and `Draw.when` hand it on.

Proof: docs/proofs/draws.md.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.experimental import io_callback

from numpyro_dp.privacy.batches import AllRows, Batch, Batches
from numpyro_dp.privacy.clipping import OwnerIndex
from numpyro_dp.privacy.ledger import Drawn, Ledger, PrivacyBudgetError, Request
from numpyro_dp.privacy.mechanisms import BarkerBatch, LogisticBit, Mechanism, with_noise_multiplier
from numpyro_dp.privacy.noise import GridNoise
from numpyro_dp.privacy.vmap import cond_of_chains

try:
    from jax.extend.core import get_opaque_trace_state as trace_state
except ImportError:  # of JAX 0.9
    from jax.core import get_opaque_trace_state as trace_state  # type: ignore[attr-defined,no-redef]

T = TypeVar("T")
_KEY = object()


class Slots(NamedTuple):
    """What the releases of a `Draw` take; slots on the leading axis. Secret.

    :ivar noise: None only in runs that are declared not private.
    :ivar batch: rows to use; None for all of them.
    :ivar noise_multiplier: noise standard deviation over sensitivity.
    :ivar granted: whether it is leave at all.
    :ivar tag: number of the release, the same for all data owners.
    :ivar accepted: whether the chain's last proposal was accepted: by it, owners see that they run the same chain.
    """

    noise: GridNoise | None
    batch: Batch | None
    noise_multiplier: jax.Array
    granted: jax.Array
    tag: jax.Array
    accepted: jax.Array


class Draw:
    """Leave to make releases of one kind, as many as it has slots; made by the ledger only.

    Each slot is good for one release, in the trace in which the draw was made, from a vault of the same ledger.
    """

    def __init__(self, slots: Slots, mechanism: Mechanism, ledger: Any, key: object = None):
        if key is not _KEY:
            raise TypeError("draws are made by the ledger: ask for them with `ask_ledger` or `draws_now`")
        self._slots: list[Slots] = [slots]  # popped when it is taken, which no other thread can do between
        self._mechanism, self._ledger, self._length = mechanism, ledger, slots.granted.shape[0]
        self._multiplier, self._is_private = slots.noise_multiplier, slots.noise is not None
        self._trace = trace_state()

    def __len__(self) -> int:
        return self._length

    @property
    def noise_multiplier(self) -> jax.Array:
        """Noise standard deviation over sensitivity; public."""
        return self._multiplier[0]

    @property
    def is_private(self) -> bool:
        """Whether there is noise: not in runs that are declared not private."""
        return self._is_private

    def split(self, first: int) -> "tuple[Draw, Draw]":
        """The first slots, and the others."""
        first = operator.index(first)
        if not 0 <= first <= len(self):
            raise ValueError(f"a draw of {len(self)} slots cannot be split after {first}")
        slots = self._take()
        return self._with(jax.tree.map(lambda x: x[:first], slots)), self._with(
            jax.tree.map(lambda x: x[first:], slots)
        )

    def scan(self, step: Callable[..., tuple[Any, Any]], start: Any, *xs: Any) -> tuple[Any, Any]:
        """`lax.scan` over the slots: ``step(state, draw, *x)`` with a draw of one slot, and what there is of `xs`."""

        def body(state: Any, slot_and_x: tuple) -> tuple[Any, Any]:
            slot, x = slot_and_x
            return step(state, self._with(jax.tree.map(lambda leaf: leaf[None], slot)), *x)

        return lax.scan(body, start, (self._take(), xs))

    def when(self, wanted: jax.Array, ask: "Callable[[Draw], T]", otherwise: Callable[[], T]) -> T:
        """`cond_of_chains` with this draw in the branch that asks."""
        slots = self._take()
        return cond_of_chains(wanted, lambda: ask(self._with(slots)), otherwise)

    def _with(self, slots: Slots) -> "Draw":
        return Draw(slots, self._mechanism, self._ledger, _KEY)

    def _take(self) -> Slots:
        """The slots, for once.

        :raises PrivacyBudgetError: if it was taken before, or could be taken several times.
        """
        if self._trace != trace_state():
            raise PrivacyBudgetError(
                "a draw is good for one release, and what is asked for in a loop, a map, a branch or a derivative may "
                "be asked for several times: hand the draw on by its `scan`, `split` or `when`"
            )
        try:
            return self._slots.pop()
        except IndexError:
            raise PrivacyBudgetError("a draw is good for one release: a second one would have the same noise") from None

    def _opened(self) -> "Opened":
        # What a program is compiled for does not go by how much noise there is: that is in the slots.
        return Opened(self._take(), with_noise_multiplier(self._mechanism, 1.0))

    @staticmethod
    def _closed(opened: "Opened", ledger: Any) -> "Draw":
        return Draw(opened.slots, opened.mechanism, ledger, _KEY)

    def __reduce__(self) -> Any:
        raise TypeError("a draw cannot be copied or pickled: it holds noise, which is good for one release")

    def _take_one(self) -> Slots:
        if len(self) != 1:
            raise PrivacyBudgetError(f"a release takes one slot of a draw, and this draw has {len(self)}")
        return jax.tree.map(lambda x: x[0], self._take())


@functools.partial(jax.tree_util.register_dataclass, data_fields=("slots",), meta_fields=("mechanism",))
class Opened:
    """A draw on its way into a program; see `Vault.program`."""

    def __init__(self, slots: Slots, mechanism: Mechanism):
        self.slots, self.mechanism = slots, mechanism


class Grant:
    """Leave for the releases of one iteration: a `Draw` for each kind.

    :ivar granted: whether it is leave at all.
    """

    def __init__(self, granted: jax.Array, draws: Mapping[str, Draw]):
        self.granted, self._draws = granted, dict(draws)

    def __getitem__(self, kind: str) -> Draw:
        return self._draws[kind]

    def cond(self, move: "Callable[[Grant], T]", stay: Callable[[], T]) -> T:
        """``move(grant)`` if it is leave, ``stay()`` otherwise; of several chains, each its own."""
        slots = {kind: draw._take() for kind, draw in self._draws.items()}

        def inside() -> T:
            return move(Grant(self.granted, {kind: self._draws[kind]._with(x) for kind, x in slots.items()}))

        return cond_of_chains(self.granted, inside, stay)


def draws_now(ledger: Ledger, requests: Mapping[str, Request], nonce: bytes) -> dict[str, Draw] | None:
    """Charge releases on all rows to the ledger, outside of programs; None if it does not allow them.

    :param requests: with a slot for each release.
    """
    # On all rows, whatever a request says of batches; and a number that is the same each time it is read.
    requests = {k: Request(int(operator.index(r.number)), tuple(r.shape)) for k, r in requests.items()}
    granted, drawn = ledger.grant(requests, 0, 0, nonce)
    if not granted:
        return None

    def draw(kind: str) -> Draw:
        length, noise = requests[kind].shape[0], drawn[kind].noise
        slots = Slots(  # made by NumPy: JAX would compile a program for each part and length
            None if noise is None else GridNoise(jnp.asarray(noise[0]), jnp.asarray(noise[1])),
            None,
            jnp.asarray(np.full(length, drawn[kind].noise_multiplier, jnp.result_type(float))),
            jnp.asarray(np.arange(length) < requests[kind].number),
            jnp.asarray(np.zeros((length, 1), np.uint32)),
            jnp.asarray(np.zeros(length, bool)),
        )
        return Draw(slots, ledger.plan.kinds[kind].mechanisms[0], ledger, _KEY)

    return {kind: draw(kind) for kind in requests}


SUM, BIT, BATCH_BIT = "a sum", "a bit", "a bit of a batch"


def law_of(mechanism: Mechanism) -> str:
    """What a mechanism releases."""
    if isinstance(mechanism, LogisticBit):
        return BIT
    return BATCH_BIT if isinstance(mechanism, BarkerBatch) else SUM


def ask_ledger(
    ledger: Ledger,
    requests: Mapping[str, tuple[jax.Array | int, tuple[int, ...]]],
    *,
    batches: Batches,
    owners: Any,
    num_rows: int,
    batched: jax.Array,
    nonce_key: jax.Array,
    origin: jax.Array,
    i: jax.Array,
    accepted: jax.Array,
) -> Grant:
    """Charge one iteration to the ledger; noise, noise multipliers and batches come from there, at run time.

    Nothing about the budget is compiled into the step or kept in the state, so neither a stale compilation nor a state
    from another kernel can change what a release costs.

    :param requests: of each kind, how many releases are made, and the shape of the noise with its slots leading. Slots
        beyond that number are no leave.
    :param batched: depends on all that `vmap` may batch: without batched operands the ledger would be asked once for
        all, and its noise be shared.
    :param i: iterations done.
    :param accepted: see `Slots`.
    """
    kinds, private = tuple(requests), ledger.plan.private
    shapes = {kind: shape for kind, (_, shape) in requests.items()}
    if isinstance(owners, OwnerIndex):  # each of them adds noise of its own
        shapes = {kind: (shape[0], owners.num_owners, *shape[1:]) for kind, shape in shapes.items()}
    dtype = jnp.result_type(float)

    def host(counts, batched, i, *nonce):
        del batched  # was needed for tracing only
        counts = dict(zip(kinds, np.asarray(counts).tolist(), strict=True))
        asked = {kind: Request(counts[kind], shapes[kind], batches) for kind in kinds}
        nonce_bytes = b"".join(np.asarray(part).tobytes() for part in (*nonce, i))
        granted, drawn = ledger.grant(asked, int(i), num_rows, nonce_bytes)
        return np.bool_(granted), {kind: _for_device(drawn[kind], dtype) for kind in kinds}

    expected = {kind: _for_device_shape(shapes[kind], private, batches, num_rows, dtype) for kind in kinds}
    nonce = random.key_data(nonce_key) if jnp.issubdtype(nonce_key.dtype, jax.dtypes.prng_key) else nonce_key
    counts = jnp.stack([jnp.asarray(requests[kind][0], jnp.int32) for kind in kinds])
    granted, drawn = io_callback(
        host, (jax.ShapeDtypeStruct((), jnp.bool_), expected), counts, batched, i, nonce, origin
    )

    def draw(k: int, kind: str) -> Draw:
        multiplier, noise, indices, sizes = drawn[kind]
        length = shapes[kind][0]
        slots = Slots(
            None if noise is None else GridNoise(noise[0], noise[1]),
            None if indices is None else Batch(indices, sizes),
            jnp.full(length, multiplier),
            granted & (jnp.arange(length) < counts[k]),
            _tags(nonce, i, k, length),
            jnp.full(length, accepted),
        )
        return Draw(slots, ledger.plan.kinds[kind].mechanisms[0], ledger, _KEY)

    return Grant(granted, {kind: draw(k, kind) for k, kind in enumerate(kinds)})


def _for_device(drawn: Drawn, dtype: Any) -> tuple:
    """What the ledger has drawn, as a callback returns it."""
    return np.asarray(drawn.noise_multiplier, dtype), drawn.noise, drawn.indices, drawn.sizes


def _for_device_shape(shape: tuple[int, ...], private: bool, batches: Batches, num_rows: int, dtype: Any) -> tuple:
    multiplier = jax.ShapeDtypeStruct((), dtype)
    noise = jax.ShapeDtypeStruct((2, *shape), jnp.int32) if private else None
    if isinstance(batches, AllRows):
        return multiplier, noise, None, None
    indices = jax.ShapeDtypeStruct((shape[0], batches.capacity(num_rows)), jnp.int32)
    return multiplier, noise, indices, jax.ShapeDtypeStruct((shape[0],), jnp.int32)


def _tags(nonce: jax.Array, i: jax.Array, kind: int, length: int) -> jax.Array:
    """Numbers of the releases of one iteration, the same in every process that runs the same chain."""
    head = jnp.concatenate([jnp.ravel(nonce).astype(jnp.uint32), jnp.stack([i, kind]).astype(jnp.uint32)])
    positions = jnp.arange(length, dtype=jnp.uint32)[:, None]
    return jnp.concatenate([jnp.broadcast_to(head, (length, head.size)), positions], 1)
