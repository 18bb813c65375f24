"""How far each step of alignment goes, on the same layers and the same text: the ladder of the README.

python -m recipes.validation_text runs/text
python -m recipes.alignment_ladder runs/ladder --train runs/text/wikipedia_5.jsonl --validation runs/text/owt_5.jsonl

Rows: a window with sinks (what one would pick instead), the mapping alone, the closed form without and with
refinement, hidden-state alignment and distillation after it, the same stages from the starts of MOHAWK and Mamba
in the Llama, the closed form, stage 2 and stage 3 of mixers that stand beside a small window (`--beside`), and
finished hybrids of the same teacher, whatever made them (`--hybrids`).
Columns: the share of layers that keep attention. Results go to OUT/results.jsonl as they come, and what is there
already is not computed again.
"""

import argparse
import copy
import dataclasses
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import logging

from convert.alignment import ClosedFormAligner
from convert.alignment.align import FitCache, LayerScore, fit_mixers, score_layers, start_mixer, write_beside
from convert.alignment.alignment import load_tokenizer
from convert.alignment.closed_form import FitSettings
from convert.alignment.distillation import distil
from convert.alignment.layerwise import LayerwiseStage, hidden_state_loss, orientation_loss
from convert.alignment.settings import DistillationSettings, HiddenStateSettings, OrientationSettings
from convert.config import make_config
from convert.layer_selection import uniform_attention_layers
from convert.loading import load_model
from convert.teacher import embedded_teacher, find_teacher

from .fidelity import Yardstick, append, check_same_run, summary, text_rows

LENGTH = 512
RATIOS = (0.5, 0.25, 0.125, 0.0)
STAGE3_ROWS = (
    "closed form + stages 2, 3",
    "MOHAWK start + stages 2, 3",
    "Mamba-in-the-Llama start + stage 3",
    "MOHAWK start + stages 1, 2, 3",
    "beside a window + stage 3",
)
OF_A_CALL = (
    "output",
    "ratios",
    "stage3_ratios",
    "stage3_rows",
    "placements",
    "placed_by",
    "beside",
    "few_tokens",
    "hybrids",
)
"""Arguments that say what to measure this time, not how."""
Mixers = dict[int, nn.Module]


class Ladder:
    """The teacher, the texts, the scores of its layers, and the results so far."""

    def __init__(self, arguments: argparse.Namespace):
        self.folder, self.arguments = arguments.output, arguments
        check_same_run(self.folder, arguments, OF_A_CALL)
        options = make_config(
            model=arguments.model or str(embedded_teacher()), output="unused", attention_ratio=0.5,
            calibration_dataset=str(arguments.train), calibration_tokens=arguments.calibration_tokens,
            work_dir=str(self.folder / "work"),
        )  # fmt: skip
        found = find_teacher(options.model)
        self.aligner = ClosedFormAligner(found, options, found.open_weights(), self.progress)
        self.teacher, self.tokenizer = self.aligner.model, load_tokenizer(found, trust_remote_code=False)
        self.scores: dict[int, LayerScore] = {}
        self.results_file = self.folder / "results.jsonl"
        self.results = (
            [json.loads(line) for line in self.results_file.read_text().splitlines()]
            if self.results_file.is_file()
            else []
        )
        whole = self.teacher.whole()
        short = text_rows(arguments.validation, self.tokenizer, LENGTH, arguments.validation_rows)
        long = text_rows(arguments.validation, self.tokenizer, arguments.long, 2, skip=arguments.validation_rows)
        self.yardstick = Yardstick(whole, self.tokenizer, short, long)
        needed = max(arguments.stage2_tokens, arguments.stage3_tokens) // LENGTH
        fitted = len(self.aligner.ids) + len(self.aligner.prose)  # what the fits have not seen
        self.train = text_rows(arguments.train, self.tokenizer, LENGTH, needed, skip=fitted)
        self.held_out = text_rows(arguments.validation, self.tokenizer, LENGTH, 4)

    def progress(self, what: str, done: int, total: int) -> None:
        """A line now and then."""
        if done % 10 == 0:
            print(f"  {time.strftime('%H:%M:%S')} {what} {done}/{total}", flush=True)

    def replaced_layers(self, ratio: float) -> list[int]:
        """The cheapest layers by KL and recall, after quick fits."""
        kept = self.folder / "scores.json"
        if not self.scores and kept.is_file():
            self.scores = {int(layer): LayerScore(**score) for layer, score in json.loads(kept.read_text()).items()}
        if not self.scores:
            mixers, examination, cache = self.aligner.candidates()
            self.scores = score_layers(mixers, examination, (), cache, self.progress)
            scores = {layer: dataclasses.asdict(score) for layer, score in self.scores.items()}
            write_beside(kept, lambda path: path.write_text(json.dumps(scores)))
        count = self.teacher.num_layers - round(ratio * self.teacher.num_layers)
        return sorted(
            sorted(self.scores, key=lambda i: self.scores[i].total(self.aligner.settings.selection.recall_weight))[
                :count
            ]
        )

    def row(
        self, name: str, ratio: float, mixers, tokens: int, seconds: float, layers: list[int] | None = None
    ) -> None:
        """Measure one cell; `tokens` passed through training or fits, in `seconds` before this."""
        if self.has(name, ratio):
            return
        layers = self.replaced_layers(ratio) if layers is None else layers
        if mixers is None:
            figures = self.yardstick.measure(windowed(self.teacher, layers, self.arguments.window, 4))
        else:
            student = self.teacher.hybrid({layer: mixers[layer] for layer in layers})
            figures = self.yardstick.measure(Yardstick.final_hidden(student), student)
        self.record(name, ratio, layers, tokens, seconds, figures)

    def record(self, name: str, ratio: float, layers: list[int], tokens: int, seconds: float, figures: dict) -> None:
        """Write a cell down."""
        cell = {"row": name, "attention": ratio, "layers": layers, "tokens": tokens, "seconds": round(seconds)}
        self.results.append(cell | figures)
        append(self.results_file, cell | figures)
        print(f"{name}, {ratio:.1%} attention, {tokens} tokens, {seconds:.0f} s: {summary(figures)}", flush=True)

    def finished_hybrid(self, folder: Path) -> None:
        """Measure a checkpoint; its row has the folder's name, and 0 tokens, since they are not known here."""
        student = load_model(str(folder), "float32")
        kinds = student.config.layer_types
        replaced = [i for i, kind in enumerate(kinds) if kind in ("linear_attention", "hybrid")]
        ratio = 1 - len(replaced) / len(kinds)
        if not self.has(f"hybrid {folder.name}", ratio):
            figures = self.yardstick.measure(Yardstick.final_hidden(student), student)
            self.record(f"hybrid {folder.name}", ratio, replaced, 0, 0.0, figures)

    def has(self, name: str, *ratios: float) -> bool:
        """Whether these cells are measured."""
        done = {(record["row"], record["attention"]) for record in self.results}
        return all((name, ratio) in done for ratio in ratios)

    def kept(self, name: str, make) -> Mixers:
        """Mixers of every layer, from disk or made and written there."""
        path = self.folder / f"{name.replace(' ', '-')}.safetensors"
        if not path.is_file():
            mixers = make()
            state = {f"{i}.{k}": v.contiguous() for i, m in mixers.items() for k, v in m.state_dict().items()}
            write_beside(path, lambda partial: save_file(state, partial))
            return mixers
        state, mixers = load_file(path), {}
        for layer in sorted({int(key.split(".")[0]) for key in state}):
            mixers[layer] = self.teacher.mixer(layer)
            prefix = f"{layer}."
            mixers[layer].load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )
        return mixers

    def closed_form(self, settings: FitSettings) -> Mixers:
        """All layers in closed form."""
        fits = self.aligner.fit(list(range(self.teacher.num_layers)), settings)
        return {layer: mixer for layer, (mixer, _) in fits.items()}

    def start(self, kind: str) -> Mixers:
        """All layers as another method begins."""
        return {layer: start_mixer(self.teacher, layer, kind, 0) for layer in range(self.teacher.num_layers)}

    def layerwise(self, mixers: Mixers, stage: int, learning_rate: float) -> Mixers:
        """Stage 1 or 2 on copies."""
        mixers = {layer: copy.deepcopy(mixer).requires_grad_(True) for layer, mixer in mixers.items()}
        tokens = self.arguments.stage2_tokens
        if stage == 1:
            settings = OrientationSettings(tokens=tokens // 5, learning_rate=learning_rate)
            loss = orientation_loss(self.teacher, settings)
        else:
            settings = HiddenStateSettings(tokens=tokens, learning_rate=learning_rate)
            loss = hidden_state_loss(self.teacher, settings)
        report = LayerwiseStage(self.teacher, mixers, loss, settings).run(self.train, self.held_out, self.progress)
        before, after = (sum(values.values()) / len(values) for values in (report.before, report.after))
        print(f"  stage {stage}: held-out loss {before:.3f} -> {after:.3f} in {report.seconds:.0f} s", flush=True)
        return mixers

    def distilled(self, mixers: Mixers, ratio: float, name: str, learning_rate: float) -> Mixers:
        """Stage 3 on copies of the layers replaced at `ratio`; everything else stays the teacher's."""
        mixers = {layer: copy.deepcopy(mixers[layer]) for layer in self.replaced_layers(ratio)}
        student, tokens = self.teacher.hybrid(mixers), self.arguments.stage3_tokens
        settings = DistillationSettings(tokens=tokens, learning_rate=learning_rate, sequences=2)
        distil(student, self.teacher.whole(), self.train, settings, self.folder / "work" / name)
        return mixers


def as_table(results: list[dict]) -> str:
    """The ladder in Markdown: KL with its 95 % interval, and copy accuracy, by share of attention."""
    ratios = sorted({record["attention"] for record in results}, reverse=True)
    cells = {(record["row"], record["attention"]): record for record in results}
    lines = ["| | tokens | " + " | ".join(f"{ratio:.1%} attention" for ratio in ratios) + " |"]
    lines.append("|---" * (len(ratios) + 2) + "|")
    for row in dict.fromkeys(record["row"] for record in results):
        found = [cells.get((row, ratio)) for ratio in ratios]
        shown = [f"{c['kl']:.3f} ± {c['kl_95']:.3f}, copy {c['copy']:.2f}" if c else "" for c in found]
        tokens = next(cell["tokens"] for cell in found if cell)
        lines.append(f"| {row} | {tokens:,} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def windowed(teacher, layers: list[int], window: int, sinks: int):
    """Hidden states of the teacher with softmax attention over a window and the first tokens only in those layers."""

    def final_hidden(ids: torch.Tensor) -> torch.Tensor:
        hidden = teacher.embed(ids)
        inputs, position = teacher.block_inputs(hidden), torch.arange(ids.shape[1])
        distance = position[:, None] - position
        seen = (distance >= 0) & ((distance < window) | (position < sinks))
        mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]
        for i, block in enumerate(teacher.model.model.layers):
            masks = inputs["masks"] | ({block.layer_type: mask} if i in layers else {})
            hidden = block(hidden, **inputs | {"masks": masks})
        return teacher.model.model.norm(hidden)

    return final_hidden


def main(arguments: argparse.Namespace) -> None:
    """Climb."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ladder, clock = Ladder(arguments), time.perf_counter
    print("teacher", {k: ladder.yardstick.teacher[k] for k in ("perplexity", "copy", "repetition")}, flush=True)
    started = clock()
    print("replaced at 50 %:", ladder.replaced_layers(0.5), f"{clock() - started:.0f} s", flush=True)
    refined = ladder.aligner.settings.fit
    solved = dataclasses.replace(refined, refine_steps=0)
    stage2, stage3 = arguments.stage2_tokens, arguments.stage3_tokens
    fitted = arguments.calibration_tokens
    closed_tokens = fitted + refined.refine_steps * refined.refine_sequences * LENGTH

    def every(name: str, make, tokens: int) -> None:
        if ladder.has(name, *arguments.ratios):
            return
        since = clock()
        mixers = make()
        seconds = clock() - since
        for ratio in arguments.ratios:
            ladder.row(name, ratio, mixers, tokens, seconds)

    def closed() -> Mixers:
        return ladder.kept("closed form", lambda: ladder.closed_form(refined))

    def aligned() -> Mixers:
        return ladder.kept("closed form 2", lambda: ladder.layerwise(closed(), 2, 5e-4))

    def random() -> Mixers:
        return ladder.kept("mohawk 2", lambda: ladder.layerwise(ladder.start("mohawk"), 2, 2e-3))

    everything = range(ladder.teacher.num_layers)
    every(f"window {arguments.window} + 4 sinks", lambda: None, 0)
    every("copy", lambda: {layer: ladder.teacher.mixer(layer) for layer in everything}, 0)
    every("closed form, solve only", lambda: ladder.closed_form(solved), fitted)
    every("closed form", closed, closed_tokens)
    for ratio in arguments.ratios:
        kept = uniform_attention_layers(len(everything), ratio)
        if kept and not ladder.has("closed form, evenly placed", ratio):
            replaced = [layer for layer in everything if layer not in kept]
            ladder.row("closed form, evenly placed", ratio, closed(), closed_tokens, 0, replaced)
    placed = [] if arguments.placements is None else json.loads(arguments.placements.read_text())["placements"]
    for choice in placed:
        name, ratio = f"closed form, placed by {choice['placement']}", choice["attention"]
        if choice["placement"] in arguments.placed_by and ratio in arguments.ratios and not ladder.has(name, ratio):
            ladder.row(name, ratio, closed(), closed_tokens, 0, choice["replaced"])
    every("closed form + stage 2", aligned, closed_tokens + stage2)
    every("MOHAWK start + stage 2", random, stage2)
    for ratio in arguments.stage3_ratios:
        for name, (start, tokens, rate) in zip(
            STAGE3_ROWS[:-1],  # the last is beside a window
            (
                (aligned, closed_tokens + stage2 + stage3, 1.5e-4),
                (random, stage2 + stage3, 5e-4),
                (lambda: ladder.start("mamba-in-llama"), stage3, 5e-4),
                (lambda: oriented(ladder), stage2 * 6 // 5 + stage3, 5e-4),
            ),
            strict=True,
        ):
            if name in arguments.stage3_rows and not ladder.has(name, ratio):
                since = clock()
                mixers = ladder.distilled(start(), ratio, f"{name} {ratio}", rate)
                ladder.row(name, ratio, mixers, tokens, clock() - since)
    for tokens in arguments.few_tokens:
        from_few_tokens(ladder, tokens, arguments.ratios[0])
    if arguments.beside:
        beside_a_window(ladder, closed_tokens)
    for folder in arguments.hybrids:
        ladder.finished_hybrid(folder)
    print(as_table(ladder.results))


def from_few_tokens(ladder: Ladder, tokens: int, ratio: float) -> None:
    """The solve alone, of the same layers, from less text, a sixth of which judges: for KL by tokens."""
    aligner, layers, rows = ladder.aligner, ladder.replaced_layers(ratio), tokens // LENGTH
    name, since = f"closed form, solve only, {tokens} tokens", time.perf_counter()
    if ladder.has(name, ratio):
        return
    solved = dataclasses.replace(aligner.settings.fit, refine_steps=0)
    nothing_kept = FitCache(None, {})
    fits = fit_mixers(
        aligner.model, layers, aligner.ids[:rows], max(1, rows // 6), solved, nothing_kept, aligner.memory
    )
    mixers = {layer: mixer for layer, (mixer, _) in fits.items()}
    ladder.row(name, ratio, mixers, tokens, time.perf_counter() - since)


def beside_a_window(ladder: Ladder, closed_tokens: int) -> None:
    """The same layers as mixers beside a window and sinks: closed form, then stage 2, or stage 3, of it."""
    arguments, name = ladder.arguments, f"beside window {ladder.arguments.beside}"
    aligner, row = ladder.aligner, STAGE3_ROWS[-1]
    aligner.follow(dataclasses.replace(aligner.options, window=arguments.beside, shared_state=True))
    started, tokens = time.perf_counter(), closed_tokens + arguments.stage2_tokens
    closed = ladder.kept(name, lambda: ladder.closed_form(aligner.settings.fit))
    for ratio in arguments.ratios:
        ladder.row(f"closed form {name} + 4 sinks", ratio, closed, closed_tokens, time.perf_counter() - started)
    if row not in arguments.stage3_rows:
        return
    aligned = ladder.kept(f"{name} 2", lambda: ladder.layerwise(closed, 2, 5e-4))
    for ratio in arguments.ratios:
        ladder.row("beside a window + stage 2", ratio, aligned, tokens, 0)
    for ratio in arguments.stage3_ratios:
        if not ladder.has(row, ratio):
            since = time.perf_counter()
            mixers = ladder.distilled(closed, ratio, f"{row} {ratio}", 1.5e-4)  # stage 2 does not help there
            ladder.row(row, ratio, mixers, closed_tokens + arguments.stage3_tokens, time.perf_counter() - since)


def oriented(ladder: Ladder) -> Mixers:
    """MOHAWK's start after stages 1 and 2."""
    return ladder.kept(
        "mohawk 1 2", lambda: ladder.layerwise(ladder.layerwise(ladder.start("mohawk"), 1, 2e-3), 2, 2e-3)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--model", help="teacher (default: the embedded one)")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--stage3-ratios", type=float, nargs="*", default=(0.5,))
    parser.add_argument("--stage3-rows", nargs="+", default=STAGE3_ROWS, choices=STAGE3_ROWS)
    parser.add_argument("--placements", type=Path, help="scores.json of recipes.layer_scores: other choices of layers")
    parser.add_argument("--placed-by", nargs="*", default=["kl", "kl+recall, 3 rounds"], help="which of them")
    parser.add_argument("--calibration-tokens", type=int, default=30720)
    parser.add_argument("--stage2-tokens", type=int, default=50176)
    parser.add_argument("--stage3-tokens", type=int, default=25600)
    parser.add_argument("--validation-rows", type=int, default=8)
    parser.add_argument("--long", type=int, default=2048, help="length of the long validation text")
    parser.add_argument("--few-tokens", type=int, nargs="*", default=(2048, 4096, 8192), help="of less text, too")
    parser.add_argument("--hybrids", type=Path, nargs="*", default=(), help="finished checkpoints to measure as well")
    parser.add_argument("--beside", type=int, default=32, help="window beside the mixers of the last rows; 0: none")
    parser.add_argument("--window", type=int, default=92, help="92 + 4 tokens of KV are as large as the SSD's state")
    main(parser.parse_args())
