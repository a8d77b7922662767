"""One budget for a table, on which several kernels, models and sessions draw; kept in a file.

A kernel's own guarantee is that of one run. Whoever fits five models to a table has spent the budget of five, and
nobody sees it. A `PrivacyBudget` does: each kernel that was given it charges its whole plan to the file, before its
first release, and is refused where the sum would exceed the budget.

**What the total guarantees.** How much a later run may cost is chosen by people who have seen the earlier results, so
costs must add up although they are chosen adaptively. For Gaussian releases they do: as long as the total of rho is
bounded beforehand, all releases together are no worse than one Gaussian release of that rho (Smith and Thakurta 2022,
"Fully adaptive composition for Gaussian differential privacy"). Other releases (batches, accept bits) are charged
with the eps and delta of their run to a part of the budget that is set aside for them when the file is made, in which
eps and delta add up (Rogers, Roth, Ullman and Vadhan 2016, "Privacy odometers and filters"). The parts are
fixed beforehand, and runs may be interleaved (Haney et al. 2023, "Concurrent composition for interactive differential
privacy with adaptive privacy-loss parameters").

**The file** is one line of JSON for each charge, and is only ever added to. Each line holds a hash of the one before.
A charge is on the disk before the noise is drawn, so a crash can only lose what was paid for. What a file cannot
show is that it was replaced by an older copy of itself, or by a copy that went another way: a second record, the
*witness*, remembers how far it had got. Whoever deletes both begins anew, which is why a new budget says that it is.
The hashes have no key, so anybody can compute them. They notice accidents and roll-backs, not somebody who edits the
file on purpose: who may write the file or its witness is trusted.

**What cannot be seen.** A virtual machine that is restored from a snapshot, or a process from a checkpoint (CRIU), has
the file, the witness or what it had claimed as they were. What was released since may be released again.

**Runs that are resumed.** Further lines say how many of a run's releases a process has *claimed*: it does so before it
makes them, a twentieth of the plan at a time. So a run that was pickled can go on elsewhere (`MCMC.resume`), as often
as one likes and after any crash, and its releases are made once: what was claimed is gone. Each kernel that takes up a
run is a *claimant* with a random name of its own. It may give back what it has claimed and not made, and nobody else
may. Lines of version 0.1.0 name no claimant: what they claim counts, and what they give back does not.

Proof: docs/proofs/budget.md.
"""

import contextlib
import dataclasses
import datetime
import decimal
import errno
import hashlib
import html
import json
import math
import os
import threading
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpyro_dp.privacy import accounting
from numpyro_dp.privacy.ledger import Plan, PrivacyBudgetError, Releases, flat_releases, require_whole
from numpyro_dp.privacy.mechanisms import NEIGHBORING_RELATIONS, Gaussian

FORMAT = "numpyro_dp privacy budget 1"
_START = "0" * 64
_LOCKED_BYTE = 2**40
"""Where Windows locks the file: beyond the text, which would not be readable otherwise."""


@dataclasses.dataclass(frozen=True)
class Charge:
    """What one run was charged.

    :ivar what: the kernel, and the label that it was given.
    :ivar eps, delta: the guarantee of that run alone.
    :ivar rho: its cost, if all of its releases are Gaussian; otherwise None, and `eps` and `delta` are the cost.
    :ivar num_rows: of how many units the table was; None under add-or-remove-one, where it is private.
    :ivar unit: "row", or a hash of which rows belong to which unit.
    :ivar run: the run's own name.
    :ivar time: when, in UTC.
    """

    what: str
    eps: float
    delta: float
    rho: float | None
    num_rows: int | None
    unit: str
    run: str
    time: str


class PrivacyBudget:
    """A budget for one table, in a file; pass it to every kernel that runs on that table.

    The file is made if it is not there. It holds nothing about the table but its number of rows (nor that under
    add-or-remove-one), so it must be you who uses one file for one table, and for no other. Several processes on one
    machine may use it at the same time.

    :param path: of the file.
    :param eps, delta: what all runs together may cost. Needed for a new file, and fixed by it.
    :param neighboring_relation: of all the runs; as in the kernels.
    :param other: ``(eps, delta)`` of it that is set aside for kernels whose releases are not all Gaussian (batches,
        accept bits). Default: nothing.
    :param witness: a second file, which tells if the first was rolled back to an earlier state: on another disk, at
        best. Default: in the user's state directory. False for none.
    :raises PrivacyBudgetError: if the file was changed or rolled back, or is for another budget. Who may write the
        file is trusted: lines that are forged on purpose, with their hashes, are not noticed.

    ::

        budget = PrivacyBudget("patients.budget", eps=3.0, delta=1e-6)
        mcmc = MCMC(DPHMC(model, eps=1.0, budget=budget), num_warmup=500, num_samples=1000)
        mcmc.run(jax.random.key(0), X, y)
        print(budget)
    """

    def __init__(
        self,
        path: str | os.PathLike,
        eps: float | None = None,
        delta: float | None = None,
        *,
        neighboring_relation: str | None = None,
        other: tuple[float, float] | None = None,
        witness: "str | os.PathLike | bool" = True,
    ):
        other = None if other is None else (float(other[0]), float(other[1]))
        self._path = Path(path).resolve()  # of a link, too, so that all who use it lock the same file
        self._witness = self._witness_of(witness)  # where it is now, wherever this process goes
        self._seen: tuple[int, str] | None = None  # how many lines, and the hash of the last
        self._threads = threading.Lock()
        self._notices: list[tuple[type[Warning], str]] = []  # given once the file is free again
        with self._locked():
            if not self.path.stat().st_size:
                self._create(eps, delta, neighboring_relation or "replace_one", other or (0.0, 0.0))
            self._header = self._read().header
        asked = {"eps": eps, "delta": delta, "neighboring_relation": neighboring_relation, "other": other}
        for name, value in asked.items():
            if value is not None and value != getattr(self, name):
                raise PrivacyBudgetError(
                    f"{self.path} is a budget with {name}={getattr(self, name)!r}, not {value!r}. What was promised "
                    f"about a table cannot be changed later: leave {name} out, or use another file for another table"
                )

    # What was promised about a table cannot be changed later, also not by an assignment.

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._path

    @property
    def eps(self) -> float:
        """What all runs together may cost, at `delta`."""
        return float(self._header["eps"])

    @property
    def delta(self) -> float:
        """What all runs together may cost."""
        return float(self._header["delta"])

    @property
    def neighboring_relation(self) -> str:
        """Of all the runs."""
        return self._header["neighboring_relation"]

    @property
    def other(self) -> tuple[float, float]:
        """What of the budget is set aside for runs whose releases are not all Gaussian."""
        eps, delta = self._header["other"]
        return float(eps), float(delta)

    # -- What is left ------------------------------------------------------------------------------------------------

    @property
    def charges(self) -> tuple[Charge, ...]:
        """All charges so far, by whatever process."""
        with self._locked():
            return self._read().charges

    @property
    def eps_spent(self) -> float:
        """What all runs so far cost together, at the budget's delta."""
        return self._total(self.charges)

    @property
    def eps_left(self) -> float:
        """The largest eps of one more run with Gaussian releases and the budget's delta that it allows; 0 if none."""
        return self.eps_left_at(self.delta)

    def eps_left_at(self, delta: float) -> float:
        """The same for a run with another delta. A kernel's own default is 0.1 / n."""
        left = self._rho_allowed() - sum(charge.rho or 0.0 for charge in self.charges)
        eps = accounting.gaussian_eps(delta, max(left, 0.0))
        return eps * (1 - 3e-9) if eps >= accounting.MIN_EPS else 0.0

    def _rho_allowed(self) -> float:
        eps, delta = self.eps - self.other[0], self.delta - self.other[1]
        return accounting.gaussian_rho(eps, delta) if eps >= accounting.MIN_EPS else 0.0

    def _total(self, charges: tuple[Charge, ...]) -> float:
        rho = math.fsum(charge.rho for charge in charges if charge.rho is not None)
        others = math.fsum(charge.eps for charge in charges if charge.rho is None)
        gaussian = accounting.gaussian_eps(self.delta - self.other[1], rho) if rho else 0.0
        return gaussian + others

    # -- Charging ----------------------------------------------------------------------------------------------------

    def require(self, plan: Plan) -> None:
        """Check that a plan could be charged now, without charging it.

        :raises PrivacyBudgetError: naming what is left and the ways out; or if a plan says less than it costs.
        :raises ValueError: if releases are counted by anything but whole numbers.
        """
        _require_price(plan)
        with self._locked():
            self._admit(plan, self._read().charges, "")

    def charge(self, plan: Plan, what: str) -> Charge:
        """Charge a plan to the file, or refuse it. Afterwards it is on the disk.

        :raises PrivacyBudgetError, ValueError: as `require`; or if the file was changed or rolled back.
        """
        _require_price(plan)
        with self._locked():
            known = self._read()
            charge = self._admit(plan, known.charges, what)
            self._append({"kind": "charge", **dataclasses.asdict(charge)}, known)
        return charge

    def take_up(self, run: str, plan: Plan) -> "RunClaimant":
        """A new claimant for a run that was charged; a kernel's ledger is one.

        It has claimed nothing yet, and whatever it does, others keep what they have claimed.

        :param run: `Charge.run`.
        :raises PrivacyBudgetError: if no such run was charged to this budget.
        """
        self.claimed(run, plan)
        return RunClaimant(self, run)

    def claimed(self, run: str, plan: Plan) -> dict[str, tuple[int, ...]]:
        """What has been claimed of a run's releases, by whatever process; of no kind more than was planned.

        :raises PrivacyBudgetError: if no such run was charged to this budget.
        """
        with self._locked():
            known = self._read()
        charged = [charge for charge in known.charges if charge.run == run]
        price = (plan.eps, plan.delta, plan.num_rows, plan.unit)
        if not charged or (charged[0].eps, charged[0].delta, charged[0].num_rows, charged[0].unit) != price:
            raise PrivacyBudgetError(
                f"this run was not charged to {self.path}, or not at this price: it was begun with another budget"
            )
        claimed = known.claimed(run)
        for name, kind in plan.kinds.items():  # more, where version 0.1.0 gave something back and claimed it again
            if name in claimed:
                claimed[name] = tuple(min(pair) for pair in zip(claimed[name], kind.counts, strict=True))
        return claimed

    def _admit(self, plan: Plan, charges: tuple[Charge, ...], what: str) -> Charge:
        if plan.neighboring_relation != self.neighboring_relation:
            raise PrivacyBudgetError(
                f"{self.path} is a budget under {self.neighboring_relation!r}, and this run is under "
                f"{plan.neighboring_relation!r}; the costs of the two cannot be added up. Nothing was released"
            )
        if charges and charges[0].num_rows != plan.num_rows:
            raise PrivacyBudgetError(
                f"the runs that were charged to {self.path} are on {charges[0].num_rows} units (rows, or persons with "
                f"`unit=`), and this one is on {plan.num_rows}. A budget is for one table and one kind of unit: a part "
                "of the rows that was chosen by their values is another table. Nothing was released"
            )
        if charges and charges[0].unit != plan.unit:
            raise PrivacyBudgetError(
                f"in the runs that were charged to {self.path} other rows belonged together than here (`unit=`): "
                "guarantees for different units do not add up. Nothing was released. Pass the same unit, with the rows "
                "in the same order, or use another file"
            )
        rho = _rho_of(plan)
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        num_rows = None if plan.num_rows is None else int(plan.num_rows)
        run = uuid.uuid4().hex
        charge = Charge(what, float(plan.eps), float(plan.delta), rho, num_rows, plan.unit, run, time)
        if rho is not None:
            self._admit_gaussian(charge, rho, charges)
        else:
            self._admit_other(charge, charges)
        return charge

    def _admit_gaussian(self, charge: Charge, rho: float, charges: tuple[Charge, ...]) -> None:
        total = math.fsum([rho, *(c.rho for c in charges if c.rho is not None)])
        if not total <= self._rho_allowed() * (1 + 1e-10):  # which was rounded down by more than that
            left = max(self._rho_allowed() - (total - rho), 0.0)
            eps = accounting.gaussian_eps(charge.delta, left)
            allowed = f"at most eps={_rounded_down(eps)}" if eps >= accounting.MIN_EPS else "nothing"
            raise PrivacyBudgetError(
                f"this run would cost ({charge.eps:g}, {charge.delta:.3g}), and of the ({self.eps - self.other[0]:g}, "
                f"{self.delta - self.other[1]:g}) for such runs in {self.path} {allowed} is left at that delta, after "
                f"{len(charges)} run(s). Nothing was released. Ask for less, or publish what there is"
            )

    def _admit_other(self, charge: Charge, charges: tuple[Charge, ...]) -> None:
        others = [c for c in charges if c.rho is None]
        left = tuple(
            total - math.fsum(getattr(c, name) for c in others)
            for total, name in zip(self.other, ("eps", "delta"), strict=True)
        )
        if not (charge.eps <= left[0] and charge.delta <= left[1]):
            raise PrivacyBudgetError(
                f"this run would cost ({charge.eps:g}, {charge.delta:.3g}) by releases that are not all Gaussian. Of "
                f"what {self.path} sets aside for such runs (`other=`: {self.other[0]:g}, {self.other[1]:g}), "
                f"({max(left[0], 0.0):g}, {max(left[1], 0.0):.3g}) is left. Nothing was released. Use a kernel on all "
                "rows, such as DPHMC or DPPenalty without batches, or give this one a smaller eps and delta"
            )

    # -- The file ----------------------------------------------------------------------------------------------------

    def _create(self, eps: float | None, delta: float | None, relation: str, other: tuple[float, float]) -> None:
        try:
            header = self._new_header(eps, delta, relation, other)
        except Exception:
            self.path.unlink()  # the empty file that was locked
            raise
        self._notices.append(
            (UserWarning, f"a new privacy budget was made, to which nothing is charged yet: {self.path}")
        )
        self._append(header, _Known(header, (), {}, ()))

    def _new_header(
        self, eps: float | None, delta: float | None, relation: str, other: tuple[float, float]
    ) -> dict[str, Any]:
        if eps is None or delta is None:
            raise ValueError(f"there is no budget at {self.path}: give `eps` and `delta` to make one")
        if not accounting.MIN_EPS <= eps < math.inf or not accounting.MIN_DELTA <= delta < 1:
            raise ValueError(f"a budget needs a positive eps and a delta between 0 and 1, got {eps} and {delta}")
        if relation not in NEIGHBORING_RELATIONS:
            raise ValueError(
                f"neighboring_relation must be one of {', '.join(map(repr, NEIGHBORING_RELATIONS))}, got {relation!r}"
            )
        if not (0 <= other[0] <= eps and 0 <= other[1] < delta):
            raise ValueError(f"other must be a part (eps, delta) of the budget ({eps:g}, {delta:g}), got {other}")
        if eps - other[0] >= accounting.MIN_EPS and delta - other[1] < accounting.MIN_DELTA:
            raise ValueError(f"other leaves a delta of {delta - other[1]:g}, too little: leave more, or all of eps")
        witness = self._witness
        if witness is not None and witness.exists():
            raise PrivacyBudgetError(
                f"there has been a budget at {self.path}, says its witness {witness}, and the file is gone. "
                "Restore it. If this is to be the budget of another table, give it another name, or delete the witness"
            )
        return {
            "kind": "budget",
            "format": FORMAT,
            "id": uuid.uuid4().hex,
            "eps": float(eps),
            "delta": float(delta),
            "neighboring_relation": relation,
            "other": [float(other[0]), float(other[1])],
        }

    def _read(self) -> "_Known":
        """What the file says, if it is what this package wrote, and all of it; or what somebody forged with care."""
        entries, hashes = [], [_START]
        text = self.path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            try:
                entry = json.loads(line)
                known, before = entry.pop("hash"), entry["before"]
            except (ValueError, KeyError, TypeError, AttributeError):
                known = before = None
            if known is None or known != _hash(entry) or before != hashes[-1] or not line.endswith("\n"):
                raise PrivacyBudgetError(
                    f"line {number} of {self.path} is not what was written there: the file was changed, or a write was "
                    "cut off. What has been spent is not known any more, so nothing more can be released. Restore the "
                    "file from a copy that has all of its lines; a last line without an end was cut off by a crash "
                    "before anything was released on it, and may be deleted"
                )
            entries.append(entry)
            hashes.append(known)
        if not entries or entries[0].get("format") != FORMAT:
            raise PrivacyBudgetError(f"{self.path} is no privacy budget of this package")
        self._compare_with_witness(entries[0]["id"], hashes[1:])
        self._require_continuation(hashes[1:])
        self._seen = len(hashes) - 1, hashes[-1]
        fields = [field.name for field in dataclasses.fields(Charge)]
        charges = tuple(Charge(**{name: e[name] for name in fields}) for e in entries if e["kind"] == "charge")
        if not all(map(_costs, charges)):
            raise PrivacyBudgetError(f"{self.path} has a charge below 0, or of no number: nobody knows what is left")
        return _Known(entries[0], charges, self._books(entries), tuple(hashes[1:]))

    def _books(self, entries: Sequence[Mapping[str, Any]]) -> "_Books":
        """What each claimant has claimed and not given back."""
        books: _Books = {}
        for entry in entries:
            if entry["kind"] not in ("claim", "give back"):
                continue
            run, claimant, back = entry["run"], entry.get("claimant"), entry["kind"] == "give back"
            own = books.setdefault((run, claimant), {})
            for name, counts in entry["counts"].items():
                # Version 0.1.0 gave back by negative counts, whoever had claimed.
                counts = counts if claimant is not None else [max(count, 0) for count in counts]
                have = own.get(name, [0] * len(counts))
                own[name] = [old - new if back else old + new for old, new in zip(have, counts, strict=True)]
                if any(count < 0 for count in (*counts, *own[name])):
                    raise PrivacyBudgetError(
                        f"{self.path} says that more {name} releases of the run {run} were given back than claimed: "
                        "nobody knows what is left"
                    )
        return books

    def _append(self, entry: dict[str, Any], known: "_Known") -> None:
        """Add a line. First the line, then the witness: after a crash in between, the file is ahead, and holds more."""
        entry["before"] = known.hashes[-1] if known.hashes else _START
        entry["hash"] = _hash(entry)
        with open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._seen = len(known.hashes) + 1, entry["hash"]
        _sync_folder(self.path.parent)
        self._update_witness(known.header["id"], len(known.hashes) + 1, entry["hash"])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone with the file, among threads and processes. A file that is not there is made, empty."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._threads:
            while True:
                with open(self.path, "a+b") as file:
                    _lock(file)
                    try:
                        # Somebody may have deleted or replaced it while we waited.
                        if self.path.exists() and os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                            yield
                            break
                    finally:
                        _unlock(file)
            notices, self._notices = self._notices, []
        for category, text in notices:  # only now: what shows a warning may ask this budget something
            warnings.warn(text, category, stacklevel=4)

    # -- The witness -------------------------------------------------------------------------------------------------

    def _witness_of(self, choice: "str | os.PathLike | bool") -> Path | None:
        if choice is False:
            return None
        if choice is not True:
            return Path(os.fspath(choice)).absolute()
        state = Path(os.environ.get("XDG_STATE_HOME") or "")
        if not state.is_absolute():  # which is to be ignored, says the specification
            state = Path.home() / ".local" / "state"
        return state / "numpyro_dp" / f"{hashlib.sha256(str(self.path).encode()).hexdigest()[:32]}.json"

    def _require_continuation(self, hashes: Sequence[str]) -> None:
        """Whatever a witness says, a file that this object has read before only grows."""
        if self._seen is None:
            return
        count, last = self._seen
        if len(hashes) < count or hashes[count - 1] != last:
            raise PrivacyBudgetError(
                f"{self.path} is not what it was when this object read it: it was rolled back to an earlier copy, or "
                "replaced by another budget. Nothing was released. Restore the newer file; or, if it is another budget "
                "now, open it anew: PrivacyBudget(path)"
            )

    def _compare_with_witness(self, identity: str, hashes: Sequence[str]) -> None:
        witness = self._witness
        if witness is None:
            return
        if not witness.exists():
            self._require_continuation(hashes)  # before a new witness vouches for it
            notice = (
                f"{self.path} has no witness at {witness}: it was moved or copied, or the witness was deleted. Whether "
                "the file was rolled back before now, nobody can tell, nor whether another copy of it is in use: what "
                f"either of the two allows was promised once. It has {len(hashes) - 1} line(s) of charges and claims. "
                "Be sure that it is the only copy, and the newest"
            )
            self._notices.append((RuntimeWarning, notice))
            self._update_witness(identity, len(hashes), hashes[-1])
            return
        try:
            known = json.loads(witness.read_text(encoding="utf-8"))
            seen, count, last = known["id"], int(known["count"]), known["hash"]
        except (ValueError, KeyError, TypeError) as error:
            raise PrivacyBudgetError(
                f"{witness}, the witness of {self.path}, is not what was written there: it cannot be told whether the "
                "file was rolled back. Restore it, or delete it if you are sure of the file"
            ) from error
        if seen != identity:
            raise PrivacyBudgetError(f"{witness} is the witness of another budget than {self.path}")
        if len(hashes) < count or hashes[count - 1] != last:
            raise PrivacyBudgetError(
                f"{self.path} has {len(hashes)} line(s), and its witness {witness} has seen {count}"
                f"{'' if len(hashes) < count else ', of which the last was another'}: the file was rolled back to an "
                "earlier copy, and what has been spent since is missing. Nothing was released. Restore the newer file"
            )
        if len(hashes) > count:  # a crash between a charge and its witness
            self._update_witness(identity, len(hashes), hashes[-1])

    def _update_witness(self, identity: str, count: int, last: str) -> None:
        witness = self._witness
        if witness is None:
            return
        try:
            witness.parent.mkdir(parents=True, exist_ok=True)
            temporary = witness.with_name(witness.name + ".new")
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(json.dumps({"id": identity, "count": count, "hash": last}))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, witness)
        except OSError as error:
            notice = (
                f"the witness of {self.path} could not be written ({error}): if the file is rolled back to an earlier "
                "copy, nobody will notice. Give `witness=` another place, or False"
            )
            self._notices.append((RuntimeWarning, notice))

    def __reduce__(self):
        raise TypeError(f"a PrivacyBudget cannot be copied or pickled: open it anew, PrivacyBudget({str(self.path)!r})")

    def __str__(self) -> str:
        charges = self.charges
        relation = self.neighboring_relation.replace("_", "-")
        lines = [
            f"Privacy budget {self.path}",
            f"  eps {self.eps:g}, delta {self.delta:g}, {relation}; {len(charges)} run(s) cost eps "
            f"{self._total(charges):.4g} together, at that delta",
            f"  one more run with Gaussian releases and delta {self.delta:g} may cost eps "
            f"{_rounded_down(self.eps_left)}",
        ]
        lines += [f"  {c.time}  {c.what}: ({c.eps:.6g}, {c.delta:.3g})" for c in charges]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """In a notebook: how much is gone, and the same text."""
        share = min(self.eps_spent / self.eps, 1.0)
        return f"<progress value='{share:.4f}' max='1'></progress> <pre>{html.escape(str(self))}</pre>"

    def __repr__(self) -> str:
        return f"PrivacyBudget({str(self.path)!r})"


class RunClaimant:
    """The hold of one ledger on a run that was charged: see `PrivacyBudget.take_up`.

    Its name in the file is random and used by nobody else, also in no copy: what is given back under it was claimed
    under it. Releases are reported as made before their noise exists, and never as fewer than before.
    """

    def __init__(self, budget: PrivacyBudget, run: str):
        self._budget, self._run, self._name = budget, run, uuid.uuid4().hex
        self._made: dict[str, list[int]] = {}

    def claim(self, counts: Mapping[str, Sequence[int]], kinds: Mapping[str, Releases]) -> bool:
        """Set further releases aside: nobody else will make them.

        :param counts: how many more of each kind, for each of its mechanisms.
        :param kinds: how many there are.
        :return: whether they were left. If they were, the claim is on the disk.
        :raises ValueError: if `counts` are no whole numbers, or negative.
        """
        budget, run = self._budget, self._run
        wanted = {name: require_whole(name, more, len(kinds[name].counts)) for name, more in counts.items()}
        with budget._locked():
            known = budget._read()
            if all(charge.run != run for charge in known.charges):
                raise PrivacyBudgetError(f"no run {run!r} was charged to {budget.path}: it is another file than before")
            claimed = known.claimed(run)
            for name, more in wanted.items():
                planned = kinds[name].counts
                have = claimed.get(name, (0,) * len(planned))
                if any(a + b > most for a, b, most in zip(have, more, planned, strict=True)):
                    return False
            budget._append({"kind": "claim", "run": run, "claimant": self._name, "counts": wanted}, known)
        return True

    def give_back(self, made: Mapping[str, Sequence[int]]) -> None:
        """Give back what this claimant has claimed of some kinds, but for the releases that were made.

        :param made: by this claimant, of each of these kinds, for each of its mechanisms.
        :raises ValueError: if that is more than it has claimed, or less than it has said before.
        """
        whole = {name: require_whole(name, counts, len(counts)) for name, counts in made.items()}
        for name, counts in whole.items():
            said = self._made.get(name, [0] * len(counts))
            if any(now < before for now, before in zip(counts, said, strict=True)):
                raise ValueError(f"{said} {name} releases were made before, and cannot be {counts} now")
        self._made |= whole
        budget, run = self._budget, self._run
        with budget._locked():
            known = budget._read()
            own, unused = known.books.get((run, self._name), {}), {}
            for name, counts in whole.items():
                claimed = own.get(name, [0] * len(counts))
                if any(count > most for count, most in zip(counts, claimed, strict=True)):
                    raise ValueError(f"{counts} {name} releases cannot have been made, of which {claimed} were claimed")
                unused[name] = [most - count for count, most in zip(counts, claimed, strict=True)]
            if any(map(any, unused.values())):
                budget._append({"kind": "give back", "run": run, "claimant": self._name, "counts": unused}, known)

    def __reduce__(self):
        raise TypeError("a claimant cannot be copied or pickled: two of one name could give back what the other made")


_Books = dict[tuple[str, str | None], dict[str, list[int]]]


class _Known(NamedTuple):
    """What a file says, and the hash of each of its lines.

    :ivar books: by run and claimant, what is claimed of each kind of release.
    """

    header: dict[str, Any]
    charges: tuple[Charge, ...]
    books: _Books
    hashes: tuple[str, ...]

    def claimed(self, run: str) -> dict[str, tuple[int, ...]]:
        """Sum of a run's claims, for each kind of release."""
        total: dict[str, tuple[int, ...]] = {}
        for kinds in (kinds for (of, _), kinds in self.books.items() if of == run):
            for name, counts in kinds.items():
                before = total.get(name, (0,) * len(counts))
                total[name] = tuple(map(sum, zip(before, counts, strict=True)))
        return total


def _rounded_down(eps: float) -> str:
    """With four digits, by which it may be asked for."""
    down = decimal.Context(prec=4, rounding=decimal.ROUND_DOWN)
    return f"{float(down.create_decimal_from_float(eps)):g}"


def _require_price(plan: Plan) -> None:
    """Refuse a plan that says a price which its releases do not have, or none: it would lower what others have spent.

    :raises PrivacyBudgetError: naming the price.
    :raises ValueError: if the counts of its releases are no counts.
    """
    for name, kind in plan.kinds.items():
        require_whole(name, kind.counts, len(kind.mechanisms))
    if not (plan.eps > 0 and 0 <= plan.delta < 1):
        raise PrivacyBudgetError(
            f"a run costs a positive eps and a delta from 0 to 1, and this plan says ({plan.eps}, {plan.delta}). "
            "Nothing was released"
        )
    if _rho_of(plan) is None and plan.eps < math.inf:
        eps = accounting.composed_eps(flat_releases(plan.kinds), plan.delta, plan.neighboring_relation)
        if not eps <= plan.eps * (1 + 1e-9):
            raise PrivacyBudgetError(
                f"this plan says that it costs eps={plan.eps:g} at delta={plan.delta:.3g}, and its releases cost "
                f"{eps:g}. Nothing was released"
            )


def _rho_of(plan: Plan) -> float | None:
    """What a plan costs in rho, if all of its releases are Gaussian; otherwise None."""
    releases = flat_releases(plan.kinds)
    gaussian = [count * mechanism.rho for mechanism, count in releases if isinstance(mechanism, Gaussian)]
    return math.fsum(gaussian) if plan.private and len(gaussian) == len(releases) else None


def _costs(charge: Charge) -> bool:
    """Whether a charge adds to what is spent."""
    numbers = (charge.eps, charge.delta, 0.0 if charge.rho is None else charge.rho)
    return all(number >= 0 for number in numbers)  # which NaN is not


def _hash(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _lock(file: Any) -> None:
    """Wait until no other process has the lock; it ends with the process."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        file.seek(_LOCKED_BYTE)
        while True:  # each attempt gives up after ten seconds
            try:
                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined]
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:
                    raise
    fcntl.flock(file, fcntl.LOCK_EX)


def _unlock(file: Any) -> None:
    """Closing the file would not do: a process that was forked meanwhile has it open, too."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        file.seek(_LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]
        return
    fcntl.flock(file, fcntl.LOCK_UN)


def _sync_folder(folder: Path) -> None:
    """Make sure that a new file is still in its folder after a crash; where folders can be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
