"""The noise that a kernel draws."""

import contextlib


@contextlib.contextmanager
def recorded_noise(kernel):
    """A list, to which each draw meanwhile is added, in steps of the grid."""
    source, drawn = kernel._ledger._noise, []
    draw = source.draw
    source.draw = lambda *arguments: drawn.append(draw(*arguments)) or drawn[-1]
    try:
        yield drawn
    finally:
        source.draw = draw
