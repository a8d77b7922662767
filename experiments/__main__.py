"""Run experiments of the papers.

    python -m experiments --list
    python -m experiments dp-hmc-figure-1                 # short: a minute or so
    python -m experiments dp-hmc-figure-1 --full          # the paper's sizes and repetitions: hours
    python -m experiments dp-hmc-figure-1 --eps 4 15 --repeats 3

Prints a table and writes a picture. Each finished run is a line in `benchmark-output/experiments/NAME.jsonl` and is not
repeated: a run that was stopped goes on where it was. Delete the file to start afresh.
"""

import argparse
import contextlib
import time
from pathlib import Path

from experiments import at_work, barker, dp_hmc, lode, privacy, raisa
from experiments.runs import OUTPUT, Experiment, Size, perform

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for module in (privacy, dp_hmc, raisa, barker, lode, at_work)
    for experiment in module.EXPERIMENTS
}


def show(experiment: Experiment, size: Size, output: Path) -> None:
    """Do what is left to do, print the table, write the picture."""
    start = time.perf_counter()
    records = perform(experiment, size, output)
    print(f"\n## {experiment.name}: {experiment.shows}\n\n{experiment.table(records)}\n")
    if experiment.draw is not None:
        with contextlib.suppress(ImportError):  # pictures are optional
            import matplotlib

            matplotlib.use("Agg")
            path = output / f"{experiment.name}{'-full' if size.full else ''}.png"
            experiment.draw(records, path)
            print(f"Picture: {path}" if path.exists() else f"Pictures: in {output}")
    print(f"{time.perf_counter() - start:.0f} seconds", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments, or all")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--full", action="store_true", help="the papers' sizes and repetitions: hours")
    parser.add_argument("--eps", type=float, nargs="+", help="instead of that size's, where an experiment has budgets")
    parser.add_argument("--repeats", type=int, help="instead of that size's, where an experiment has repetitions")
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="likewise, where an experiment has several")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="of the samplers that are compared, these only")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for records and pictures")
    options = parser.parse_args(arguments)
    names = list(EXPERIMENTS) if options.names == ["all"] else options.names
    unknown = sorted(set(names) - set(EXPERIMENTS))
    if unknown:
        parser.error(f"no experiment {', '.join(unknown)}; --list says what there is")
    if options.list or not names:
        for experiment in EXPERIMENTS.values():
            jobs, all_jobs = (len(experiment.jobs(Size(full))) for full in (False, True))
            print(f"{experiment.name:<22}{experiment.shows} ({jobs} runs; --full: {all_jobs})")
        return
    eps, problems, methods = (tuple(given or ()) or None for given in (options.eps, options.problems, options.methods))
    size = Size(options.full, eps, options.repeats, problems, methods)
    for name in names:
        show(EXPERIMENTS[name], size, options.output)


if __name__ == "__main__":
    main()
