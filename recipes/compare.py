"""Measure hybrids beside their teacher and beside other ways to shrink its cache: quality, memory, speed.

convert-to-hybrid compare TEACHER [HYBRID...] [--out DIR]

DIR/compare.json holds every method that is done, DIR/compare.md the tables, DIR/compare.png KL and recall by bytes.
docs/guide/compare.md says what each method and each figure is.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from convert.checkpoint.load import load_model, prompt_tokenizer
from convert.checkpoint.tokenizer import differing_text
from convert.fit.probes import plain_tokens
from convert.hybrids.shapes import tensor_shapes
from convert.io.folder import write_beside
from convert.io.writer import human_bytes
from convert.layout.cache import cache_bytes, contexts
from convert.memory import keep_free_memory, return_free_memory
from convert.teachers.teacher import public_name
from convert.tools.generate import sampling
from convert.tools.inspect import hybrid_config
from convert.tools.page import EXPONENTS, write_page

from .compare_options import CompareOptions
from .evaluate import fingerprint
from .evaluation.budgets import EVICTED, HEAD, at_budgets
from .evaluation.commit import project_commit
from .evaluation.comparison_page import comparison_page, shown
from .evaluation.eviction import Scores, kept_bytes, pairs_of_bytes, read_after, reading_scores
from .evaluation.generation import common_prefix
from .evaluation.llama_caches import EXACT, LLAMA_CACHES, LlamaCache, check_llama, is_llama_file, llama_version
from .evaluation.metrics import PerToken, Reader, by_position, per_token, reader, remembered
from .evaluation.other_caches import (
    BFLOAT16,
    OtherCache,
    attending,
    layer_shapes,
    read_with,
    window_of_bytes,
)
from .evaluation.picture import mean_of, picture, points
from .evaluation.real_caches import REAL_CACHES, check_packages, held_bytes, make_cache, read_held
from .evaluation.recall import NEEDLE, hits, needle_distances, needles_probe, questions
from .evaluation.results import ResultsFolder
from .evaluation.ruler import TASKS, generators, ruler
from .evaluation.speed import speed
from .evaluation.texts import TextSource

RESULTS, REPORT, PICTURE = "compare.json", "compare.md", "compare.png"
CONTINUED = 64
"""Number of tokens with which a model goes on with a text."""
CONTINUED_AT_ONCE = 8
"""Texts that a model goes on with at once."""
AFTER = 128
"""Number of tokens that are judged after each context."""
ROUNDED = {
    "int8": OtherCache(8),
    "int4": OtherCache(4),
    "int3": OtherCache(3),
    "int2": OtherCache(2, whole=128),
}
"""Caches in few bits; at 2 bits as many tokens are whole as KIVI has by default."""
COPIED_ROWS = 4
"""Number of rows of random tokens that are to be copied."""
LONGEST_COPIED = 2048
"""Largest number of their tokens: four rows of half a long text's length would take as long as two such texts."""
SPEED_TOKENS, LONG = 8, 1024
"""Decoding steps that are timed, and number of tokens from which on a prompt is read once instead of three times."""
QUICK = {"length": 2048, "rows": 1, "speed": (512, 4096)}
"""Sizes of a quick comparison."""
GIBIBYTE = 2**30
REAL, LLAMA = "transformers' cache", "llama.cpp's cache"
AFTER_CONTEXTS = (*EVICTED, REAL)
"""Kinds of caches that are judged after contexts alone."""
Row = dict[str, Any]


class Method(NamedTuple):
    """A cache to measure."""

    name: str
    kind: str
    """Name of its line in the picture."""
    settings: str
    """Settings that its figures depend on, besides those of all figures."""
    nbytes: Callable[[int], int]
    """Bytes of the cache of so many tokens."""
    weights: int
    """Bytes of the weights in bfloat16."""
    reader: Callable[[Sequence[int]], Reader]
    """Makes the reader of single texts in which contexts end at these places."""
    model: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None
    """Opens the model that answers with this cache; none where the cache depends on where contexts end, and for
    emulated caches of teachers with sliding windows."""
    reference: Reader | None = None
    """Reader that it is compared with; None for the teacher's."""


class Comparison:
    """Teacher, texts and probes that all methods share."""

    def __init__(self, options: CompareOptions, progress: Callable[[str, int, int], None]):
        self.options, self.progress = options, progress
        self.sources = [TextSource(text) for text in options.text]
        trusts = options.trust_remote_code
        self.configs = {name: hybrid_config(name, trust_remote_code=trusts) for name in options.hybrids}
        self.tokenizer = same_tokenizer(options)
        self.teacher = load(options, options.teacher)
        self.shapes = layer_shapes(self.teacher)
        self.weights = sum(parameter.numel() for parameter in self.teacher.parameters()) * BFLOAT16
        self.own = reader(self.teacher)

    @functools.cached_property
    def reference(self) -> Reader:
        """The teacher's reader, which reads each text once."""
        return remembered(self.own)

    @functools.cached_property
    def context_scores(self) -> Callable[[torch.Tensor], Scores]:
        """KVzip's scores of a context, which it computes once."""
        known: dict[bytes, Scores] = {}
        o = self.options
        count = o.rows * len(o.text) * len(range(o.first, o.length, o.first)) + COPIED_ROWS + o.needle_rows

        def scores_of(context: torch.Tensor) -> Scores:
            key = context.cpu().numpy().tobytes()
            if key not in known:
                known[key] = reading_scores(self.teacher, self.own, self.shapes, self.tokenizer, context)
                return_free_memory()  # of matrices whose sizes differ from context to context
                self.progress("contexts read again", len(known), max(len(known), count))
            return known[key]

        return scores_of

    def methods(self) -> Iterator[Method]:
        """The teacher, its cache in few bits, and each hybrid with a window and an eviction of the same bytes."""
        whole = self._other("teacher", "teacher", OtherCache())
        yield whole._replace(reader=lambda ends: self.reference, model=lambda: nullcontext(self.teacher))
        beside = self.options.beside
        for name, cache in ROUNDED.items():
            if name in beside:
                yield self._other(f"{name} cache", "rounded cache", cache)
        if self.options.real:
            yield from map(self._real, REAL_CACHES)
        if self.options.real and is_llama_file(self.options.teacher):
            yield from self._of_llama()
        for name, config in self.configs.items():
            short, nbytes = short_name(name, self.options.hybrids), cache_bytes(config, self.options.length)[1]
            yield self._hybrid(name, short, config)
            if "window" in beside:
                yield from self._windows(short, nbytes)
            if "eviction" in beside:
                yield from self._evictions(short, nbytes)

    def _windows(self, short: str, nbytes: int) -> Iterator[Method]:
        for bits, kind in ((16, "window"), (8, "window, int8")):
            cache = window_of_bytes(self.shapes, nbytes, bits)
            if cache is not None:
                yield self._other(f"{kind}, as {short}", kind, cache)

    def _evictions(self, short: str, nbytes: int) -> Iterator[Method]:
        if all(shape.limit is not None for shape in self.shapes):
            return  # there is nothing to evict
        for kind, moments in zip(EVICTED, (False, True), strict=True):
            pairs = pairs_of_bytes(self.shapes, nbytes, moments, self.options.length)
            if pairs is not None:
                yield self._eviction(f"{kind}, as {short}", kind, pairs, moments)

    def _other(self, name: str, kind: str, cache: OtherCache) -> Method:
        # `generate` holds the latest keys alone of a layer with a sliding window; a cache counts from the first
        slides = any(shape.limit for shape in self.shapes)
        return Method(
            name, kind, repr(cache), lambda n: cache.nbytes(self.shapes, n), self.weights,
            lambda ends: read_with(self.teacher, self.own, cache.attend),
            None if slides else lambda: attending(self.teacher, cache.attend),
        )  # fmt: skip

    def _real(self, name: str) -> Method:
        make = functools.partial(make_cache, self.teacher.config, name)
        settings = f"{REAL_CACHES[name]} {transformers.__version__}"
        return Method(name, REAL, settings, held_bytes(make, self.shapes), self.weights,
                      lambda ends: read_held(self.own, make, ends))  # fmt: skip

    def _of_llama(self) -> Iterator[Method]:
        exact = None
        for name, types in LLAMA_CACHES.items():
            cache = LlamaCache(self.options.teacher, name, self.options.length)
            read = cache.reader(self.own, self.teacher.dtype)
            exact = exact or remembered(read)
            yield Method(name, LLAMA, f"{types} {llama_version()}", cache.nbytes, self.weights,
                         lambda ends, read=read: read, reference=None if name == EXACT else exact)  # fmt: skip

    def _hybrid(self, name: str, short: str, config: PreTrainedConfig) -> Method:
        made = functools.cache(lambda: load(self.options, name))
        settings = f"{name} {fingerprint(name, None, self.options.trust_remote_code)}"
        weights = sum(math.prod(shape) for shape in tensor_shapes(config).values()) * BFLOAT16
        return Method(short, "hybrid", settings, lambda n: cache_bytes(config, n)[1], weights,
                      lambda ends: reader(made()), lambda: nullcontext(made()))  # fmt: skip

    def _eviction(self, name: str, kind: str, pairs: int, moments: bool) -> Method:
        return Method(
            name, kind, f"{pairs} {moments}", lambda n: kept_bytes(self.shapes, pairs, moments, n), self.weights,
            lambda ends: read_after(self.teacher, self.own, self.context_scores, ends, pairs, moments),
        )  # fmt: skip

    def measure(self, method: Method, folder: ResultsFolder, cell: str) -> Row:
        """All figures of a method but speed; sizes, each text and recall are kept one by one."""
        row = folder.cell("method", cell, self.sizes, method)
        row["text"] = {
            source.label: folder.cell("method", f"{cell} text {source.label}", self.text, method, source)
            for source in self.sources
        }
        return row | {"recall": folder.cell("method", f"{cell} recall", self.recall, method)}

    def sizes(self, method: Method) -> Row:
        """Bytes of a cache."""
        shown = contexts(self.teacher.config)
        return {
            "name": method.name,
            "kind": method.kind,
            "cache_bytes": {name: method.nbytes(length) for name, length in shown.items()},
            "share": method.nbytes(self.options.length) / OtherCache().nbytes(self.shapes, self.options.length),
            "shares": {name: method.nbytes(n) / OtherCache().nbytes(self.shapes, n) for name, n in shown.items()},
            "bytes_at": {str(2**k): method.nbytes(2**k) for k in EXPONENTS},
            "weight_bytes": method.weights,
            "sequences": GIBIBYTE // method.nbytes(self.options.length),
        }

    def text(self, method: Method, source: TextSource) -> dict[str, Any]:
        """Figures on one text: from the first judged position on, and on the tokens right after a context."""
        o, what = self.options, f"{method.name}, {source.label}"
        ids = source.rows(self.tokenizer, o.length, o.rows).to(self.teacher.device)
        ends = range(o.first, o.length, o.first)
        advance = functools.partial(self.progress, what, total=len(ids))
        found = per_token(method.reader(ends), method.reference or self.reference, ids, 1, advance)
        after = [place for end in ends for place in range(end, min(end + min(AFTER, o.first), o.length - 1))]
        everywhere = None if method.kind in AFTER_CONTEXTS else summary(found, range(o.first, o.length - 1))
        positions = None if everywhere is None else [(row["stop"], row["kl"]) for row in by_position(found)]
        return {
            "rows": len(ids), "everywhere": everywhere, "after_contexts": summary(found, after),
            "by_position": positions,
        }  # fmt: skip

    def recall(self, method: Method) -> dict[str, Any]:
        """Share of random tokens that are found again, copied and hidden in text; all questions come at the end."""
        source, length = self.sources[0], self.options.length
        vocabulary_size = self.teacher.config.vocab_size
        short = source.rows(self.tokenizer, copied_length(length), COPIED_ROWS)
        copied = questions(short, self.tokenizer, vocabulary_size, [], seed=0)[0].probe
        distances = needle_distances(length, self.options.needles)
        prose = source.rows(self.tokenizer, length, self.options.needle_rows)
        needles = needles_probe(prose, plain_tokens(vocabulary_size), distances, seed=0)
        found = []
        # a copy is asked for by one token, a needle by its first half: neither is part of the context
        for probe, asking in ((copied, 1), (needles, NEEDLE // 2)):
            end = probe.answers[0].nonzero()[0].item() - asking
            said = hits(method.reader([end]), probe, 1, self.teacher.device)
            found.append(said[probe.answers].view(len(probe.ids), -1).double())
            self.progress(f"{method.name}, recall", len(found), 2)
        by_distance = found[1].view(len(prose), len(distances), -1).mean((0, 2)).tolist()
        return {
            "copy": found[0].mean().item(),
            "needle": found[1].mean().item(),
            "needles": dict(zip(map(str, distances), by_distance, strict=True)),
            "needle_rows": len(prose),
        }

    def continuation(self, method: Method, source: TextSource) -> list[int]:
        """Token ids with which a model goes on with a text up to the end of a row."""
        return self._continue(method, source.rows(self.tokenizer, self.options.length, 1)[:, :-CONTINUED])[0]

    def continuations(self, method: Method, source: TextSource) -> list[list[int]]:
        """Token ids with which a model goes on with each of many pieces of a text."""
        pieces = source.rows(self.tokenizer, self.options.first + CONTINUED, self.options.continuations)
        return self._continue(method, pieces[:, :-CONTINUED])

    @torch.no_grad()
    def _continue(self, method: Method, ids: torch.Tensor) -> list[list[int]]:
        """The most likely token each time, but never the end of text, after each text of (B, L)."""
        greedy = {"temperature": None, "top_p": None, "top_k": None} | sampling(0.0)
        # a checkpoint may name more tokens that end a text than another; all are to choose among the same
        greedy |= {"eos_token_id": self.tokenizer.eos_token_id, "pad_token_id": self.tokenizer.pad_token_id}
        said: list[list[int]] = []
        with method.model() as model:
            for part in ids.to(self.teacher.device).split(CONTINUED_AT_ONCE):
                found = model.generate(
                    part, attention_mask=torch.ones_like(part), max_new_tokens=CONTINUED, min_new_tokens=CONTINUED,
                    num_beams=1, **greedy,
                )  # fmt: skip
                said += found[:, part.shape[1] :].tolist()
                self.progress(f"{method.name}, going on", len(said), len(ids))
        return said

    def ruler(self, method: Method, length: int, task: str) -> float:
        """Score of one of RULER's tasks at one length; each row alone, as other caches count from the first token."""
        with method.model() as model:
            found = ruler(model, self.tokenizer, [length], self.options.ruler_rows, [task], 1)
        self.progress(f"{method.name}, RULER at {length:,} tokens", TASKS.index(task) + 1, len(TASKS))
        return found[length][task]

    def speed(self, context: int) -> list[Row]:
        """Rows of speed at one length, in turns: the teacher, also with transformers' caches, and all hybrids."""
        names = {short_name(name, self.options.hybrids): name for name in self.options.hybrids}
        real = REAL_CACHES if self.options.real else ()
        caches = {name: functools.partial(make_cache, self.teacher.config, name) for name in real}
        models = {"teacher": self.teacher} | dict.fromkeys(real, self.teacher)
        models |= {short: load(self.options, name) for short, name in names.items()}
        advance = functools.partial(self.progress, f"speed at {context:,} tokens")
        return speed(models, 1, context, SPEED_TOKENS, 3 if context <= LONG else 1, advance, caches)


def copied_length(length: int) -> int:
    """Number of tokens of a row whose second half is to be a copy of the first; rows of text have `length`."""
    return min(length // 2, LONGEST_COPIED)


def summary(found: PerToken, places: Sequence[int]) -> dict[str, float]:
    """Means over positions of all rows, and how KL is distributed."""
    kl, agrees, nats = (t[:, list(places)].double().flatten() for t in (found.kl, found.agrees, found.nats))
    return {
        "kl": kl.mean().item(),
        "kl_median": kl.median().item(),
        "kl_999": kl.quantile(0.999).item(),
        "agreement": agrees.mean().item(),
        "perplexity": math.exp(nats.mean().item()),
    }


def load(options: CompareOptions, name: str) -> PreTrainedModel:
    """One of the models that are compared."""
    return load_model(name, options.dtype, options.device, trust_remote_code=options.trust_remote_code)


def short_name(name: str, among: Sequence[str]) -> str:
    """The last part of a hybrid's name, or all of it where another one has the same."""
    last = Path(name).name
    return last if sum(Path(other).name == last for other in among) == 1 else name


def same_tokenizer(options: CompareOptions) -> PreTrainedTokenizerBase:
    """The teacher's tokenizer, as which every hybrid's has to read text."""
    own, *others = (
        prompt_tokenizer(name, trust_remote_code=options.trust_remote_code)
        for name in (options.teacher, *options.hybrids)
    )
    for name, other in zip(options.hybrids, others, strict=True):
        if other.get_vocab() != own.get_vocab() or differing_text(own, other) is not None:
            raise ValueError(f"{name} has another tokenizer than {options.teacher}; compare it with its own teacher.")
    return own


def sized(options: CompareOptions) -> CompareOptions:
    """The options with the sizes of a quick comparison, if it is one, in the place of those left at their defaults."""
    small = {name: size for name, size in QUICK.items() if getattr(options, name) == getattr(CompareOptions, name)}
    return dataclasses.replace(options, **small) if options.quick else options


def compare(options: CompareOptions, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Measure what is not measured yet, write it all, and return it.

    Raises:
        ValueError: something cannot be measured; what was finished before is kept.
    """
    keep_free_memory()
    options = sized(options)
    if len(set(options.hybrids)) < len(options.hybrids):
        raise ValueError("A hybrid is named twice.")
    if len({TextSource(text).label for text in options.text}) < len(options.text):
        raise ValueError("Two --text have the same name; rename one, since results are told apart by it.")
    common = {
        "teacher": [options.teacher, fingerprint(options.teacher, None, options.trust_remote_code)],
        "text": [[source.name, source.fingerprint()] for source in map(TextSource, options.text)],
    }
    sizes = ("length", "rows", "first", "needle_rows", "needles", "dtype", "device")
    common |= {name: getattr(options, name) for name in sizes}
    parts = {
        "speed": {"steps": SPEED_TOKENS},
        "ruler": {"rows": options.ruler_rows},
        "continuation": CONTINUED,
        "continuations": [CONTINUED, options.continuations],
    }
    # results of before lack some figures, so that their methods are measured again
    folder = ResultsFolder(Path(options.output), {"common": common, "method": {"version": 3}} | parts)
    if options.ruler:  # before anything is computed for nothing
        generators()
    if options.real:
        check_packages()
    if options.real and is_llama_file(options.teacher):
        check_llama()
    comparison = Comparison(options, progress)
    found: dict[str, Any] = {
        "teacher": public_name(options.teacher),
        "commit": project_commit(),
        "environment": {"torch": torch.__version__, "transformers": transformers.__version__,
                        "threads": torch.get_num_threads(), "device": options.device},
        "settings": common,
        "methods": [],
        "speed": [],
    }  # fmt: skip
    own: dict[str, list[list[int]]] = {}  # the teacher's continuations, which comes first
    for method in comparison.methods():
        cell = f"{method.name} {method.settings}"
        row = comparison.measure(method, folder, cell)
        row["ruler"] = {}
        for n in options.ruler if method.model else ():
            row["ruler"][str(n)] = {
                task: folder.cell("ruler", f"{cell} {n} {task}", comparison.ruler, method, n, task) for task in TASKS
            }
        row["going_on"] = {}
        for source in comparison.sources if options.continuations and method.model else ():
            place = f"{cell} {source.label}"
            said = folder.cell("continuations", place, comparison.continuations, method, source)
            row["going_on"][source.label] = alike(said, own.setdefault(source.label, said))
        row["continuations"] = {}
        if options.html is not None and method.kind in ("teacher", "hybrid"):
            for source in comparison.sources:
                ids = folder.cell("continuation", f"{cell} {source.label}", comparison.continuation, method, source)
                row["continuations"][source.label] = ids
        found["methods"].append(row)
        write(folder.path, found)
    hybrids = [f"{name} {fingerprint(name, None, options.trust_remote_code)}" for name in options.hybrids]
    for context in options.speed:
        cell = f"{context} {hybrids} {options.real}"
        found["speed"] += folder.cell("speed", cell, comparison.speed, context)
        write(folder.path, found)
    if options.html is not None:
        configs = {short_name(name, options.hybrids): config for name, config in comparison.configs.items()}
        write_page(options.html, comparison_page(found, configs, comparison.tokenizer))
    return found


def write(folder: Path, found: dict[str, Any]) -> None:
    """Write what is measured so far as JSON, tables and picture."""
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    write_beside(folder / RESULTS, lambda partial: partial.write_text(text))
    write_beside(folder / REPORT, lambda partial: partial.write_text(markdown(found)))
    picture(points(found["methods"])).savefig(folder / PICTURE)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def alike(said: Sequence[list[int]], own: Sequence[list[int]]) -> dict[str, float]:
    """Share of tokens before the first that is not the teacher's, and of pieces without one.

    Args:
        said: token ids after each piece. own: the teacher's.
    """
    equal = [common_prefix(*pair) for pair in zip(said, own, strict=True)]
    pieces = len(equal)
    return {"pieces": pieces, "tokens": sum(equal) / pieces / CONTINUED, "whole": equal.count(CONTINUED) / pieces}


def going_on_lines(methods: Sequence[Row], first: int) -> list[str]:
    """Lines about how long caches go on with pieces of texts as the teacher does, if that was measured."""
    rows = {row["name"]: row["going_on"] for row in methods if row["going_on"]}
    if not rows:
        return []
    own = next(iter(rows.values()))
    cells = [
        [name, *(f"{text['tokens']:.0%}, {text['whole']:.0%}" for text in row.values())] for name, row in rows.items()
    ]
    return [
        "",
        f"After pieces of {first:,} tokens each cache generates {CONTINUED} more, the most likely one each time. "
        "Share of tokens before the first that differs from the teacher's, and of pieces without one:",
        "",
        *table(["cache", *(f"{label} ({text['pieces']})" for label, text in own.items())], cells),
    ]


def markdown(found: dict[str, Any]) -> str:
    """Tables of quality, of each text, of memory and of speed."""
    methods, settings = found["methods"], found["settings"]

    quality, texts, needles, memory = [], [], [], []
    for row in methods:
        kl = [shown(mean_of(row, "everywhere", name)) for name in ("kl", "kl_median", "kl_999")]
        share = f"{row['share']:.1%}"
        recall = f"{row['recall']['copy']:.0%}, {row['recall']['needle']:.0%}"
        after = shown(mean_of(row, "after_contexts", "kl"))
        where = "after_contexts" if row["kind"] in AFTER_CONTEXTS else "everywhere"
        quality.append([row["name"], share, *kl, after, shown(mean_of(row, where, "agreement"), ".1%"), recall])
        texts.append([row["name"]])
        for of_text in row["text"].values():
            texts[-1].append(f"{of_text[where]['kl']:.4f}, {of_text[where]['perplexity']:.2f}")
        needles.append([row["name"], *(f"{share:.0%}" for share in row["recall"]["needles"].values())])
        sizes = row["cache_bytes"].values()
        memory.append([row["name"], f"{row['sequences']:,}", *map(human_bytes, sizes)])
        memory[-1] += [human_bytes(size + row["weight_bytes"]) for size in sizes]
    labels = list(methods[0]["text"]) if methods else []
    shown_at = list(methods[0]["cache_bytes"]) if methods else []
    recall = methods[0]["recall"] if methods else {"needles": {}, "needle_rows": 0}
    where = ", ".join(f"{name} {value}" for name, value in found["environment"].items())
    first, tokens = settings["first"], f"{settings['length']:,}"
    lines = [
        f"# {found['teacher']}, its hybrids, and other caches",
        "",
        f"Commit {found['commit']}, {where}. Rounding, windows and eviction are emulated and their bytes counted; "
        "caches named after a library are its own, and their bytes measured. "
        f"Share is of a cache in bfloat16 at {tokens} tokens. KL from the teacher, in nats per token, is a mean over "
        f"{', '.join(labels)}: from position {first} on, and on the {min(AFTER, first)} tokens after each of the "
        f"contexts of {first}, {2 * first}, ... tokens. Eviction and transformers' own caches are judged after "
        f"contexts alone; the tokens after them come on top of their bytes. KL of llama.cpp's caches of few bits is "
        f"from its cache in 16 bits. Recall of random tokens: copied, "
        f"{copied_length(settings['length']) // 2:,} back, and needles, hidden in text (a mean over all distances).",
        "",
        *table(["cache", "share", "KL", "median", "99.9 %", "KL after contexts", "top-1 agreement", "recall"],
               quality),
        "",
        "KL and perplexity by text:",
        "",
        *table(["cache", *labels], texts),
        "",
        f"Needles found, by distance in tokens, with {recall['needle_rows'] * NEEDLE // 2} answers each:",
        "",
        *table(["cache", *recall["needles"]], needles),
        "",
        f"Sequences of {tokens} tokens whose caches fit into 1 GiB; bytes of one, and with weights in bfloat16:",
        "",
        *table(["cache", "in 1 GiB", *shown_at, *(f"{name} and weights" for name in shown_at)], memory),
    ]  # fmt: skip
    budgets = at_budgets(found)
    if budgets:
        lines += ["", "Caches of about the same size; peak: the largest size while a prompt is read:", ""]
        lines += table(HEAD, budgets)
    lines += going_on_lines(methods, settings["first"])
    answered = [row for row in methods if row["ruler"]]
    if answered:
        lengths = list(answered[0]["ruler"])
        lines += ["", f"RULER, mean score of {len(TASKS)} tasks:", ""]
        lines += table(
            ["cache", *(f"{int(length):,} tokens" for length in lengths)],
            [
                [row["name"], *(f"{sum(row['ruler'][n].values()) / len(row['ruler'][n]):.1%}" for n in lengths)]
                for row in answered
            ],
        )
    if found["speed"]:
        speeds = [
            [f"{row['context']:,}", row["which"], f"{row['prefill_tokens_per_second']:,.0f}",
             f"{row['decode_tokens_per_second']:.1f}", f"{row['context'] / row['prefill_tokens_per_second']:.2f}"]
            for row in found["speed"]
        ]  # fmt: skip
        lines += ["", "Tokens per second, one sequence; emulated caches and those of llama.cpp are not timed:", ""]
        lines += table(["tokens", "model", "prompt", "decoding", "seconds to the first token"], speeds)
    return "\n".join(lines) + "\n"
