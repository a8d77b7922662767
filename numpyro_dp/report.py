"""The report on a run: what it guarantees, what it released, what the guarantee rests on."""

import dataclasses
import html
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from numpyro_dp import statements
from numpyro_dp.privacy import accounting
from numpyro_dp.privacy.ledger import Releases, flat_releases
from numpyro_dp.privacy.mechanisms import Mechanism
from numpyro_dp.statements import round_up, some_of

_BRIEF = ("guarantee", "but", "spent", "private", "public", "also reads", "little about", "left out", "verdict")
_LARGE_EPS = 10.0


class PosteriorWarning(UserWarning):
    """Released numbers do not vouch for a posterior. Privacy is not concerned: `mcmc.privacy.posterior` says why."""


@dataclasses.dataclass(frozen=True)
class Posterior:
    """What draws are draws of, and whether released numbers vouch for them.

    :ivar description: what the draws are draws of.
    :ivar reasons: why released numbers do not vouch for them; empty if they do.
    :ivar uninformed: parameters of which the draws say hardly more than the prior does, or of which the rows tell
        nothing that noise does not hide, while they tell of others.
    """

    description: str
    reasons: tuple[str, ...] = ()
    uninformed: tuple[str, ...] = ()

    @property
    def trusted(self) -> bool:
        """Whether there is no reason for doubt. Each number that is looked at has noise: see the docs for how often
        this is wrong, either way."""
        return not self.reasons

    def __str__(self) -> str:
        return self.description

    def verdict(self) -> str:
        """One line: whether to believe it, and why not."""
        return "vouched for by released numbers" if self.trusted else f"NOT TO BE TRUSTED: {'; '.join(self.reasons)}"


@dataclasses.dataclass(frozen=True)
class PrivacyReport:
    """What a run guarantees, what it released, and what the guarantee rests on. Holds nothing private.

    :ivar eps, delta: the guarantee: that of everything the kernel was allowed to release, fixed beforehand.
    :ivar neighboring_relation: which tables are neighbours.
    :ivar unit: what one protected unit is.
    :ivar num_rows: n under replace-one; None under add-or-remove-one, where it is private.
    :ivar kinds: for each kind of release, its mechanisms and how many of them were planned.
    :ivar committed: the releases that were committed to before the first one, with what was kept in reserve: `rho`
        and `eps_at` are theirs.
    :ivar made: how many releases were made.
    :ivar clips: for each kind, how rows were clipped.
    :ivar public_arguments: arguments of the model that were treated as public knowledge.
    :ivar closed_over: what the model reads besides its arguments (globals, attributes) and that holds numbers. It is
        treated as public, and what is stored elsewhere (files, a database) is not seen.
    :ivar private_arguments: arguments whose rows are protected.
    :ivar dropped_sites: sites that are not among the samples, with the reason: deterministic ones, and latents of rows.
    :ivar noise: where the noise came from.
    :ivar posterior: what the draws are draws of, and whether released numbers vouch for them.
    :ivar assumptions: what the guarantee and the posterior rest on.
    :ivar is_federated: whether data owners in processes of their own took part, each of whom holds its own rows.
    """

    eps: float
    delta: float
    neighboring_relation: str
    unit: str
    num_rows: int | None
    num_chains: int
    num_iterations: int
    kinds: Mapping[str, Releases]
    committed: tuple[tuple[Mechanism, int], ...]
    made: Mapping[str, tuple[int, ...]]
    clips: Mapping[str, str]
    public_arguments: tuple[str, ...]
    closed_over: tuple[str, ...]
    private_arguments: tuple[str, ...]
    dropped_sites: Mapping[str, str]
    noise: str
    posterior: Posterior
    assumptions: tuple[str, ...]
    kernel: str
    is_federated: bool = False

    @property
    def private(self) -> bool:
        return self.eps < math.inf

    @property
    def releases(self) -> dict[str, dict[str, Any]]:
        """For each kind: mechanism, noise multiplier (the smallest), planned number, number made, clip bound."""
        return {
            name: {
                "mechanism": kind.mechanisms[0].describe(),
                "noise_multiplier": min(mechanism.noise_multiplier for mechanism in kind.mechanisms),
                "largest_noise_multiplier": max(mechanism.noise_multiplier for mechanism in kind.mechanisms),
                "planned": sum(kind.counts),
                "made": sum(self.made[name]),
                "clip": self.clips[name],
            }
            for name, kind in self.kinds.items()
        }

    @property
    def rho(self) -> float | None:
        """The guarantee in zCDP terms: costs of independent analyses of one table add up in rho. None: it has none."""
        return self._rho(self.committed)

    @property
    def rho_spent(self) -> float | None:
        """`rho` of what has been released so far; bookkeeping, as `eps_spent`."""
        return self._rho(flat_releases(self.kinds, self.made))

    def _rho(self, releases: tuple) -> float | None:
        costs = [(mechanism.rho, count) for mechanism, count in releases]
        if any(rho is None for rho, _ in costs):
            return None
        return sum((rho or 0.0) * count for rho, count in costs) * (1 + 1e-14)

    @property
    def eps_spent(self) -> float:
        """What has been released so far would cost this much. Bookkeeping, not a guarantee: a run that was stopped
        because of what it released guarantees `eps`."""
        if not self.private:
            return math.inf
        releases = flat_releases(self.kinds, self.made)
        if not releases:
            return 0.0
        # The committed eps covers everything; rounding up on the way must not show more.
        return min(accounting.composed_eps(releases, self.delta, self.neighboring_relation), self.eps)

    @property
    def eps_left(self) -> float:
        """The committed eps minus `eps_spent`; bookkeeping."""
        return self.eps - self.eps_spent if self.private else math.inf

    def eps_at(self, delta: float) -> float:
        """The guarantee at another delta: every pair ``(eps_at(delta), delta)`` holds at once."""
        if not self.private:
            return math.inf
        return accounting.composed_eps(self.committed, delta, self.neighboring_relation)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; infinities as the string ``"inf"``."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("kinds", "committed", "made", "clips"):
            del fields[name]
        fields["posterior"] = {**vars(self.posterior), "trusted": self.posterior.trusted}
        fields |= {name: getattr(self, name) for name in ("releases", "rho", "rho_spent", "eps_spent")}
        return _plain(fields)

    def to_json(self, **options: Any) -> str:
        """`to_dict` as JSON text; `options` go to `json.dumps`."""
        return json.dumps(self.to_dict(), **options)

    def guarantee(self) -> str:
        """The guarantee in one line."""
        if not self.private:
            noisy = any(release["noise_multiplier"] for release in self.releases.values())
            return f"NOT PRIVATE: {'too little noise for a finite eps' if noisy else 'run without noise'} (eps = inf)"
        relation = {
            "replace_one": "replacing one",
            "add_or_remove_one": "adding or removing one",
            "zero_out": "zeroing out one",
        }
        return (
            f"({round_up(self.eps, 6)}, {round_up(self.delta, 3)})-differentially private with respect to "
            f"{relation[self.neighboring_relation]} {self.unit}"
        )

    @property
    def cautions(self) -> tuple[str, ...]:
        """Why a guarantee with these numbers promises little; empty for usual ones."""
        found = []
        if self.private and self.eps > _LARGE_EPS:
            odds = f"e^{self.eps:.3g}" if self.eps > 30 else f"{math.exp(self.eps):.2g}"
            found.append(f"eps = {self.eps:g} promises next to nothing: odds of {odds} to 1 to tell two tables apart")
        if self.private and self.num_rows is not None and self.delta * self.num_rows > 1:
            found.append(
                f"delta = {self.delta:g} is above 1 / n: who publishes one row in {1 / self.delta:.3g}, at random, "
                "passes for private as well. Without `delta` it is 0.1 / n"
            )
        return tuple(found)

    def methods(self) -> str:
        """A paragraph for the methods section of a paper; see `numpyro_dp.statements`."""
        return statements.methods(self, version("numpyro_dp"))

    def to_registry(self, **of_the_curator: Any) -> dict[str, Any]:
        """An entry for OpenDP's registry of deployments of differential privacy, by its schema of July 2026.

        :param of_the_curator: what no run knows: `name`, `data_curators` (a list), `intended_use`,
            `data_product_region`, `publication_date` (as 2026-11-29), `data_product_sector`, `registry_authors` (a
            list), `url_slug`. What is left out is None, and to be filled in before the entry is valid; of these only
            the sector need not be there.
        """
        return statements.registry_entry(self, version("numpyro_dp"), of_the_curator)

    def label_html(self) -> str:
        """A label for the page on which the posterior is published: HTML, as `numpyro_dp.plots.plot_label` draws it."""
        (name, loss), *facts = statements.label(self, version("numpyro_dp"))
        head = f"<b>Privacy facts</b><br>{html.escape(name)}: <b>{html.escape(loss)}</b>"
        return f"<div style='border:2px solid; padding:.5em; max-width:40em'>{head}<hr>{_table(facts)}</div>"

    def _lines(self) -> list[tuple[str, str]]:
        """What there is to say, each with what it is about."""
        size = f"n = {self.num_rows}" if self.num_rows is not None else "n is private"
        covered = f"{self.num_chains} chain(s) of {self.num_iterations} iterations, warmup included; {size}"
        lines = [("guarantee", self.guarantee()), *(("but", caution) for caution in self.cautions), ("covers", covered)]
        if self.private:
            rho = f"; rho {round_up(self.rho, 6)}" if self.rho else ""
            spent = f"eps {self.eps_spent:.6g} so far (bookkeeping; the guarantee is the line above)"
            lines += [("accounting", f"{accounting.how(self.committed)}{rho}"), ("spent", spent)]
        for kind, release in self.releases.items():
            made = f"{release['made']} of {release['planned']} releases ({release['mechanism']})"
            lines.append((kind, f"{made}, noise multiplier {_range(release)}, {release['clip']}"))
        lines += [
            ("private", ", ".join(self.private_arguments)),
            ("public", ", ".join(self.public_arguments) or "no argument"),
            ("noise", self.noise),
            ("posterior", str(self.posterior)),
        ]
        if names := self.posterior.uninformed:
            what = "the draws are hardly narrower than the prior, or no rows tell of them (codes of groups start at 0)"
            lines.append(("little about", f"{some_of(names, 10)}: {what}"))
        if self.closed_over:
            lines.append(("also reads", f"the model, as public: {', '.join(self.closed_over)}"))
        lines += [("left out", f"site '{name}' ({reason})") for name, reason in self.dropped_sites.items()]
        lines += [("assumes", assumption) for assumption in self.assumptions]
        return [*lines, ("verdict", self.posterior.verdict())]

    def __str__(self) -> str:
        return self._text(self._lines())

    def brief(self) -> str:
        """What to read of it after each run: not what was released, and what the guarantee rests on."""
        return self._text([line for line in self._lines() if line[0] in _BRIEF], "; print(mcmc.privacy) says more")

    def _text(self, lines: Sequence[tuple[str, str]], more: str = "") -> str:
        text = [f"Privacy of this {self.kernel} run{more}", *(f"  {about:<12} {what}" for about, what in lines)]
        return "\n".join(textwrap.fill(line, 110, subsequent_indent=" " * 15) for line in text)

    def _repr_html_(self) -> str:
        """In a notebook: guarantee and verdict, and the rest on demand."""
        lines = self._lines()
        first = [line for line in lines if line[0] in ("guarantee", "but", "verdict")]
        rest = [line for line in lines if line not in first]
        title = html.escape(f"Privacy of this {self.kernel} run")
        return f"<b>{title}</b>{_table(first)}<details><summary>what it rests on</summary>{_table(rest)}</details>"


def _table(lines: Sequence[tuple[str, str]]) -> str:
    cell = "style='text-align:left; vertical-align:top'"
    rows = (f"<tr><th {cell}>{html.escape(a)}</th><td {cell}>{html.escape(text)}</td></tr>" for a, text in lines)
    return f"<table>{''.join(rows)}</table>"


def _range(release: Mapping[str, Any]) -> str:
    smallest, largest = (f"{release[name]:.6g}" for name in ("noise_multiplier", "largest_noise_multiplier"))
    return smallest if smallest == largest else f"{smallest} to {largest}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value
