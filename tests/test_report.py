"""The report as text and in a notebook."""

import html

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_dp import MCMC, DPPenalty, plan


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


@pytest.mark.filterwarnings("ignore:the posterior")
def test_a_notebook_shows_what_print_says():
    kernel = DPPenalty(model, eps=1.0, prepare=False, clip_ratio=1.0, step_size=0.1, row_plate="rows")
    mcmc = MCMC(kernel, num_warmup=1, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), np.linspace(-1, 1, 50).astype(np.float32))
    text, shown = str(mcmc.privacy), html.unescape(mcmc.privacy._repr_html_())
    first, rest = shown.split("<details>")
    assert mcmc.privacy.guarantee() in first
    assert "NOT TO BE TRUSTED" in first
    assert "<details>" not in rest
    for line in ("covers", "accounting", "spent", "private", "assumes"):
        assert f">{line}</th>" in rest
        assert f"\n  {line} " in text
    assert text.startswith("Privacy of this DPPenalty run\n  guarantee    (1, 0.002)-differentially private")


def test_a_plan_in_a_notebook():
    found = plan(n=1000, d=2, eps=1.0)
    assert found._repr_html_().startswith("<pre>1,000 rows, 2 parameters")
