"""Run every code cell of a notebook, in order and in one namespace, and store what it prints and draws in it.

python -m recipes.studies.attention_as_rnn.execute docs/attention-as-rnn.ipynb

Plain Python, so that tests can run the cells without Jupyter; pyplot.show() stores the figures.
"""

import argparse
import base64
import contextlib
import io
import json
from pathlib import Path

from convert.checkpoint.folder import write_beside

DOTS_PER_INCH = 72


def execute(notebook: dict) -> dict:
    """The notebook with new outputs; whatever a cell raises is raised."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    namespace, count = {"__name__": "__main__"}, 0
    figures: list[str] = []

    def keep_figures(*args, **kwargs) -> None:
        for number in pyplot.get_fignums():
            drawn = io.BytesIO()
            pyplot.figure(number).savefig(drawn, format="png", dpi=DOTS_PER_INCH)
            figures.append(base64.b64encode(drawn.getvalue()).decode() + "\n")
        pyplot.close("all")

    shown, pyplot.show = pyplot.show, keep_figures
    try:
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code":
                continue
            count += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"cell {count}", "exec"), namespace)
            pictures = [
                {"output_type": "display_data", "metadata": {}, "data": {"image/png": png, "text/plain": ["<Figure>"]}}
                for png in figures
            ]
            figures.clear()
            text = printed.getvalue().splitlines(keepends=True)
            streams = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
            cell |= {"execution_count": count, "outputs": pictures + streams}
    finally:
        pyplot.show = shown
        pyplot.close("all")
    return notebook


def main(path: Path) -> None:
    """Run it and write it back."""
    executed = execute(json.loads(path.read_text()))
    write_beside(path, lambda beside: beside.write_text(json.dumps(executed, indent=1, ensure_ascii=False) + "\n"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    main(parser.parse_args().notebook)
