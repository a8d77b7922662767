"""Differentially private MCMC for NumPyro."""

from numpyro_dp.arviz import to_arviz
from numpyro_dp.kernels.hmc import DPHMC
from numpyro_dp.kernels.penalty import DPPenalty
from numpyro_dp.ledger import PrivacyBudgetError, PrivacyReport
from numpyro_dp.mcmc import MCMC
from numpyro_dp.model import UnsupportedModelError

__version__ = "0.1.0.dev0"

__all__ = ["DPHMC", "MCMC", "DPPenalty", "PrivacyBudgetError", "PrivacyReport", "UnsupportedModelError", "to_arviz"]
