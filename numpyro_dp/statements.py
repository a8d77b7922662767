"""What a report says to others: a paragraph for a paper's methods section, an entry for a registry of deployments.

Both are made of the report alone, so they hold nothing private, and claim nothing that the report does not.
"""

import decimal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpyro_dp.report import PrivacyReport

_NEIGHBORS = {
    "replace_one": "replaced by another",
    "add_or_remove_one": "added or removed",
    "zero_out": "replaced by one that counts for nothing",
}
_INTEGERS = (
    "Clipped sums are whole numbers, so their sensitivity holds in floating point; noise is a rounded normal (or "
    "logistic) variable, drawn exactly"
)

OF_THE_CURATOR = (
    "name",
    "data_curators",
    "intended_use",
    "data_product_region",
    "publication_date",
    "data_product_sector",
    "registry_authors",
    "url_slug",
)
"""Fields of the registry's entries that no run knows."""


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def methods(report: "PrivacyReport", version: str) -> str:
    """A paragraph for the methods section: what a referee asks."""
    if not report.private:
        return f"Draws were made with numpyro_dp {version} ({report.kernel}), without differential privacy."
    size = f", n = {report.num_rows:,}" if report.num_rows is not None else ""
    kinds = {release["mechanism"].split(" (")[0] for release in report.releases.values() if release["planned"]}
    rho = f" It is also {round_up(report.rho, 4)}-zero-concentrated." if report.rho else ""
    sentences = [
        f"Posterior draws were made with numpyro_dp {version} ({report.kernel}) under differential privacy.",
        f"Everything that was computed from the table and handed out is {report.guarantee()}{size}: whoever sees all "
        f"of it can hardly tell whether one unit was {_NEIGHBORS[report.neighboring_relation]}.{rho}",
        f"The guarantee covers {report.num_chains} chain(s) with warmup, tuning, and each look at the table, for the "
        "budget that was committed before the first of them.",
        f"Rows' contributions were clipped and added up, and noise was added to the sums ({', '.join(sorted(kinds))}); "
        f"their privacy losses were composed, and rounded up. {_INTEGERS}. Randomness: {report.noise}.",
        f"What the draws are: {report.posterior.description}.",
        "Released numbers vouch for this posterior."
        if report.posterior.trusted
        else f"Released numbers do not vouch for this posterior: {'; '.join(report.posterior.reasons)}.",
    ]
    if report.public_arguments:
        sentences.append(f"Treated as public: {', '.join(report.public_arguments)}.")
    sentences.append(
        "The guarantee assumes that model, priors and scales of the covariates were chosen without looking at the "
        "table. Other analyses of the table add to its cost."
    )
    return " ".join(sentences)


def registry_entry(report: "PrivacyReport", version: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """An entry for the registry of deployments (OpenDP; the fields of its schema of July 2026).

    :param told: what only the curator knows, see `OF_THE_CURATOR`; what is left out of it is None.
    :raises TypeError: if something else is told.
    """
    if unknown := sorted(set(told) - set(OF_THE_CURATOR)):
        raise TypeError(f"an entry has no {', '.join(unknown)}; of the curator are {', '.join(OF_THE_CURATOR)}")
    said = dict.fromkeys(OF_THE_CURATOR) | dict(told)
    authors, slug = said.pop("registry_authors"), said.pop("url_slug")
    if said["data_product_sector"] is None:  # the only one that an entry may do without
        del said["data_product_sector"]
    read = [*report.public_arguments, *report.closed_over]
    size = "private" if report.num_rows is None else "public"
    deployment: dict[str, Any] = {
        "basic": {"data_product_type": "Machine learning model", "description": _described(report), **said},
        "deployment_model": {
            "model_name": "Federated" if report.is_federated else "Central",
            "release_type": "One release",
            "data_source_type": "Static",
            "access_type": "Non-interactive",
        },
        "accounting": {
            "post_processing": "Draws, summaries and predictions are computed from released numbers and the prior",
            "composition": "Privacy losses of all releases, rounded up; adaptive stages under a filter on rho",
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": "Assumed: nothing was chosen by looking at the table. What was "
            "tuned on the table is within the budget",
            "mechanisms": _mechanisms(report, version),
        },
        "administrative": {"sources": f"Made with numpyro_dp {version}, {report.kernel}", "registry_authors": authors},
    }
    if report.private:
        deployment["dp_variant"] = {
            "variant_name": "Approximate DP",
            "data_domain": ", ".join(report.private_arguments),
            "unprotected_quantities": "; ".join(
                [f"units: their number is {size}", *(f"public: {name}" for name in read)]
            ),
        }
        deployment["privacy_loss"] = {
            "privacy_unit": report.unit,
            "privacy_unit_details": f"Neighbouring tables differ in one unit, which is "
            f"{_NEIGHBORS[report.neighboring_relation]} ({report.neighboring_relation.replace('_', '-')})",
            "privacy_parameters": {"epsilon": report.eps, "delta": report.delta},
            "privacy_parameters_details": report.guarantee(),
        }
    return {"url_slug": slug, "status": "Draft", "tier": 3, "deployment": deployment}


def _described(report: "PrivacyReport") -> str:
    vouched = "" if report.posterior.trusted else ". Released numbers do not vouch for them"
    return f"Draws from a posterior: {report.posterior.description}{vouched}"


def _mechanisms(report: "PrivacyReport", version: str) -> str:
    """As a list, which the registry shows."""
    releases = [f"{kind}: {of['planned']} of {of['mechanism']}, {of['clip']}" for kind, of in report.releases.items()]
    code = f"The library is numpyro_dp {version}"
    return "\n".join(f"- {line}" for line in [*releases, _INTEGERS, f"Randomness: {report.noise}", code])


def label(report: "PrivacyReport", version: str) -> list[tuple[str, str]]:
    """Facts for a label beside a published posterior, the first of them its headline."""
    if not report.private:
        return [("Privacy loss", "not private: no finite eps")]
    size = "their number is private" if report.num_rows is None else f"their number, {report.num_rows:,}, is public"
    vouched = "yes" if report.posterior.trusted else f"no: {report.posterior.reasons[0].split(':')[0]}"
    public = ", ".join([*report.public_arguments, *report.closed_over]) or "nothing else"
    return [
        ("Privacy loss", f"eps {round_up(report.eps, 4)}, delta {round_up(report.delta, 3)}"),
        ("Protected", f"one {report.unit}"),
        ("From being", f"{_NEIGHBORS[report.neighboring_relation]}; {size}"),
        ("Covers", f"{report.num_chains} chain(s) with warmup, tuning, and each look at the table"),
        ("Does not cover", "other publications from the same table: their eps add to this"),
        ("Who sees the rows", "who holds them already"),
        ("Also public", public),
        ("Vouched for by released numbers", vouched),
        ("Made with", f"numpyro_dp {version}, {report.kernel}"),
    ]


def round_up(value: float, digits: int) -> str:
    """`value` to so many significant digits, never below it."""
    up = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(up.create_decimal(repr(value))):.{digits}g}"
