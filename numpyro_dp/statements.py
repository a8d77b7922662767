"""What a report says to others: a paragraph for a paper's methods section, an entry for a registry of deployments.

Both are made of the report alone, so they hold nothing private, and claim nothing that the report does not.
"""

import decimal
from collections.abc import Sequence
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


def registry_entry(report: "PrivacyReport", version: str) -> dict[str, Any]:
    """An entry for the registry of deployments (OpenDP, 2025; the fields of its files), as far as a run knows.

    What only the curator knows is None: name, curators, purpose, actors, authors.
    """
    clips = {kind: f"{release['mechanism']}, clipped: {release['clip']}" for kind, release in report.releases.items()}
    unknown = {"name": None, "data_curators": None, "intended_use": None, "data_product_region": None}
    product = {**unknown, "data_product_type": "Posterior draws", "description": report.posterior.description}
    chosen = "Assumed: nothing was chosen by looking at the table. What was tuned on the table is within the budget"
    read = [*report.public_arguments, *report.closed_over]
    size = "private" if report.num_rows is None else "public"
    return {
        "status": "Draft",
        "deployment": {
            "product": {**product, "publication_date": None, "data_product_sector": None},
            "dp_flavor": {
                "name": "Approximate DP" if report.private else None,
                "input_metric": report.neighboring_relation.replace("_", "-"),
                "bound_on_input_distance": 1,
                "output_measure": "hockey-stick divergence",
                "bound_on_output_distance": {"epsilon": _number(report.eps), "delta": report.delta},
                "data_domain": ", ".join(report.private_arguments),
                "unprotected_quantities": "; ".join(
                    [f"units: their number is {size}", *(f"public: {name}" for name in read)]
                ),
            },
            "privacy_loss": {
                "privacy_unit": report.unit,
                "privacy_unit_description": f"One unit is {_NEIGHBORS[report.neighboring_relation]}",
                "privacy_parameters": {"epsilon": _number(report.eps), "delta": report.delta},
                "privacy_parameters_description": report.guarantee(),
            },
            "model": {
                "model_name": "Central",
                "actors": None,
                "release_type": "One-time",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": "Draws, summaries and predictions are computed from released numbers and the prior",
                "composition": "Privacy losses of all releases, rounded up; adaptive stages under a filter on rho",
            },
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": chosen,
                "mechanisms": {"releases": clips, "randomness": report.noise, "floating_point": _INTEGERS},
                "justification": None,
            },
            "resources": {"sources": f"numpyro_dp {version}, {report.kernel}", "registry_authors": None},
        },
    }


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


def _number(value: float) -> float | str:
    return value if value < float("inf") else "inf"
