"""Is the default right, or does it say that it is not? A part of the zoo, against NUTS.

    python benchmarks/right.py seen --eps .5 1 3 --tables 2 --jobs 2 --out seen.jsonl
    python benchmarks/right.py --show seen.jsonl
    python benchmarks/right.py seen --eps 1 --names logistic --require  # fails if a run is out of the question

A run is *off* if a posterior mean is more than 4 of its own standard deviations from the exact one, or if 90% intervals
hold less than 60% of the exact draws; *flagged* if `mcmc.privacy.posterior` is not trusted. The limit (`limit.py`) is
printed beside the error where the model is smooth enough to have one. Errors are in exact standard deviations.

The parts `"unseen"`, `"fresh"` and `"third"` are for final figures: whoever looks at them has nothing to choose any
more. `"limit"` has the tables of `limit.py`.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import numpyro
from jax import random
from jax.flatten_util import ravel_pytree
from limit import limit_of
from numpyro.infer import MCMC as ExactMCMC
from numpyro.infer import NUTS, init_to_median, init_to_sample
from numpyro.infer.util import initialize_model
from scipy.optimize import minimize
from zoo import PROBLEMS
from zoo_awkward import AWKWARD
from zoo_fresh import FRESH
from zoo_limit import LIMIT, draws_of_regression
from zoo_third import THIRD
from zoo_unseen import UNSEEN

import numpyro_dp.mcmc
from numpyro_dp import DPHMC, MCMC, PosteriorWarning, PrivacyBudgetError, UnsupportedModelError
from numpyro_dp.privacy.accounting import gaussian_rho


def flat(samples, sites):
    return np.concatenate([np.asarray(samples[s], float).reshape(len(samples[s]), -1) for s in sites], 1)


def exact_run(name, model, kwargs, seed):
    """Exact draws: NUTS on the table itself, unless the problem has a sampler of its own; and the largest R-hat.

    Where two chains of NUTS disagree, six with a dense mass matrix start from the prior, or else from its median; those
    that stay where the density is so low that next to nothing of the mass can be there (they are stuck) are left out.
    """
    if name in OWN_SAMPLERS:
        draws = OWN_SAMPLERS[name](seed, **kwargs)
    elif name in WHITENED:
        draws = whitened_nuts(model, kwargs, seed)
    else:
        draws, _ = _nuts(model, kwargs, random.key(seed), num_chains=2)
        for strategy in (init_to_sample, init_to_median):
            if _largest_r_hat(draws) < WELL_MIXED:
                break
            again = {"num_chains": 6, "num_warmup": 1000, "dense_mass": True, "init_strategy": strategy}
            draws, energy = _nuts(model, kwargs, random.key(1000 + seed), max_tree_depth=7, **again)
            level = np.nanmedian(energy, axis=1)
            draws = {name: value[level < np.nanmin(level) + FAR_BELOW] for name, value in draws.items()}
    return {name: value.reshape(-1, *value.shape[2:]) for name, value in draws.items()}, _largest_r_hat(draws)


WELL_MIXED = 1.05
NOT_MIXED = 1.1
FAR_BELOW = 10.0
"""Of the log density; a hump so much lower has about exp(-10) of the mass."""


def _nuts(model, kwargs, key, num_chains, num_warmup=500, **options):
    """Draws and potential energies, by chain."""
    kernel = NUTS(model, target_accept_prob=0.9, **options)
    run = {"num_chains": num_chains, "chain_method": "vectorized", "progress_bar": False}
    mcmc = ExactMCMC(kernel, num_warmup=num_warmup, num_samples=1000, **run)
    mcmc.run(key, **kwargs, extra_fields=("potential_energy",))
    draws = {name: np.asarray(value) for name, value in mcmc.get_samples(group_by_chain=True).items()}
    return draws, np.asarray(mcmc.get_extra_fields(group_by_chain=True)["potential_energy"])


def _largest_r_hat(draws):
    """Of halves of chains, so that one chain has one, too."""
    halves = {name: np.concatenate(np.split(value, 2, axis=1)) for name, value in draws.items()}
    return max(float(np.nanmax(site["r_hat"])) for site in numpyro.diagnostics.summary(halves).values())


def step_by_gibbs(seed, day, y):
    """Of `zoo.step_on_a_day`, whose density has steps, at which NUTS stands still. Two chains of 1,000 draws."""
    rng = np.random.default_rng(seed)
    order = np.argsort(day)
    day, y = np.asarray(day, float)[order], np.asarray(y, float)[order]
    edges = np.concatenate([[0.0], day, [100.0]])
    scales = np.geomspace(1, 20, 4000)
    chains = []
    for change in (20.0, 80.0):
        sigma, draws = 5.0, []
        for _ in range(1200):
            late = day > change
            level = np.empty(2)
            for k, rows in enumerate((~late, late)):
                precision = 1 / 20**2 + rows.sum() / sigma**2
                level[k] = rng.normal(y[rows].sum() / sigma**2 / precision, precision**-0.5)
            square = np.sum((y - level[late.astype(int)]) ** 2)
            log_density = -len(y) * np.log(scales) - square / (2 * scales**2) - scales**2 / 200 + np.log(scales)
            sigma = rng.choice(scales, p=_normalised(log_density))
            gain = ((y - level[1]) ** 2 - (y - level[0]) ** 2) / (2 * sigma**2)
            log_density = np.concatenate([[0.0], np.cumsum(gain)]) + np.log(np.maximum(np.diff(edges), 1e-300))
            k = rng.choice(len(edges) - 1, p=_normalised(log_density))
            change = rng.uniform(edges[k], edges[k + 1])
            draws.append((*level, change, sigma))
        chains.append(draws[200:])
    chains = np.array(chains)
    return {"level": chains[..., :2], "change": chains[..., 2], "sigma": chains[..., 3]}


def _normalised(log_density):
    weights = np.exp(log_density - log_density.max())
    return weights / weights.sum()


def border_of_a_uniform(seed, y):
    rng = np.random.default_rng(seed)
    return {"top": y.max() * rng.random((2, 1000)) ** (-1 / (len(y) - 1))}


def border_of_an_exponential(seed, y):
    """Priors are next to flat where the posterior is."""
    rng = np.random.default_rng(seed)
    y = np.asarray(y, float)
    rate = rng.gamma(len(y), 1 / (y - y.min()).sum(), (2, 1000))
    return {"rate": rate, "shift": y.min() - rng.exponential(1 / (len(y) * rate))}


def border_of_a_pareto(seed, y):
    """The logarithm of a Pareto draw is a shifted exponential one."""
    draws = border_of_an_exponential(seed, np.log(np.asarray(y, float)))
    return {"alpha": draws["rate"], "least": np.exp(draws["shift"])}


OWN_SAMPLERS = {name: draws_of_regression for name in LIMIT if name.startswith("logistic")} | {
    "step_on_a_day": step_by_gibbs,
    "highest_of_a_uniform": border_of_a_uniform,
    "earliest_arrival": border_of_an_exponential,
    "pareto_of_incomes": border_of_a_pareto,
}


def whitened_nuts(model, kwargs, seed):
    """Two chains in coordinates whitened at the mode, in double precision: where columns are all but collinear."""
    with jax.enable_x64(True):
        wide = {name: np.asarray(x, float) if np.asarray(x).dtype.kind == "f" else x for name, x in kwargs.items()}
        found = initialize_model(random.key(seed), model, model_kwargs=wide, init_strategy=init_to_median)
        start, unravel = ravel_pytree(found.param_info.z)
        energy = jax.jit(lambda u: found.potential_fn(unravel(u)))
        slopes, hessian = jax.jit(jax.grad(energy)), jax.jit(jax.hessian(energy))
        mode = minimize(energy, np.asarray(start), jac=slopes, hess=hessian, method="trust-exact").x
        values, vectors = np.linalg.eigh(np.asarray(hessian(mode)))
        place = lambda z: unravel(mode + (vectors / np.sqrt(values)) @ z)  # noqa: E731
        kernel = NUTS(potential_fn=lambda z: found.potential_fn(place(z)))
        run = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
        mcmc = ExactMCMC(kernel, num_warmup=500, num_samples=1000, **run)
        mcmc.run(random.key(seed), init_params=0.1 * random.normal(random.key(seed), (2, len(mode))))
        draws = jax.vmap(jax.vmap(lambda z: found.postprocess_fn(place(z))))(mcmc.get_samples(group_by_chain=True))
        return {name: np.asarray(value) for name, value in draws.items()}


WHITENED = ("age_and_its_square", "calendar_years")


def kept_exact_run(folder, name, model, kwargs, seed):
    """The same, once for a folder and a zoo: exact draws do not depend on what is judged by them."""
    zoos = {"zoo_fresh.py": FRESH, "zoo_third.py": THIRD, "zoo_awkward.py": AWKWARD, "zoo_limit.py": LIMIT}
    parts = ("zoo.py", "limit.py", next((file for file, problems in zoos.items() if name in problems), "zoo_unseen.py"))
    files = [Path(__file__).with_name(part).read_bytes() for part in parts]
    zoo = hashlib.sha256(b"".join(files)).hexdigest()[:8]
    path = Path(folder) / f"{name}-{seed}-{zoo}.npz"
    if not path.exists():
        exact, r_hat = exact_run(name, model, kwargs, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(part, **exact, r_hat__=r_hat)
        part.replace(path)
    with np.load(path) as file:
        exact = dict(file)
    return exact, float(exact.pop("r_hat__"))


def keep_programs(folder):
    """On disk, for the next table of a model: compiling takes two thirds of a run. Made-up tables may be there, too."""
    numpyro_dp.mcmc._no_compilation_cache_on_disk = contextlib.nullcontext
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def one_run(name, model, kwargs, exact, eps, seed):
    found = {"name": name, "eps": eps, "seed": seed}
    mcmc = MCMC(DPHMC(model, eps=eps), num_warmup=300, num_samples=500, progress_bar=False)
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("ignore", PosteriorWarning)
            mcmc.run(random.key(seed), **kwargs)
    except (PrivacyBudgetError, UnsupportedModelError) as error:
        return found | {"refused": str(error)[:200]}
    samples = mcmc.get_samples()
    sites = [s for s in sorted(exact) if s in samples and np.shape(samples[s])[1:] == np.shape(exact[s])[1:]]
    private, draws = flat(samples, sites), flat(exact, sites)
    sd, own = draws.std(0) + 1e-30, private.std(0) + 1e-30
    error = private.mean(0) - draws.mean(0)
    low, high = np.quantile(private, [0.05, 0.95], axis=0)
    posterior = mcmc.privacy.posterior
    check = mcmc.sampler.prepared.check
    return found | {
        "size": len(mcmc.sampler.prepared.coordinates),
        "error": float(np.sqrt(np.mean((error / sd) ** 2))),
        "own": float(np.max(np.abs(error / own))),
        "coverage": float(((draws >= low) & (draws <= high)).mean()),
        "sd_ratio": float(np.median(own / sd)),
        "flagged": not posterior.trusted,
        "reasons": list(posterior.reasons),
        "check": {k: np.asarray(v, float).tolist() for k, v in check._asdict().items() if v is not None},
        "seconds": time.perf_counter() - started,
    }


def run(half, kinds, names, epses, tables, out, exact_draws, shard):
    """
    Runs that are in ``out`` are not made again.

    :return: whether no run was out of the question.
    """
    problems = {n: p for n, p in (PROBLEMS | UNSEEN | FRESH | THIRD | AWKWARD | LIMIT).items() if p.half == half}
    names = [n for n, p in problems.items() if n in (names or [n]) and p.kind in (kinds or [p.kind])]
    names = names[shard[0] :: shard[1]]
    lines = Path(out).read_text().splitlines() if Path(out).exists() else []
    made = {(r["name"], r["seed"], r["eps"]): r for r in map(json.loads, lines)}
    asked = [made[k] for k in itertools.product(names, tables, epses) if k in made]
    are_possible = not any(map(is_out_of_the_question, asked))
    if asked:
        print(f"{len(asked)} runs are in {out} and are not made again: name another file for new ones", flush=True)
    for name in names:
        for seed in tables:
            left = [eps for eps in epses if (name, seed, eps) not in made]
            if epses and not left:
                continue
            model, kwargs = problems[name].make(seed)
            exact, r_hat = kept_exact_run(exact_draws, name, model, kwargs, seed)
            for eps in left:
                rho = gaussian_rho(eps, 0.1 / problems[name].n)
                found = one_run(name, model, kwargs, exact, eps, seed)
                found |= {"kind": problems[name].kind, "n": problems[name].n, "exact_r_hat": r_hat}
                found["limit"] = limit_of(model, kwargs, exact, rho)
                with open(out, "a") as file:
                    file.write(json.dumps(found) + "\n")
                print(line(found), flush=True)
                are_possible &= not is_out_of_the_question(found)
            jax.clear_caches()
    return are_possible


def is_off(found):
    return found["own"] > 4 or found["coverage"] < 0.6


_FAR, _WIDE = 6, 10
"""Of its own standard deviations, and over the exact posterior's width: chance does not do that to everyday models."""


def is_out_of_the_question(found):
    """Whether a run was refused, or is far off or far too wide and not flagged: then the default is broken."""
    return "refused" in found or (not found["flagged"] and (found["own"] > _FAR or found["sd_ratio"] > _WIDE))


def line(found):
    head = f"{found['name']:<26}{found['kind']:<9} eps {found['eps']:<4g} table {found['seed']}"
    if "refused" in found:
        return f"{head}  refused: {found['refused'][:90]}"
    verdict = "OFF" if is_off(found) else "right"
    if found.get("exact_r_hat", 1.0) > NOT_MIXED:
        verdict = f"no exact answer (R-hat {found['exact_r_hat']:.1f})"
    verdict += ", flagged" if found["flagged"] else ""
    limit = "-" if found["limit"] is None else f"{found['limit']:.2f}"
    return (
        f"{head}  error {found['error']:<7.2f} limit {limit:<5} sd {found['sd_ratio']:<6.2f} "
        f"own {found['own']:<7.2f} cover {found['coverage']:.2f}  {verdict}"
        + "".join(f"\n      {reason[:150]}" for reason in found["reasons"])
    )


def show(path):
    """Each run; then, as tables for a page, each model with medians over its tables, and counts by kind."""
    runs = [json.loads(text) for text in Path(path).read_text().splitlines()]
    for found in sorted(runs, key=lambda r: (r["kind"], r["name"], r["eps"], r["seed"])):
        print(line(found))
    done = [r for r in runs if "refused" not in r]
    epses, kinds = (sorted({r[key] for r in runs}) for key in ("eps", "kind"))
    print("\n| model | n, coordinates |" + "".join(f" eps {eps:g} |" for eps in epses))
    print("|---|---|" + "---|" * len(epses))
    for kind, name in dict.fromkeys((r["kind"], r["name"]) for r in sorted(done, key=lambda r: r["kind"])):
        these = [r for r in done if r["name"] == name]
        cells = [cell([r for r in these if r["eps"] == eps]) for eps in epses]
        size = f"{these[0]['n']:,}, {these[0]['size']}"
        print(f"| {name.replace('_', ' ')} ({kind}) | {size} | " + " | ".join(cells) + " |")
    print(
        "\n| kind | eps | runs | right | right, flagged | off, flagged | off, silent | refused | error / limit | sd |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kind in kinds:
        for eps in epses:
            these = [r for r in runs if r["kind"] == kind and r["eps"] == eps]
            ran = [r for r in these if "refused" not in r]
            counts = [sum((is_off(r), r["flagged"]) == which for r in ran) for which in _COUNTED]
            ratios = [r["error"] / r["limit"] for r in ran if r["limit"] is not None] or [np.nan]
            spread = "; ".join(f"{x:.1f}" for x in (np.median(ratios), np.quantile(ratios, 0.9), max(ratios)))
            sd = np.median([r["sd_ratio"] for r in ran]) if ran else np.nan
            numbers = " | ".join(map(str, [len(these), *counts, len(these) - len(ran)]))
            print(f"| {kind} | {eps:g} | {numbers} | {spread} | {sd:.2f} |")


def cell(runs):
    """Of one model at one eps: error (limit), sd ratio, coverage; how many runs were not right and trusted."""
    if not runs:
        return "—"
    error, sd, coverage = (np.median([r[key] for r in runs]) for key in ("error", "sd_ratio", "coverage"))
    limits = [r["limit"] for r in runs if r["limit"] is not None]
    text = f"{error:.2f} ({np.median(limits):.2f})" if limits else f"{error:.2f}"
    others = {"flagged": (False, True), "off, flagged": (True, True), "**off, silent**": (True, False)}
    counts = {what: sum((is_off(r), r["flagged"]) == which for r in runs) for what, which in others.items()}
    return "; ".join([f"{text}, {sd:.2f}, {coverage:.2f}", *(f"{k} {what}" for what, k in counts.items() if k)])


_COUNTED = ((False, False), (False, True), (True, True), (True, False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("half", nargs="?", choices=("seen", "judged", "unseen", "fresh", "third", "awkward", "limit"))
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--eps", nargs="*", type=float, default=[1.0, 3.0], help="without a value: exact draws only")
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--first-table", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shard", type=int)
    parser.add_argument("--out", default="right.jsonl")
    parser.add_argument("--exact-draws", default="exact-draws", help="folder in which exact draws are kept")
    parser.add_argument("--programs", help="folder in which compiled programs are kept; jobs have their own")
    parser.add_argument("--require", action="store_true", help="fail if a run is out of the question")
    parser.add_argument("--show")
    options = parser.parse_args()
    if options.show:
        show(options.show)
    elif options.half is None:
        parser.error("which half?")
    elif options.jobs > 1 and options.shard is None:
        again = [sys.executable, *sys.argv]
        jobs = [subprocess.Popen([*again, "--shard", str(k)], env=dict(os.environ)) for k in range(options.jobs)]
        sys.exit(max(job.wait() for job in jobs))
    else:
        seeds = range(options.first_table, options.first_table + options.tables)
        shard = (options.shard or 0, options.jobs)
        if options.programs:
            keep_programs(Path(options.programs) / str(shard[0]))
        kinds, names = options.kinds, options.names
        found = run(options.half, kinds, names, options.eps, seeds, options.out, options.exact_draws, shard)
        sys.exit(options.require and not found)
