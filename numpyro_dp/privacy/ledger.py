"""The budget of one kernel: what will be released, and who may release it.

A kernel owns one `Ledger`. Its plan (how much noise, how many releases) is fixed before the first look at the data and
never changes; the guarantee that a report states is that of the plan. The ledger lives on the host and hands out the
noise and the batches themselves, release by release, so the budget cannot be overrun whatever drives the kernel:
another chain, a second `run`, a state that is used twice, a hand-written loop. Without a grant there is no noise, and
without noise a step releases nothing.

Proof: docs/proofs/gaussian.md.
"""

import collections
import dataclasses
import hashlib
import math
import operator
import os
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from numpyro_dp.privacy import accounting
from numpyro_dp.privacy.batches import ALL_ROWS, AllRows, Batches, require_batches
from numpyro_dp.privacy.mechanisms import NEIGHBORING_RELATIONS, Gaussian, Mechanism, rebuilt, with_noise_multiplier
from numpyro_dp.privacy.noise import MAX_NOISE_MULTIPLIER, NoiseSource

if TYPE_CHECKING:
    from numpyro_dp.privacy.budget import PrivacyBudget, RunClaimant

_forks = 0  # of the process, from the first one that imported this module down to this one


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def _this_process() -> tuple[int, int]:
    """What tells a process from those that it was forked from: a child may have its parent's number, in a container."""
    return os.getpid(), _forks


_COPY = (
    "this kernel is a copy or was unpickled: it keeps results, not budget, which stays with the original. Make a new "
    "kernel with a budget of its own"
)

CLAIM = 1 / 20
"""The part of a plan's releases that a process sets aside at a time; as much may be lost if it crashes."""


class PrivacyBudgetError(RuntimeError):
    """A run would release more than the budget allows, or asks for a budget that makes no sense."""


class Wanted(NamedTuple):
    """One kind of release as a kernel wants it, before its noise is known.

    :ivar mechanisms: from a noise multiplier to the mechanism; or, for noise that follows a schedule, to one mechanism
        for each iteration of a chain. More noise for a larger argument.
    :ivar counts: how many releases of each of these mechanisms, over all chains.
    :ivar share: fraction of the budget.
    """

    mechanisms: Callable[[float], tuple[Mechanism, ...]]
    counts: tuple[int, ...]
    share: float = 1.0


class Releases(NamedTuple):
    """One kind of release as it is planned.

    :ivar mechanisms: one for all iterations, or one for each iteration of a chain.
    :ivar counts: how many releases of each there may be, over all chains.
    """

    mechanisms: tuple[Mechanism, ...]
    counts: tuple[int, ...]

    def stage(self, iteration: int) -> int | None:
        """Which of the mechanisms is that of an iteration; None if the plan does not reach so far."""
        if len(self.mechanisms) == 1:
            return 0
        return iteration if 0 <= iteration < len(self.mechanisms) else None


class Request(NamedTuple):
    """What one iteration asks for.

    :ivar number: how many releases will be made.
    :ivar shape: shape of the noise, ``(at least number, ...)``.
    :ivar batches: how rows are drawn, for each entry of the leading axis of `shape`.
    """

    number: int
    shape: tuple[int, ...]
    batches: Batches = ALL_ROWS


class Drawn(NamedTuple):
    """What the ledger hands out for one request; secret.

    :ivar noise_multiplier: of the mechanism that was granted.
    :ivar noise: int32 of shape ``(2, *shape)``, as from `NoiseSource.draw`; None without privacy.
    :ivar indices, sizes: the batches, or None where all rows are used.
    """

    noise_multiplier: float
    noise: np.ndarray | None
    indices: np.ndarray | None
    sizes: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will be released about the table, decided before it is looked at.

    :ivar eps, delta: the guarantee. ``eps=inf`` means no noise and no privacy.
    :ivar kinds: for each kind of release, the mechanisms and how many there may be.
    :ivar num_rows: n; None with ``add_or_remove_one``, where it is private.
    :ivar unit: "row", or a hash of which rows belong to which unit.
    """

    eps: float
    delta: float
    neighboring_relation: str
    kinds: Mapping[str, Releases]
    num_iterations: int
    num_chains: int
    num_rows: int | None
    unit: str = "row"

    @property
    def private(self) -> bool:
        """Whether there is noise. With too little of it `eps` may be infinite all the same."""
        return all(m.noise_multiplier > 0 for kind in self.kinds.values() for m in kind.mechanisms)


def flat_releases(
    kinds: Mapping[str, Releases], counts: Mapping[str, Sequence[int]] | None = None
) -> tuple[tuple[Mechanism, int], ...]:
    """Planned releases, or `counts` of them, as `numpyro_dp.privacy.accounting` takes them."""
    return tuple(
        (mechanism, int(count))
        for name, kind in kinds.items()
        for mechanism, count in zip(kind.mechanisms, kind.counts if counts is None else counts[name], strict=True)
        if count
    )


def merged_stages(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Kinds that were planned stage by stage, as "bounds 1" and "bounds 2", as one kind each, of several stages.

    :param kinds: of each, `Releases` or counts.
    """
    merged: dict[str, Any] = {}
    for name, kind in kinds.items():
        name = re.sub(r" \d+$", "", name)
        before = merged.get(name)
        if before is None:
            merged[name] = kind
        elif isinstance(kind, Releases):
            merged[name] = Releases(before.mechanisms + kind.mechanisms, before.counts + kind.counts)
        else:
            merged[name] = before + kind
    return merged


def require_whole(name: str, counts: Sequence[int], length: int) -> list[int]:
    """So many whole numbers, none of them negative, as Python's own integers.

    :raises ValueError: if `counts` are something else.
    """
    try:
        whole = [operator.index(count) for count in counts]
    except TypeError:
        whole = []
    if len(whole) != length or len(counts) != length or any(count < 0 for count in whole):
        raise ValueError(
            f"{name} releases are counted by {length} whole number(s) of at least 0, one for each mechanism; got "
            f"{list(counts)}"
        )
    return whole


def plan_for_budget(
    *,
    eps: float,
    delta: float,
    neighboring_relation: str,
    wanted: Mapping[str, Wanted],
    num_iterations: int,
    num_chains: int,
    num_rows: int | None,
) -> Plan:
    """The plan with the least noise that is ``(eps, delta)``-DP: each kind of release gets its share of the budget."""
    wanted = {name: kind for name, kind in wanted.items() if sum(kind.counts)}
    if (
        any(not kind.share > 0 for kind in wanted.values())
        or math.fsum(kind.share for kind in wanted.values()) > 1 + 1e-12
    ):
        raise ValueError(
            f"the shares of a budget are positive and add up to 1 at most, got {[k.share for k in wanted.values()]}"
        )
    if eps == math.inf:
        multipliers = dict.fromkeys(wanted, 0.0)
    elif all(map(_is_gaussian_scale, wanted.values())):
        rho = accounting.gaussian_rho(eps, delta)
        multipliers = {name: _gaussian_multiplier(kind, rho) for name, kind in wanted.items()}
    else:
        base = {name: math.sqrt(sum(kind.counts) / kind.share) for name, kind in wanted.items()}

        def releases_at(scale: float) -> tuple:
            return flat_releases(_planned(wanted, {name: scale * base[name] for name in wanted}))

        scale = accounting.calibrate(releases_at, eps, delta, neighboring_relation)
        multipliers = {name: scale * base[name] for name in wanted}
    kinds = _planned(wanted, multipliers)
    _require_noise_in_range(kinds, eps)
    return Plan(eps, delta, neighboring_relation, kinds, num_iterations, num_chains, num_rows)


def _is_gaussian_scale(kind: Wanted) -> bool:
    """Whether all mechanisms are Gaussian, with noise proportional to the argument: then what they cost is exact."""
    once, twice = kind.mechanisms(1.0), kind.mechanisms(2.0)
    return all(
        isinstance(m, Gaussian) and double.noise_multiplier == 2 * m.noise_multiplier
        for m, double in zip(once, twice, strict=True)
    )


def _gaussian_multiplier(kind: Wanted, rho: float) -> float:
    """The argument of `kind.mechanisms` with which they cost the kind's share of `rho`, up to rounding."""
    # Each mechanism's noise is proportional to the argument: at 1, they cost as much as so many of noise 1 would.
    count = math.fsum(c / m.noise_multiplier**2 for m, c in zip(kind.mechanisms(1.0), kind.counts, strict=True))
    return accounting.noise_multiplier_for(kind.share * rho, count)


def plan_for_noise(
    *,
    noise_multipliers: Mapping[str, float],
    delta: float,
    neighboring_relation: str,
    wanted: Mapping[str, Wanted],
    num_iterations: int,
    num_chains: int,
    num_rows: int | None,
) -> Plan:
    """The plan with given noise multipliers; its ``eps`` is what that costs."""
    kinds = _planned({name: kind for name, kind in wanted.items() if sum(kind.counts)}, noise_multipliers)
    eps = accounting.composed_eps(flat_releases(kinds), delta, neighboring_relation)
    _require_noise_in_range(kinds, eps)
    return Plan(eps, delta, neighboring_relation, kinds, num_iterations, num_chains, num_rows)


def _require_noise_in_range(kinds: Mapping[str, Releases], eps: float) -> None:
    for name, releases in kinds.items():
        largest = max(mechanism.noise_multiplier for mechanism in releases.mechanisms)
        if largest > MAX_NOISE_MULTIPLIER:
            raise PrivacyBudgetError(
                f"eps={eps:g} over {sum(releases.counts)} {name} releases needs a noise multiplier of {largest:.3g}, "
                f"above {MAX_NOISE_MULTIPLIER:.3g}: no posterior can come of it. Raise eps or run fewer iterations"
            )


def _planned(wanted: Mapping[str, Wanted], noise_multipliers: Mapping[str, float]) -> dict[str, Releases]:
    return {
        name: Releases(kind.mechanisms(noise_multipliers[name]), tuple(kind.counts)) for name, kind in wanted.items()
    }


def _plain_request(request: Request) -> Request:
    """The same request, of Python's own numbers, which are what they were when they were checked."""
    number, *shape = (int(operator.index(x)) for x in (request.number, *request.shape))
    return Request(number, tuple(shape), require_batches(request.batches))


def _rebuilt(kinds: Mapping[str, Releases]) -> dict[str, Releases]:
    """The same kinds of release, of our own classes and of plain numbers.

    :raises ValueError: if counts are no counts, or one kind has mechanisms that differ in more than their noise.
    :raises TypeError: if a mechanism is of another class.
    """
    found = {}
    for name, (mechanisms, counts) in kinds.items():
        mechanisms, counts = tuple(map(rebuilt, mechanisms)), tuple(counts)
        if len({with_noise_multiplier(mechanism, 1.0) for mechanism in mechanisms}) != 1 or "\0" in name:
            raise ValueError(f"{name!r} releases are of mechanisms that differ in their noise only, under a plain name")
        found[str(name)] = Releases(mechanisms, tuple(require_whole(name, counts, len(mechanisms))))
    return found


def _plain(plan: Plan) -> Plan:
    """The same plan, of our own classes and of Python's own numbers, which stay what they are."""
    relation = next((relation for relation in NEIGHBORING_RELATIONS if relation == plan.neighboring_relation), None)
    if relation is None:
        raise ValueError(f"unknown neighboring_relation {plan.neighboring_relation!r}")
    num_rows = None if plan.num_rows is None else operator.index(plan.num_rows)
    sizes = operator.index(plan.num_iterations), operator.index(plan.num_chains), num_rows
    eps, delta = map(float, (plan.eps, plan.delta))
    return Plan(eps, delta, relation, _rebuilt(plan.kinds), *sizes, str(plan.unit))


def _require_price(plan: Plan) -> None:
    """Check that a plan says what its releases cost.

    :raises PrivacyBudgetError: if the releases cost more than the plan says.
    """
    if plan.eps == math.inf:
        return
    eps = accounting.composed_eps(flat_releases(plan.kinds), plan.delta, plan.neighboring_relation)
    if not plan.private or not eps <= plan.eps * (1 + 1e-9):
        raise PrivacyBudgetError(f"these releases cost eps {eps:.6g}, more than the {plan.eps:.6g} of their plan")


class Ledger:
    """Grants releases until the plan is used up. Thread-safe; cannot be copied or pickled into a second budget.

    A fork of the process has no budget either. What no program can see from within is that the whole machine or process
    was set back: a virtual machine that is restored from a snapshot, or a process from a checkpoint (CRIU), has the
    ledger as it was, and may release again what was released since.

    :param budget: of the table, if it has one: the whole plan is charged to it before the first release, and releases
        are claimed from it, some at a time, before they are made. Who holds the noise holds the debt.
    :param what: the name of the run in it.
    """

    def __init__(self, noise: NoiseSource | None, budget: "PrivacyBudget | None" = None, what: str = ""):
        self._process = _this_process()
        self._budget, self._what = budget, what
        self._run: str | None = None  # in the budget, once it is charged
        self._claimant: RunClaimant | None = None
        self._taken: dict[str, tuple[int, ...]] = {}  # claimed by others before this ledger took up their run
        self._claimed: dict[str, list[int]] = {}  # by them, and by this ledger
        self._noise: NoiseSource | None = noise
        self._reproducible = noise is not None and noise.reproducible
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._plan_as_committed: Plan | None = None  # as it was before any reserve was assigned
        self._spent: dict[str, list[int]] = {}
        self._table: tuple | None = None
        self._context = b""
        self._repeats: collections.Counter[bytes] = collections.Counter()
        self._warned = False

    @property
    def budget(self) -> "PrivacyBudget | None":
        """Of the table, if the run is charged to one; None for a copy."""
        return self._budget

    @property
    def reproducible(self) -> bool:
        """Whether the noise comes from a seed."""
        return self._reproducible

    @property
    def committed(self) -> bool:
        """Whether there is a plan yet."""
        return self._plan is not None

    @property
    def plan(self) -> Plan:
        """The plan; a copy, which nobody's change of it changes here.

        :raises RuntimeError: before it is committed.
        """
        return dataclasses.replace(self._known_plan, kinds=dict(self._known_plan.kinds))

    @property
    def _known_plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("no privacy budget is committed yet: it is when the kernel is initialised, by `run`")
        return self._plan

    @property
    def committed_releases(self) -> tuple[tuple[Mechanism, int], ...]:
        """What was committed before the first release, reserves unassigned: the guarantee is that of these.

        What a reserve is assigned to follows from what was released, and so may what it costs. Whatever it is, nothing
        may be claimed of it beyond what the reserve guarantees (a filter, not an odometer).

        :raises RuntimeError: before there is a plan.
        """
        return flat_releases((self._plan_as_committed or self._known_plan).kinds)

    @property
    def closed(self) -> bool:
        """Whether this is a copy, also by a fork of the process: it keeps the books but has no budget."""
        return self._noise is None or _this_process() != self._process

    @property
    def untouched(self) -> bool:
        """Whether nothing has been released yet, so that the plan may still change."""
        return not any(map(any, self.spent().values()))

    def commit(self, plan: Plan, context: str = "") -> None:
        """Fix the plan. It cannot change once something has been released.

        :param context: settings of the kernel that owns the ledger, and a fingerprint of its model. Two kernels that
            share a noise seed but not these draw different noise.
        """
        with self._lock:
            if any(map(any, self._spent.values())):
                raise PrivacyBudgetError("the budget of this kernel is committed already, and part of it is spent")
            # First: should this be interrupted, no plan may stand beside the charge of another.
            self._run, self._claimant, self._taken = None, None, {}
            plan = _plain(plan)  # which nobody else can change later
            _require_price(plan)
            kept = self._plan or plan
            if (kept.private, kept.neighboring_relation) != (plan.private, plan.neighboring_relation):
                raise PrivacyBudgetError(  # vaults are made for one of them
                    "a plan that was committed is replaced by one under the same relation, with privacy if it had any"
                )
            self._plan = self._plan_as_committed = plan
            self._spent = {name: [0] * len(kind.counts) for name, kind in plan.kinds.items()}
            self._claimed = {name: [0] * len(kind.counts) for name, kind in plan.kinds.items()}
            self._context = repr((plan, context)).encode()

    def assign(self, reserve: str, kinds: Mapping[str, Releases]) -> None:
        """Decide what a kind of release that was kept in reserve is spent on.

        The choice may follow from what was released before, and so may what it costs: no more than the reserve. Among
        `kinds` there may be another reserve, from which later stages are assigned; the whole is then a filter on rho
        (Smith and Thakurta 2022; for stages of fixed cost Dong, Roth and Su 2022, Theorem 4).

        :raises PrivacyBudgetError: if `kinds` are not Gaussian, cost more, or the reserve is touched or gone; or if the
            budget is not here, but with the original of this copy.
        :raises ValueError: if one of `kinds` has another name's place, or a count that is no count.
        """
        with self._lock:
            plan = self._known_plan
            if self.closed:
                raise PrivacyBudgetError(_COPY)
            if reserve not in plan.kinds or any(self._spent[reserve]):
                raise PrivacyBudgetError(f"there is no untouched {reserve} in the budget of this kernel")
            if set(kinds) & set(plan.kinds):
                raise ValueError(f"{sorted(set(kinds) & set(plan.kinds))} are planned already")
            kinds = _rebuilt(kinds)
            if plan.private and not all(m.noise_multiplier > 0 for kind in kinds.values() for m in kind.mechanisms):
                raise PrivacyBudgetError("nothing in a private plan is without noise")
            new, old = flat_releases(kinds), flat_releases({reserve: plan.kinds[reserve]})
            if not all(isinstance(mechanism, Gaussian) for mechanism, _ in (*new, *old)):
                raise PrivacyBudgetError("only Gaussian releases may be decided on later")
            costs = [math.fsum(count * (m.rho or 0.0) for m, count in releases) for releases in (new, old)]
            if not costs[0] <= costs[1]:
                raise PrivacyBudgetError(f"rho {costs[0]:g} is wanted from a reserve of {costs[1]:g}")
            if not self._claim({reserve: (0, 1)}):
                raise PrivacyBudgetError(
                    f"what to do with the {reserve} of this run was decided elsewhere: somebody else has resumed it"
                )
            left = {name: kind for name, kind in plan.kinds.items() if name != reserve}
            self._plan = dataclasses.replace(plan, kinds={**left, **kinds})
            self._context += repr(self._plan).encode()
            for books in (self._spent, self._claimed):
                del books[reserve]
                books |= {name: [0] * len(kind.counts) for name, kind in kinds.items()}

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

    def require_size(self, num_rows: int) -> None:
        """Check that the table has as many rows as the plan is for, where that decides the price of a batch.

        :raises PrivacyBudgetError: if it has not.
        """
        planned = self._known_plan.num_rows
        if planned is not None and num_rows != planned:
            raise PrivacyBudgetError(
                f"the privacy budget of this kernel is for a table of {planned} rows, and this one has {num_rows}. "
                "Make a new kernel for other data"
            )

    def spent(self) -> dict[str, tuple[int, ...]]:
        """Releases of each kind so far, for each of its mechanisms."""
        with self._lock:
            return {name: tuple(counts) for name, counts in self._spent.items()}

    def take_over(self, spent: Mapping[str, Sequence[int]]) -> None:
        """Count what the process that draws the noise has counted, where several run the same program."""
        with self._lock:
            self._spent = {
                name: [max(pair) for pair in zip(own, map(int, spent[name]), strict=True)]
                for name, own in self._spent.items()
            }

    def _gone(self) -> dict[str, np.ndarray]:
        """Releases of each kind that cannot be made any more: made here, or claimed by others who resumed this run."""
        with self._lock:
            gone = {name: np.array(counts) for name, counts in self._spent.items()}
            if self._budget is not None and self._run is not None:
                for name, counts in self._budget.claimed(self._run, self._known_plan).items():
                    if name in gone:
                        gone[name] += np.subtract(counts, self._claimed[name])
        return gone

    def require(self, counts: Mapping[str, int], num_iterations: int, start: int | None, what: str) -> None:
        """Check that `counts` releases are left.

        :param counts: releases of each kind in all.
        :param num_iterations: in how many iterations of a chain they are made, equally many in each.
        :param start: how many iterations the chains have done before; None if that is not known.
        :raises PrivacyBudgetError: naming what is left and the ways out.
        """
        if self.closed:
            raise PrivacyBudgetError(_COPY)
        plan, spent = self._known_plan, self._gone()
        short = []
        for name, count in counts.items():
            if name not in plan.kinds:
                continue
            left = np.subtract(plan.kinds[name].counts, spent[name])
            if len(left) > 1 and start is not None:  # of each iteration's own releases
                coming = left[start : start + num_iterations]
                within = len(coming) == num_iterations and bool((coming >= count / num_iterations).all())
            else:
                within = bool(left.sum() >= count)
            if not within:
                short.append(f"{left.sum()} of {count} {name} releases")
        if short and plan.private:
            raise PrivacyBudgetError(
                f"the privacy budget (eps={plan.eps:g}, planned for {plan.num_chains} chain(s) of "
                f"{plan.num_iterations} iterations) does not allow {what}: {', '.join(short)} left. Nothing was "
                "released. Keep part of the budget for later runs by giving the kernel `num_iterations=` larger than "
                "one run needs, or make a new kernel, whose eps adds to this one"
            )

    def grant(
        self, requests: Mapping[str, Request], iteration: int, num_rows: int, nonce: bytes
    ) -> tuple[bool, dict[str, Drawn]]:
        """Charge the requested releases and draw their noise and batches; or, if the plan does not allow them, neither.

        A plan without privacy grants everything, with no noise, and keeps the books.

        :param iteration: how many iterations the chain has done: it decides the noise where that follows a schedule.
        :param num_rows: rows to draw batches from.
        :param nonce: see `NoiseSource.draw`.
        """
        requests = {str(name): _plain_request(request) for name, request in requests.items()}
        for name, request in requests.items():
            if request.number < 0:
                raise ValueError(f"a release cannot be taken back, got a count of {request.number} for {name}")
        source = None if self.closed else self._noise
        with self._lock:
            plan = self._known_plan  # once something is spent it does not change
            found = {name: plan.kinds[name].stage(iteration) for name in requests}
            stages = {name: stage or 0 for name, stage in found.items()}
            mechanisms = {name: plan.kinds[name].mechanisms[stage] for name, stage in stages.items()}
            for name, request in requests.items():
                mechanism = mechanisms[name]
                if plan.private and not request.batches.accounts_for(mechanism, num_rows):
                    raise PrivacyBudgetError(
                        f"{name} releases are accounted for as {mechanism.describe()}, and asked for on "
                        f"{request.batches}"
                    )
            within = all(
                found[name] is not None and self._spent[name][k] + requests[name].number <= plan.kinds[name].counts[k]
                for name, k in stages.items()
            )
            granted = not plan.private or (within and source is not None)
            if granted:
                granted = self._claim({name: (stages[name], request.number) for name, request in requests.items()})
            if granted:  # charged before any noise exists
                for name, request in requests.items():
                    self._spent[name][stages[name]] += request.number
            if granted and self._reproducible:
                nonce = self._unrepeated(nonce)
            warn = not granted and not self._warned
            self._warned |= not granted
        if warn:
            warnings.warn(
                f"the privacy budget (eps={plan.eps:g}) is used up: the chain stands still from here on, and its "
                "further draws are copies, marked `exhausted`. Give the kernel the `num_iterations` and `num_chains` "
                "that the run needs",
                RuntimeWarning,
                stacklevel=2,
            )
        if source is None:  # of a copy, for batches alone: it has no noise to give
            source = NoiseSource()

        def draw(name: str, request: Request) -> Drawn:
            mechanism = mechanisms[name]
            nonce_of_kind = name.encode() + b"\0" + nonce
            if not granted:
                noise = np.zeros((2, *request.shape), np.int32)
            elif plan.private:
                noise = source.draw(request.shape, mechanism, plan.neighboring_relation, nonce_of_kind)
            else:
                noise = None
            indices = sizes = None
            if not isinstance(request.batches, AllRows):
                words = source.words(b"batch\0" + nonce_of_kind)
                drawn = [request.batches.draw(words, num_rows) for _ in range(request.shape[0])]
                indices, sizes = np.stack([d[0] for d in drawn]), np.array([d[1] for d in drawn], np.int32)
            return Drawn(mechanism.noise_multiplier, noise, indices, sizes)

        return granted, {name: draw(name, request) for name, request in requests.items()}

    def _claim(self, wanted: Mapping[str, tuple[int, int]]) -> bool:
        """Whether the budget of the table has set releases aside for this process: before, or now.

        :param wanted: for each kind, a stage and how many releases.
        """
        if self._budget is None:
            return True
        plan = self._known_plan
        if self._run is None:
            self._run = self._budget.charge(plan, self._what).run
        if self._claimant is None:
            self._claimant = self._budget.take_up(self._run, plan)
        missing = {
            name: (stage, self._spent[name][stage] + number - self._claimed[name][stage])
            for name, (stage, number) in wanted.items()
            if self._spent[name][stage] + number > self._claimed[name][stage]
        }
        if not missing:
            return True
        ahead = {name: self._block(name, *short) for name, short in missing.items()}
        exactly = {name: _at(len(self._claimed[name]), *short) for name, short in missing.items()}
        for counts in (ahead, exactly):
            if self._claimant.claim(counts, plan.kinds):
                for name, more in counts.items():
                    self._claimed[name] = [have + count for have, count in zip(self._claimed[name], more, strict=True)]
                return True
        return False

    def _block(self, name: str, stage: int, missing: int) -> list[int]:
        """What is missing, and as many of the releases that come next as are claimed at a time."""
        planned, claimed = self._known_plan.kinds[name].counts, self._claimed[name]
        block = _at(len(planned), stage, missing)
        more = math.ceil(CLAIM * sum(planned)) - missing
        for later in range(stage, len(planned)):
            count = max(0, min(more, planned[later] - claimed[later] - block[later]))
            block[later] += count
            more -= count
        return block

    def settle(self) -> None:
        """Give back to the budget of the table what this ledger has claimed and not made."""
        with self._lock:
            if self._claimant is None or self.closed:
                return
            # First: should this be interrupted, what may have been given back is claimed anew.
            self._claimed = {name: list(map(min, counts, self._spent[name])) for name, counts in self._claimed.items()}
            self._claimant.give_back({name: self._own(name, counts) for name, counts in self._claimed.items()})

    def _own(self, name: str, counts: Sequence[int]) -> list[int]:
        """Those of the releases that nobody else had claimed before."""
        taken = self._taken.get(name, (0,) * len(counts))
        return [count - others for count, others in zip(counts, taken, strict=True)]

    def resume(self, budget: "PrivacyBudget") -> None:
        """Take up a run that was begun elsewhere: what nobody has claimed of its plan.

        :raises PrivacyBudgetError: if this is no copy of a run that was charged to `budget`, or its noise has a seed.
        """
        with self._lock:
            if not self.closed:
                raise PrivacyBudgetError("this kernel has its budget: only a copy, or one that was pickled, is resumed")
            if self._run is None or self._plan is None:
                raise PrivacyBudgetError(
                    "this run was not charged to a PrivacyBudget before it was pickled, so nobody knows what has been "
                    "released since: give a new kernel a budget of its own"
                )
            if self._reproducible:
                raise PrivacyBudgetError(
                    "noise that a seed decides cannot be resumed: it would be the same under other queries"
                )
            taken = budget.claimed(self._run, self._plan)
            self._spent = {
                name: list(taken.get(name, [0] * len(kind.counts))) for name, kind in self._plan.kinds.items()
            }
            self._claimed = {name: list(counts) for name, counts in self._spent.items()}
            self._taken = {name: tuple(counts) for name, counts in self._spent.items()}
            self._claimant = budget.take_up(self._run, self._plan)
            self._noise, self._budget, self._process = NoiseSource(), budget, _this_process()
            self._table, self._warned = None, False

    def first_iteration_left(self) -> int:
        """The first iteration of a chain from which on nothing of the plan is gone, where each has its own releases."""
        touched = [np.flatnonzero(gone) for gone in self._gone().values() if len(gone) > 1]
        return max((int(stages[-1]) + 1 for stages in touched if len(stages)), default=0)

    def _unrepeated(self, nonce: bytes) -> bytes:
        """`nonce` made unique to this kernel and to this draw: the same noise under two queries would cancel out."""
        digest = hashlib.sha3_256(self._context + nonce).digest()
        self._repeats[digest] += 1
        return digest + self._repeats[digest].to_bytes(8, "big")

    def __getstate__(self):
        # A copy that could grant releases would double the budget.
        return {
            "_plan": self._plan,
            "_plan_as_committed": self._plan_as_committed,
            "_spent": self.spent(),
            "_run": self._run,  # by which the budget of the table knows what is left
            "_warned": True,
            "_reproducible": self._reproducible,
        }

    def __setstate__(self, state):
        self.__init__(noise=None)  # type: ignore[misc]
        self.__dict__.update({_NAMED_BEFORE.get(name, name): value for name, value in state.items()})


_NAMED_BEFORE = {"reproducible": "_reproducible", "_committed": "_plan_as_committed"}  # in pickles of older versions


def _reference(leaf: Any) -> Any:
    try:
        return weakref.ref(leaf)
    except TypeError:  # numbers and the like are public
        return lambda: leaf


def _at(length: int, stage: int, count: int) -> list[int]:
    return [count if k == stage else 0 for k in range(length)]
