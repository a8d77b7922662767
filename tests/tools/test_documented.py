"""Pages of the site whose code is a program: it runs, as it stands there."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore")
def test_what_a_run_gives_for_nothing(capsys):
    arviz = pytest.importorskip("arviz", minversion="1.0")
    assert arviz
    names = {"__name__": "documented"}
    for code in re.findall(r"```python\n(.*?)```", (DOCS / "afterwards.md").read_text(), re.DOTALL):
        exec(compile(code, "afterwards.md", "exec"), names)
    shown = capsys.readouterr().out
    assert shown.count("✓") == 3, shown
    found, released = names["combined"], names["draws"]["b"]
    # Both are about one release; a mixture over 20 synthetic tables has their sampling error beside.
    assert (abs(found.mean(0) - released.mean(0)) < 6 * found.std(0) / 20**0.5).all()
