"""The budget of one kernel, and the report on it.

A kernel owns one `Ledger`. Its plan (how much noise, how many releases) is fixed before the first look at the data and
never changes; the guarantee that a report states is that of the plan. The ledger lives on the host and hands out the
noise itself, release by release, so the budget cannot be overrun whatever drives the kernel: another chain, a second
`run`, a state that is used twice, a hand-written loop. Without a grant there is no noise, and without noise a step
releases nothing.
"""

import collections
import dataclasses
import decimal
import hashlib
import json
import math
import textwrap
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent

from numpyro_dp import accounting
from numpyro_dp.noise import MAX_NOISE_MULTIPLIER, NoiseSource


class PrivacyBudgetError(RuntimeError):
    """A run would release more than the budget allows, or asks for a budget that makes no sense."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will be released about the table, decided before it is looked at.

    :ivar eps, delta: the guarantee. ``eps=inf`` means no noise and no privacy.
    :ivar noise_multipliers: for each kind of release, noise standard deviation over L2 sensitivity.
    :ivar counts: for each kind of release, how many there may be, over all chains and iterations.
    :ivar num_rows: n; None with ``add_or_remove_one``, where it is private.
    """

    eps: float
    delta: float
    neighboring_relation: str
    noise_multipliers: Mapping[str, float]
    counts: Mapping[str, int]
    num_iterations: int
    num_chains: int
    num_rows: int | None

    @property
    def private(self) -> bool:
        return self.eps < math.inf

    @property
    def rho(self) -> float:
        """Total cost of everything planned: the zCDP parameter, see `numpyro_dp.accounting`."""
        return self.rho_of(self.counts)

    def rho_of(self, counts: Mapping[str, int]) -> float:
        return sum(accounting.releases_rho(self.noise_multipliers[kind], count) for kind, count in counts.items())

    def event(self, counts: Mapping[str, int] | None = None) -> DpEvent:
        """The releases as a dp_accounting event, for composition with other analyses of the same table."""
        return ComposedDpEvent(
            [
                accounting.gaussian_event(self.noise_multipliers[kind], count, self.neighboring_relation)
                for kind, count in (self.counts if counts is None else counts).items()
                if count
            ]
        )


def plan_for_budget(
    *,
    eps: float,
    delta: float,
    neighboring_relation: str,
    counts: Mapping[str, int],
    shares: Mapping[str, float],
    num_iterations: int,
    num_chains: int,
    num_rows: int | None,
) -> Plan:
    """The plan with the least noise that is ``(eps, delta)``-DP: each kind of release gets its share of the budget.

    :param counts: how many releases of each kind, over all chains and iterations.
    :param shares: fractions of ``rho``, adding up to 1.
    """
    rho = accounting.gaussian_rho(eps, delta) if eps < math.inf else math.inf
    multipliers = {
        kind: accounting.noise_multiplier_for(shares[kind] * rho, count) for kind, count in counts.items() if count
    }
    for kind, multiplier in multipliers.items():
        if multiplier > MAX_NOISE_MULTIPLIER:
            raise PrivacyBudgetError(
                f"eps={eps:g} over {counts[kind]} {kind} releases needs a noise multiplier of {multiplier:.3g}, above "
                f"{MAX_NOISE_MULTIPLIER:.3g}: no posterior can come of it. Raise eps or run fewer iterations"
            )
    return Plan(eps, delta, neighboring_relation, multipliers, dict(counts), num_iterations, num_chains, num_rows)


def plan_for_noise(
    *,
    noise_multipliers: Mapping[str, float],
    delta: float,
    neighboring_relation: str,
    counts: Mapping[str, int],
    num_iterations: int,
    num_chains: int,
    num_rows: int | None,
) -> Plan:
    """The plan with given noise multipliers; its ``eps`` is what that costs."""
    used = {kind: noise_multipliers[kind] for kind, count in counts.items() if count}
    plan = Plan(math.inf, delta, neighboring_relation, used, dict(counts), num_iterations, num_chains, num_rows)
    return dataclasses.replace(plan, eps=accounting.gaussian_eps(delta, plan.rho))


class Ledger:
    """Grants releases until the plan is used up. Thread-safe; cannot be copied or pickled into a second budget.

    :ivar reproducible: whether the noise comes from a seed.
    """

    def __init__(self, noise: NoiseSource | None):
        self._noise: NoiseSource | None = noise
        self.reproducible = noise is not None and noise.reproducible
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._spent: dict[str, int] = {}
        self._table: tuple | None = None
        self._context = b""
        self._repeats: collections.Counter[bytes] = collections.Counter()
        self._warned = False

    @property
    def committed(self) -> bool:
        """Whether there is a plan yet."""
        return self._plan is not None

    @property
    def plan(self) -> Plan:
        """The plan.

        :raises RuntimeError: before it is committed.
        """
        if self._plan is None:
            raise RuntimeError("no privacy budget is committed yet: it is when the kernel is initialised, by `run`")
        return self._plan

    @property
    def closed(self) -> bool:
        """Whether this is a copy, which keeps the books but has no budget."""
        return self._noise is None

    @property
    def untouched(self) -> bool:
        """Whether nothing has been released yet, so that the plan may still change."""
        return not any(self.spent().values())

    def commit(self, plan: Plan, context: str = "") -> None:
        """Fix the plan. It cannot change once something has been released.

        :param context: settings of the kernel that owns the ledger. Two kernels that share a noise seed but not their
            settings draw different noise.
        """
        with self._lock:
            if any(self._spent.values()):
                raise PrivacyBudgetError("the budget of this kernel is committed already, and part of it is spent")
            self._plan = plan
            self._spent = dict.fromkeys(plan.counts, 0)
            self._context = repr((plan, context)).encode()

    def bind_table(self, leaves: Sequence[Any]) -> None:
        """Remember which arrays the budget is for, without keeping them alive or reading them.

        :raises PrivacyBudgetError: if the kernel has run on other arrays before.
        """
        known = tuple(_reference(leaf) for leaf in leaves)
        with self._lock:
            if self._table is None:
                self._table = known
                return
            same = len(known) == len(self._table) and all(
                new() is old() and new() is not None for new, old in zip(known, self._table, strict=True)
            )
        if not same:
            raise PrivacyBudgetError(
                "this kernel has run on other arrays before. A kernel's budget belongs to one table: make a new kernel "
                "for other data, or pass the very same array objects to continue"
            )

    def spent(self) -> dict[str, int]:
        """Releases of each kind so far."""
        with self._lock:
            return dict(self._spent)

    def left(self) -> dict[str, int]:
        """Releases of each kind that the plan still allows."""
        with self._lock:
            return {kind: count - self._spent[kind] for kind, count in self.plan.counts.items()}

    def require(self, counts: Mapping[str, int], what: str) -> None:
        """Check that `counts` releases are left.

        :raises PrivacyBudgetError: naming what is left and the ways out.
        """
        if self.closed:
            raise PrivacyBudgetError(
                "this kernel is a copy or was unpickled: it keeps results, not budget, which stays with the original. "
                "Make a new kernel with a budget of its own"
            )
        plan, left = self.plan, self.left()
        short = [kind for kind, count in counts.items() if left[kind] < count]
        if short and plan.private:
            listed = ", ".join(f"{left[kind]} of {counts[kind]} {kind} releases" for kind in short)
            raise PrivacyBudgetError(
                f"the privacy budget (eps={plan.eps:g}, planned for {plan.num_chains} chain(s) of "
                f"{plan.num_iterations} iterations) does not allow {what}: {listed} left. Nothing was released. "
                "Keep part of the budget for later runs by giving the kernel `num_iterations=` larger than one run "
                "needs, or make a new kernel, whose eps adds to this one"
            )

    def grant(
        self, counts: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], nonce: bytes
    ) -> tuple[bool, dict[str, np.ndarray]]:
        """Charge `counts` releases and draw their noise; or, if the plan does not allow them, neither.

        A plan without privacy grants everything, with no noise, and keeps the books.

        :param counts: releases of each kind that the caller will make.
        :param shapes: shape of the noise for each kind, ``(releases, dimension)`` or ``(releases,)``.
        :param nonce: see `NoiseSource.draw`.
        """
        if min(counts.values()) < 0:
            raise ValueError(f"a release cannot be taken back, got counts {counts}")
        source = self._noise
        with self._lock:
            plan = self.plan  # once something is spent it does not change
            within = all(self._spent[kind] + count <= plan.counts[kind] for kind, count in counts.items())
            granted = not plan.private or (within and source is not None)
            if granted:  # charged before any noise exists
                for kind, count in counts.items():
                    self._spent[kind] += count
            if granted and self.reproducible:
                nonce = self._unrepeated(nonce)
            warn = not granted and not self._warned
            self._warned |= not granted
        if not plan.private:
            return True, {}
        if warn:
            warnings.warn(
                f"the privacy budget (eps={plan.eps:g}) is used up: the chain stands still from here on, and its "
                "further draws are copies, marked `exhausted`. Give the kernel the `num_iterations` and `num_chains` "
                "that the run needs",
                RuntimeWarning,
                stacklevel=2,
            )
        if not granted or source is None:
            return False, {kind: np.zeros((2, *shape), np.int32) for kind, shape in shapes.items()}
        return True, {
            kind: source.draw(
                shape, plan.noise_multipliers[kind], plan.neighboring_relation, kind.encode() + b"\0" + nonce
            )
            for kind, shape in shapes.items()
        }

    def _unrepeated(self, nonce: bytes) -> bytes:
        """`nonce` made unique to this kernel and to this draw: the same noise under two queries would cancel out."""
        digest = hashlib.sha3_256(self._context + nonce).digest()
        self._repeats[digest] += 1
        return digest + self._repeats[digest].to_bytes(8, "big")

    def __getstate__(self):
        # A copy that could grant releases would double the budget.
        return {"_plan": self._plan, "_spent": self.spent(), "_warned": True, "reproducible": self.reproducible}

    def __setstate__(self, state):
        self.__init__(noise=None)  # type: ignore[misc]
        self.__dict__.update(state)


def _reference(leaf: Any) -> Any:
    try:
        return weakref.ref(leaf)
    except TypeError:  # numbers and the like are public
        return lambda: leaf


@dataclasses.dataclass(frozen=True)
class PrivacyReport:
    """What a run guarantees, what it released, and what the guarantee rests on. Holds nothing private.

    :ivar eps, delta: the guarantee: that of everything the kernel was allowed to release, fixed beforehand.
    :ivar neighboring_relation: which tables are neighbours.
    :ivar unit: what one protected unit is.
    :ivar num_rows: n under replace-one; None under add-or-remove-one, where it is private.
    :ivar rho: the same guarantee in zCDP terms; costs of independent analyses of one table add up in rho.
    :ivar releases: for each kind: noise multiplier, planned number, number made, clip bound.
    :ivar eps_spent: what has been released so far would cost this much. Bookkeeping, not a guarantee: a run that was
        stopped because of what it released guarantees `eps`.
    :ivar public_arguments: arguments of the model that were treated as public knowledge.
    :ivar private_arguments: arguments whose rows are protected.
    :ivar dropped_sites: deterministic sites left out of the samples, with the reason.
    :ivar noise: where the noise came from.
    :ivar assumptions: what the guarantee and the posterior rest on.
    """

    eps: float
    delta: float
    neighboring_relation: str
    unit: str
    num_rows: int | None
    rho: float
    num_chains: int
    num_iterations: int
    releases: Mapping[str, Mapping[str, Any]]
    eps_spent: float
    rho_spent: float
    public_arguments: tuple[str, ...]
    private_arguments: tuple[str, ...]
    dropped_sites: Mapping[str, str]
    noise: str
    assumptions: tuple[str, ...]
    kernel: str

    @property
    def private(self) -> bool:
        return self.eps < math.inf

    @property
    def eps_left(self) -> float:
        """The committed eps minus `eps_spent`; bookkeeping."""
        return self.eps - self.eps_spent if self.private else math.inf

    @property
    def events(self) -> tuple[DpEvent, ...]:
        """Privacy events of everything committed, for dp_accounting's PLD accountant under `neighboring_relation`."""
        if not self.private:
            raise ValueError("a run without noise has no privacy event: it is not private")
        return tuple(
            accounting.gaussian_event(kind["noise_multiplier"], kind["planned"], self.neighboring_relation)
            for kind in self.releases.values()
            if kind["planned"]
        )

    def eps_at(self, delta: float) -> float:
        """The guarantee at another delta: every pair ``(eps_at(delta), delta)`` holds at once."""
        return accounting.gaussian_eps(delta, self.rho) if self.private else math.inf

    def comparison(self) -> dict[str, float]:
        """eps of the same releases by the exact composition and by the looser zCDP and RDP bounds."""
        if not self.private:
            return dict.fromkeys(("exact", "rdp", "zcdp"), math.inf)
        return {
            "exact": accounting.gaussian_eps(self.delta, self.rho),
            "rdp": accounting.rdp_eps(self.delta, self.rho),
            "zcdp": accounting.zcdp_eps(self.delta, self.rho),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; infinities as the string ``"inf"``."""
        fields = dataclasses.asdict(self)
        if self.private:
            fields["events"] = [repr(event) for event in self.events]
        return _plain(fields)

    def to_json(self, **options: Any) -> str:
        """`to_dict` as JSON text; `options` go to `json.dumps`."""
        return json.dumps(self.to_dict(), **options)

    def guarantee(self) -> str:
        """The guarantee in one line."""
        if not self.private:
            return "NOT PRIVATE: run without noise (eps = inf)"
        relation = {"replace_one": "replacing one", "add_or_remove_one": "adding or removing one"}
        return (
            f"({_round_up(self.eps, 6)}, {_round_up(self.delta, 3)})-differentially private with respect to "
            f"{relation[self.neighboring_relation]} {self.unit}"
        )

    def __str__(self) -> str:
        lines = [
            f"Privacy of this {self.kernel} run",
            f"  guarantee    {self.guarantee()}",
            f"  covers       {self.num_chains} chain(s) of {self.num_iterations} iterations, warmup included"
            + (f"; n = {self.num_rows}" if self.num_rows is not None else "; n is private"),
        ]
        if self.private:
            others = self.comparison()
            lines += [
                f"  rho          {self.rho:.6g} (zCDP; looser bounds on eps: RDP {others['rdp']:.4g}, "
                f"zCDP {others['zcdp']:.4g})",
                f"  spent        eps {self.eps_spent:.6g} so far (bookkeeping; the guarantee is the line above)",
            ]
        for kind, release in self.releases.items():
            lines.append(
                f"  {kind:<12} {release['made']} of {release['planned']} releases, "
                f"noise multiplier {release['noise_multiplier']:.6g}, {release['clip']}"
            )
        lines += [
            f"  private      {', '.join(self.private_arguments)}",
            f"  public       {', '.join(self.public_arguments) or 'no argument'}",
            f"  noise        {self.noise}",
        ]
        for name, reason in self.dropped_sites.items():
            lines.append(f"  left out     site '{name}' ({reason})")
        lines += [f"  assumes      {assumption}" for assumption in self.assumptions]
        return "\n".join(textwrap.fill(line, 110, subsequent_indent=" " * 15) for line in lines)


def _round_up(value: float, digits: int) -> str:
    """`value` to so many significant digits, never below it."""
    up = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(up.create_decimal(repr(value))):.{digits}g}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value
