"""How well Toeplitz, low-rank, SSD and semiseparable matrices approximate a teacher's attention matrices.

python -m recipes.studies.structured_matrices.run [TEACHER] [--dataset TEXT ...] [--output runs/matrices]

Samples causal self-attention matrices, one random head per layer, and approximates each by a Toeplitz matrix (exact
projection), a low-rank one (LR), the same with one decay per token (SSD), and a general semiseparable one (SSM,
balanced truncation). Writes distances.json, distances.md and distances.png. Needs `datasets` for texts of your own.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from convert.alignment.text import documents, token_rows
from convert.checkpoint.load import load_model, load_tokenizer
from convert.teachers.teacher import embedded_teacher

from .fits import distance, low_rank, ssd, toeplitz
from .semiseparable import balanced_truncation, lower_bound

MATRICES_AT_ONCE = 10
LABELS = {"low_rank": "LR", "ssd": "SSD", "ssm": "SSM", "lower_bound": "no state of N can beat"}
# Bick et al. 2024: Llama2-7B-Chat, 1,000 matrices of 512 tokens, mean over WikiText-103, OpenWebText, C4 and IMDb
PAPER_TOEPLITZ = 12.2
PAPER = {
    "low_rank": {16: 0.605, 32: 0.315, 64: 0.130},
    "ssd": {16: 0.463, 32: 0.230, 64: 0.095},
    "ssm": {16: 0.250, 32: 0.119, 64: 0.044},
}


@dataclass(frozen=True)
class Place:
    """Where a matrix comes from: the dataset, its row of text, and the attention head."""

    dataset: str
    row: int
    layer: int
    head: int


def choose_places(datasets: list[str], num_layers: int, num_heads: int, count: int, seed: int) -> list[Place]:
    """One random head per layer and row of text, the datasets as even as possible; random layers in the last row."""
    generator = torch.Generator().manual_seed(seed)
    places = []
    for index, dataset in enumerate(datasets):
        wanted = count // len(datasets) + (index < count % len(datasets))
        for first in range(0, wanted, num_layers):
            layers = torch.randperm(num_layers, generator=generator)[: wanted - first].sort().values
            heads = torch.randint(num_heads, (len(layers),), generator=generator)
            pairs = zip(layers.tolist(), heads.tolist(), strict=True)
            places += [Place(dataset, first // num_layers, layer, head) for layer, head in pairs]
    return places


@torch.no_grad()
def attention_matrices(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, places: list[Place], length: int
) -> torch.Tensor:
    """Attention probabilities (M, L, L) of a teacher with eager attention, in float32."""
    found = {}
    for dataset in dict.fromkeys(place.dataset for place in places):
        of_dataset = [place for place in places if place.dataset == dataset]
        rows = token_rows(documents(dataset), tokenizer, length, 1 + max(p.row for p in of_dataset), dataset)
        for row, ids in enumerate(rows):
            attentions = model(ids[None], output_attentions=True).attentions
            found |= {p: attentions[p.layer][0, p.head].float() for p in of_dataset if p.row == row}
    return torch.stack([found[place] for place in places])


def approximate(target: torch.Tensor, state: int) -> dict[str, torch.Tensor]:
    """Distances (M,) of matrices (M, L, L) to each family of one state size, and the least that is possible."""
    target = target.double()
    linear = low_rank(target, state)
    fits = {
        "low_rank": linear,
        "ssd": ssd(target, state).better_of(linear, target),  # LR is SSD with decays of 1
        "ssm": balanced_truncation(target, state),
    }
    distances = {name: distance(target, fit.matrix()) for name, fit in fits.items()}
    return distances | {"lower_bound": lower_bound(target, state)}


def approximate_all(matrices: torch.Tensor, states: list[int]) -> dict[str, dict[int, torch.Tensor]]:
    """Family to state size to distances (M,)."""
    found: dict[str, dict[int, torch.Tensor]] = {name: {} for name in LABELS}
    for state in states:
        parts = [approximate(batch, state) for batch in matrices.split(MATRICES_AT_ONCE)]
        for name in LABELS:
            found[name][state] = torch.cat([part[name] for part in parts])
        print(f"N = {state}: done", file=sys.stderr)
    return found


def as_table(norms: torch.Tensor, to_toeplitz: torch.Tensor, found: dict[str, dict[int, torch.Tensor]]) -> str:
    """Mean distances and their standard deviations in Markdown, the paper's means in brackets."""
    sizes = list(found["ssm"])
    lines = [f"Mean norm of the matrices: {norms.mean():.2f}.", ""]
    lines += ["| | " + " | ".join(f"N = {n}" for n in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    spread = f"{to_toeplitz.mean():.2f} ± {to_toeplitz.std(correction=0):.2f} ({PAPER_TOEPLITZ})"
    lines.append(f"| Toeplitz (paper), no state | {spread} |" + " |" * (len(sizes) - 1))
    for family in PAPER:
        cells = [f"{found[family][n].mean():.3f} ± {found[family][n].std(correction=0):.3f}" for n in sizes]
        cells = [
            c + (f" ({PAPER[family][n]:.3f})" if n in PAPER[family] else "") for c, n in zip(cells, sizes, strict=True)
        ]
        lines.append(f"| {LABELS[family]} (paper) | " + " | ".join(cells) + " |")
    bounds = " | ".join(f"{values.mean():.3f}" for values in found["lower_bound"].values())
    return "\n".join([*lines, f"| {LABELS['lower_bound']} | {bounds} |"]) + "\n"


def plot(matrix: torch.Tensor, to_toeplitz: torch.Tensor, found: dict[str, dict[int, torch.Tensor]], path: Path):
    """Distance over state size, and one matrix (L, L) with what Toeplitz and SSM make of it."""
    sizes, example = list(found["ssm"]), matrix[None].double()
    figure = Figure(figsize=(16, 4), layout="constrained")
    axes = figure.subplots(1, 4)
    for name, values in found.items():
        means = [value.mean().item() for value in values.values()]
        axes[0].plot(sizes, means, "o:" if name == "lower_bound" else "o-", label=LABELS[name])
    axes[0].axhline(to_toeplitz.mean().item(), color="grey", linestyle="--", label="Toeplitz")
    axes[0].set(xscale="log", yscale="log", xlabel="state size N", ylabel="Frobenius distance")
    axes[0].set_xticks(sizes, map(str, sizes))
    axes[0].set_xticks([], minor=True)
    axes[0].legend(fontsize=7)
    shown = {"attention": example, "Toeplitz": toeplitz(example)}
    shown[f"SSM, N = {sizes[0]}"] = balanced_truncation(example, sizes[0]).matrix()
    for axis, (title, values) in zip(axes[1:], shown.items(), strict=True):
        axis.imshow(values[0].clamp_min(0).sqrt().numpy(), vmin=0, vmax=1, cmap="magma")
        axis.set_title(title)
    figure.savefig(path, dpi=80)


def study(teacher: str, output: Path, datasets: list[str], num_matrices: int, states: list[int], length: int) -> str:
    """Sample, approximate and write the results; returns the table."""
    if num_matrices < 1:
        raise ValueError(f"--num-matrices must be at least 1, not {num_matrices}.")
    if not all(0 < state < length for state in states):
        raise ValueError(f"--state-sizes must lie between 1 and {length - 1}; a state of --length holds everything.")
    started = time.perf_counter()
    model = load_model(teacher, dtype="float32")
    model.set_attn_implementation("eager")  # the only one that returns the probabilities
    shape = model.config.num_hidden_layers, model.config.num_attention_heads
    places = choose_places(datasets, *shape, num_matrices, seed=0)
    matrices = attention_matrices(model, load_tokenizer(teacher), places, length)
    norms, to_toeplitz = matrices.norm(dim=(1, 2)), distance(matrices, toeplitz(matrices))
    found = approximate_all(matrices, states)
    table = as_table(norms, to_toeplitz, found)
    rows = [
        asdict(place) | {"norm": norms[i].item(), "toeplitz": to_toeplitz[i].item()}
        | {name: {n: values[i].item() for n, values in of_state.items()} for name, of_state in found.items()}
        for i, place in enumerate(places)
    ]  # fmt: skip
    report = {"teacher": teacher, "length": length, "seconds": time.perf_counter() - started, "matrices": rows}
    output.mkdir(parents=True, exist_ok=True)
    (output / "distances.md").write_text(table)
    (output / "distances.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(matrices[len(matrices) // 2], to_toeplitz, found, output / "distances.png")
    return table


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", nargs="?", help="Hub id, folder or GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--output", type=Path, default=Path("runs/matrices"), help="folder for the results")
    parser.add_argument("--dataset", nargs="+", default=["default"], help="texts (default: the calibration text)")
    parser.add_argument("--num-matrices", type=int, default=100, help="number of matrices over all texts")
    parser.add_argument("--state-sizes", type=int, nargs="+", default=[16, 32, 64], help="state sizes N")
    parser.add_argument("--length", type=int, default=512, help="tokens per matrix")
    given = parser.parse_args(arguments)
    teacher = given.teacher or str(embedded_teacher())
    try:
        print(study(teacher, given.output, given.dataset, given.num_matrices, given.state_sizes, given.length))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
