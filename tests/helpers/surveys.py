"""Surveys of tables with rows' densities written by hand, and leaves for releases with noise made by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.model.coordinates import Cut
from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.fund import RESERVE, Fund
from numpyro_dp.preparation.last_bounds import misfit_of
from numpyro_dp.preparation.survey import NO_STEPS, Derivatives, Fit, Steps, Survey
from numpyro_dp.privacy.accounting import gaussian_eps, noise_multiplier_for
from numpyro_dp.privacy.ledger import Ledger, Plan, Releases, merged_stages
from numpyro_dp.privacy.mechanisms import Gaussian
from numpyro_dp.privacy.noise import NoiseSource
from numpyro_dp.privacy.release import Vault
from tests.helpers.drawn import given_draw

M = 3
POWER = 0.4
FRAME = Frame(np.array([0.3, -0.2, 0.1]), np.array([[0.5, 0, 0], [0.2, 0.4, 0], [-0.1, 0.3, 0.6]]))
MULTIPLIER = 1e-9  # noise that nobody sees


# -- Densities of a row (X, y), and the same with y drawn at phi -------------------------------------------------------


def logistic(phi, row):
    X, y = row
    logit = X[0] @ phi
    return y[0] * logit - jnp.logaddexp(0.0, logit)


def drawn_logistic(phi, row, words):
    X, y = row
    drawn = jax.random.bernoulli(jax.random.wrap_key_data(words), jax.nn.sigmoid(X[0] @ phi))
    return logistic(phi, (X, drawn[None].astype(y.dtype)))


def yes_or_no(phi, row):
    """The logistic one again, whose outcomes are listed."""
    return logistic(phi, row)


def listed_yes_or_no(phi, row, words):
    X, y = row
    return logistic(phi, (X, words[:1].astype(y.dtype)))


def log_normal(phi, row):
    """No density at y = 0, nor below, and a scale among the parameters."""
    X, y = row
    misfit = (jnp.log(y[0]) - X[0, :2] @ phi[:2]) * jnp.exp(-phi[2])
    return -(misfit**2) / 2 - phi[2] - jnp.log(y[0])


def drawn_log_normal(phi, row, words):
    X, y = row
    normal = jax.random.normal(jax.random.wrap_key_data(words), y.shape, y.dtype)
    return log_normal(phi, (X, jax.lax.stop_gradient(jnp.exp(X[0, :2] @ phi[:2] + jnp.exp(phi[2]) * normal))))


def linear(phi, row):
    """Normal, of known scale 1: the log density is a parabola."""
    X, y = row
    return -((y[0] - X[0] @ phi) ** 2) / 2


def drawn_linear(phi, row, words):
    X, y = row
    normal = jax.random.normal(jax.random.wrap_key_data(words), (), y.dtype)
    return linear(phi, (X, jax.lax.stop_gradient(X[0] @ phi + normal)[None]))


def counts(phi, row):
    """Poisson, with the logarithm of the mean in a range in which single precision holds what it should."""
    X, y = row
    eta = jnp.clip(X[0] @ phi, -20.0, 20.0)
    return y[0] * eta - jnp.exp(eta) - jax.lax.lgamma(y[0] + 1)


def draw_count(phi, row, words):
    X, _ = row
    mean = jnp.exp(jnp.clip(jnp.nan_to_num(X[0] @ phi), -20.0, 20.0))
    return jax.random.poisson(jax.random.wrap_key_data(words), mean).astype(jnp.uint32)


def drawn_counts(phi, row, words):
    return count_log_density(phi, row, jax.lax.stop_gradient(draw_count(phi, row, words)))


def count_log_density(phi, row, count):
    X, y = row
    return counts(phi, (X, count[None].astype(y.dtype)))


DRAWN = {
    logistic: drawn_logistic,
    yes_or_no: listed_yes_or_no,
    log_normal: drawn_log_normal,
    linear: drawn_linear,
    counts: drawn_counts,
}
OUTCOMES = {yes_or_no: 2}
OF_COUNTS = {"draw_count": draw_count, "count_log_density": count_log_density}


# -- Surveys -----------------------------------------------------------------------------------------------------------


def cut_of(density, drawn=None, size=M):
    return Cut(size, True, tuple("abcdefgh"[:size]), lambda z: z, density, drawn)


def survey_of(
    rows, density=logistic, relation="replace_one", power=POWER, can_draw=True, is_smooth=True, ledger=None, apart=None
):
    """
    :param can_draw: whether the survey is told how outcomes are drawn.
    :param ledger: whose draws are taken; None for draws that a test makes.
    """
    rows = tuple(jnp.asarray(part, jnp.result_type(float)) for part in rows)
    vault = Vault(rows, neighboring_relation=relation, ledger=ledger)
    target = PrivateTarget(vault, lambda z: -z @ z / 2, density, num_params=M, num_rows=len(rows[0]), power=power)
    cut = cut_of(density, DRAWN[density] if can_draw else None)
    of_outcomes = OF_COUNTS if density is counts and can_draw else {"num_outcomes": OUTCOMES.get(density)}
    is_discrete = density not in (linear, log_normal)
    return Survey(target, dataclasses.replace(cut, apart=apart, is_discrete=is_discrete, **of_outcomes), is_smooth)


def with_rows(survey, rows, dtype=None):
    """The same survey, with its programs, of another table."""
    rows = tuple(jnp.asarray(part, dtype or survey.dtype) for part in rows)
    survey._target = survey._target._in(survey._target.vault._of(rows))
    survey._target.num_rows = len(rows[0])
    return survey


def table(n, seed=0):
    """Covariates of several sizes, outcomes 0 and 1."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, M)) * rng.choice([0.3, 1.0, 4.0], (n, 1)), rng.integers(0, 2, n).astype(float)


# -- Leaves for releases -----------------------------------------------------------------------------------------------


def draw(*shape, hi=0, lo=0, multiplier=MULTIPLIER):
    """For a release of `shape` with given noise, in steps of the grid."""
    return given_draw(*shape, hi=hi, lo=lo, noise_multiplier=multiplier)


def of_derivatives(m=M, has_kinks=False, num_steps=0, given=False, **noise):
    return draw(m + (1 + has_kinks) * m * (m + 1) // 2 + num_steps + given * m, **noise)


INVERSE = np.linalg.inv(FRAME.whitening)
STEPS = Steps(np.arange(M), 2 * INVERSE / np.linalg.norm(INVERSE, axis=0), np.ones(M))


def searches(counts, k=1, multiplier=MULTIPLIER, hi=0, lo=0):
    """For the `counts` steps of a search of k bounds.

    :param hi, lo: noise of each step, shape (counts,) or none.
    """
    hi, lo = (np.broadcast_to(np.asarray(part)[..., None], (counts, k)) for part in (hi, lo))
    return given_draw(k, slots=counts, hi=hi, lo=lo, noise_multiplier=multiplier)


class Parabola:
    """In the place of a survey: what one of n rows would say whose log likelihood is a parabola of phi.

    :param place, precision: of the likelihood's mode.
    :param misfit: of the rows, over that of usual tables, all of which the clip moves one way; None for rows as the
        model says, whose outcomes can have few values.
    :param given: whether rows tell that way, as what they have been given back.
    :ivar asked: names of the questions, in order.
    """

    def __init__(self, place, precision, n=10_000, seed=0, power=1.0, centres=True, misfit=None, given=False):
        self.place, self.precision, self.n = np.asarray(place, float), np.asarray(precision, float), n
        self.size, self.power, self.centres = len(self.place), power, centres
        self.kinds = np.eye(self.size, dtype=bool)
        self.is_open, self.misfit, self.is_weighted = misfit is not None, misfit or 0.0, False
        self.tells_given = given
        self.has_kinks, self.is_listed, self.is_discrete = False, False, False
        self.asked: list[str] = []
        self._rng = np.random.default_rng(seed)

    def log_likelihood(self, phi):
        away = np.asarray(phi) - self.place
        return -np.einsum("...i,ij,...j", away, self.precision, away) / 2

    def derivative_numbers(self, num_steps=0):
        return self.size + self.size * (self.size + 1) // 2 + num_steps

    def exact(self, frame):
        """Score and information at the centre of the frame."""
        whitening = np.asarray(frame.whitening)
        return (
            whitening.T @ self.precision @ (self.place - frame.center),
            whitening.T @ self.precision @ whitening,
        )

    def _noise(self, draw):
        return 2 * np.max(np.asarray(draw.noise_multiplier, float))

    def count(self, draw):
        self.asked.append("count")
        return self.n + self._noise(draw) * self._rng.normal()

    def scales(self, draws, frame, grid, smallest, threshold, kinds):
        self.asked.append("scales")
        score, information = self.exact(frame)
        return kinds @ np.sqrt(np.diag(information) / self.n + (score / self.n) ** 2)

    def row_counts(self, draw, frame, least):
        """All rows tell of all coordinates."""
        self.asked.append("row_counts")
        noise = math.sqrt(self.size) / 2 * self._noise(draw) * self._rng.normal(size=self.size)
        return self.n + noise

    def bounds(self, draws, frame, smallest, threshold, grid=None):
        self.asked.append("bounds")
        score, information = self.exact(frame)
        return np.array(
            [math.sqrt(np.trace(information) / self.n + score @ score / self.n**2), np.trace(information) / self.n]
        )

    def derivatives(self, draw, frame, bounds, share, num_rows, steps=NO_STEPS):
        self.asked.append("derivatives")
        score, information = self.exact(frame)
        multiple = bounds.score / math.sqrt(self.size / (self.power * self.n))
        pull = self.misfit * misfit_of(multiple, self.power * self.n, self.size) * math.sqrt(self.size)
        along = np.asarray(frame.whitening).T @ np.linalg.cholesky(self.precision)[:, 0]
        score = score + pull * along
        score = score * min(1, self.n * bounds.score / max(np.linalg.norm(score), 1e-30))
        information = information * min(1, self.n * bounds.information / np.linalg.norm(information))
        scales = [self._noise(draw) * b / math.sqrt(part) for b, part in zip(bounds, (1 - share, share), strict=True)]
        noise = np.tril(self._rng.normal(size=2 * [self.size]) * np.where(np.eye(self.size), 1, math.sqrt(0.5)))
        found = Derivatives(
            score + scales[0] * self._rng.normal(size=self.size),
            scales[0],
            information + scales[1] * (noise + np.tril(noise, -1).T),
            scales[1],
        )
        if not self.tells_given:
            return found
        return found._replace(given=8 * along + self._rng.normal(size=self.size), given_scale=1.0)

    def unclipped_trace(self, draw, frame, largest):
        self.asked.append("whole")
        return self.power * (np.trace(self.exact(frame)[1]) + largest * self._noise(draw) * self._rng.normal())

    def long_rows(self, draw, frame, edges):
        """No row is longer than the model expects."""
        self.asked.append("long_rows")
        scale = self._noise(draw) * math.sqrt(len(edges) - 1) / 2
        return scale * self._rng.normal(size=len(edges) - 1), scale

    def gains(self, draw, start, ends, bounds):
        self.asked.append("gains")
        rises = self.log_likelihood(ends) - self.log_likelihood(start)
        scales = self._noise(draw) * math.sqrt(len(ends)) * np.asarray(bounds)
        return np.clip(rises, -self.n * bounds, self.n * bounds) + scales * self._rng.normal(size=len(ends)), scales

    def fit(self, search, draw, frame, bounds, points, typical, threshold, answer=1.0):
        """As if nothing were clipped, and no row surprising."""
        self.asked.append("fit")
        score, information = self.exact(frame)
        scale = self._noise(draw) * math.sqrt(4)
        square, curve, k = bounds.score**2 * scale / 2, typical * scale / 4, len(points)
        noise = self._rng.normal(size=5 + k)
        return Fit(
            clipped=scale * noise[0],
            clipped_scale=scale,
            curve=curve * noise[4 : 4 + k],
            turned=0.1 * scale * noise[-1],
            turned_scale=0.1 * scale,
            curve_scale=curve,
            outlying=scale * noise[1],
            outlying_scale=scale,
            square=np.trace(information) + score @ score / self.n + square * noise[2],
            square_scale=square,
            surplus=2 * square * noise[3],
        )

    def fit_numbers(self, num_points):
        return 5 + num_points


def fund_of(rho):
    """A fund with a ledger of its own."""
    ledger = Ledger(NoiseSource(0))
    reserve = Releases((Gaussian(noise_multiplier_for(rho, 1)),), (1,))
    ledger.commit(Plan(gaussian_eps(1e-6, rho), 1e-6, "replace_one", {RESERVE: reserve}, 1, 1, None))
    return Fund(ledger)


def spent_by(fund):
    """rho of each kind of release that was planned and made, stages as one."""
    kinds = {name: kind for name, kind in fund._ledger.plan.kinds.items() if RESERVE not in name}
    assert fund._ledger.spent().items() >= {name: kind.counts for name, kind in kinds.items()}.items()
    merged = merged_stages(kinds)
    return {
        name: math.fsum(count * m.rho for m, count in zip(kind.mechanisms, kind.counts, strict=True))
        for name, kind in merged.items()
    }


def positive(rng, m, scale=1.0):
    """A positive definite matrix."""
    root = rng.normal(size=(m, m + 2))
    return scale * root @ root.T / m


def symmetric_noise(rng, count, m, scale):
    """Noise as the survey releases it: independent in the packed entries, whose off-diagonal is times sqrt(2)."""
    rows, columns = np.tril_indices(m)
    noise = np.zeros((count, m, m))
    noise[:, rows, columns] = scale * rng.normal(size=(count, len(rows))) / np.where(rows == columns, 1, np.sqrt(2))
    return noise + np.swapaxes(np.tril(noise, -1), 1, 2)


def assert_mean(draws, expected):
    """The average over the first axis, within 5 standard errors and rounding."""
    error = draws.std(0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(0) - expected) <= 5 * error + 1e-12), (draws.mean(0) - expected) / error


def assert_covariance(draws, expected):
    centred = draws - draws.mean(0)
    assert_mean(centred[:, :, None] * centred[:, None], expected)
