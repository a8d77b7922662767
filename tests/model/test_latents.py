"""Continuous latents of rows and of units: what is found, integrated out, refused."""

import dataclasses

import jax
import numpy as np
import pytest

from numpyro_dp.model.integration import rules
from numpyro_dp.model.separate import separate
from numpyro_dp.model.units import group_rows
from tests.helpers.mixed import MIXED, log_density_by_grid

CASES = sorted(MIXED)


def _admitted(name, rule=-1):
    """The case and its model by unit, with one of the rules."""
    case = MIXED[name]
    separated = separate(case.model, case.args, unit=case.unit)
    latents = dataclasses.replace(separated.latents, rule=rules(separated.latents.size)[rule])
    separated = dataclasses.replace(separated, latents=latents)
    return case, group_rows(separated, case.unit, case.args, {}) if case.unit else separated


@pytest.mark.parametrize("name", CASES)
def test_a_units_density_is_the_integral_of_numpyros(name, x64):
    case, separated = _admitted(name)
    assert separated.latents.names == set(case.latents)
    assert separated.prototype.keys().isdisjoint(case.latents)
    assert set(separated.dropped_sites) == set(case.dropped)
    rows = separated.rows(case.args, {})
    density = separated.row_log_density(case.args, {})
    rng = np.random.default_rng(1)
    flat = 0.7 * rng.normal(size=separated.num_params)
    for k in (0, separated.num_rows - 1):
        row = tuple(part[k : k + 1] for part in rows)
        value, slope = jax.value_and_grad(lambda z: density(z, row))(flat)  # noqa: B023
        reference = log_density_by_grid(case, k)
        expected, expected_slope = jax.value_and_grad(lambda z: reference(separated.unravel(z)))(flat)  # noqa: B023
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(slope, expected_slope, rtol=1e-4, atol=1e-4)
