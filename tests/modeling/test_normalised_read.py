"""The far past read as softmax would, against its equations written out token by token."""

import pytest
import torch

from convert.placement.cache import cache_bytes
from modeling_llamba import LlambaForCausalLM
from modeling_llamba.hybrid_cache import cache_nbytes
from modeling_llamba.normalised_read import NormalisedRead, theory_mass
from modeling_llamba.salient_tokens import compete, holders_before
from modeling_llamba.window_attention import Near, Tokens, WindowInputs
from tests.modeling.test_training import gradients
from tests.students import make_student, student_config
from tests.teachers import LLAMA3_ROPE, random_ids

LENGTH = 45
EXACT = dict(rtol=1e-9, atol=1e-11)


def layer_and_input(**overrides):
    model = make_student(pattern="normalised-only", **overrides)
    u = torch.randn(2, LENGTH, model.config.hidden_size, dtype=torch.float64)
    rotary = model.model.rotary_emb(u, torch.arange(LENGTH)[None])
    return model.model.layers[1].mixer, u, rotary


def slow_dimensions(config):
    """Dimensions of a head in the state: of the slowest planes, and those that are not rotated."""
    planes, D, kept = config.rotary_planes, config.head_dim, config.hybrid_state_planes
    kept = planes if kept is None else kept
    return [d for d in range(D) if d >= 2 * planes or d % planes >= planes - kept]


@torch.no_grad()
def token_by_token(m, u, rotary, inputs, seq_idx=None):
    """out of a hybrid layer whose heads have no full attention, in float64."""
    config, attention, read = m.config, m.attention, m.read
    W, sinks, H = attention.window, config.hybrid_sinks, attention.heads
    q, _, k, v = (t.double() for t in attention.project(u, rotary, inputs)[:4])
    k, v = (t.repeat_interleave(H // t.shape[1], dim=1) for t in (k, v))
    q, planes, D = q * q.shape[-1] ** -0.5, config.rotary_planes, q.shape[-1]
    slow = slow_dimensions(config)
    a = read.log_decay.double().exp().repeat_interleave(H // len(read.log_decay))
    mass = read.mass.double()
    salience = u @ (attention.salience if config.hybrid_salient else torch.zeros_like(u[0, 0]))
    out = torch.zeros_like(u)
    for b in range(u.shape[0]):
        for t in range(u.shape[1]):
            if inputs.index[b, t] < 0:
                continue
            own = [j for j in range(t + 1) if inputs.index[b, j] >= 0]
            if seq_idx is not None:
                own = [j for j in own if seq_idx[b, j] == seq_idx[b, t]]
            near = [j for j in own if t - j < W or inputs.index[b, j] < sinks]
            salient, far = [], []
            for j in (j for j in own if j not in near):
                salient = sorted([*salient, j], key=lambda j: (-salience[b, j].item(), j))
                far, salient = far + salient[config.hybrid_salient :], salient[: config.hybrid_salient]
            near += salient
            scores = (q[b, :, t, None] @ k[b, :, near].mT)[:, 0]
            y = (scores.softmax(-1)[:, None] @ v[b, :, near])[:, 0]
            if inputs.index[b, t] < W + sinks:
                out[b, t] = m.near_proj(y.flatten())
                continue
            mean, tilt, gate = torch.zeros_like(y), torch.zeros_like(y), torch.zeros_like(y[:, :1])
            if far:
                weight = a[:, None] ** torch.arange(len(far) - 1, -1, -1)
                n = weight.sum(-1, keepdim=True)
                keys = k[b][:, far][..., slow]
                key_mean = (weight[..., None] * keys).sum(1) / n
                mean = (weight[..., None] * v[b, :, far]).sum(1) / n
                S = (weight[..., None] * v[b, :, far]).mT @ keys
                qt = q[b, :, t, slow]
                tilt = (S @ qt[..., None])[..., 0] / n - mean * (qt * key_mean).sum(-1, keepdim=True)
                plane = [d if d < planes else d - planes for d in range(D)]
                of_slow = [plane[d] - min(plane[d] for d in slow) for d in slow]
                alpha, beta = mass[:, 2:].split([max(of_slow) + 1, D - planes], dim=1)
                log_mass = mass[:, 0] + mass[:, 1] * n[:, 0].log()
                log_mass = log_mass + (alpha[:, of_slow] * qt * key_mean).sum(-1)
                log_mass = log_mass + (beta[:, plane] * q[b, :, t] ** 2).sum(-1)
                gate = torch.sigmoid(log_mass - scores.logsumexp(-1))[:, None]
            out[b, t] = m.out_proj(torch.cat([((1 - gate) * y), gate * mean, gate * tilt]).flatten())
    return out


PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
CASES = {
    "grouped queries": {},
    "all planes": dict(hybrid_state_planes=None),
    "one key head": dict(num_key_value_heads=1, mixer_num_kv_heads=1),
    "as many key heads": dict(num_key_value_heads=4, mixer_num_kv_heads=4),
    "biases": dict(attention_bias=True, attention_out_bias=True),
    "rms": dict(qk_norm="rms", family="phimamba"),
    "layer norm, partial rotary": dict(qk_norm="layer", family="phimamba", rope_parameters=PARTIAL_ROPE),
    "scaled rotary": dict(rope_parameters=dict(LLAMA3_ROPE)),
    "window 1, no sink": dict(hybrid_window=1, hybrid_sinks=0),
    "window 7, 4 sinks": dict(hybrid_window=7, hybrid_sinks=4),
    "window 40": dict(hybrid_window=40, hybrid_sinks=3),
    "window wider than the text": dict(hybrid_window=100),
    "salient": dict(hybrid_salient=3),
    "the slowest plane": dict(hybrid_state_planes=1, hybrid_salient=2),
    "three planes of four, one key head": dict(hybrid_state_planes=3, num_key_value_heads=1, mixer_num_kv_heads=1),
    "one plane of two, partial rotary": dict(hybrid_state_planes=1, rope_parameters=PARTIAL_ROPE),
    "salient, window 1, no sink, rms": dict(
        hybrid_salient=1, hybrid_window=1, hybrid_sinks=0, qk_norm="rms", family="phimamba"
    ),
    "salient, window 40": dict(hybrid_salient=5, hybrid_window=37),
    "more places than tokens": dict(hybrid_salient=60),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_layer_from_its_equations(name, window_by):
    """Plain, with padding before, in and after the text, and packed."""
    m, u, rotary = layer_and_input(hybrid_full_heads=None, **CASES[name])
    index, seq_idx = torch.arange(LENGTH).expand(2, LENGTH), torch.tensor([[0] * 20 + [1] * 25, [0] * 45])
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :3], mask[0, 20:24], mask[1, 40:] = 0, 0, 0
    padded = (mask.cumsum(1) - 1).masked_fill(mask == 0, -1)
    packed = torch.where(seq_idx == 1, index - 20, index)
    for own, ids, real in ((index, None, None), (padded, None, mask.bool()), (packed, seq_idx, None)):
        inputs = WindowInputs(own)
        expected, got = token_by_token(m, u, rotary, inputs, ids), m(u, rotary, seq_idx=ids, window=inputs)
        real = torch.ones(2, LENGTH, dtype=torch.bool) if real is None else real
        torch.testing.assert_close(got[real], expected[real], **EXACT)
        near, far = m.materialize(u, rotary, seq_idx=ids, window=inputs)
        seen = m.attention(u, rotary, inputs, ids)
        y, mean, tilt = m.read(seen, ids).unflatten(-1, (3, m.attention.heads, -1)).unbind(2)
        torch.testing.assert_close((near[0] @ near[1]).transpose(1, 2)[real], y[real], **EXACT)
        torch.testing.assert_close((far[0] @ far[1]).transpose(1, 2)[real], (mean + tilt)[real], **EXACT)


@torch.no_grad()
def test_heads_with_full_attention_stand_in_the_first_block():
    m, u, rotary = layer_and_input(hybrid_full_heads=[[1, 3]] * 2)
    mask = torch.full((LENGTH, LENGTH), float("-inf"), dtype=u.dtype).triu(1)[None, None]
    near = m.attention(u, rotary, WindowInputs(torch.arange(LENGTH).expand(2, -1), None, mask))
    y, mean, tilt = m.read(near).unflatten(-1, (3, m.attention.heads, -1)).unbind(2)
    assert torch.equal(y[:, :, [1, 3]], near.output[:, :, [1, 3]])
    assert not mean[:, :, [1, 3]].any() and not tilt[:, :, [1, 3]].any()
    assert mean[:, 10:, [0, 2]].any() and tilt[:, 10:, [0, 2]].any()


@torch.no_grad()
def test_far_tokens_drawn_from_a_gaussian_are_read_exactly():
    """The tilted mean, and with half the variance of the scores in c0 the log mass."""
    torch.manual_seed(0)
    config = student_config(pattern="normalised-only", hybrid_window=1, hybrid_sinks=0, hybrid_state_planes=None)
    read = NormalisedRead(config, 0).double()
    heads, dim, length = 4, 8, 40_000
    mix = torch.randn(2 * dim, 2 * dim, dtype=torch.float64) * 0.3
    keys, values = (torch.randn(1, 2, length, 2 * dim, dtype=torch.float64) @ mix + 0.3).split(dim, dim=-1)
    query = torch.randn(1, length, heads, dim, dtype=torch.float64)
    context = Tokens(keys, values, torch.arange(length)[None])
    near = Near(query, torch.zeros(1, length, heads), query, context, torch.arange(length)[None])
    far, last = read.far(near), length - 1
    keys, values, mean = (
        t.repeat_interleave(2, 0) for t in (keys[0, :, :last], values[0, :, :last], far.value_mean[0, last])
    )
    scores = (keys @ far.query[0, last, :, :, None])[..., 0]
    expected = (scores.softmax(-1)[:, None] @ values)[:, 0]
    assert (mean + far.tilt[0, last] - expected).norm() < 0.05 * (expected - mean).norm()
    mass = read.log_mass(far)[0, last] + scores.var(-1) / 2
    torch.testing.assert_close(mass, scores.logsumexp(-1), rtol=0, atol=0.05)


@torch.no_grad()
def test_mass_is_linear_in_its_features():
    m, u, rotary = layer_and_input(rope_parameters=PARTIAL_ROPE, hybrid_state_planes=1)
    far = m.read.far(m.attention(u, rotary, WindowInputs(torch.arange(LENGTH).expand(2, -1))))
    features = m.read.mass_features(far)
    assert features.shape[-1] == m.read.mass.shape[1] == 2 + (1 + 4) + (2 + 4)
    torch.testing.assert_close((features * m.read.mass).sum(-1), m.read.log_mass(far), **EXACT)


@torch.no_grad()
def test_positions_that_all_move_change_nothing():
    m, u, rotary = layer_and_input()
    moved = make_student(pattern="normalised-only").model.rotary_emb(u, torch.arange(LENGTH)[None] + 1000)
    torch.testing.assert_close(m(u, moved), m(u, rotary), rtol=1e-3, atol=1e-4)  # the angles are float32


@pytest.mark.parametrize("shift", [-100.0, 0.0, 100.0])
@pytest.mark.parametrize("log_decay", [[0.0, -18.42], [-1e-8, -0.7], [0.5, 0.0]])
def test_extreme_masses_and_decays(shift, log_decay):
    """In float32: like the float64 equations, and with finite gradients that reach all parameters."""
    m, u, rotary = layer_and_input(hybrid_full_heads=None)
    with torch.no_grad():
        m.read.log_decay.copy_(torch.tensor(log_decay))
        m.read.mass[:, 0] += shift
    single = layer_and_input(hybrid_full_heads=None)[0].float()
    single.load_state_dict(m.state_dict())
    inputs = WindowInputs(torch.arange(LENGTH).expand(2, -1))
    m.read.log_decay.data.clamp_(max=0)
    expected = token_by_token(m, u, rotary, inputs)
    u = u.float().requires_grad_()
    out = single(u, [t.float() for t in rotary], window=inputs)
    torch.testing.assert_close(out.detach().double(), expected, rtol=1e-4, atol=1e-4)
    out.square().sum().backward()
    grads = {name: p.grad for name, p in single.named_parameters()} | {"input": u.grad}
    assert all(g is not None and g.isfinite().all() for g in grads.values())
    if shift == 0:
        assert [name for name, g in grads.items() if not g.any()] == []
        assert (grads["read.log_decay"] != 0).all() or min(log_decay) < -18


def test_gradients_are_those_of_the_equations(window_by):
    m, u, rotary = layer_and_input()
    inputs = WindowInputs(torch.arange(LENGTH).expand(2, -1))
    near = m.attention(u, rotary, inputs)
    names = [name for name, _ in m.named_parameters() if name.startswith(("read.", "attention."))]
    parameters = [m.get_parameter(name) for name in names]
    torch.manual_seed(1)
    weights = torch.randn(3, *near.output.shape, dtype=torch.float64)
    parts = m.read(near).unflatten(-1, (3, *near.output.shape[2:])).movedim(2, 0)
    scanned = torch.autograd.grad((parts[0] * weights[0] + (parts[1] + parts[2]) * weights[1]).sum(), parameters)
    near = m.attention(u, rotary, inputs)
    gate, (mean, tilt) = m.read.matrices(near)
    v = near.context.values.repeat_interleave(2, dim=1)
    far = ((mean + tilt) @ v).transpose(1, 2)
    gate = gate[..., None]
    expected = torch.autograd.grad(((1 - gate) * near.output * weights[0] + gate * far * weights[1]).sum(), parameters)
    for name, got, wanted in zip(names, scanned, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@torch.no_grad()
def test_the_state_is_float32_under_bf16_and_constant():
    model = make_student(pattern="normalised-only", dtype=torch.float32, hybrid_full_heads=None)
    ids = random_ids(1, 60)
    whole = model(ids).logits
    model = model.bfloat16()
    out, sizes = model(ids[:, :12], use_cache=True), []
    for t in range(12, 60):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values)
        sizes.append(cache_nbytes(out.past_key_values))
    state = out.past_key_values.layers[0].recurrent_states[0]
    assert state.dtype == torch.float32 and state.shape == (1, 2, 9, 5) and len(set(sizes)) == 1
    seen = sum(model.config.window_of(layer) - 1 + 2 for layer in (0, 1))
    assert sizes[0] == 2 * state.numel() * 4 + 2 * 2 * 8 * seen * 2
    assert (out.logits[:, -1] - whole[:, -1]).norm() < 0.1 * whole[:, -1].norm()


def test_a_compiled_layer_and_its_gradients():
    torch.compiler.reset()
    m, u, rotary = layer_and_input(hybrid_full_heads=None)
    index = torch.arange(LENGTH).expand(2, -1)
    plain = m(u, rotary, window=WindowInputs(index))
    expected = torch.autograd.grad(plain.sum(), list(m.parameters()))
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)(u, rotary, window=WindowInputs(index))
    torch.testing.assert_close(compiled, plain, **EXACT)
    for got, wanted in zip(torch.autograd.grad(compiled.sum(), list(m.parameters())), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9)


@torch.no_grad()
def test_exported():
    model = make_student(pattern="normalised-only", hybrid_full_heads=None)
    ids, other = random_ids(2, 20), random_ids(2, 20, seed=5)
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    torch.testing.assert_close(program.module()(input_ids=other, use_cache=False).logits, model(other).logits)


@pytest.mark.parametrize("family", ["llamba", "phimamba"])
def test_training_and_lora(family):
    """Every parameter gets a gradient and the loss falls; adapters on two projections train alone and merge."""
    from peft import LoraConfig, get_peft_model

    model, ids = make_student(family, pattern="normalised-only", dtype=torch.float32).train(), random_ids(4, 24)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(8):
        loss, grads = gradients(model, ids)
        losses.append(loss.item())
        assert all(g.isfinite().all() and g.any() for g in grads.values())
        optimizer.step()
    assert losses[-1] < losses[0] - 0.2
    model = make_student(family, pattern="normalised-only")
    config = LoraConfig(r=4, target_modules=["out_proj", "q_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    adapted(ids, labels=ids).loss.backward()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2 and all("lora" in name and p.grad.any() for name, p in trained.items())
    logits = adapted(ids).logits
    torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, logits)


@torch.no_grad()
def test_new_models_hold_the_theorys_mass():
    config = student_config(pattern="normalised-only")
    read = LlambaForCausalLM(config).model.layers[0].mixer.read
    assert torch.equal(read.mass, theory_mass(config, 0)) and not read.log_decay.any()
    assert read.mass.tolist() == [[0.0] + [1.0] * (1 + 2) + [0.0] * 4] * 4


@pytest.mark.parametrize(
    "options",
    [
        dict(hybrid_read="softmax"),
        dict(mixer="none", mixer_decay_bias=False),
        dict(mixer_sees="all"),
        dict(rope_parameters=PARTIAL_ROPE | {"rope_type": "proportional"}),
        dict(layer_rope=["main", "local"], local_rope_parameters=PARTIAL_ROPE),
    ],
)
def test_contradictory_reads_are_refused(options):
    with pytest.raises(ValueError, match="hybrid_read"):
        student_config(pattern="normalised-only", **options)


def test_a_state_without_keys_is_refused():
    with pytest.raises(ValueError, match="hybrid_state_planes"):
        student_config(pattern="normalised-only", hybrid_state_planes=0)


def test_an_odd_number_of_rotated_dimensions():
    """Of 8 x 0.65 = 5 dimensions transformers makes three angles, so three planes are turned."""
    odd = PARTIAL_ROPE | {"partial_rotary_factor": 0.65}
    model = make_student(pattern="normalised-only", rope_parameters=odd)
    assert len(model.model.rotary_emb.inv_freq) == model.config.rotary_planes == 3


@torch.no_grad()
def test_a_layer_without_rotary_embedding_keeps_all_of_a_key():
    model = make_student(
        pattern="normalised", dtype=torch.float32, hybrid_state_planes=1, layer_rope=["none", "main", "main"],
        conversion={"teacher_layer_types": ["full_attention"] * 3},
    )  # fmt: skip
    ids = random_ids(1, 60)
    whole, out = model(ids).logits, model(ids[:, :40], use_cache=True)
    for t in range(40, 60):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values)
        torch.testing.assert_close(out.logits[:, -1], whole[:, t], rtol=1e-4, atol=1e-5)
    shapes = [layer.recurrent_states[0].shape for layer in out.past_key_values.layers[::2]]
    assert shapes == [(1, 2, 9, 1 + 8), (1, 2, 9, 1 + 2)]
    assert cache_nbytes(out.past_key_values) == cache_bytes(model.config, 60, torch.float32)[1]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("places", [1, 3, 9])
def test_who_holds_a_place_when_a_block_begins(places, packed):
    """All blocks at once, against one block after the other; saliences that tie, blocks in which nobody enters."""
    B, blocks, T = 2, 13, 4
    columns = blocks * T
    salience = torch.randint(6, (B, columns)).double()
    held = torch.full((B, places), -1)
    entering = torch.arange(columns).expand(B, -1).clone()
    entering[torch.rand(B, columns) < 0.3] = -1
    entering[0, 8:20] = -1
    seq_idx = None
    if packed:
        own = (torch.rand(B, columns) < 0.1).cumsum(1)
        of_query = torch.nn.functional.pad(own, (0, 1), value=own.max() + 1)
        entering = entering.masked_fill(own != of_query[:, 1:], -1)
        seq_idx = own, of_query.unfold(1, T + 1, T)
    entering = entering.view(B, blocks, T)
    found = holders_before(held, entering, salience, seq_idx)
    for n in range(blocks):
        assert [sorted(row) for row in found[:, n].tolist()] == [sorted(row) for row in held.tolist()], n
        held = compete(held, entering[:, n], salience, None if seq_idx is None else (own, seq_idx[1][:, n])).held
