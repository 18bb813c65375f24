"""Speculative decoding, for hybrids and with them: draft some tokens, verify them in one pass, keep what is right.

    model.generate(**inputs, custom_generate=model.speculative_decoding, draft=small_model, num_draft_tokens=4)

Greedy output is the target's own greedy output; sampled output follows the target's distribution, whatever the draft
(Leviathan et al. 2023, arXiv 2211.17192, algorithm 1). Recurrent states stay at the last verified token and are
advanced by the accepted tokens alone (`record` and `accept` in hybrid_cache.py). The assisted generation of
transformers has to crop its caches and so refuses models with a recurrent state.

How long a draft should be: where each drafted token is right with probability a, given that those before it are, a
pass that verifies K of them yields (equation 1 there)

    tokens(a, K) = 1 + a + ... + a^K = (1 - a^(K+1)) / (1 - a)

and takes, with plain decoding's seconds per token `step`, what a pass over several tokens takes beyond that `several`,
what each further token adds to it `token`, and what it takes to draft one `draft`,

    seconds(K) = step + several + K (token + draft)          seconds(0) = step

so that it is tokens(a, K) step / seconds(K) times as fast as plain decoding. Theorem 3.8 there is the case
several = token = 0, of a machine that waits for its weights. On a CPU `several` decides: a matrix times a few vectors
takes up to twice as long as times one, and then each further vector little.

Shapes: B batch, L length, K drafted tokens, V vocabulary.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .hybrid_cache import accept, cache_nbytes, record, recorded_bytes, stop_recording

EXPECTED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
# they count their calls or keep a cache, and here they would see drafts as well
STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
SELF_SHARE = 3  # a model's own draft is its first third
FORGET = 0.9  # weight of what was measured a round ago against now: the last ten rounds or so count
PROBE_EVERY = 16  # rounds without a draft, until one is tried again
FIRST_LENGTHS = (0, 4, 2)  # two lengths tell `token` from `several`


class Drafted(NamedTuple):
    """tokens (B, K), the first counts[row] of which are drafted; probabilities (B, K, V) they were drawn with.

    Without probabilities the tokens were not sampled: each counts as drafted with certainty.
    """

    tokens: torch.Tensor
    counts: list[int]
    probabilities: torch.Tensor | None = None


class Text:
    """The rows of tokens so far, as `generate` would return them, with room for more.

    tokens: (B, capacity). starts and ends: of each row, where its padding ends and its text so far does. active: rows
    that are not finished.
    """

    def __init__(self, prompt: torch.Tensor, mask: torch.Tensor | None, capacity: int):
        rows, columns = prompt.shape
        self.tokens = torch.nn.functional.pad(prompt, (0, capacity - columns))
        self.starts = [0] * rows if mask is None else (columns - mask.long().sum(1)).tolist()
        self.ends = [columns] * rows
        self.active = [True] * rows

    def length(self, row: int) -> int:
        """Number of tokens in a row, without its padding."""
        return self.ends[row] - self.starts[row]

    def last(self, count: int) -> torch.Tensor:
        """The last tokens of each row, (B, count); a row that ended earlier may be shorter, and begins with zeros."""
        rows = []
        for row, end in zip(self.tokens, self.ends, strict=True):
            found = row[max(end - count, 0) : end]
            rows.append(torch.nn.functional.pad(found, (count - len(found), 0)))
        return torch.stack(rows)

    def write(self, tokens: torch.Tensor, offset: int = 0) -> None:
        """Write (B, n) tokens after each row's text without making them part of it."""
        for row, new in enumerate(tokens):
            start = self.ends[row] + offset
            self.tokens[row, start : start + len(new)] = new


class Track:
    """A model that follows a text: its cache, how many tokens of each row are in it, and how many await `accept`."""

    def __init__(self, model: PreTrainedModel, cache: Cache):
        self.model, self.cache = model, cache
        self.lengths: list[int] = []
        self.columns = self.ahead = self.extra_bytes = 0

    def prefill(self, text: Text, chunk_size: int | None = None, behind: int = 0) -> torch.Tensor:
        """Feed the text except its last `behind` tokens, then start recording; returns the next logits (B, V)."""
        self.lengths = [text.length(row) - behind for row in range(len(text.ends))]
        self.columns = max(self.lengths)
        ids = torch.zeros(len(self.lengths), self.columns, dtype=torch.long)
        for row, (start, length) in enumerate(zip(text.starts, self.lengths, strict=True)):
            ids[row, self.columns - length :] = text.tokens[row, start : start + length]
        index = torch.arange(self.columns) - self.columns + torch.tensor(self.lengths)[:, None]
        ids, index = ids.to(self.model.device), index.to(self.model.device)
        size, logits = chunk_size or self.columns, None
        for start in range(0, self.columns, size):
            stop = min(start + size, self.columns)
            logits = self.model(
                input_ids=ids[:, start:stop],
                attention_mask=None if min(self.lengths) == self.columns else (index[:, :stop] >= 0).long(),
                position_ids=index[:, start:stop].clamp(min=0),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        record(self.cache)
        return logits.to(text.tokens.device)

    def feed(self, ids: torch.Tensor, active: Sequence[bool]) -> torch.Tensor:
        """Feed tokens (B, L) that `accept` keeps or drops; returns logits (B, L, V). Inactive rows are padding."""
        device, length = self.model.device, ids.shape[1]
        total = self.columns + self.ahead + length
        mask = None
        if not all(active) or min(self.lengths) < self.columns:
            mask = torch.ones(len(active), total, dtype=torch.long)
            for row, (real, unfinished) in enumerate(zip(self.lengths, active, strict=True)):
                mask[row, : self.columns - real] = 0
                mask[row, self.columns :] = int(unfinished)
            mask = mask.to(device)
        positions = torch.tensor(self.lengths)[:, None] + self.ahead + torch.arange(length)
        logits = self.model(
            input_ids=ids.to(device),
            attention_mask=mask,
            position_ids=positions.to(device),
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        self.ahead += length
        self.extra_bytes = max(self.extra_bytes, recorded_bytes(self.cache))
        return logits.to(ids.device)

    def accept(self, counts: Sequence[int], active: Sequence[bool]) -> None:
        """Keep the first counts[row] tokens fed since the last call."""
        lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        columns = max(n for n, unfinished in zip(lengths, active, strict=True) if unfinished or not any(active))
        accept(self.cache, counts, drop=self.columns + max(counts) - columns)
        self.lengths, self.columns, self.ahead = [min(n, columns) for n in lengths], columns, 0


class PromptLookup:
    """What followed the last tokens where they occurred before (Saxena 2023, prompt lookup decoding)."""

    def __init__(self, longest_match: int = 3):
        self.longest_match = longest_match

    def propose(self, text: Text, count: int, choose: Callable) -> Drafted:
        """Up to `count` tokens a row; none where the text does not repeat itself."""
        found = []
        for row, (start, end) in enumerate(zip(text.starts, text.ends, strict=True)):
            found.append(self._lookup(text.tokens[row, start:end], count) if text.active[row] else [])
        width = max(map(len, found))
        tokens = torch.zeros(len(found), width, dtype=torch.long, device=text.tokens.device)
        for row, continuation in enumerate(found):
            tokens[row, : len(continuation)] = torch.as_tensor(continuation)
        return Drafted(tokens, [len(continuation) for continuation in found])

    def _lookup(self, tokens: torch.Tensor, count: int) -> torch.Tensor | list:
        """The continuation of the latest earlier occurrence of the longest possible match."""
        for size in range(min(self.longest_match, len(tokens) - 1), 0, -1):
            same = (tokens[:-1].unfold(0, size, 1) == tokens[-size:]).all(1).nonzero()
            if len(same):
                after = int(same[-1]) + size
                return tokens[after : after + count]
        return []

    def accept(self, text: Text) -> None:
        """A lookup keeps nothing between calls."""

    def extra_bytes(self) -> int:
        return 0


class ModelDraft:
    """A language model that decodes ahead; its cache is rolled back together with the target's."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.track: Track | None = None

    def propose(self, text: Text, count: int, choose: Callable) -> Drafted:
        """`count` tokens a row; `choose` turns logits (B, V) into tokens (B,) and probabilities (B, V) or None."""
        if self.track is None:
            self.track = Track(self.model, empty_cache(self.model))
            self.track.prefill(text, behind=1)
        unseen = {text.length(row) - self.track.lengths[row] for row, active in enumerate(text.active) if active}
        assert len(unseen) == 1, f"rows are {unseen} tokens behind"
        ids, tokens, probabilities = text.last(unseen.pop()), [], []
        for step in range(count):
            token, probability = choose(self.track.feed(ids, text.active)[:, -1:], step)
            ids = token[:, None]
            text.write(ids, step)
            tokens.append(token)
            probabilities.append(probability)
        drawn = None if probabilities[0] is None else torch.stack(probabilities, 1)
        return Drafted(torch.stack(tokens, 1), [count] * len(text.ends), drawn)

    def accept(self, text: Text) -> None:
        """Go on behind the text as it is now; every row is left the same number of tokens behind."""
        if self.track is None or not self.track.ahead or not any(text.active):
            return
        rows = [row for row, active in enumerate(text.active) if active]
        seen = {row: min(text.length(row) - 1, self.track.lengths[row] + self.track.ahead) for row in rows}
        behind = max(text.length(row) - seen[row] for row in rows)
        counts = [0] * len(text.ends)
        for row in rows:
            counts[row] = text.length(row) - behind - self.track.lengths[row]
        self.track.accept(counts, text.active)

    def extra_bytes(self) -> int:
        """Bytes of the draft's cache and of what it records."""
        return 0 if self.track is None else cache_nbytes(self.track.cache) + self.track.extra_bytes


def empty_cache(model: PreTrainedModel) -> Cache:
    """A cache that can record.

    Raises:
        ValueError: the model is recurrent in a way that is not this project's.
    """
    if hasattr(model, "new_cache"):
        return model.new_cache()
    cache = DynamicCache(config=model.config)
    if any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers):
        raise ValueError(
            f"{type(model).__name__} is recurrent and cannot take tokens back; use a Transformer, or a hybrid of "
            "convert-to-hybrid."
        )
    return cache


def first_layers(model: PreTrainedModel, layers: int | None = None) -> PreTrainedModel:
    """The model's first layers (a third by default) under its own final norm and head; shares every weight with it.

    Raises:
        ValueError: there are not so many layers, or not fewer than all.
    """
    if not hasattr(getattr(model, "model", None), "layers"):
        raise ValueError(
            f"{type(model).__name__} does not keep its layers where draft='self' looks; name another draft."
        )
    total = len(model.model.layers)
    layers = max(total // SELF_SHARE, 1) if layers is None else layers
    if not 0 < layers < total:
        raise ValueError(f"A draft of the model's own first layers takes 1 to {total - 1} of them, not {layers}.")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    for name in ("layer_types", "hybrid_full_heads"):
        if getattr(config, name, None) is not None:
            setattr(config, name, getattr(config, name)[:layers])
    with torch.device("meta"):
        draft = type(model)(config)
    for name, module in model.model.named_children():
        setattr(draft.model, name, nn.ModuleList(module[:layers]) if name == "layers" else module)
    draft.lm_head = model.lm_head
    return draft.train(model.training)


@dataclass(frozen=True)
class CostModel:
    """Seconds of a plain step, what a pass over several tokens adds, what each of them adds, and of drafting one."""

    step: float
    several: float
    token: float
    draft: float

    @staticmethod
    def tokens(acceptance: float, length: int) -> float:
        """Expected tokens of a pass that verifies `length` drafted ones."""
        return sum(acceptance**i for i in range(length + 1))

    def seconds(self, length: int) -> float:
        """Predicted seconds to draft and verify `length` tokens."""
        return self.step + (self.several + length * (self.token + self.draft) if length else 0.0)

    def speedup(self, acceptance: float, length: int) -> float:
        """Predicted speed relative to plain decoding; 1 at length 0."""
        return self.tokens(acceptance, length) * self.step / self.seconds(length)

    def best(self, acceptance: float, longest: int) -> int:
        """The fastest length up to `longest`; 0 where no draft pays."""
        return max(range(longest + 1), key=lambda length: self.speedup(acceptance, length))

    def break_even(self, length: int) -> float | None:
        """The acceptance above which drafts of this length pay; None where not even perfect ones do."""
        if self.speedup(1.0, length) <= 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(middle, length) > 1 else (middle, high)
        return high


@dataclass
class DraftLength:
    """Chooses the length of each draft from how the last ones did."""

    longest: int = 8
    rounds: int = 0
    without: int = 0
    steps: list[float] = field(default_factory=lambda: [0.0, 0.0])
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    drafting: list[float] = field(default_factory=lambda: [0.0, 0.0])
    trials: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def next(self) -> int:
        """How many tokens to draft now."""
        if self.rounds < len(FIRST_LENGTHS):
            return min(FIRST_LENGTHS[self.rounds], self.longest)
        length = self.cost().best(self.acceptance(), self.longest)
        if length == 0 and self.without >= PROBE_EVERY:
            return min(2, self.longest)
        return length

    def note(self, length: int, accepted: int, rejected: int, draft_seconds: float, verify_seconds: float) -> None:
        """Learn from a round that verified `length` drafted tokens; accepted and rejected are counted over all rows.

        A row rejects at most one token: those behind it are not judged.
        """
        self.rounds += 1
        self.without = 0 if length else self.without + 1
        if length:
            new = (1.0, length, length**2, verify_seconds, length * verify_seconds)
            self.sums = [FORGET * old + value for old, value in zip(self.sums, new, strict=True)]
            self.drafting = [FORGET * self.drafting[0] + draft_seconds, FORGET * self.drafting[1] + length]
        else:
            self.steps = [FORGET * self.steps[0] + verify_seconds, FORGET * self.steps[1] + 1]
        if accepted + rejected:
            self.trials = [FORGET * self.trials[0] + accepted, FORGET * self.trials[1] + accepted + rejected]

    def acceptance(self) -> float:
        """Estimated probability that a drafted token is accepted; 1/2 before anything is known."""
        return (self.trials[0] + 1) / (self.trials[1] + 2)

    def cost(self) -> CostModel:
        """Costs from what was measured: the mean of plain steps, and a line fitted to the other passes."""
        weight, k, kk, seconds, k_seconds = self.sums
        spread = weight * kk - k * k
        token = max((weight * k_seconds - k * seconds) / spread, 0.0) if spread > 1e-9 * weight * kk else 0.0
        whole = (seconds - token * k) / weight if weight else 0.0
        step = self.steps[0] / self.steps[1] if self.steps[1] else max(whole, 1e-9)
        return CostModel(step, max(whole - step, 0.0), token, self.drafting[0] / max(self.drafting[1], 1e-9))


@dataclass
class Statistics:
    """Counts over one generation, without the prompt.

    passes: forward passes of the target, for all rows at once. row_passes: the same, counted per unfinished row.
    tokens: generated. drafted: verified. accepted: kept. rejected: judged wrong; tokens behind a rejected one are not
    judged. extra_bytes: memory that plain decoding does not need: the target's records and the draft's cache.
    """

    passes: int = 0
    row_passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    extra_bytes: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def summary(self) -> dict[str, Any]:
        """All counts and three ratios; `acceptance`, which `CostModel` takes, is a share of the judged tokens."""
        judged = self.accepted + self.rejected
        return asdict(self) | {
            "acceptance": self.accepted / judged if judged else None,
            "tokens_per_target_pass": self.tokens / self.row_passes if self.row_passes else None,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else None,
        }


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`, and the statistics."""

    statistics: Statistics | None = None


@torch.no_grad()
def speculative_decoding(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft: PreTrainedModel | str = "prompt-lookup",
    num_draft_tokens: int | str = "auto",
    draft_layers: int | None = None,
    token_streamer: Any = None,
    **model_kwargs,
) -> torch.LongTensor | SpeculativeOutput:
    """Decoding loop for `generate(..., custom_generate=speculative_decoding)`, which hands the other arguments over.

    Args:
        draft: a model of the same vocabulary, "prompt-lookup", or "self" for the model's own first layers.
        num_draft_tokens: verified per pass, or "auto" for as many as pay (`DraftLength`).
        draft_layers: how many layers make a draft of "self"; a third of them by default.
        token_streamer: gets tokens as they are accepted; `generate` keeps the one it calls `streamer` to itself.

    Returns:
        (B, length) with the prompt, or a `SpeculativeOutput` where `return_dict_in_generate` is set.

    Raises:
        ValueError: the draft has another vocabulary, there is nothing to draft, the prompt is empty or padded on the
            right, or something was asked for that does not exist here (beams, scores, a static cache).
    """
    mask = model_kwargs.get("attention_mask")
    _check_request(model, input_ids, mask, generation_config, logits_processor, model_kwargs, token_streamer)
    source = make_draft(model, draft, draft_layers)
    lengths = DraftLength() if num_draft_tokens == "auto" else _fixed_length(num_draft_tokens)
    limit = generation_config.max_length
    longest = lengths.longest if isinstance(lengths, DraftLength) else lengths
    text = Text(input_ids.to(model.device), mask, limit + longest + 1)
    cache = model_kwargs.get("past_key_values")
    target = Track(model, empty_cache(model) if cache is None else cache)
    loop = _Loop(text, target, source, logits_processor, stopping_criteria, generation_config, token_streamer)
    loop.begin()
    while loop.unfinished():
        asked = lengths.next() if isinstance(lengths, DraftLength) else lengths
        report = loop.round(min(asked, limit - 1 - loop.shortest_end()))
        if isinstance(lengths, DraftLength):
            lengths.note(*report)
    sequences = loop.sequences().to(input_ids.device)
    if token_streamer is not None:
        token_streamer.end()
    if not generation_config.return_dict_in_generate:
        return sequences
    # the caches of several rows are not where plain decoding would have left them
    stop_recording(target.cache)
    cache = target.cache if len(sequences) == 1 else None
    return SpeculativeOutput(sequences=sequences, past_key_values=cache, statistics=loop.finished_statistics())


def make_draft(model: PreTrainedModel, draft: PreTrainedModel | str, layers: int | None) -> PromptLookup | ModelDraft:
    """The source of drafts for `model`.

    Raises:
        ValueError: see `speculative_decoding`.
    """
    if layers is not None and draft != "self":
        raise ValueError("draft_layers belongs to draft='self'.")
    if draft == "prompt-lookup":
        return PromptLookup()
    if draft == "self":
        return ModelDraft(first_layers(model, layers))
    if not isinstance(draft, PreTrainedModel):
        raise ValueError(f"draft must be a model, 'prompt-lookup' or 'self', not {draft!r}.")
    own, theirs = (m.get_output_embeddings().weight.shape[0] for m in (model, draft))
    if own != theirs:
        raise ValueError(f"The draft has a vocabulary of {theirs} tokens, the target of {own}; they must share it.")
    return ModelDraft(draft)


def _fixed_length(length: int | str) -> int:
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"num_draft_tokens must be at least 1, or 'auto'; got {length!r}.")
    return length


def _check_request(model, input_ids, mask, config, processors, model_kwargs, streamer) -> None:
    unknown = sorted(name for name, value in model_kwargs.items() if name not in EXPECTED and value is not None)
    if unknown:
        raise ValueError(f"Speculative decoding takes no {', '.join(unknown)}.")
    if input_ids.numel() == 0:
        raise ValueError("The prompt is empty; give at least one token.")
    if mask is not None and not ((mask.diff(dim=1) >= 0).all() and mask[:, -1].all()):
        raise ValueError("Pad the prompts on the left: tokenizer.padding_side = 'left'.")
    if config.num_beams > 1:
        raise ValueError("Speculative decoding knows no beams; use num_beams=1.")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise ValueError(f"Speculative decoding does not collect what {name} asks for.")
    for processor in processors:
        by_row = isinstance(processor, PrefixConstrainedLogitsProcessor) and len(input_ids) > 1
        if isinstance(processor, STATEFUL) or by_row:
            raise ValueError(f"{type(processor).__name__} cannot judge rows of different length, or drafts.")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise ValueError("Speculative decoding begins with the whole prompt; pass no past_key_values with tokens.")
    if streamer is not None and len(input_ids) > 1:
        raise ValueError("A streamer takes one row; pass prompts one at a time.")


def judge(scores: torch.Tensor, drafted: Drafted, sample: bool) -> tuple[list[int], torch.Tensor]:
    """How many of each row's drafted tokens are accepted, and the token that follows them.

    Args:
        scores: (B, K + 1, V) of the target, at each drafted token and behind the last.

    Returns:
        counts, and tokens (B,). Greedy: what the target would have said. Sampled: distributed as the target's own.
    """
    rows, length = drafted.tokens.shape
    place = torch.arange(length, device=scores.device)
    there = place < torch.tensor(drafted.counts, device=scores.device)[:, None]
    batch = torch.arange(rows, device=scores.device)
    if not sample:
        best = scores.argmax(-1)
        stands = ((best[:, :length] == drafted.tokens) & there).long().cumprod(1).sum(1)
        return stands.tolist(), best[batch, stands]
    target = scores.softmax(-1)
    p = target[:, :length].gather(2, drafted.tokens[..., None])[..., 0]
    certain = torch.nn.functional.one_hot(drafted.tokens, target.shape[-1]).to(target)
    q_all = certain if drafted.probabilities is None else drafted.probabilities
    q = q_all.gather(2, drafted.tokens[..., None])[..., 0]
    stands = ((torch.rand_like(p) * q < p) & there).long().cumprod(1).sum(1)
    # behind the draft nothing is taken off the target's distribution
    off = torch.nn.functional.pad(q_all * there[..., None], (0, 0, 0, 1))[batch, stands]
    rest = (target[batch, stands] - off).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target[batch, stands])
    return stands.tolist(), torch.multinomial(rest, 1)[:, 0]


class _Loop:
    """One call of `speculative_decoding`."""

    def __init__(self, text: Text, target: Track, draft, processors, criteria, config: GenerationConfig, streamer):
        self.text, self.target, self.draft = text, target, draft
        self.processors, self.criteria, self.config, self.streamer = processors, criteria, config, streamer
        self.stopped: list[int | None] = [None] * len(text.ends)
        self.fills_up = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.statistics = Statistics()

    def begin(self) -> None:
        """Run the prompt, and take the first token from what it says."""
        if self.streamer is not None:
            self.streamer.put(self.text.tokens[:, : self.text.ends[0]].cpu())
        logits = self.target.prefill(self.text, self.config.prefill_chunk_size)
        self.text.write(self.choose(logits[:, None])[0][:, None])
        self._commit([1] * len(self.text.ends))

    def round(self, length: int) -> tuple[int, int, int, float, float]:
        """Draft, verify and keep; returns the arguments of `DraftLength.note`."""
        text, rows, began = self.text, len(self.text.ends), time.perf_counter()
        if length > 0:
            drafted = self.draft.propose(text, length, self.choose)
        else:
            drafted = Drafted(torch.zeros(rows, 0, dtype=torch.long, device=text.tokens.device), [0] * rows)
        verifying = time.perf_counter()
        logits = self.target.feed(torch.cat([text.last(1), drafted.tokens], 1), text.active)
        text.write(drafted.tokens)
        counts, behind = judge(self.scores(logits), drafted, self.config.do_sample)
        active, asked = list(text.active), sum(n for n, on in zip(drafted.counts, text.active, strict=True) if on)
        for row, count in enumerate(counts):
            text.tokens[row, text.ends[row] + count] = behind[row]
        kept = self._commit([count + 1 if on else 0 for count, on in zip(counts, active, strict=True)])
        self.target.accept(kept, text.active)
        self.draft.accept(text)
        ended, accepted = time.perf_counter(), sum(n for n, on in zip(counts, active, strict=True) if on)
        rejected = sum(on and n < of for n, of, on in zip(counts, drafted.counts, active, strict=True))
        self.statistics += Statistics(
            1, sum(active), sum(kept), asked, accepted, rejected, 0, verifying - began, ended - verifying
        )
        return drafted.tokens.shape[1], accepted, rejected, verifying - began, ended - verifying

    def scores(self, logits: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """(B, n, V) in float32 as `generate` has them, processed; logits[:, i] stands behind offset + i new tokens."""
        logits = logits.to(copy=True, dtype=torch.float32)
        for end in set(self.text.ends) if self.processors else ():
            rows = [row for row, other in enumerate(self.text.ends) if other == end]
            for i in range(logits.shape[1]):
                # the whole batch, since some processors know their rows by place
                processed = self.processors(self.text.tokens[:, : end + offset + i], logits[:, i].clone())
                logits[rows, i] = processed[rows]
        return logits

    def choose(self, logits: torch.Tensor, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A token per row (B,) for logits (B, 1, V), and the probabilities it was drawn with."""
        scores = self.scores(logits, offset)[:, 0]
        if not self.config.do_sample:
            return scores.argmax(-1), None
        probabilities = scores.softmax(-1)
        return torch.multinomial(probabilities, 1)[:, 0], probabilities

    def _commit(self, counts: list[int]) -> list[int]:
        """Extend each row by up to `counts` of the tokens written after it, to where it stops; returns how many."""
        kept = []
        for row, count in enumerate(counts):
            taken = 0
            while taken < count and self.text.active[row]:
                taken += 1
                end = self.text.ends[row] + taken
                if self.stopped[row] is None and self.criteria(self.text.tokens[row : row + 1, :end], None).item():
                    self.stopped[row] = end
                if self.stopped[row] is not None:
                    self.text.active[row] = not self.fills_up and end < self.config.max_length
            if self.streamer is not None and taken:
                self.streamer.put(self.text.tokens[row, self.text.ends[row] : self.text.ends[row] + taken].cpu())
            self.text.ends[row] += taken
            kept.append(taken)
        return kept

    def unfinished(self) -> bool:
        """Whether some row goes on; without an end-of-text token all do, to the end of the last, as in `generate`."""
        if None in self.stopped:
            return True
        return not self.fills_up and min(self.text.ends) < max(self.stopped)

    def shortest_end(self) -> int:
        """Length of the shortest unfinished row."""
        return min(end for end, active in zip(self.text.ends, self.text.active, strict=True) if active)

    def sequences(self) -> torch.Tensor:
        """(B, length), finished rows filled up with padding."""
        length = max(self.stopped)
        sequences = self.text.tokens[:, :length].clone()
        for row, end in enumerate(self.stopped):
            if self.fills_up and end < length:
                sequences[row, end:] = self.config._pad_token_tensor
        return sequences

    def finished_statistics(self) -> Statistics:
        """The statistics, with the extra bytes filled in."""
        self.statistics.extra_bytes = self.target.extra_bytes + self.draft.extra_bytes()
        return self.statistics
