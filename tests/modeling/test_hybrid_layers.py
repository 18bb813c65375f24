"""Window, sinks, full heads and a mixer in one layer, against the same written out densely, token by token."""

import functools
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask, flex_attention
from transformers import DynamicCache

import modeling_llamba.window_attention as window_attention
from modeling_llamba.attention import SoftmaxAttention
from modeling_llamba.hybrid_cache import cache_nbytes
from modeling_llamba.hybrid_mixer import MIXER_CLASSES
from modeling_llamba.rotary import apply_rotary
from modeling_llamba.window_attention import Tokens, WindowInputs, with_past
from tests.students import make_student, student_config
from tests.teachers import TINY, random_ids

LENGTH = 45


def layer_and_input(mixer="discrete_mamba2", **overrides):
    model = make_student(mixer=mixer, pattern="beside-only", **overrides)
    u = torch.randn(2, LENGTH, model.config.hidden_size, dtype=torch.float64)
    rotary = model.model.rotary_emb(u, torch.arange(LENGTH)[None])
    return model.model.layers[1].mixer, u, rotary


def dense_attention(attention, u, full_heads, reach):
    """The attention with its whole matrix, a query at a time."""
    config = attention.config
    heads, kv, dim = attention.heads, attention.kv_heads, attention.head_dim
    q, k, v = (getattr(attention, f"{n}_proj")(u).unflatten(-1, (-1, dim)).transpose(1, 2) for n in "qkv")
    k, v = (t.repeat_interleave(heads // kv, dim=1) for t in (k, v))
    frequencies = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2) / dim)

    def rotated(x, positions):
        angles = torch.cat([positions[:, None] * frequencies] * 2, -1)[None].double()
        return apply_rotary(x, angles.cos(), angles.sin(), head_dim_axis=1)

    positions, out = torch.arange(u.shape[1]), torch.zeros_like(q)
    keys = rotated(k, positions)
    for t in range(u.shape[1]):
        scores = (rotated(q[:, :, t : t + 1], positions[t : t + 1]) @ keys.mT)[:, :, 0] * dim**-0.5
        near = (rotated(q[:, :, t : t + 1], positions[t : t + 1].clamp(max=reach)) @ keys.mT)[:, :, 0] * dim**-0.5
        is_sink = positions < config.hybrid_sinks
        limited = torch.where(is_sink, near, scores)
        visible = (positions <= t) & (is_sink | (positions > t - config.hybrid_window))
        for h in range(heads):
            full = h in full_heads
            row, seen = (scores[:, h], positions <= t) if full else (limited[:, h], visible)
            out[:, h, t] = (row.masked_fill(~seen, -torch.inf).softmax(-1)[:, None] @ v[:, h])[:, 0]
    return out.transpose(1, 2).flatten(2)


@torch.no_grad()
def late_recurrence(ssd, u, rotary, window, sinks):
    """The SSD whose state a token reaches when it leaves the window, a sink never."""
    s = ssd.project(u, rotary)
    H = ssd.num_heads
    x, B = (t.repeat_interleave(H // t.shape[2], 2) for t in (s.x, s.B))
    step = torch.ones_like(s.log_a) if s.step is None else s.step
    state, y = torch.zeros(u.shape[0], H, ssd.head_dim, ssd.d_state, dtype=u.dtype), []
    for t in range(u.shape[1]):
        old = t - window
        if old >= 0:
            state = s.log_a[:, old].exp()[..., None, None] * state
            if old >= sinks:
                state = state + (step[:, old, :, None] * x[:, old])[..., None] * B[:, old, :, None]
        y.append((state * s.C[:, t, :, None]).sum(-1) + ssd.D[:, None] * x[:, t])
    return torch.stack(y, 1), s.gate


@pytest.mark.parametrize("window, sinks, reach", [(6, 2, None), (1, 0, None), (40, 3, 10), (7, 4, 9), (100, 2, None)])
@pytest.mark.parametrize("mixer", ["discrete_mamba2", "mamba2"])
@torch.no_grad()
def test_a_hybrid_layer_from_its_equations(mixer, window, sinks, reach, window_by):
    m, u, rotary = layer_and_input(mixer, hybrid_window=window, hybrid_sinks=sinks, hybrid_sink_reach=reach)
    index = torch.arange(LENGTH).expand(2, LENGTH)
    near = make_student(pattern="beside-only").model.rotary_emb(u, index.clamp(max=reach or LENGTH))
    inputs = WindowInputs(index, near)
    attention = dense_attention(m.attention, u, m.attention.full_heads, reach or LENGTH)
    torch.testing.assert_close(m.attention(u, rotary, inputs).output.flatten(2), attention, rtol=1e-5, atol=1e-6)
    y, gate = late_recurrence(m.ssd, u, rotary, window, sinks)
    expected = m.out_proj(torch.cat([attention, m.ssd.finish(y, gate)], -1))
    expected[:, : window + sinks] = m.near_proj(attention[:, : window + sinks])
    torch.testing.assert_close(m(u, rotary, window=inputs), expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_late_matrix_times_x_is_the_mixers_output():
    for mixer in ("discrete_mamba2", "mamba2"):
        m, u, rotary = layer_and_input(mixer)
        index = torch.arange(LENGTH).expand(2, LENGTH)
        for seq_idx in (None, (index // 16)):
            own = index if seq_idx is None else index % 16
            matrix, x = m.ssd.materialize(u, rotary, seq_idx=seq_idx, index=own)
            y = (matrix @ x).transpose(1, 2)
            gate = m.ssd.project(u, rotary, seq_idx=seq_idx).gate
            expected = m.ssd(u, rotary, seq_idx=seq_idx, index=own)
            torch.testing.assert_close(m.ssd.finish(y, gate), expected, rtol=1e-6, atol=1e-8)
        assert matrix.tril(-1).triu(-5).abs().max() == 0, "the window itself is not the mixer's"
        assert matrix[..., :2].tril(-1).abs().max() == 0, "neither are the sinks"


@pytest.mark.parametrize("full", [True, False])
@torch.no_grad()
def test_everything_kept_is_the_teachers_attention(full):
    heads = list(range(TINY["num_attention_heads"]))
    kept = dict(hybrid_full_heads=[heads] * 2, hybrid_window=3) if full else dict(hybrid_window=LENGTH)
    m, u, rotary = layer_and_input(**kept)
    teacher = SoftmaxAttention(student_config(pattern="attention", hybrid_full_heads=None), 1).double()
    for name in "qkv":
        getattr(teacher, f"{name}_proj").load_state_dict(getattr(m.attention, f"{name}_proj").state_dict())
    teacher.o_proj.weight.copy_(m.out_proj.weight[:, : m.attention_size])
    m.near_proj.weight.copy_(teacher.o_proj.weight)
    m.out_proj.weight[:, m.attention_size :] = 0
    m.out_proj.bias.zero_()
    mask = torch.full((LENGTH, LENGTH), float("-inf"), dtype=u.dtype).triu(1)[None, None]
    inputs = WindowInputs(torch.arange(LENGTH).expand(2, LENGTH), None, mask)
    torch.testing.assert_close(m(u, rotary, window=inputs), teacher(u, rotary, mask)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("heads", [[0, 1], [0, 1, 2], [2], [3, 0], [0, 1, 2, 3]])
@torch.no_grad()
def test_kept_heads_in_any_number_to_a_key_head(heads):
    """In whole groups the keys are not copied; either way a cached step and a padded batch see the same."""
    model = make_student(pattern="beside-only", hybrid_full_heads=[heads] * 2).double()
    m = model.model.layers[1].mixer.attention
    assert (m._kv_place is None) == (heads not in ([0, 1, 2], [3, 0]))
    u, index = torch.randn(2, LENGTH, TINY["hidden_size"], dtype=torch.float64), torch.arange(LENGTH).expand(2, LENGTH)
    rotary = model.model.rotary_emb(u, index)
    expected = dense_attention(m, u, heads, LENGTH)
    torch.testing.assert_close(m(u, rotary, WindowInputs(index)).output.flatten(2), expected, rtol=1e-5, atol=1e-6)
    ids, cache, steps = random_ids(2, 12), model.new_cache(), []
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for t in range(12):
        steps.append(model(ids[:, t : t + 1], past_key_values=cache, attention_mask=mask[:, : t + 1]).logits)
    whole = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(torch.cat(steps, 1)[mask.bool()], whole[mask.bool()], rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_no_mixer_leaves_the_attention_and_its_out_proj():
    m, u, rotary = layer_and_input("none", hybrid_window=6, hybrid_sinks=2)
    index = torch.arange(LENGTH).expand(2, LENGTH)
    expected = m.out_proj(dense_attention(m.attention, u, m.attention.full_heads, LENGTH))
    torch.testing.assert_close(m(u, rotary, window=WindowInputs(index)), expected, rtol=1e-5, atol=1e-6)
    assert {name.split(".")[0] for name, _ in m.named_parameters()} == {"attention", "out_proj"}


@pytest.mark.parametrize("mixer", MIXER_CLASSES)
@torch.no_grad()
def test_nothing_but_the_mixer_is_the_plain_mixer(mixer):
    m, u, rotary = layer_and_input(mixer, mixer_sees="all")
    plain = make_student(mixer=mixer, pattern="pure").model.layers[1].mixer
    state = dict(m.ssd.state_dict())
    state["out_proj.weight"], state["out_proj.bias"] = m.out_proj.weight[:, m.attention_size :], m.out_proj.bias
    plain.load_state_dict(state)
    m.out_proj.weight[:, : m.attention_size] = 0
    torch.testing.assert_close(m(u, rotary), plain(u, rotary), rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_decoding_keeps_a_constant_number_of_bytes():
    model = make_student(pattern="beside-only", hybrid_full_heads=None)
    ids, sizes = random_ids(1, 60), []
    out = model(ids[:, :12], use_cache=True)
    for t in range(12, 60):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values)
        sizes.append(cache_nbytes(out.past_key_values))
    assert len(set(sizes)) == 1
    for layer in out.past_key_values.layers:
        for kept in (*layer.recent[:3], *layer.leaving):
            columns = kept.shape[-2 if kept.ndim == 4 else 1]  # one more may be left of the step before
            most = kept.numel() * kept.element_size() * (columns + 1) / columns
            assert kept.untyped_storage().nbytes() <= most, "no view of the whole prompt"
    assert out.past_key_values.get_seq_length() == 60
    torch.testing.assert_close(out.logits, model(ids).logits[:, -1:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_far_beyond_the_training_length_a_sink_is_seen_as_from_its_end():
    """Whatever the position, attention to sinks and window does not change once the reach is passed."""
    m, u, _ = layer_and_input(hybrid_sink_reach=16, hybrid_full_heads=None)
    model = make_student(pattern="beside-only", hybrid_sink_reach=16, hybrid_full_heads=None)
    token = random_ids(1, 1).expand(1, 200)
    hidden = model.model(token, output_hidden_states=True).hidden_states[0]
    masks = model.model._masks(hidden, None, None, None, torch.arange(200)[None], None)
    seen = m.attention(
        hidden, model.model.rotary_emb(hidden, torch.arange(200)[None]), masks["hybrid"].of_layer("main")
    )
    out = seen.output.flatten(2)
    torch.testing.assert_close(out[:, 30], out[:, 199], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "overrides, packed",
    [
        ({"hybrid_full_heads": [[1, 3]] * 2}, False),  # packed, these ask transformers' mask
        ({"hybrid_full_heads": None}, True),
        ({"mixer_sees": "all"}, True),
        ({"mixer": "none", "mixer_sees": "all"}, True),
        ({"mixer": "mamba2"}, False),
        ({"mixer": "mamba2"}, True),
    ],
)
@torch.no_grad()
def test_the_layer_is_its_matrices_times_its_values(overrides, packed):
    m, u, rotary = layer_and_input(**overrides)
    index, third = torch.arange(LENGTH).expand(2, -1), LENGTH // 3
    seq_idx = (index >= third).int() if packed else None
    index = index - third * seq_idx if packed else index
    window = WindowInputs(index)
    near, far = m.materialize(u, rotary, seq_idx=seq_idx, window=window)
    assert (near[0].triu(1) == 0).all() and torch.allclose(near[0].sum(-1), torch.ones(()).double())
    features = [(near[0] @ near[1]).transpose(1, 2).flatten(2)]
    if far is not None:
        y = (far[0].double() @ far[1].double()).transpose(1, 2)
        features.append(m.ssd.finish(y, m.ssd.project(u, rotary, None, seq_idx).gate))
    out = m.out_proj(torch.cat(features, -1))
    if m.near_tokens:
        out = torch.where((index < m.near_tokens)[..., None], m.near_proj(features[0]), out)
    torch.testing.assert_close(m(u, rotary, seq_idx=seq_idx, window=window), out, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed, places, packed", [(0, 0, False), (1, 3, False), (2, 3, True)])
def test_blocks_of_columns_that_some_query_sees(seed, places, packed):
    """flex_attention skips the others; none that is seen may be missing, and they stay few."""
    torch.manual_seed(seed)
    model = make_student(pattern="beside-only", mixer="none", hybrid_salient=places, hybrid_window=90)
    attention, size = model.model.layers[0].mixer.attention, window_attention.FLEX_BLOCK
    for past, length in ((0, 700), (89, 1100), (0, 4000)):
        u = torch.randn(1, past + length, model.config.hidden_size, dtype=torch.float64)
        index = torch.arange(past + length)[None]
        inputs, seq_idx = WindowInputs(index), (index >= 500).int() if packed and not past else None
        projected = attention.project(u, model.model.rotary_emb(u, index), inputs)
        seen = Tokens(projected.key, projected.value, index, projected.salience)
        seen = with_past(seen, attention._places(seen, None)) if places else seen
        selection = attention._select(seen, length, past, seq_idx)
        until = attention._seen_until(seen.index, selection, length, seq_idx)
        blocks = window_attention.blocks_seen(until, length)
        dense = create_mask(blocks.mask_mod, 1, 1, length, until.shape[1], device="cpu")[0, 0]
        dense = F.pad(dense, (0, -dense.shape[1] % size, 0, -length % size)).unflatten(1, (-1, size)).any(-1)
        needed, listed = dense.unflatten(0, (-1, size)).any(1), blocks.to_dense()[0, 0].bool()
        assert listed.shape == needed.shape and not (needed & ~listed).any()
        assert listed.sum(-1).max() <= 3 + places


@torch.no_grad()
def test_flex_attention_is_compiled_for_any_length(monkeypatch):
    """And not anew for each; what is compiled is traced as on CUDA, and run by PyTorch."""
    torch.compiler.reset()
    model = make_student(pattern="normalised", dtype=torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled, frames = torch.compile(flex_attention, backend=counter), []
    monkeypatch.setattr(window_attention, "compiled_flex_attention", lambda: compiled)
    for batch, length in ((1, 300), (1, 512), (2, 333), (3, 150), (2, 700), (1, 1000)):
        ids = random_ids(batch, length)
        expected = model(ids).logits
        with monkeypatch.context() as on_cuda:
            on_cuda.setattr(window_attention, "can_flex", lambda *inputs: True)
            out = model(ids[:, :140], use_cache=True)
            found = torch.cat([out.logits, model(ids[:, 140:], past_key_values=out.past_key_values).logits], dim=1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        frames.append(counter.frame_count)
    assert 0 < frames[2] == frames[-1], frames


def test_flex_attention_stays_compiled_in_a_process_of_many_kinds(monkeypatch):
    """Of more kinds than PyTorch compiles by itself: types, models, with and without gradients and inference mode."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(window_attention, "can_flex", lambda *inputs: True)
    window_attention.compiled_flex_attention.cache_clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for dtype, cap in itertools.product((torch.float32, torch.bfloat16), (None, 9.0)):
            model = make_student(pattern="normalised", dtype=dtype, attn_logit_softcapping=cap)
            for mode in (torch.no_grad, torch.inference_mode):
                for batch, length in ((1, 300), (2, 400)):
                    with mode():
                        assert model(random_ids(batch, length)).logits.isfinite().all()
    window_attention.compiled_flex_attention.cache_clear()
    assert counter.frame_count > torch._dynamo.config.recompile_limit


def test_caches_of_other_models_are_refused():
    model = make_student(pattern="beside-only")
    with pytest.raises(ValueError, match="cache made for them"):
        model(random_ids(1, 4), past_key_values=DynamicCache())
    other = make_student(pattern="attention")
    begun = other(random_ids(1, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="keys of another model"):
        model(random_ids(1, 1), past_key_values=begun)
    fresh = DynamicCache(config=model.config)
    ids = random_ids(1, 9)
    torch.testing.assert_close(model(ids, past_key_values=fresh).logits, model(ids).logits)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(hybrid_window=None), "hybrid_window"),
        (dict(hybrid_window=0), "hybrid_window"),
        (dict(hybrid_sinks=-1), "hybrid_sinks"),
        (dict(mixer="mamba1", mixer_d_state=4, mixer_decay_bias=False, mixer_sees="beyond"), "of the Mamba-2 kind"),
        (dict(mixer_sees="some"), "mixer_sees"),
        (dict(mixer="none", mixer_decay_bias=False, mixer_sees="beyond"), "of the Mamba-2 kind"),
        (dict(mixer="none", mixer_decay_bias=False, layer_types=["linear_attention"] * 2), "one of the mixers"),
        (dict(hybrid_full_heads=[[0]]), "for each of 2 layers"),
        (dict(hybrid_full_heads=[[0], [0, 0]]), "different heads"),
        (dict(hybrid_full_heads=[[99], []]), "below 4"),
        (dict(layer_types=["linear_attention"] * 2, hybrid_full_heads=[[0], []]), "not hybrid"),
    ],
)
def test_contradictory_windows_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        student_config(pattern="beside-only", **options)


def test_gradients_reach_every_parameter():
    m, u, rotary = layer_and_input()
    inputs = WindowInputs(torch.arange(LENGTH).expand(2, LENGTH), None, None)
    m(u.requires_grad_(True), rotary, window=inputs).square().sum().backward()
    for name, parameter in m.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert u.grad.abs().amax((0, 2)).min() > 0
