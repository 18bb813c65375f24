"""Speculative decoding, for hybrids and with them: draft some tokens, verify them in one pass, keep what is right.

    model.generate(**inputs, custom_generate=model.speculative_decoding, draft=small_model, num_draft_tokens=4)

Greedy output is the target's own greedy output; sampled output follows the target's distribution, whatever the draft
(Leviathan et al. 2023, arXiv 2211.17192, algorithm 1). Recurrent states stay at the last verified token and are
advanced by the accepted tokens alone (`record` and `accept` in hybrid_cache.py). The assisted generation of
transformers has to crop its caches and so refuses models with a recurrent state.

Shapes: B batch, L length, K drafted tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
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
# of the last tokens, for prompt lookup
LONGEST_MATCH = 3


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
        """The last tokens of each row, (B, count)."""
        return torch.stack([row[end - count : end] for row, end in zip(self.tokens, self.ends, strict=True)])

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

    def propose(self, text: Text, count: int, choose: Callable) -> Drafted:
        """Up to `count` tokens a row; none where the text does not repeat itself."""
        rows = zip(text.tokens, text.starts, text.ends, text.active, strict=True)
        found = [self._lookup(row[start:end], count if active else 0) for row, start, end, active in rows]
        return Drafted(torch.nn.utils.rnn.pad_sequence(found, batch_first=True), [len(tokens) for tokens in found])

    def _lookup(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """The continuation of the latest earlier occurrence of the longest possible match."""
        for size in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
            same = (tokens[:-1].unfold(0, size, 1) == tokens[-size:]).all(1).nonzero()
            if len(same):
                after = int(same[-1]) + size
                return tokens[after : after + count]
        return tokens[:0]

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
        if not any(text.active):
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


@dataclass
class Statistics:
    """Counts over one generation, without the prompt.

    passes: forward passes of the target, for all rows at once. row_passes: the same, counted per unfinished row.
    tokens: generated. drafted: verified. accepted: kept. extra_bytes: memory that plain decoding does not need: the
    target's records and the draft's cache.
    """

    passes: int = 0
    row_passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    extra_bytes: int = 0

    def summary(self) -> dict[str, int | float | None]:
        """All counts, and two ratios."""
        return asdict(self) | {
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
    num_draft_tokens: int = 5,
    token_streamer: Any = None,
    **model_kwargs,
) -> torch.LongTensor | SpeculativeOutput:
    """Decoding loop for `generate(..., custom_generate=speculative_decoding)`, which hands the other arguments over.

    Args:
        draft: a model of the same vocabulary, or "prompt-lookup".
        num_draft_tokens: tokens drafted and verified per pass, at most.
        token_streamer: gets tokens as they are accepted; `generate` keeps the one it calls `streamer` to itself.

    Returns:
        (B, length) with the prompt, or a `SpeculativeOutput` where `return_dict_in_generate` is set.

    Raises:
        ValueError: the draft has another vocabulary, there is nothing to draft, the prompt is empty or padded on the
            right, or something was asked for that does not exist here (beams, scores, a static cache).
    """
    mask = model_kwargs.get("attention_mask")
    _check_request(input_ids, mask, generation_config, logits_processor, model_kwargs, token_streamer)
    if isinstance(num_draft_tokens, bool) or not isinstance(num_draft_tokens, int) or num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens must be a whole number of at least 1; got {num_draft_tokens!r}.")
    source = make_draft(model, draft)
    text = Text(input_ids.to(model.device), mask, generation_config.max_length + num_draft_tokens + 1)
    cache = model_kwargs.get("past_key_values")
    target = Track(model, empty_cache(model) if cache is None else cache)
    loop = _Loop(text, target, source, logits_processor, stopping_criteria, generation_config, token_streamer)
    loop.begin()
    while loop.unfinished():
        loop.round(num_draft_tokens)
    sequences = loop.sequences().to(input_ids.device)
    if token_streamer is not None:
        token_streamer.end()
    if not generation_config.return_dict_in_generate:
        return sequences
    # the caches of several rows are not where plain decoding would have left them
    stop_recording(target.cache)
    cache = target.cache if len(sequences) == 1 else None
    loop.statistics.extra_bytes = target.extra_bytes + source.extra_bytes()
    return SpeculativeOutput(sequences=sequences, past_key_values=cache, statistics=loop.statistics)


def make_draft(model: PreTrainedModel, draft: PreTrainedModel | str) -> PromptLookup | ModelDraft:
    """The source of drafts for `model`.

    Raises:
        ValueError: see `speculative_decoding`.
    """
    if draft == "prompt-lookup":
        return PromptLookup()
    if not isinstance(draft, PreTrainedModel):
        raise ValueError(f"draft must be a model or 'prompt-lookup', not {draft!r}.")
    own, theirs = (m.get_output_embeddings().weight.shape[0] for m in (model, draft))
    if own != theirs:
        raise ValueError(f"The draft has a vocabulary of {theirs} tokens, the target of {own}; they must share it.")
    return ModelDraft(draft)


def _check_request(input_ids, mask, config, processors, model_kwargs, streamer) -> None:
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

    def round(self, longest: int) -> None:
        """Draft up to `longest` tokens, verify them and keep what is right."""
        text = self.text
        shortest = min(end for end, on in zip(text.ends, text.active, strict=True) if on)
        # the token behind the draft is one more
        drafted = self.draft.propose(text, max(min(longest, self.config.max_length - 1 - shortest), 1), self.choose)
        logits = self.target.feed(torch.cat([text.last(1), drafted.tokens], 1), text.active)
        text.write(drafted.tokens)
        counts, behind = judge(self.scores(logits), drafted, self.config.do_sample)
        active, known = list(text.active), self.statistics
        for row, count in enumerate(counts):
            text.tokens[row, text.ends[row] + count] = behind[row]
        kept = self._commit([count + 1 if on else 0 for count, on in zip(counts, active, strict=True)])
        self.target.accept(kept, text.active)
        self.draft.accept(text)
        known.passes += 1
        known.row_passes += sum(active)
        known.tokens += sum(kept)
        known.drafted += sum(count for count, on in zip(drafted.counts, active, strict=True) if on)
        known.accepted += sum(count for count, on in zip(counts, active, strict=True) if on)

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

    def sequences(self) -> torch.Tensor:
        """(B, length), finished rows filled up with padding."""
        length = max(self.stopped)
        sequences = self.text.tokens[:, :length].clone()
        for row, end in enumerate(self.stopped):
            if self.fills_up and end < length:
                sequences[row, end:] = self.config._pad_token_tensor
        return sequences
