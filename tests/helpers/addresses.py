"""Addresses for processes that are to meet."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_address() -> Iterator[str]:
    """An address that no other test is given: the port stays taken, and a coordinator may listen on it all the same."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"
