"""A run's releases as dp_accounting describes them, so that its accountants can check ours: extra `accounting`."""

try:
    from dp_accounting import (
        DpEvent,
        GaussianDpEvent,
        NeighboringRelation,
        PoissonSampledDpEvent,
        SampledWithoutReplacementDpEvent,
        SelfComposedDpEvent,
        TruncatedSubsampledGaussianDpEvent,
        ZCDpEvent,
    )
except ImportError as error:
    raise ImportError("events need dp_accounting: pip install 'numpyro_dp[accounting]'") from error

from numpyro_dp.privacy.mechanisms import (
    FixedBatchGaussian,
    Gaussian,
    LogisticBit,
    Mechanism,
    PoissonGaussian,
    TruncatedPoissonGaussian,
    noise_per_row_bound,
)
from numpyro_dp.report import PrivacyReport

DP_ACCOUNTING_RELATIONS = {
    "replace_one": NeighboringRelation.REPLACE_ONE,
    "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
}


def privacy_events(report: PrivacyReport) -> tuple[DpEvent, ...]:
    """Events of everything that a run has committed, under its `neighboring_relation`.

    For dp_accounting's PLD accountant: its RDP accountant ignores the relation for Gaussians on all rows, and makes
    half of the true eps of them under replace-one. Batches of a fixed size and accept bits it knows in RDP only.

    :param report: `mcmc.privacy`.
    :raises ValueError: if dp_accounting has no event for a mechanism, or there is no privacy.
    """
    if not report.private:
        raise ValueError("a run without noise has no privacy event: it is not private")
    relation = report.neighboring_relation
    return tuple(SelfComposedDpEvent(event_of(mechanism, relation), count) for mechanism, count in report.committed)


def event_of(mechanism: Mechanism, relation: str) -> DpEvent:
    """One release.

    :raises ValueError: if dp_accounting has no event for it, or it is not private under `relation`.
    """
    mechanism.check_relation(relation)
    noise = noise_per_row_bound(mechanism.noise_multiplier, relation)
    if type(mechanism) is Gaussian:
        return GaussianDpEvent(noise)
    if type(mechanism) is PoissonGaussian:
        return PoissonSampledDpEvent(mechanism.rate, GaussianDpEvent(noise))
    if type(mechanism) is TruncatedPoissonGaussian:
        return TruncatedSubsampledGaussianDpEvent(mechanism.num_rows, mechanism.rate, mechanism.max_batch_size, noise)
    if type(mechanism) is FixedBatchGaussian:
        on_batch = GaussianDpEvent(mechanism.noise_per_replacement(relation))
        return SampledWithoutReplacementDpEvent(mechanism.num_rows, mechanism.batch_size, on_batch)
    if type(mechanism) is LogisticBit:
        return ZCDpEvent(mechanism.rho)
    raise ValueError(f"dp_accounting has no event for this release: {mechanism.describe()}")
