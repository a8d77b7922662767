"""What the preparation may still spend: a filter on the budget.

Costs of the search follow from what it has released, so that they are not known beforehand; their sum is bounded. For
Gaussian releases this is no worse than costs that were fixed: if the sum of the releases' rho never exceeds what was
committed, whatever was released, the whole is as private as one Gaussian release of that rho (Smith and Thakurta 2022,
"Fully adaptive composition for Gaussian differential privacy"; for rho alone Whitehouse et al. 2023). The ledger
enforces it: each stage is assigned from what is left, and one that would cost more is refused.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from numpyro_dp.privacy.accounting import noise_multiplier_for
from numpyro_dp.privacy.draws import Draw, draws_now
from numpyro_dp.privacy.ledger import Ledger, PrivacyBudgetError, Releases, Request
from numpyro_dp.privacy.mechanisms import Gaussian

RESERVE = "reserve"
BEGUN = (
    "the preparation was begun before and did not end, and its budget is spent: make a new kernel, whose eps adds to "
    "this one's"
)


def silent(text: str) -> None:
    """Announces nothing."""


def tell(announce: Callable[[str], None], text: str) -> None:
    """What is paid for must not be lost because nobody can be told."""
    with contextlib.suppress(Exception):
        announce(text)


class Wish(NamedTuple):
    """One kind of release in a stage.

    :ivar rho: what all of them cost together.
    :ivar number: how many of them.
    :ivar shape: of one.
    """

    rho: float
    number: int = 1
    shape: tuple[int, ...] = ()


class Fund:
    """Spends what was committed for the preparation, stage by stage.

    :param announce: is told of each stage, for who waits.
    :param asked: a hash of what is asked of the table, as far as plan and context do not tell. With a noise seed, other
        questions have other noise.
    """

    def __init__(self, ledger: Ledger, announce: Callable[[str], None] = silent, asked: str = ""):
        self._ledger, self._announce, self._asked = ledger, announce, asked
        self._stage = 0

    @property
    def _reserve(self) -> str:
        return RESERVE if self._stage == 0 else f"{RESERVE} {self._stage}"

    @property
    def left(self) -> float:
        """In rho."""
        kind = self._ledger.plan.kinds.get(self._reserve)
        return 0.0 if kind is None else kind.mechanisms[0].rho or 0.0

    def assign(self, kinds: Mapping[str, Releases]) -> None:
        """Plan releases, paid from what is left.

        :raises PrivacyBudgetError: if they cost more than that.
        """
        cost = math.fsum(n * (m.rho or 0.0) for kind in kinds.values() for m, n in zip(*kind, strict=True))
        rest = (self.left - cost) * (1 - 1e-12)
        kinds = dict(kinds)
        reserve = self._reserve
        if rest > 1e-8 * self.left:  # less is what noise multipliers were rounded up by
            left = Gaussian(noise_multiplier_for(rest, 1))
            kinds[f"{RESERVE} {self._stage + 1}"] = Releases((left,), (1,))
        self._ledger.assign(reserve, kinds)
        self._stage += 1

    def ask(self, **wishes: Wish) -> dict[str, Draw]:
        """Leave for a stage of releases: of each kind, a draw with a slot for each release."""
        tell(self._announce, f"preparing, stage {self._stage + 1}: {', '.join(wishes).replace('_', ' ')}")
        names = {kind: f"{kind.replace('_', ' ')} {self._stage + 1}" for kind in wishes}
        self.assign(
            {
                names[kind]: Releases((Gaussian(noise_multiplier_for(wish.rho, wish.number)),), (wish.number,))
                for kind, wish in wishes.items()
            }
        )
        requests = {names[kind]: Request(wish.number, (wish.number, *wish.shape)) for kind, wish in wishes.items()}
        draws = draws_now(self._ledger, requests, b"preparation" + self._asked.encode())
        if draws is None:
            raise PrivacyBudgetError(BEGUN)
        return {kind: draws[name] for kind, name in names.items()}
