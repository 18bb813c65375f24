"""One token of a layer by one kernel, against attention, competition and read token by token in float64."""

import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import StaticCache

import modeling_llamba.ssd as ssd
from modeling_llamba.hybrid_cache import new_cache, recurrent_state, tensors_of
from modeling_llamba.hybrid_mixer import HybridMixer
from modeling_llamba.window_attention import Near, Projected, WindowInputs
from tests.kernels.conftest import DEVICE, INTERPRETED
from tests.kernels.test_read_step import features_of, relative_error, state_of
from tests.students import make_student, student_config
from tests.teachers import random_ids

PADDING = (0, 3)
"""Columns before each row's first token."""
PASSES = ((4, "torch"), *[(1, "auto")] * 12, (2, "torch"), (1, "torch"), *[(1, "auto")] * 3, (5, "torch"), (1, "auto"))
"""Tokens at a time: with one at a time the window turns in its ring, otherwise it is put in order again."""
CLOSE = dict(rtol=1e-4, atol=1e-5 if INTERPRETED else 5e-2)  # as tensor cores round what the prompt's kernel is given
LENGTH = sum(tokens for tokens, _ in PASSES)
CASES = {  # family, H, K, D, share of D that is rotated, window, sinks, places, full heads, cap, dtype
    "grouped queries": ("llamba", 9, 3, 64, 1.0, 6, 2, 3, [], None, torch.float32),
    "no places, D 80": ("phimamba", 2, 2, 80, 0.4, 5, 4, 0, [], None, torch.float32),
    "no sinks, full heads": ("llamba", 8, 1, 16, 1.0, 4, 0, 2, [0, 5, 7], None, torch.float32),
    "a cap, windows in tiles": ("llamba", 2, 1, 256, 1.0, 12, 3, 5, [1], 2.0, torch.float32),
    "few columns, more places": ("llamba", 34, 2, 6, 1.0, 2, 1, 12, [1, 33], None, torch.float32),
    "bf16": ("llamba", 6, 3, 64, 1.0, 6, 2, 3, [4], None, torch.bfloat16),
}
SLOW = {"grouped queries": 8, "no places, D 80": 3, "a cap, windows in tiles": 1, "bf16": 8}
"""Planes of the rotary embedding in the state; all of them in the other cases."""


def token_by_token(mixer, new: Projected, of_full):
    """What the layer hands to out_proj (B, L, 3, H, D), and the state after the last token, by lists of tokens."""
    attention, read = mixer.attention, mixer.read
    query, sink_query, key, value, salience = (t.double() for t in new)
    shared, S, W = attention.heads // attention.kv_heads, attention.sinks, attention.window
    rows = [[([], []), torch.zeros(LENGTH, attention.heads, attention.head_dim).double(), None] for _ in PADDING]
    output, log_mass, fars = torch.zeros_like(query), torch.zeros(*query.shape[:3]).double(), []
    for b, before in enumerate(PADDING):
        (held, far), first = rows[b][0], before + S
        for t in range(before, LENGTH):
            fars.append([*far])
            near = [*range(max(t - W + 1, first), t + 1), *held]
            sinks = [*range(before, min(first, t + 1))]
            for head in range(attention.heads):
                keys, values = (x[b, head // shared, [*sinks, *near]] for x in (key, value))
                scores = torch.cat([
                    keys[: len(sinks)] @ sink_query[b, head, t], keys[len(sinks) :] @ query[b, head, t]
                ]) * attention.scaling  # fmt: skip
                if attention.softcap is not None:
                    scores = attention.softcap * (scores / attention.softcap).tanh()
                output[b, head, t], log_mass[b, head, t] = scores.softmax(0) @ values, scores.logsumexp(0)
            if t - W + 1 >= first:
                held.append(t - W + 1)
                if len(held) > attention.places:
                    far.append(min(held, key=lambda c: (salience[b, c], -c)))
                    held.remove(far[-1])
        rows[b] = far
    output[:, attention.full_heads] = of_full.transpose(1, 2).double()
    features, fars = torch.zeros(len(PADDING), LENGTH, 3, attention.heads, attention.head_dim).double(), iter(fars)
    kvs = range(attention.kv_heads)
    for b, before in enumerate(PADDING):
        for t in range(before, LENGTH):
            far = next(fars)
            seen = Near(
                output[b, None, None, :, t], log_mass[b, None, None, :, t], query[b, None, None, :, t], None, None
            )
            features[b, t] = features_of(
                read, seen, *([[x[b, kv, far] for kv in kvs]] for x in (key, value))
            )[0].transpose(0, 1)  # fmt: skip
            if t - before < mixer.near_tokens:
                features[b, t] = output[b, :, t]
    state = state_of(read, *([[x[b, kv, far] for kv in kvs] for b, far in enumerate(rows)] for x in (key, value)))
    return features, state


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_layer_token_by_token(record_property, monkeypatch, launches, case):
    family, H, K, D, rotated, window, sinks, places, full_heads, cap, dtype = CASES[case]
    config = student_config(
        family, pattern="normalised-only", num_attention_heads=H, num_key_value_heads=K, head_dim=D,
        hybrid_full_heads=[full_heads] * 2, mixer_num_kv_heads=K, hybrid_window=window, hybrid_sinks=sinks,
        hybrid_salient=places, attn_logit_softcapping=cap, hybrid_state_planes=SLOW.get(case),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rotated},
    )  # fmt: skip
    mixer, rows = HybridMixer(config, 0).eval(), len(PADDING)
    mixer.read.log_decay.data = torch.linspace(-0.1, 0, K)
    mixer.read.mass.data += 0.2 * torch.randn_like(mixer.read.mass)
    query, sink_query = torch.randn(2, rows, H, LENGTH, D).to(dtype)
    key, value = torch.randn(2, rows, K, LENGTH, D).to(dtype)
    index = torch.arange(LENGTH) - torch.tensor(PADDING)[:, None]
    salience = torch.randint(-3, 4, (rows, LENGTH)).float().masked_fill(index < sinks, -torch.inf)  # with ties
    of_full = torch.randn(rows, LENGTH, len(full_heads), D).to(dtype)
    expected, last_state = token_by_token(mixer, Projected(query, sink_query, key, value, salience), of_full)

    mixer.to(DEVICE).out_proj = nn.Identity()
    del mixer.near_proj
    mixer.near_proj = lambda near: near.repeat(1, 1, 3)
    cache, found, first = new_cache(config), [], 0
    for tokens, backend in PASSES:
        monkeypatch.setenv(ssd.BACKEND_VARIABLE, backend)
        span = slice(first, first + tokens)
        new = Projected(*(t[:, :, span].to(DEVICE) for t in (query, sink_query, key, value)), None)
        if places:
            new = new._replace(salience=salience[:, span].to(DEVICE))
        monkeypatch.setattr(mixer.attention, "project", lambda *inputs, new=new: new)
        theirs = of_full[:, span].to(DEVICE) if full_heads else None
        monkeypatch.setattr(mixer.attention, "attend_fully", lambda *inputs, theirs=theirs: theirs)
        least = max(first - max(PADDING), 0) if tokens == 1 else None
        inputs = WindowInputs(index[:, span].clamp(min=-1).to(DEVICE), least=least)
        found.append(mixer(torch.empty(rows, tokens, 0), None, past_key_values=cache, window=inputs))
        first += tokens
    assert launches["layer"] == PASSES.count((1, "auto")) and launches["read"] == 0
    found = torch.cat(found, dim=1).unflatten(2, (3, H, D)).cpu()
    of_heads = [t[index >= 0].transpose(1, 2) for t in (found, expected)]
    error, state_error = relative_error(*of_heads), relative_error(recurrent_state(cache, 0), last_state)
    record_property("features", f"{error:.1e}")
    record_property("state", f"{state_error:.1e}")
    assert error < (2e-5 if dtype == torch.float32 else 2e-2 if INTERPRETED else 1e-2) and state_error < 1e-6


ROTARY, SALIENCE = ("mul", "add", "neg", "cat"), ("mul", "sum", "lt", "masked_fill")


class Launches(TorchDispatchMode):
    """Names of PyTorch's operations that are kernels on a GPU: neither views nor memory."""

    FREE = ("empty", "new_empty", "empty_strided", "lift_fresh", "detach", "promote_types")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function._schema.name.split("::")[1]
        if not function.is_view and name not in (*self.FREE, "_unsafe_view"):
            self.names.append(name)
        return function(*arguments, **(options or {}))


@torch.no_grad()
def test_one_launch_instead_of_many(record_property, monkeypatch):
    """A decoding step of a layer with salient tokens, its window full: projections, rotary embedding, and one launch.

    Of the third step, since the first one puts the window into its ring.
    """
    model = make_student("llamba", pattern="normalised", dtype=torch.float32, hybrid_full_heads=None).to(DEVICE)
    layer, u, watch = (
        model.model.layers[0].mixer,
        torch.randn(1, 40, model.config.hidden_size, device=DEVICE),
        Launches(),
    )

    counts = {}
    for backend in ("torch", "auto"):
        monkeypatch.setenv(ssd.BACKEND_VARIABLE, backend)
        cache = new_cache(model.config)
        for first, last in ((0, 37), (37, 38), (38, 39), (39, 40)):
            index = torch.arange(first, last, device=DEVICE)[None]
            rotary, watch.names = model.model.rotary_emb(u, index), []
            before = [t.data_ptr() for t in tensors_of(cache.layers[0])]
            with watch:
                layer(u[:, first:last], rotary, past_key_values=cache, window=WindowInputs(index, least=first))
        counts[backend] = [*watch.names]
    assert [t.data_ptr() for t in tensors_of(cache.layers[0])] == before  # all of the cache in place
    beside = [name for name in counts["auto"] if name != "mix_one"]
    assert len(beside) == len(counts["auto"]) - 1 and {*beside} <= {"mm", "addmm", *ROTARY, *SALIENCE}
    record_property("operations of the layer in PyTorch", len(counts["torch"]))
    record_property("beside the kernel", len(beside))


class Calls(TorchDispatchMode):
    """All that PyTorch is asked for, with every number, and where each tensor of the cache and the parameters is."""

    def __init__(self, lasting):
        super().__init__()
        self.lasting, self.calls = {t.data_ptr() for t in lasting if t.numel()}, []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        leaves = tree_leaves((arguments, options))
        tensors = [
            t.data_ptr() if t.data_ptr() in self.lasting else tuple(t.shape) for t in leaves if torch.is_tensor(t)
        ]
        self.calls.append((str(function), tensors, [each for each in leaves if not torch.is_tensor(each)]))
        return function(*arguments, **(options or {}))


def static_model(monkeypatch, family, tokens):
    """A model with every part of the default, ids (1, L), their logits, and a static cache."""
    model = make_student(family, pattern="normalised", dtype=torch.float32).to(DEVICE)
    ids = random_ids(1, tokens).to(DEVICE)
    with monkeypatch.context() as plainly:
        plainly.setenv(ssd.BACKEND_VARIABLE, "torch")
        logits = model(ids).logits
    return model, ids, logits, StaticCache(config=model.config, max_cache_len=64)


@pytest.mark.parametrize("prompt", [4, 40])
@torch.no_grad()
def test_a_static_step_is_the_same_every_time(monkeypatch, launches, prompt):
    """What a CUDA graph of a step would do again is what the next step has to do: same numbers, same addresses."""
    model, ids, logits, cache = static_model(monkeypatch, "llamba", prompt + 10)
    model(ids[:, :prompt], past_key_values=cache)
    held = [t for layer in cache.layers for t in vars(layer).values() if torch.is_tensor(t)]
    held += [t for layer in cache.layers if hasattr(layer, "ring") for t in (*layer.ring, *tensors_of(layer))]
    steps, token, position = [], ids[:, :1].clone(), torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    for t in range(prompt, ids.shape[1]):
        token.copy_(ids[:, t : t + 1])
        position.fill_(t)
        calls = Calls([token, position, *held, *model.parameters(), *model.buffers()])
        with calls:
            out = model(token, position_ids=position, past_key_values=cache)
        torch.testing.assert_close(out.logits[:, 0], logits[:, t], **CLOSE)
        steps.append(calls.calls)
    assert launches["layer"] == 10 * model.config.layer_types.count("hybrid")
    # until when near_proj may be needed, of each layer
    near = {layer.mixer.near_tokens - prompt for layer in model.model.layers if layer.layer_type == "hybrid"}
    edges = sorted({0, *(step for step in near if step > 0), 10})
    assert edges == ([0, 4, 7, 10] if prompt == 4 else [0, 10]) and len(steps[-1]) > 50
    for first, last in itertools.pairwise(edges):
        assert all(step == steps[first] for step in steps[first:last])


@torch.no_grad()
def test_static_steps_compile_into_one_graph(monkeypatch):
    torch.compiler.reset()
    model, ids, logits, cache = static_model(monkeypatch, "phimamba", 26)
    model(ids[:, :20], past_key_values=cache)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for t in range(20, 26):
        position = torch.full((1, 1), t, device=DEVICE)
        step = compiled(ids[:, t : t + 1], past_key_values=cache, position_ids=position, use_cache=True)
        torch.testing.assert_close(step.logits[:, 0], logits[:, t], **CLOSE)
    assert counter.frame_count == 1


@torch.no_grad()
def test_generate_with_a_static_cache(launches):
    model, ids = (
        make_student("phimamba", pattern="normalised", dtype=torch.float32).to(DEVICE),
        random_ids(2, 9).to(DEVICE),
    )
    options = dict(max_new_tokens=4, eos_token_id=None, do_sample=False, disable_compile=True)
    options |= dict(return_dict_in_generate=True)
    static = model.generate(ids, cache_implementation="static", **options)
    assert static.past_key_values.is_compileable
    assert launches["layer"] == 2 * 3
    assert torch.equal(static.sequences, model.generate(ids, **options).sequences)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    padded = model.generate(ids, attention_mask=mask, cache_implementation="static", **options)
    assert torch.equal(padded.sequences, model.generate(ids, attention_mask=mask, **options).sequences)
    assert not padded.past_key_values.is_compileable  # its mask grows
