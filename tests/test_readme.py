"""The README's code runs, and its commands name files and extras that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

if not README.exists():  # an installed package without its repository
    pytest.skip("no README beside the tests", allow_module_level=True)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.filterwarnings("default")  # as a reader would run it
def test_the_example_runs(capsys):
    (code,) = blocks("python")
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["mcmc"].privacy.eps == 1.0
    assert "(1, 5e-06)-differentially private" in capsys.readouterr().out
    assert set(names["idata"]["posterior"].data_vars) == {"b"}


def test_the_commands_are_complete():
    demo, tests = blocks("sh")
    extras = re.search(
        r"\[project.optional-dependencies\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    for command, extra in ((demo, "demo"), (tests, "tests")):
        assert f".[{extra}]" in command
        assert f"{extra} = [" in extras.group(1)
