"""Speculative decoding, for hybrids and with them: draft some tokens, verify them in one pass, keep what is right.

    model.generate(**inputs, custom_generate=model.speculative_decoding, draft=small_model, num_draft_tokens=4)

Greedy output is the target's own greedy output; sampled output follows the target's distribution, whatever the draft
(Leviathan et al. 2023, arXiv 2211.17192, algorithm 1). Recurrent states are kept at the last verified token and
advanced by the accepted ones alone: recording.py. transformers' own assisted generation has to crop its caches and so
refuses models with a state.

Shapes: B batch, K drafted tokens, V vocabulary.
"""

import time
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .draft_length import DraftLength
from .drafts import Drafted, ModelDraft, PromptLookup, Text, Track, empty_cache, first_layers
from .recording import stop_recording

EXPECTED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
# they count their calls or keep a cache, and here they would see drafts as well
STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
# of the draft that a model is to itself


@dataclass
class Statistics:
    """What happened behind the prompt.

    passes: of the target, for all rows at once. row_passes: the same, each row counted that was not finished. tokens:
    that came of them. drafted: tokens to verify. accepted: those that stood. rejected: those that did not, without
    what came behind them and was not judged. extra_bytes: what plain decoding does not hold, that is what the mixers
    of the target record, and the draft's cache.
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
        """All of it and three ratios; `acceptance` is that of draft_length.py, a share of the tokens judged."""
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
        num_draft_tokens: verified per pass, or "auto" for as many as pay (draft_length.py).
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
    """What drafts for `model`.

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
    """How many of each row's drafted tokens stand, and the token behind them.

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
        """Draft, verify, keep; returns what `DraftLength.note` wants."""
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
        """Count so many of the tokens behind each row to its text, up to where it stops; how many there were."""
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
        """Of the rows that go on."""
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
        """With the bytes held."""
        self.statistics.extra_bytes = self.target.extra_bytes + self.draft.extra_bytes()
        return self.statistics
