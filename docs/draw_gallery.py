"""Draws the pictures of gallery.md: `python docs/draw_gallery.py`, in a clone, with the extra `plots`; some minutes."""

import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

PAGE = Path(__file__).with_name("gallery.md")


def draw(folder: Path) -> list[str]:
    """Run the page's code, and write each picture when the page shows it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names: dict = {"__name__": "gallery"}
    drawn = []
    for code, picture in re.findall(r"```python\n(.*?)```|!\[.*?\]\(_static/(.*?)\)", PAGE.read_text(), re.DOTALL):
        if code:
            exec(compile(code, str(PAGE), "exec"), names)
        else:
            plt.gcf().savefig(folder / picture, dpi=90)
            plt.close("all")
            drawn.append(picture)
    return drawn


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    pictures = PAGE.parent / "_static"
    with tempfile.TemporaryDirectory() as elsewhere:
        os.environ["XDG_STATE_HOME"] = elsewhere  # for the witness of the page's budget
        os.chdir(elsewhere)
        print("\n".join(draw(pictures)), file=sys.stderr)
        os.chdir("/")
