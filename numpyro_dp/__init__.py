"""Differentially private MCMC for NumPyro."""

from numpyro_dp.arviz import to_arviz
from numpyro_dp.formula.model import FormulaModel
from numpyro_dp.kernels.barker import DPBarker
from numpyro_dp.kernels.exponential_family import DPExponentialFamily
from numpyro_dp.kernels.hmc import DPHMC
from numpyro_dp.kernels.penalty import DPPenalty
from numpyro_dp.kernels.sghmc import DPSGHMC
from numpyro_dp.kernels.sgld import DPSGLD
from numpyro_dp.kernels.sgnht import DPSGNHT
from numpyro_dp.kernels.stochastic_gradient import decreasing_steps
from numpyro_dp.mcmc import MCMC
from numpyro_dp.model.arguments import UnsupportedModelError
from numpyro_dp.model.families import ExponentialFamily
from numpyro_dp.preparation import Preparation
from numpyro_dp.privacy.batches import FixedBatches, PoissonBatches
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.ledger import PrivacyBudgetError
from numpyro_dp.report import Posterior, PosteriorWarning, PrivacyReport
from numpyro_dp.tables.engines import EngineLostError, JaxProcesses
from numpyro_dp.tables.pieces import TableChangedError
from numpyro_dp.tables.scan import scan
from numpyro_dp.tools.auditing import AuditResult, audit
from numpyro_dp.tools.glm import glm
from numpyro_dp.tools.planning import RunPlan, plan
from numpyro_dp.tools.rehearsal import Rehearsal, rehearse
from numpyro_dp.tools.sums import NoisySum, release_sum

__version__ = "0.2.0"

__all__ = [
    "DPHMC",
    "DPSGHMC",
    "DPSGLD",
    "DPSGNHT",
    "MCMC",
    "AuditResult",
    "DPBarker",
    "DPExponentialFamily",
    "DPPenalty",
    "EngineLostError",
    "ExponentialFamily",
    "FixedBatches",
    "FormulaModel",
    "JaxProcesses",
    "NoisySum",
    "PoissonBatches",
    "Posterior",
    "PosteriorWarning",
    "Preparation",
    "PrivacyBudget",
    "PrivacyBudgetError",
    "PrivacyReport",
    "Rehearsal",
    "RunPlan",
    "TableChangedError",
    "UnsupportedModelError",
    "audit",
    "decreasing_steps",
    "glm",
    "plan",
    "rehearse",
    "release_sum",
    "scan",
    "to_arviz",
]
