"""Data owners in threads of one process."""

import threading
from collections import Counter

from numpyro_dp.owners import Owners, OwnersError


class LocalExchange(Owners):
    @classmethod
    def group(cls, num_owners: int, timeout: float = 10.0) -> list["LocalExchange"]:
        """The ends of all owners."""
        store = _LocalStore()
        return [cls(store, num_owners, index, timeout) for index in range(num_owners)]

    def wait_for_a_message(self, seconds: float) -> bool:
        """Until an owner has sent something, so it has read its model: NumPyro reads one at a time in a process."""
        return self._store.wait_for_a_value(seconds)


class _LocalStore:
    def __init__(self):
        self.values: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            if key in self.values:
                raise OwnersError(f"key {key} has a value already")
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, seconds)
            return self.values.get(key)

    def wait_for_a_value(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self.values), seconds)

    def count(self, key: str) -> int:
        with self._changed:
            self._counts[key] += 1
            return self._counts[key]

    def delete(self, key: str) -> None:
        with self._changed:
            self._counts.pop(key, None)
            for known in [known for known in self.values if known == key or known.startswith(f"{key}/")]:
                del self.values[known]
