"""What a report says of a run: the guarantee, and what it rests on. Of the table it knows shapes only."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from numpyro_dp.kernels.settings import DEFAULT_CLIP, Settings
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.privacy.accounting import composed_eps
from numpyro_dp.privacy.clipping import OwnerIndex
from numpyro_dp.privacy.ledger import Ledger, Plan, flat_releases, merged_stages
from numpyro_dp.report import Posterior, PrivacyReport, round_up

if TYPE_CHECKING:
    from numpyro_dp.kernels.base import DPKernel


def describe_table(settings: Settings, separated: SeparableModel) -> dict[str, Any]:
    """What a report says about the table. No shape of it where the number of rows is private."""
    shapes = settings.table_size_is_public
    return {
        "unit": _unit(settings, separated),
        "public_arguments": tuple(map(str, separated.public_arguments())),
        "private_arguments": tuple(str(a) if shapes else a.name for a in separated.private_arguments()),
        "closed_over": separated.closed_over,
        "dropped_sites": {**separated.dropped_sites, **_integrated(separated)},
    }


def described_together(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What `describe_table` says of two runs of one kernel: everything that either of them names."""
    found = dict(earlier)
    for about in ("public_arguments", "private_arguments", "closed_over"):
        found[about] = tuple(dict.fromkeys([*earlier[about], *now[about]]))
    found["dropped_sites"] = {**now["dropped_sites"], **earlier["dropped_sites"]}
    return found


def _integrated(separated: SeparableModel) -> dict[str, str]:
    """Why latents of rows or units are not among the samples."""
    latents = separated.latents
    if latents is None:
        return {}
    reason = (
        f"one value for each {'unit' if latents.plates else 'row'} would publish it, so it is integrated out: by "
        f"{len(latents.rule.nodes)} nodes, whose error is {latents.error:.0e} of a gradient on synthetic rows. "
        "Predictions for others draw it from its law"
    )
    return dict.fromkeys(sorted(latents.names), reason)


def report(kernel: "DPKernel", table: dict[str, Any]) -> PrivacyReport:
    """The report of what a kernel has committed, and of the posterior.

    :param table: by `describe_table`.
    """
    ledger, plan = kernel.ledger, kernel.ledger.plan
    kinds = merged_stages(plan.kinds)
    return PrivacyReport(
        eps=plan.eps,
        delta=plan.delta,
        neighboring_relation=plan.neighboring_relation,
        num_rows=plan.num_rows,
        num_chains=plan.num_chains,
        num_iterations=plan.num_iterations,
        kinds=kinds,  # a reader who changes theirs does not change the plan
        committed=ledger.committed_releases,
        made=merged_stages(ledger.spent()),
        clips={kind: kernel.describe_clip(kind) for kind in kinds},
        noise=_noise(kernel.settings, ledger),
        assumptions=_assumptions(kernel, plan),
        kernel=type(kernel).__name__,
        is_federated=kernel.settings.has_exchange,
        posterior=Posterior(kernel.describe_posterior(), tuple(kernel.doubts()), tuple(kernel.uninformed())),
        **table,
    )


def _unit(settings: Settings, separated: SeparableModel) -> str:
    row = "row of " + (f"plate '{separated.row_plate}'" if separated.row_plate else "the table")
    if settings.unit is None:
        return row
    name = f"unit '{settings.unit}'" if isinstance(settings.unit, str) else "unit"
    units = f"{separated.num_rows} units" if settings.size_is_public else "units"
    if settings.max_rows_per_unit is None:
        return f"{name} with all of its rows ({units}, with up to {separated.rows_per_unit} rows each)"
    return (
        f"{name} with all of its rows, whichever and however many they are ({units}; the first "
        f"{settings.max_rows_per_unit} rows of each count)"
    )


def _noise(settings: Settings, ledger: Ledger) -> str:
    if not ledger.plan.private:
        return "none"
    if not ledger.reproducible:
        return "fresh entropy of the operating system; it cannot be replayed"
    can_be_found = ". This seed is below 2**64 and can be found by trying: use secrets.randbits(128)"
    return (
        "reproducible, derived from noise_seed: the guarantee holds only while that seed is secret, and if it is used "
        f"for one run on one table{can_be_found if settings.seed_is_short else ''}"
    )


def _assumptions(kernel: "DPKernel", plan: Plan) -> tuple[str, ...]:
    settings = kernel.settings
    found = [
        "the model, its public arguments, starting values, step sizes and clip bounds were not chosen by looking at "
        "the private rows",
        "the table, the console and this process's memory stay with the curator",
    ]
    found += [kernel.describe_missing(), kernel.describe_exactness()]
    if settings.is_tempered:
        power = f"{settings.power:g}" if settings.n0 is None else f"n0 / n = {settings.n0:g} / n"
        found.append(f"the posterior is tempered: each row's likelihood counts with the power {power}")
    found += _owners(settings, plan)
    if settings.shared is None:
        found.append("other runs on this table add to its cost: `PrivacyBudget` keeps count of them")
    else:
        eps, delta = settings.shared
        found.append(
            f"this run is charged to a budget of eps {eps:g}, delta {delta:g}, which other runs on this table share"
        )
    if settings.default_clips and kernel.algorithm is kernel:
        names = " and ".join(f"clip_{name}" for name in settings.default_clips)
        found.append(
            f"{names} stayed at the default of {DEFAULT_CLIP:g}, not chosen for this model: privacy holds, but rows "
            "may be clipped, and nobody has looked"
        )
    if settings.private_args is None and not settings.table_size_is_public:
        found.append(
            "no public argument is a number that goes by how long the table is. Each array argument was taken for "
            "rows: `private_args` says which are"
        )
    if settings.max_rows_per_unit is not None:
        found.append(
            f"rows of a unit beyond the first {settings.max_rows_per_unit} are left out: the posterior is that of the "
            "others. It costs precision that units are private: where it may be public whose each row is, leave "
            "max_rows_per_unit out"
        )
        if settings.size_is_public:
            found.append("the number of units is public; which rows belong to which unit is private")
    elif settings.unit is not None:
        found.append("which rows belong to which unit is public")
    elif settings.size_is_public:
        found.append("the number of rows is public")
    return tuple(found)


def _owners(settings: Settings, plan: Plan) -> list[str]:
    owners = settings.owners
    if owners is None:
        return []
    count = owners.num_owners
    lines = [
        f"the rows belong to {count} data owners, each row to one of them. The guarantee is that of each owner's rows "
        "against the other owners, who see its noisy sums; no owner chooses its noise after seeing theirs"
    ]
    if isinstance(owners, OwnerIndex) and plan.private:
        outside = [
            (dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier * math.sqrt(count)), made)
            for mechanism, made in flat_releases(plan.kinds)
        ]
        eps = composed_eps(tuple(outside), plan.delta, plan.neighboring_relation)
        lines.append(f"against who sees only the chains, the noise of all owners counts: eps is {round_up(eps, 4)}")
    return lines
