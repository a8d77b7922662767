"""Several owners of rows, one posterior: the owners' processes exchange noisy clipped sums and nothing else.

Each owner runs the same kernel with the same public random key on its own rows, in its own process. In every iteration
it adds its own noise to its own clipped sum, and `Owners.exchange` gives every owner the noisy sums of all (Yıldırım
2017, section 3.2.2). They are whole steps of the grid of `numpyro_dp.privacy.noise`, so that the total is an exact
integer and all owners take bit-identical decisions.

*What crosses the network*: for each exchange an owner's noisy sums (8 bytes a number) under a hash of a public tag; at
the start hashes of the public configuration; at the end that an owner has left, and whom it waited for in vain.
`Owners._send` is the one place that sends, and on request records what it sends in `Owners.sent`.

*What an owner sees*: the noisy sums of each other owner. So does whoever reaches the coordinator, which by default
neither authenticates nor encrypts: let the network do that, or JAX's ``mtls_`` options. Each owner's guarantee holds
against all of them, since it rests on the noise that this owner drew and not on what the others do.

*Trust*: an owner who sends wrong numbers cannot weaken another one's guarantee, but spoils the posterior; owners are
taken to be honest but curious. An owner must not choose its noise after seeing what others sent: the noise is drawn
before theirs is asked for, and nothing proves that to them. A row belongs to one owner; if one person has rows at
several, the costs of these owners add up for that person (their rho, or on batches their eps and delta). How long an
owner takes to answer shows about how many rows it has, which is public under replace-one.
"""

import atexit
import contextlib
import hashlib
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

import jax
import numpy as np

DEFAULT_TIMEOUT = 120.0
"""Seconds. Owners compile their steps at different speeds."""

_LOOK_UP = 0.5
"""Seconds after which a waiting owner looks whether the one it waits for has left."""

_FAREWELL = 10.0
"""Seconds for which the coordinator's process outlives a failure, so that the others can find out on their own."""


_OVER = "the run is over"


class OwnersError(RuntimeError):
    """The owners cannot go on together: one is missing, has left, or runs another configuration."""


class Store(Protocol):
    """The shared key-value store that owners exchange over. Keys are paths."""

    def put(self, key: str, value: bytes) -> None:
        """Give a new key its value."""

    def get(self, key: str, seconds: float) -> bytes | None:
        """The value of a key; None if it has none within so many seconds."""

    def count(self, key: str) -> int:
        """How many times any owner has called this for the key, this call included."""

    def delete(self, key: str) -> None:
        """Delete the key, or all keys below it, if there are any."""


class Owners:
    """One owner's end of the exchange, over a store: use `JaxOwners`.

    Start with `check` for everything that must be the same at all owners. `exchange` computes nothing with JAX, so a
    callback may call it while a compiled loop runs, and several threads may at the same time. As each exchange waits
    for all owners, those of one thread must come in the same order everywhere.

    The store is emptied as it is read. Here, a hash of each tag is kept (about 150 bytes).

    :ivar num_owners: how many there are.
    :ivar index: which one this is, from 0.
    :ivar timeout: seconds that one exchange waits for the others.
    :ivar sent: None, or a list to which every ``(key, value)`` that is sent is appended, for audits.
    """

    def __init__(self, store: Store, num_owners: int, index: int, timeout: float):
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
        if not 0 <= index < num_owners:
            raise ValueError(f"index must be at least 0 and below num_owners={num_owners}, got {index}")
        self.num_owners, self.index, self.timeout = num_owners, index, float(timeout)
        self.sent: list[tuple[str, bytes]] | None = None
        self._store = store
        self._checked = False
        self._ended: str | None = None  # why nothing can be exchanged any more
        self._missing: set[int] = set()
        self._uses: Counter[bytes] = Counter()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(4 * num_owners, "numpyro_dp.owners")

    def exchange(self, tag: bytes, mine: np.ndarray) -> np.ndarray:
        """The arrays of all owners, once all have called this with the same tag.

        :param tag: which exchange this is; public. Those with the same tag are paired in their order.
        :param mine: this owner's noisy sums in steps of the grid: int64, of the same shape at all owners.
        :return: int64 of shape ``(num_owners, *mine.shape)``, in the order of the owners.
        :raises OwnersError: naming the owners that left or did not answer in time. Nothing can be exchanged after that.
        """
        if not self._checked and self._ended is None:
            raise RuntimeError("call `check` first: owners exchange nothing before they know that they run the same")
        return self._gather(b"exchange", tag, mine)

    def check(self, tag: bytes, public: bytes) -> None:
        """Make sure that all owners pass the same `public`: settings, a random key, a starting point. Sends a hash.

        :param tag: the name of what is compared.
        :raises OwnersError: at every owner, naming the tag and who differs from whom; or as in `exchange`.
        """
        digests = self._gather(b"check", tag, np.frombuffer(hashlib.sha3_256(public).digest(), np.int64))
        alike: dict[bytes, list[int]] = {}
        for owner, digest in enumerate(digests):
            alike.setdefault(digest.tobytes(), []).append(owner)
        if len(alike) > 1:
            self._fail(
                f"owners differ in {tag.decode(errors='replace')!r}: {' versus '.join(map(_named, alike.values()))}. "
                "All must run the same model with the same settings, random key and starting point"
            )
        self._checked = True

    def close(self) -> None:
        """Leave. Whoever still waits for this owner is told at once. Closing twice does no harm."""
        self._leave(_OVER)

    def __enter__(self):
        return self

    def __exit__(self, error, *details) -> None:
        self._leave(_OVER if error is None else "the run ended with an error")

    # -- One exchange ------------------------------------------------------------------------------------------------

    def _gather(self, kind: bytes, tag: bytes, mine: np.ndarray) -> np.ndarray:
        pool = self._pool
        if pool is None or self._ended is not None:
            raise OwnersError(f"nothing can be exchanged any more: {self._ended}")
        if not isinstance(mine, np.ndarray | np.int64) or mine.dtype != np.int64:
            given = f"an array of {mine.dtype}" if isinstance(mine, np.ndarray) else type(mine).__name__
            raise TypeError(f"owners exchange whole steps of the grid as int64 arrays, got {given}")
        key = self._new_key(kind, tag)
        message = mine.astype("<i8").tobytes()
        wait = _Wait(time.monotonic() + self.timeout)
        # Asking for the others' messages while this one is on its way saves a round trip.
        asked = {
            owner: pool.submit(self._receive, f"{key}/{owner}", owner, wait)
            for owner in range(self.num_owners)
            if owner != self.index
        }
        try:
            self._send(f"{key}/{self.index}", message)
            messages = {owner: future.result() for owner, future in asked.items()}
        except OwnersError as error:
            wait.over.set()
            self._fail(str(error))
        messages[self.index] = message
        if wait.missing:
            self._missing = set(wait.missing)
            self._fail("; ".join(why for _, why in sorted(wait.missing.items())))
        for owner, received in messages.items():
            if received is None:
                self._fail("closed while waiting")
            elif len(received) != len(message):
                self._fail(f"owner {owner} sent {len(received)} bytes and owner {self.index} {len(message)}")
        pool.submit(self._clear, key)  # nobody waits for that
        everyone = [np.frombuffer(messages[owner], "<i8") for owner in range(self.num_owners)]
        return np.stack(everyone).astype(np.int64).reshape(self.num_owners, *mine.shape)

    def _new_key(self, kind: bytes, tag: bytes) -> str:
        """A key that no exchange has had before, the same at all owners."""
        tag = hashlib.blake2b(kind + b"\0" + tag, digest_size=16).digest()
        with self._lock:
            self._uses[tag] += 1
            return f"messages/{tag.hex()}-{self._uses[tag]}"

    def _send(self, key: str, value: bytes) -> None:
        """The one way out of this process."""
        if self.sent is not None:
            self.sent.append((key, value))
        self._store.put(key, value)

    def _receive(self, key: str, owner: int, wait: "_Wait") -> bytes | None:
        """What `owner` sent; None, with the reason in `wait`, if nothing will come."""
        while True:
            left = wait.deadline - time.monotonic()
            message = self._store.get(key, max(0.0, min(_LOOK_UP, left)))
            if message is not None:
                return message
            farewell = self._store.get(f"left/{owner}", 0)
            if farewell is not None:
                message = self._store.get(key, 0)  # it may have come before the farewell
                if message is None:
                    wait.give_up(owner, f"owner {owner} has left ({farewell.decode(errors='replace')})")
                return message
            if left <= 0:
                wait.give_up(owner, f"owner {owner} did not answer within {self.timeout:g} s")
                return None
            if (wait.over.is_set() or self._ended is not None) and left > _LOOK_UP:  # else its time is up, too
                return None

    def _clear(self, key: str) -> None:
        """Delete the messages if all have read them."""
        counter = f"read/{key}"
        if self._store.count(counter) == self.num_owners:
            self._store.delete(counter)
            self._store.delete(key)

    def _fail(self, why: str) -> NoReturn:
        self._end(why)
        raise OwnersError(f"the run of {self.num_owners} owners cannot go on at owner {self.index}: {why}")

    def _leave(self, why: str) -> None:
        if self._pool is None:  # a copy
            return
        self._end(why)
        self._pool.shutdown()

    def _end(self, why: str) -> None:
        """Exchange nothing any more, and tell the others why. The reason is public."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = why
        with contextlib.suppress(OwnersError):
            self._send(f"left/{self.index}", why.encode())

    def __getstate__(self):
        # A copy, for instance of a kernel that has run, knows who took part, and cannot exchange anything.
        return {"num_owners": self.num_owners, "index": self.index, "timeout": self.timeout}

    def __setstate__(self, state):
        self.__dict__.update(state, sent=None, _checked=False, _pool=None)
        self._ended = "this is a copy, the original has the connection"


class _Wait:
    """How long one exchange waits, and for whom it waited in vain."""

    def __init__(self, deadline: float):
        self.deadline = deadline
        self.over = threading.Event()
        self.missing: dict[int, str] = {}

    def give_up(self, owner: int, why: str) -> None:
        self.missing[owner] = why
        self.over.set()


def _named(owners: Sequence[int]) -> str:
    return f"owner{'s' * (len(owners) > 1)} {', '.join(map(str, owners))}"


class JaxOwners(Owners):
    """Owners in the processes of JAX's multi-process runtime: one owner a process, with the process's index.

    Messages go through the key-value store of JAX's coordinator, which lives in owner 0's process. All owners make
    their `JaxOwners` objects in the same order. Either connect here::

        with JaxOwners.connect("10.0.0.1:8476", num_owners=3, index=0) as owners:
            ...

    or make a ``JaxOwners()`` after ``jax.distributed.initialize``. Then JAX aborts all processes some time after one
    has died; with `connect`, the others end with an `OwnersError` only. Either way, if owner 0's process dies, the
    coordinator dies with it, and JAX aborts the others at once.

    JAX shows the devices of all owners to each of them, and an array that is put on devices of another owner is sent
    there: keep rows on local devices. Everything in `numpyro_dp` does.

    :param timeout: seconds that an exchange waits for the other owners.
    """

    def __init__(self, timeout: float = DEFAULT_TIMEOUT):
        # The client of JAX's key-value store has no public name; other libraries take it from here, too.
        from jax._src import distributed

        state = distributed.global_state
        if state.client is None:
            raise RuntimeError(
                "this process is not connected to other owners: use JaxOwners.connect(coordinator_address, "
                "num_owners, index), or call jax.distributed.initialize first"
            )
        # At its first use JAX introduces the devices of all processes to each other, and would wait for one that died.
        jax.local_devices()
        super().__init__(_JaxStore(state.client), state.num_processes, state.process_id, timeout)
        self._connected_here = False

    @classmethod
    def connect(
        cls,
        coordinator_address: str,
        num_owners: int,
        index: int,
        timeout: float = DEFAULT_TIMEOUT,
        **options: Any,
    ) -> "JaxOwners":
        """Connect this process with the other owners', before anything is computed with JAX.

        `close`, or the end of a ``with`` block or of the process, disconnects it again. Owner 0's process ends only
        when the others have left, or after `timeout` seconds, and aborts those that have not.

        :param coordinator_address: host and port at owner 0 that all owners can reach.
        :param index: which owner this is, from 0.
        :param timeout: seconds that an exchange waits for the other owners.
        :param options: of ``jax.distributed.initialize``, such as ``mtls_`` files, or ``initialization_timeout``:
            seconds to wait here until all owners are connected (300), after which JAX aborts the process.
        """
        defaults: dict[str, Any] = {"cluster_detection_method": "deactivate"}  # all that it would detect is given
        with _recoverable():
            jax.distributed.initialize(coordinator_address, num_owners, index, **(defaults | options))
        owners = cls(timeout)
        owners._connected_here = True
        atexit.register(owners._at_exit)
        return owners

    def _leave(self, why: str) -> None:
        super()._leave(why)
        if self.index != 0:
            self._disconnect()

    def _at_exit(self) -> None:
        self.close()
        self._disconnect()

    def _disconnect(self) -> None:
        if not self._connected_here:
            return
        self._connected_here = False
        if self.index == 0:
            with contextlib.suppress(OwnersError):
                self._see_off(_FAREWELL if self._missing else self.timeout)
        jax.distributed.shutdown()

    def _see_off(self, seconds: float) -> None:
        """Wait for the others to leave: JAX aborts the processes that are connected when its coordinator ends."""
        deadline = time.monotonic() + seconds
        for owner in set(range(1, self.num_owners)) - self._missing:
            while self._store.get(f"left/{owner}", _LOOK_UP) is None and time.monotonic() < deadline:
                pass
        time.sleep(_LOOK_UP)  # they disconnect right after saying so

    def __setstate__(self, state):
        super().__setstate__(state)
        self._connected_here = False


@contextlib.contextmanager
def _recoverable() -> Iterator[None]:
    """Have JAX's runtime go on when a process dies, rather than abort the others."""
    before = jax.config.jax_enable_recoverability
    jax.config.update("jax_enable_recoverability", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_recoverability", before)


class _JaxStore:
    """JAX's key-value store. The n-th object of each owner shares a path with the n-th of the others."""

    _made: tuple[Any, Iterator[int]] = None, itertools.count()

    def __init__(self, client: Any):
        if _JaxStore._made[0] is not client:
            _JaxStore._made = client, itertools.count()
        self._client = client
        self._root = f"numpyro_dp/{next(_JaxStore._made[1])}"

    def put(self, key: str, value: bytes) -> None:
        with _reported():
            self._client.key_value_set_bytes(f"{self._root}/{key}", value)

    def get(self, key: str, seconds: float) -> bytes | None:
        with _reported():
            try:
                if seconds > 0:
                    return self._client.blocking_key_value_get_bytes(f"{self._root}/{key}", math.ceil(1e3 * seconds))
                return self._client.key_value_try_get_bytes(f"{self._root}/{key}")
            except jax.errors.JaxRuntimeError as error:
                if str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                    return None
                raise

    def count(self, key: str) -> int:
        with _reported():
            return self._client.key_value_increment(f"{self._root}/{key}", 1)

    def delete(self, key: str) -> None:
        with _reported():
            self._client.key_value_delete(f"{self._root}/{key}")


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise OwnersError(f"JAX's coordinator, in owner 0's process, refused or cannot be reached: {error}") from error
