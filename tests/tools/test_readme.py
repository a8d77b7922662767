"""The README's code runs, and its commands name files and extras that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

if not README.exists():  # an installed package without its repository
    pytest.skip("no README beside the tests", allow_module_level=True)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.filterwarnings("default")  # as a reader would run it
@pytest.mark.statistical
def test_the_example_runs(capsys):
    first, before = blocks("python")
    names: dict = {}
    exec(compile(first, "README.md", "exec"), names)
    assert names["mcmc"].privacy.eps == 1.0
    assert "(1, 5e-06)-differentially private" in capsys.readouterr().out
    assert set(names["idata"]["posterior"].data_vars) == {"at_50", "per_year", "smoking", "spread"}
    assert "repetitions=20" in before  # takes minutes
    exec(compile(before.replace("repetitions=20", "repetitions=1"), "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "20,000 rows, 4 parameters, eps 1" in printed
    assert "Rehearsal of DPHMC at eps 1, n = 20,000: 1 simulated table(s)" in printed


def test_the_commands_are_complete():
    demo, tests = blocks("sh")
    extras = re.search(
        r"\[project.optional-dependencies\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    for command, extra in ((demo, "demo"), (tests, "tests")):
        assert f".[{extra}]" in command
        assert f"{extra} = [" in extras.group(1)
