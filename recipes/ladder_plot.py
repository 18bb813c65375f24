"""KL to the teacher against the tokens spent, one line per method, from a ladder's results.

python -m recipes.ladder_plot docs/ladder.jsonl docs/ladder.png --attention 0.5     # or runs/ladder/results.jsonl

Tokens are those that passed through a fit or a training step. What needs none is a dotted line.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
METHODS = {
    "closed form beside window": "beside a window, closed form first",
    "beside a window + stage 2": "beside a window, then stage 2",
    "beside a window": "beside a window, closed form first",
    "MOHAWK start": "MOHAWK's start",
    "Mamba-in-the-Llama start": "Mamba in the Llama's start",
    "closed form": "mixers alone, closed form first",
}
OTHER_LAYERS = ("evenly placed", "placed by")


def method_of(row: str) -> str | None:
    """The line a row of the ladder belongs to; None where it belongs to none."""
    if any(words in row for words in OTHER_LAYERS):
        return None
    return next((line for prefix, line in METHODS.items() if row.startswith(prefix)), None)


def lines_of(results: list[dict], attention: float) -> dict[str, list[tuple[int, float, float]]]:
    """Tokens, KL and half of its 95 % interval, by method, in the order of tokens."""
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for record in results:
        line = method_of(record["row"])
        if line is not None and record["attention"] == attention and record["tokens"]:
            lines.setdefault(line, []).append((record["tokens"], record["kl"], record["kl_95"]))
    return {line: sorted(points) for line, points in lines.items()}


def plot(results: list[dict], attention: float, path: Path) -> None:
    """Draw them.

    Raises:
        ValueError: no row has this share of attention.
    """
    from matplotlib import pyplot

    lines = lines_of(results, attention)
    if not lines:
        known = sorted({record["attention"] for record in results})
        raise ValueError(f"No row of these results has {attention:.1%} attention; there are {known}.")
    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for line, points in lines.items():
        tokens, kl, interval = zip(*points, strict=True)
        axis.errorbar(tokens, kl, yerr=interval, marker="o", capsize=2, label=line)
    for record in results:
        if record["attention"] == attention and record["row"].startswith("window"):
            axis.axhline(record["kl"], color="k", ls=":", label=f"{record['row']}, not trained")
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="KL(teacher ‖ hybrid), nats per token")
    axis.set_title(f"{attention:.0%} of the layers keep attention")
    axis.grid(True, which="both", alpha=0.2)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--attention", type=float, default=0.5, help="share of the layers that keep it")
    given = parser.parse_args()
    plot([json.loads(row) for row in given.results.read_text().splitlines()], given.attention, given.picture)
