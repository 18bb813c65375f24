"""The fit of a hybrid layer: what it sees of the teacher, what it finds, what it changes, what a low rank costs."""

import dataclasses

import pytest
import torch

from convert.fit import mass_fit
from convert.fit.fit import FitCache, fit_layers
from convert.fit.hybrid_fit import (
    attention_received,
    cut_map,
    fit_hybrid_layer,
    fit_salience,
    ranks_within,
    set_map,
)
from convert.fit.layer_data import Pieces, held_out_error
from convert.fit.mass_fit import attend_far, attend_near, error_of, fit_mass, gates_of, regress
from convert.fit.probes import copy_probe, with_recall
from convert.layout.placement import CacheBits, Hybrid, everywhere
from convert.options import FitOptions
from modeling_llamba.hybrid.inputs import unpadded
from modeling_llamba.hybrid.readout import theory_mass
from tests.helpers.hybrid_fit import BLOCK, RANK, SALIENT, SINKS, WINDOW, layer_and_data
from tests.helpers.tiny import config_of, rows, teacher_model

FITTED = {"salience", "mass", "down.weight", "up.weight"}


def copied(layer):
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def changed(layer, before):
    """Names of what is no longer the same."""
    now = layer.state_dict()
    return {name for name in now.keys() | before if name not in now or not torch.equal(now[name], before.get(name))}


def projected_and_near(layer, u, rotary):
    """Queries, keys and values of the heads with a window, what is near, and its layout."""
    projected = layer.select_windowed(layer.project(u, rotary, unpadded(u)))
    return projected, *attend_near(layer, projected)


def dense_scores(layer, projected):
    """Scores (B, H', L, L) of full causal attention."""
    keys = projected.key.repeat_interleave(layer.shared, dim=1)
    scores = projected.query @ keys.mT * layer.scaling
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    length = scores.shape[-1]
    return scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)


def num_left(t):
    """Number of tokens that have left the window of token t: whole blocks."""
    return max(t // BLOCK - WINDOW // BLOCK + 1, 0) * BLOCK


def evicted_tokens(salience, t):
    """The tokens in the state that token t reads: those that left, but for the sinks and the most salient."""
    others = list(range(SINKS, num_left(t)))
    return sorted(sorted(others, key=lambda j: -salience[j].item())[SALIENT:])


@pytest.mark.parametrize("name", ["llama-gqa", "phi", "qwen3", "gemma2"])
@torch.no_grad()
def test_the_teachers_attention_in_blocks_is_the_whole(name, saved_teacher):
    layer, data = layer_and_data(saved_teacher(name))
    layer.salience.normal_(generator=torch.Generator().manual_seed(0))
    u, _ = data.batch(range(2))
    projected, near, layout = projected_and_near(layer, u, data.rotary)
    scores, length = dense_scores(layer, projected), u.shape[1]
    values = projected.value.repeat_interleave(layer.shared, dim=1)

    tokens = torch.arange(length)
    left = tokens < torch.tensor([num_left(t) for t in range(length)])[:, None]
    queries = left.sum(0).clamp(min=1)
    expected = (scores.softmax(-1) * left).sum((1, 2)) / queries
    torch.testing.assert_close(attention_received(layer, u, data.rotary, queries=5), expected)

    mass, far = attend_far(layer, projected, near, layout, queries=5)
    for b in range(2):
        for t in range(WINDOW, length):
            evicted = evicted_tokens(projected.salience[b], t)
            expected = scores[b, :, t, evicted].logsumexp(-1)
            torch.testing.assert_close(mass[b, t - WINDOW], expected, rtol=1e-4, atol=1e-5)
            if evicted:
                shares = scores[b, :, t, evicted].softmax(-1)
                expected = torch.einsum("hj,hjp->hp", shares, values[b, :, evicted])
                torch.testing.assert_close(far[b, t - WINDOW], expected, rtol=1e-4, atol=1e-5)
    assert len(evicted) == length - WINDOW - SINKS - SALIENT
    # what is near and what is in the state are all of the attention
    log_mass = layout.to_tokens(layout.in_order(near.log_mass))
    together = torch.logaddexp(log_mass, mass)
    torch.testing.assert_close(together, scores.logsumexp(-1).transpose(1, 2)[:, WINDOW:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_tokens_that_all_heads_look_at_are_found(saved_teacher):
    """Keys that grow along one direction of the input are salient where the input points there."""
    layer, data = layer_and_data(saved_teacher("llama-gqa"))
    u = torch.randn(6, 60, data.u.shape[2], generator=torch.Generator().manual_seed(0))
    loud = torch.zeros(6, 60, dtype=torch.bool)
    loud[:, [7, 19]] = True
    layer.q_proj.weight.zero_()
    u[..., 0] = 1.0
    layer.q_proj.weight[:, 0] = 1.0  # every query is the same vector of ones
    layer.k_proj.weight.zero_()
    layer.k_proj.weight[:, 1] = 3.0
    u[..., 1] = loud.float()
    still = torch.ones(1, 60, data.rotary[0].shape[-1]), torch.zeros(1, 60, data.rotary[0].shape[-1])

    def seen_to_the_end():
        _, near, _ = projected_and_near(layer, u, still)
        return (near.until[:, layer.shape.places :][:, :60] > 59 // BLOCK)[loud]

    assert not seen_to_the_end().all()
    fit_salience(layer, [u], still)
    assert seen_to_the_end().all()


@torch.no_grad()
def test_a_mass_that_is_linear_is_found(saved_teacher):
    """Keys that are all zero have the log mass log m, whatever the mass says before."""
    layer, data = layer_and_data(saved_teacher("llama-gqa"))
    layer.k_proj.weight.zero_()
    layer.mass[:, 0], layer.mass[:, 1] = 1.0, 0.5
    u = data.batch(data.fitting())[0]
    projected, near, layout = projected_and_near(layer, u, data.rotary)
    fit_mass(layer, [(u, near, projected, layout)])
    torch.testing.assert_close(layer.mass, theory_mass(layer.config, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama-gqa", "phi", "qwen3", "gemma2"])
@torch.no_grad()
def test_the_gate_comes_closer_to_the_true_one(name, saved_teacher):
    layer, data = layer_and_data(saved_teacher(name), sequences=16)

    def error():
        """Of the gates g, which are found again in g y, the first part of the features of the output map."""
        u, seen = data.batch(data.judging())[0], []
        handle = layer.down.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
        layer(u, data.rotary)
        handle.remove()
        projected, near, layout = projected_and_near(layer, u, data.rotary)
        output, log_mass = (layout.to_tokens(layout.in_order(t)) for t in (near.output, near.log_mass))
        gated = seen[0].unflatten(-1, (output.shape[2], 3, -1))[..., 0, :]
        gate = (gated * output).sum(-1) / output.square().sum(-1)
        true = torch.sigmoid(attend_far(layer, projected, near, layout)[0] - log_mass)
        return (gate - true).square().mean()

    of_theory = error()
    u = data.batch(data.fitting())[0]
    projected, near, layout = projected_and_near(layer, u, data.rotary)
    fit_mass(layer, [(u, near, projected, layout)])
    assert error() < 0.8 * of_theory


@pytest.mark.parametrize(
    "name, heads, gated", [("llama-gqa", (0, 1), False), ("gemma2", (), False), ("qwen3", (2, 3), True)]
)
@torch.no_grad()
def test_a_mass_that_harms_the_outputs_is_not_taken(name, heads, gated, saved_teacher, monkeypatch):
    """Unless the harm is small; errors are those of the layer where o_proj takes one head alone."""
    layer, data = layer_and_data(saved_teacher(name), heads, sequences=16, rank=0)
    layer.q_proj.weight *= 4  # sharp attention, which a mean is far from
    if gated:
        layer.gate_proj = torch.nn.Linear(data.u.shape[2], layer.o_proj.weight.shape[1])
    u = data.batch(data.fitting())[0]
    projected, near, layout = projected_and_near(layer, u, data.rotary)
    gates = [gates_of(layer, u, near, projected, layout, queries=5)]
    theory = layer.mass.double()
    regressed = regress(gates, theory)
    fit_mass(layer, [(u, near, projected, layout)])
    torch.testing.assert_close(layer.mass.double(), regressed, rtol=1e-4, atol=1e-4)
    wrong = regressed.clone()
    wrong[:, 0] += 50.0  # a gate that is wide open
    shut = regressed.clone()
    shut[:, 0] -= 50.0
    harm = error_of(gates, wrong) / error_of(gates, shut)
    monkeypatch.setattr(mass_fit, "regress", lambda *_: wrong)
    monkeypatch.setattr(mass_fit, "HARM", 0.99 * harm.min().item())
    fit_mass(layer, [(u, near, projected, layout)])  # from the mass that it has so far
    torch.testing.assert_close(layer.mass.double(), regressed, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(mass_fit, "HARM", 1.01 * harm.max().item())
    fit_mass(layer, [(u, near, projected, layout)])
    torch.testing.assert_close(layer.mass.double(), wrong, rtol=1e-4, atol=1e-4)

    values = projected.value.repeat_interleave(layer.shared, dim=1)
    teachers = (dense_scores(layer, projected).softmax(-1) @ values).transpose(1, 2)
    first = layer.windowed[0] * layer.shared  # the first query head with a window
    if gated:
        teachers = teachers * layer.head_gates(u)[:, :, first : first + teachers.shape[2]]
    of_head = slice(first * layer.head_dim, (first + 1) * layer.head_dim)
    weight = layer.o_proj.weight[:, of_head].clone()
    layer.o_proj.weight.zero_()
    layer.o_proj.weight[:, of_head] = weight

    def error(mass):
        layer.mass.copy_(mass)
        return (layer(u, data.rotary) - teachers[:, :, 0] @ weight.T)[:, WINDOW:].square().sum().item()

    expected = (error_of(gates, theory) - error_of(gates, wrong))[0].item()
    assert error(theory) - error(wrong) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["llama-gqa", "phi", "qwen3", "gemma2"])
@torch.no_grad()
def test_the_fit_comes_closer_and_leaves_the_teachers_weights_alone(name, saved_teacher):
    """o_proj and all else of the teacher are its own, bit for bit; kept heads have no part in what is added."""
    heads = (1, 3) if name == "phi" else (0, 1)
    layer, data = layer_and_data(saved_teacher(name), heads, sequences=80)
    before = copied(layer)
    mapped = held_out_error(layer, data).item()
    fit = fit_hybrid_layer(layer, data).read()
    assert fit.solved < mapped
    assert fit.solved < 0.97 * fit.mapped
    assert held_out_error(layer, data).item() == pytest.approx(fit.by_rank[max(fit.by_rank)], rel=1e-3)
    assert changed(layer, before) == FITTED
    teachers = teacher_model(saved_teacher(name)).block(1).self_attn.o_proj.weight
    assert torch.equal(layer.o_proj.weight, teachers)
    windowed = layer.config.num_attention_heads - 2
    assert layer.down.weight.shape[1] == 3 * windowed * layer.head_dim
    assert len(layer.mass) == windowed


@torch.no_grad()
def test_a_low_rank_is_the_best_part_of_the_solution(saved_teacher):
    """Against a ridge regression of its own, projected on the directions of the output in which it explains most."""
    layer, data = layer_and_data(saved_teacher("llama-gqa"), sequences=10)
    data = dataclasses.replace(data, u=torch.cat([data.u[:8]] * 2), y=torch.cat([data.y[:8]] * 2), held_out=8)
    fit = fit_hybrid_layer(layer, data).read()
    errors = [error for _, error in sorted(fit.by_rank.items())]
    assert list(fit.by_rank) == [0, 8, 16, 24, 32]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.9 * errors[0]

    down, up, seen = layer.down.weight.clone(), layer.up.weight.clone(), []
    layer.up.weight.zero_()
    handle = layer.down.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    u, y = data.batch(data.fitting())
    residual = (y - layer(u, data.rotary))[:, WINDOW:].flatten(0, 1).double()
    handle.remove()
    (features,) = (t.flatten(0, 1).double() for t in seen)
    gram = features.T @ features
    penalty = fit.ridge * gram.diagonal().mean() * torch.eye(len(gram))
    solution = torch.linalg.solve(gram + penalty, features.T @ residual)
    _, _, directions = torch.linalg.svd(features @ solution)
    for rank, error in fit.by_rank.items():
        best = directions[:rank]
        found = up[:, :rank].double() @ down[:rank].double()
        torch.testing.assert_close(found.T, solution @ best.T @ best, rtol=1e-3, atol=1e-4)
        set_map(layer, down, up)
        cut_map(layer, rank)
        assert held_out_error(layer, data).item() == pytest.approx(error, rel=1e-3)
        assert rank == 0 or torch.equal(layer.down.weight, down[:rank])
        assert rank == 0 or torch.equal(layer.up.weight, up[:, :rank])
    set_map(layer, down[:0], up[:, :0])
    assert layer.down is None
    assert layer.up is None


@torch.no_grad()
def test_smaller_pieces_are_the_same_fit(saved_teacher):
    """Where nothing is kept; fewer sequences at a time divide the text otherwise between mass and map."""
    found = []
    for pieces in (Pieces(), Pieces(kept=False), Pieces(queries=8, kept=False)):
        layer, data = layer_and_data(saved_teacher("llama-gqa"), sequences=10)
        fit = fit_hybrid_layer(layer, dataclasses.replace(data, pieces=pieces)).read()
        found.append((layer.state_dict(), list(fit.by_rank.values())))
    for state, errors in found[1:]:
        assert errors == pytest.approx(found[0][1], rel=1e-3)
        torch.testing.assert_close(state["mass"], found[0][0]["mass"], rtol=1e-3, atol=1e-3)
    pieces, seen = Pieces(), []
    while pieces is not None:
        seen.append(pieces)
        pieces = pieces.smaller()
    assert [tuple(p) for p in seen] == [
        (2, 128, True), (2, 128, False), (1, 128, False), (1, 64, False), (1, 32, False), (1, 16, False),
    ]  # fmt: skip


def ranks_of_mean(errors, mean):
    """`ranks_within` where a rank costs the same in all layers."""
    return ranks_within(errors, dict.fromkeys(errors, 7), 7 * mean * len(errors))


def test_ranks_go_where_they_gain_most():
    errors = {
        0: {0: 1.0, 8: 0.5, 16: 0.3, 32: 0.2},
        3: {0: 0.5, 8: 0.2, 16: 0.15, 32: 0.14},
        5: {0: 0.3, 8: 0.31, 16: 0.32, 32: 0.33},  # for which a map does harm
    }
    assert ranks_of_mean(errors, 0) == {0: 0, 3: 0, 5: 0}
    assert ranks_of_mean(errors, 8) == {0: 16, 3: 8, 5: 0}
    assert ranks_of_mean(errors, 64) == {0: 32, 3: 32, 5: 0}
    # a gain that comes late is found, too
    late = {0: {0: 1.0, 8: 0.99, 16: 0.1}, 1: {0: 1.0, 8: 0.8, 16: 0.75}}
    assert ranks_of_mean(late, 8) == {0: 16, 1: 0}
    # weights are what is spent, not ranks
    alike = {0: {0: 1.0, 8: 0.5}, 1: {0: 1.0, 8: 0.4}}
    assert ranks_within(alike, {0: 10, 1: 20}, 160) == {0: 8, 1: 0}
    assert ranks_within(alike, {0: 10, 1: 20}, 239) == {0: 8, 1: 0}
    assert ranks_within(alike, {0: 10, 1: 20}, 240) == {0: 8, 1: 8}


@pytest.mark.parametrize("mean", [1, 7, 12, 20, 33, 200])
def test_ranks_spend_the_mean_and_no_more(mean):
    generator = torch.Generator().manual_seed(mean)
    steps = (0, 8, 16, 24, 32, 64)
    errors = {
        layer: {rank: (scale * 0.9 ** (rank**0.5)).item() for rank in steps}
        for layer, scale in enumerate(torch.rand(6, generator=generator) + 0.1)
    }
    ranks = ranks_of_mean(errors, mean)
    assert all(ranks[layer] in of_rank for layer, of_rank in errors.items())
    assert sum(ranks.values()) <= 6 * mean
    narrowest = min((8 if rank < 32 else 32 for rank in ranks.values() if rank < 64), default=0)
    assert not narrowest or sum(ranks.values()) > 6 * mean - narrowest


@torch.no_grad()
def test_a_fit_knows_what_rounding_does(saved_teacher):
    """Fitted with rounded keys and values, a layer comes closer than one that is rounded after its fit."""
    folder = saved_teacher("llama-mqa-wide-heads")
    bits = CacheBits(window=(2, 2))
    layer, data = layer_and_data(folder, sequences=80, bits=bits)
    fit_hybrid_layer(layer, data)
    error = held_out_error(layer, data)
    whole, of_whole = layer_and_data(folder, sequences=80)
    fit_hybrid_layer(whole, of_whole)
    layer.load_state_dict(whole.state_dict(), strict=False)  # which has no offset of keys
    assert error < 0.98 * held_out_error(layer, data)


@torch.no_grad()
def test_without_a_map_the_mass_alone_is_fitted(saved_teacher):
    layer, data = layer_and_data(saved_teacher("llama-gqa"), rank=0)
    before = copied(layer)
    fit = fit_hybrid_layer(layer, data).read()
    assert changed(layer, before) == {"salience", "mass"}
    assert fit.ridge is None
    assert fit.by_rank == {0: pytest.approx(held_out_error(layer, data).item(), rel=1e-3)}


@torch.no_grad()
def test_a_window_alone_learns_who_stays_in_sight_and_nothing_else(saved_teacher):
    layer, data = layer_and_data(saved_teacher("llama-gqa"), state=False, rank=0)
    before = copied(layer)
    fit = fit_hybrid_layer(layer, data).read()
    assert changed(layer, before) == {"salience"}
    assert fit.mapped == fit.solved == fit.refined
    assert fit.by_rank is None


@pytest.mark.parametrize("rank", [RANK, 0])
def test_fits_are_kept_for_a_run_that_goes_on(rank, saved_teacher, tmp_path, monkeypatch):
    """The map is kept at the highest rank judged, whatever rank the layer begins with."""
    model, ids = teacher_model(saved_teacher("llama-gqa")), rows(8)
    placement = everywhere(Hybrid(WINDOW, BLOCK, SINKS, salient=SALIENT, rank=rank), 4)
    model.follow(config_of(model.weights, placement))
    cache = FitCache(tmp_path, {"a": 1})
    fitted = fit_layers(model, [1, 2], ids, 2, FitOptions(), cache, 10**9)
    monkeypatch.setattr("convert.fit.fit.fit_hybrid_layer", None)
    resumed = fit_layers(model, [1, 2], ids, 2, FitOptions(), FitCache(tmp_path, {"a": 1}), 10**9)
    for number, (layer, report) in fitted.items():
        assert resumed[number][1] == report
        assert not changed(resumed[number][0], layer.state_dict())
        assert (layer.down is None) == (rank == 0)
        assert max(report.by_rank) == (32 if rank else 0)


@pytest.mark.parametrize("salient, state, length", [(0, True, 6), (2, True, 8), (10, True, 16), (2, False, 7)])
def test_sequences_within_the_window_leave_nothing_to_fit(salient, state, length, saved_teacher):
    """Or those all of whose tokens behind it hold a place, so that the state stays empty."""
    layer, data = layer_and_data(saved_teacher("llama-gqa"), salient=salient, state=state, rank=0)

    def shorter(length):
        rotary = tuple(t[:, :length] for t in data.rotary)
        return dataclasses.replace(data, u=data.u[:, :length], y=data.y[:, :length], rotary=rotary)

    with pytest.raises(ValueError, match="set sequence_length higher"):
        fit_hybrid_layer(layer, shorter(length))
    fit_hybrid_layer(layer, shorter(length + BLOCK))


def test_activations_that_are_not_finite_are_refused(saved_teacher):
    layer, data = layer_and_data(saved_teacher("llama-gqa"))
    assert data.finite
    data.y[3, 5, 7] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinity"):
        fit_hybrid_layer(layer, dataclasses.replace(data, finite=None)).read()


def test_calibration_text_asks_for_recall():
    ids = torch.arange(13 * 16).view(13, 16)
    changed = with_recall(ids, range(1000, 1100), seed=0)
    rows_changed = (changed != ids).any(1).nonzero()[:, 0].tolist()
    assert rows_changed == [0, 6, 12]
    assert torch.equal(changed[12, :8], changed[12, 8:])
    assert torch.equal(changed[0, :8], changed[0, 8:])
    assert torch.equal(changed[6, -4:], changed[6, changed[6].tolist().index(changed[6, -4]) :][:4])
    assert copy_probe(range(1000, 1100), 1, 8, 12).ids.tolist() == changed[12:].tolist()
