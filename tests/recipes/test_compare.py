"""The comparison as it is typed, on a tiny Qwen3, and each other cache against a plain formula."""

import contextlib
import io
import json
import random
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from convert.checkpoint.load import load_model
from convert.checkpoint.pictures import LINE_COLORS
from convert.layout.cache import cache_bytes
from convert.options import documented
from modeling_llamba.compatibility import CACHE_NAME, cache_of
from recipes import compare as comparison
from recipes import compare_options
from recipes.cli import COMPARE, main
from recipes.compare import CONTINUED
from recipes.compare_options import CompareOptions
from recipes.demo import saved_and_paid
from recipes.evaluation import real_caches, recall
from recipes.evaluation.eviction import (
    REPEAT,
    Eviction,
    keep_highest,
    kept_bytes,
    pairs_of_bytes,
    read_after,
    read_moments,
    reading_scores,
)
from recipes.evaluation.generation import common_prefix
from recipes.evaluation.metrics import reader
from recipes.evaluation.other_caches import (
    GROUP,
    SINKS,
    Call,
    LayerShape,
    OtherCache,
    attending,
    layer_shapes,
    read_with,
    round_groups,
    window_of_bytes,
)
from recipes.evaluation.picture import Point, picture
from recipes.evaluation.recall import NEEDLE, needle_distances, needles_probe
from recipes.evaluation.texts import PYTHON_CODE, TextSource
from tests.helpers.html_page import check_page
from tests.helpers.teachers import TEACHERS, make_teacher, random_ids
from tests.helpers.tiny_chat import chat_tokenizer, save_chat_teacher, save_hybrid, words

LENGTH, FIRST = 128, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3 with a tokenizer, its hybrid, and a text."""
    folder = tmp_path_factory.mktemp("compare")
    teacher = save_chat_teacher(folder / "teacher", "qwen3")
    save_hybrid(teacher, folder / "hybrid", window=16)
    rng = random.Random(0)
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": words(rng, 60, 90)}) for _ in range(40)))
    return folder


@pytest.fixture(scope="module")
def model():
    return make_teacher("qwen3")


@pytest.fixture
def quick_ruler(monkeypatch):
    """Replaces RULER, whose rows are longer than tiny models take, by an answer to a prompt."""

    def answers(model, tokenizer, lengths, rows, tasks, batch_size):
        assert batch_size == 1
        assert len(tasks) == 1
        ids = torch.arange(lengths[0])[None] % 100
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        return {lengths[0]: dict.fromkeys(tasks, out[0, lengths[0] :].float().mean().item() / 128)}

    monkeypatch.setattr(comparison, "ruler", answers)
    monkeypatch.setattr(comparison, "generators", lambda: None)


def compare(folder, out, *arguments, hybrids=("hybrid",)):
    """The exit code of the command, what it printed, and its errors."""
    models = [str(folder / name) for name in ("teacher", *hybrids)]
    texts = ["--text", str(folder / "text.jsonl")]
    sizes = ["--length", str(LENGTH), "--first", str(FIRST), "--speed", "32"]
    code, said, errors = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        try:
            main(["compare", *models, "--out", str(out), *texts, *sizes, "-q", *arguments])
        except SystemExit as stopped:
            code = stopped.code
    return code, said.getvalue(), errors.getvalue()


def test_everything_at_once(folder, tmp_path, monkeypatch):
    """All methods; figures are those of plain computations; the same command again computes nothing."""
    code, said, errors = compare(folder, tmp_path, "--json")
    assert code == 0, errors
    found = json.loads(said)
    assert found == json.loads((tmp_path / "compare.json").read_text())
    rows = {row["name"]: row for row in found["methods"]}
    kinds = ("window", "window, int8", "eviction", "eviction and moments")
    assert list(rows) == ["teacher", "int8 cache", "int4 cache", "int3 cache", "int2 cache", "hybrid",
                          *(f"{kind}, as hybrid" for kind in kinds)]  # fmt: skip
    teacher, hybrid = (load_model(str(folder / name), "float32") for name in ("teacher", "hybrid"))
    ids = TextSource(str(folder / "text.jsonl")).rows(chat_tokenizer(), LENGTH, 2)
    with torch.no_grad():
        ours, theirs = (model(ids).logits[:, FIRST : LENGTH - 1].log_softmax(-1) for model in (hybrid, teacher))
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    figures = rows["hybrid"]["text"]["text"]["everywhere"]
    assert figures["kl"] == pytest.approx(kl.mean().item(), rel=1e-3)
    assert figures["kl_999"] == pytest.approx(kl.flatten().quantile(0.999).item(), rel=1e-3)
    assert figures["agreement"] == pytest.approx((ours.argmax(-1) == theirs.argmax(-1)).double().mean().item())
    nats = -ours.gather(-1, ids[:, FIRST + 1 :, None]).mean().item()
    assert figures["perplexity"] == pytest.approx(torch.tensor(nats).exp().item(), rel=1e-3)
    assert rows["teacher"]["text"]["text"]["everywhere"]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows["eviction, as hybrid"]["text"]["text"]["everywhere"] is None
    assert rows["hybrid"]["cache_bytes"]["4k"] == cache_bytes(hybrid.config, 4096)[1]
    parameters = sum(parameter.numel() for parameter in hybrid.parameters())
    assert rows["hybrid"]["weight_bytes"] == 2 * parameters > rows["teacher"]["weight_bytes"]
    for kind in kinds:  # of the same bytes as the hybrid, or a token less, where the rows end
        row = rows[f"{kind}, as hybrid"]
        assert 0.95 < row["share"] / rows["hybrid"]["share"] <= 1
        assert row["text"]["text"]["after_contexts"]["kl"] > 1e-5
    assert [(row["which"], row["context"]) for row in found["speed"]] == [("teacher", 32), ("hybrid", 32)]

    report = (tmp_path / "compare.md").read_text()
    assert f"{figures['kl']:.4f}" in report
    assert max(line.count("|") for line in report.splitlines()) == 9
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    drawn = comparison.points(found["methods"])
    assert [point.kind for point in drawn] == [row["kind"] for row in found["methods"][1:]]
    of_hybrid = drawn[list(rows).index("hybrid") - 1]
    recall = [rows[name]["recall"]["needle"] for name in ("hybrid", "teacher")]
    assert of_hybrid.found == (pytest.approx(100 * recall[0] / recall[1]) if recall[1] else None)
    needles = rows["hybrid"]["recall"]["needles"]
    assert sum(needles.values()) / len(needles) == pytest.approx(recall[0])

    def refuse(*arguments):
        raise ValueError("computed again")

    for what in ("sizes", "text", "recall", "speed"):
        monkeypatch.setattr(comparison.Comparison, what, refuse)
    code, again, errors = compare(folder, tmp_path, "--json")
    assert code == 0, errors
    assert json.loads(again) == found, errors
    code, _, errors = compare(folder, tmp_path, "--rows", "1")
    assert code == 1, "other settings are measured anew"
    assert "computed again" in errors, "other settings are measured anew"


def test_a_page_of_it(folder, tmp_path):
    """All caches and pictures in one file, and how the models go on with a text: by the tokens of `generate`."""
    file = tmp_path / "page.html"
    code, said, errors = compare(folder, tmp_path / "out", "--html", str(file), "--json")
    assert code == 0, errors
    found = json.loads(said)
    content = file.read_text()
    text = check_page(content)
    for row in found["methods"]:
        assert row["name"] in text
        assert f"{row['text']['text']['after_contexts']['kl']:.4f}" in text
    assert content.count("<svg") == 5
    assert all((row["text"]["text"]["by_position"] is None) == row["name"].startswith("eviction")
               for row in found["methods"])  # fmt: skip
    tokenizer = chat_tokenizer()
    ids = TextSource(str(folder / "text.jsonl")).rows(tokenizer, LENGTH, 1)
    said = {}
    for name in ("teacher", "hybrid"):
        model = load_model(str(folder / name), "float32")
        out = model.generate(ids[:, :-CONTINUED], do_sample=False, max_new_tokens=CONTINUED, min_new_tokens=CONTINUED,
                             pad_token_id=0)  # fmt: skip
        said[name] = out[0, LENGTH - CONTINUED :].tolist()
        assert tokenizer.decode(said[name]) in text
    assert {row["name"]: row["continuations"]["text"] for row in found["methods"] if row["continuations"]} == said
    alike = common_prefix(said["teacher"], said["hybrid"])
    assert f"hybrid: {alike} of {CONTINUED} tokens" in text
    marked = tokenizer.decode(said["hybrid"][: alike + 1])[len(tokenizer.decode(said["hybrid"][:alike])) :]
    assert f"<mark>{marked}</mark>" in content
    assert found["methods"][0]["bytes_at"]["4096"] == found["methods"][0]["cache_bytes"]["4k"]


def test_every_kind_of_cache_is_drawn():
    """More kinds than the picture has colours."""
    kinds = [f"kind {number}" for number in range(len(LINE_COLORS) + 2)]
    drawn = picture([Point(kind, 10.0 + number, 0.1, 50.0) for number, kind in enumerate(kinds)])
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == kinds
    assert all(len(axes.lines) == len(kinds) for axes in drawn.axes)


def test_transformers_own_caches_are_held(folder, monkeypatch):
    """The tokens behind a context, read exactly and rounded at its end, attend to what is held then."""
    model = load_model(str(folder / "teacher"), "float32")
    make = partial(real_caches.make_cache, model.config, "transformers fp8")
    ids = random_ids(1, 40) % 100
    read = real_caches.read_held(reader(model), make, [16, 32])
    with torch.no_grad():
        found = read.head(read.states(ids)[0])
        whole = model(ids).logits[0]
        torch.testing.assert_close(found[:16], whole[:16])
        for end, stop in ((16, 32), (32, 40)):
            cache = make()
            model(ids[:, :end], **{CACHE_NAME: cache})
            expected = model(ids[:, end:stop], **{CACHE_NAME: cache}).logits[0]
            torch.testing.assert_close(found[end:stop], expected)
            assert (found[end:stop] - whole[end:stop]).abs().max() > 1e-3


def test_bytes_of_transformers_own_caches_are_those_that_they_hold(folder):
    model = load_model(str(folder / "teacher"), "bfloat16")
    make = partial(real_caches.make_cache, model.config, "transformers fp8")
    shapes = layer_shapes(model)
    nbytes = real_caches.held_bytes(make, shapes)
    for tokens in (100, 700):
        cache = make()
        with torch.no_grad():
            model(random_ids(1, tokens) % 100, **{CACHE_NAME: cache})
        tensors = [t for layer in cache.layers for t in (*layer._quantized_keys, *layer._quantized_values)]
        assert nbytes(tokens) == sum(t.nbytes for t in tensors)
    assert nbytes(4096) / OtherCache().nbytes(shapes, 4096) == pytest.approx(0.5, rel=1e-3)


def test_real_caches_are_refused_in_one_line(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="full attention layers.* Leave out --real"):
        real_caches.make_cache(make_teacher("gemma3").config, "transformers fp8")
    monkeypatch.setattr(real_caches.importlib.util, "find_spec", lambda name: None)
    code, _, errors = compare(folder, tmp_path, "--real")
    assert code == 1
    assert "--real needs optimum.quanto: pip install '.[rivals]'" in errors


def test_no_context_holds_what_asks(folder, monkeypatch):
    """Eviction is told where a context ends: right before the tokens that ask for what is hidden in it."""
    options = CompareOptions(
        teacher=str(folder / "teacher"), text=[str(folder / "text.jsonl")], length=256, first=FIRST, rows=1
    )
    compared = comparison.Comparison(options, lambda *_: None)
    teacher = next(compared.methods())
    contexts_of, probes = [], []

    def noting(read, probe, *more):
        probes.append(probe)
        return torch.zeros_like(probe.answers)

    monkeypatch.setattr(comparison, "hits", noting)
    compared.recall(teacher._replace(reader=contexts_of.append))
    for (end,), probe in zip(contexts_of, probes, strict=True):
        for ids in probe.ids.tolist():
            asking = ids[end : probe.answers[0].nonzero()[0]]
            places = [i for i in range(len(ids)) if ids[i : i + len(asking)] == asking]
            assert len(places) == 2, "once in the context, and once to ask"
            assert places[1] == end, "nothing that asks comes before"
    assert len(probes) == 2


@pytest.mark.parametrize("distances", [(), (10, 400), (100, 110), (400, 100)])
def test_needles_do_not_overlap(distances):
    assert recall.NEEDLE == compare_options.NEEDLE
    with pytest.raises(ValueError, match="--needles must grow from"):
        CompareOptions(needles=distances)


def test_needles_lie_as_far_back_as_they_are_said_to():
    """Each needle is in the text once, at its distance from its question, whose second half is to be answered."""
    distances = needle_distances(512, CompareOptions.needles)
    assert distances == [100, 400]
    assert needle_distances(128, CompareOptions.needles) == [64], "half a row, where none fits"
    assert needle_distances(512, [200, 300, 500]) == [200, 300]
    probe = needles_probe(random_ids(3, 512) % 50, range(50, 500), distances, seed=0)
    for ids, answers in zip(probe.ids.tolist(), probe.answers.tolist(), strict=True):
        for question, distance in zip((512 - 2 * NEEDLE, 512 - NEEDLE), distances, strict=True):
            needle = ids[question : question + NEEDLE]
            assert [i for i in range(512) if ids[i : i + NEEDLE] == needle] == [question - distance, question]
            assert answers[question : question + NEEDLE] == [False] * (NEEDLE // 2) + [True] * (NEEDLE // 2)
        assert sum(answers) == NEEDLE


def test_long_rows_copy_no_more(folder, tmp_path, monkeypatch):
    """The rows that are copied have half of the tokens of the others, up to a limit; the report says how many."""
    hits, asked = comparison.hits, []
    monkeypatch.setattr(comparison, "hits", lambda *args: asked.append(args[1]) or hits(*args))
    for limit, length in ((2048, LENGTH // 2), (16, 16)):
        monkeypatch.setattr(comparison, "LONGEST_COPIED", limit)
        code, said, errors = compare(folder, tmp_path / str(limit), "--beside", "[]")
        assert code == 0, errors
        assert f"copied, {length // 2} back" in said
        copied, needles = (probe.ids for probe in asked[-2:])
        assert copied.shape == (4, length)
        assert copied[:, : length // 2].equal(copied[:, length // 2 :])
        assert needles.shape == (4, LENGTH)


def test_what_was_finished_is_kept(folder, tmp_path, monkeypatch):
    """A comparison that is stopped goes on where it was: the text of the third method is not read again."""
    text, recall = comparison.Comparison.text, comparison.Comparison.recall
    read, asked = [], []
    monkeypatch.setattr(
        comparison.Comparison, "text", lambda self, m, source: read.append(m.name) or text(self, m, source)
    )

    def twice(self, method):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(method.name)
        return recall(self, method)

    monkeypatch.setattr(comparison.Comparison, "recall", twice)
    assert compare(folder, tmp_path)[0] == 130
    assert [row["name"] for row in json.loads((tmp_path / "compare.json").read_text())["methods"]] == asked
    monkeypatch.setattr(comparison.Comparison, "recall", lambda self, m: asked.append(m.name) or recall(self, m))
    code, said, errors = compare(folder, tmp_path)
    assert code == 0, errors
    assert read == asked
    assert len(asked) == len(set(asked)) == 10
    assert "| int4 cache |" in said


def test_caches_beside_are_chosen(folder, tmp_path):
    code, said, errors = compare(folder, tmp_path, "--beside", "int4,window", "--json")
    assert code == 0, errors
    names = ["teacher", "int4 cache", "hybrid", "window, as hybrid", "window, int8, as hybrid"]
    assert [row["name"] for row in json.loads(said)["methods"]] == names
    code, said, errors = compare(folder, tmp_path, "--beside", "[]", "--json")
    assert code == 0, errors
    assert [row["name"] for row in json.loads(said)["methods"]] == ["teacher", "hybrid"]
    code, _, errors = compare(folder, tmp_path, "--beside", "int5")
    assert code == 1
    assert "--beside takes some of int8, int4, int3, int2, window, eviction; got int5." in errors


def test_ruler_is_answered_with_each_cache(folder, tmp_path, quick_ruler):
    """Answers differ where the cache does; eviction has none."""
    code, said, errors = compare(folder, tmp_path, "--ruler", "[100]", "--json")
    assert code == 0, errors
    scores = {row["name"]: row["ruler"].get("100", {}).get("ruler_vt") for row in json.loads(said)["methods"]}
    assert scores["teacher"] == scores["int8 cache"] != scores["hybrid"]
    assert scores["window, as hybrid"] != scores["teacher"]
    assert scores["eviction, as hybrid"] is None
    assert len({*scores.values()}) > 2
    assert "| cache | 100 tokens |" in (tmp_path / "compare.md").read_text()


def test_emulated_caches_of_sliding_windows_do_not_answer(folder, tmp_path, quick_ruler):
    """`generate` holds the latest of their keys, in other columns than the emulation counts by."""
    save_chat_teacher(tmp_path / "teacher", "gemma3")
    (tmp_path / "text.jsonl").write_text((folder / "text.jsonl").read_text())
    arguments = "--ruler", "[100]", "--continuations", "2", "--beside", "int4", "--json"
    code, said, errors = compare(tmp_path, tmp_path / "out", *arguments, hybrids=())
    assert code == 0, errors
    answered = {row["name"]: bool(row["ruler"] and row["going_on"]) for row in json.loads(said)["methods"]}
    assert answered == {"teacher": True, "int4 cache": False}


def test_going_on_as_the_teacher_does(folder, tmp_path):
    """With each cache that answers, more pieces than are read at once; by the tokens of `generate`, one by one."""
    pieces = 10
    code, said, errors = compare(folder, tmp_path, "--continuations", str(pieces), "--json")
    assert code == 0, errors
    found = {row["name"]: row["going_on"].get("text") for row in json.loads(said)["methods"]}
    ids = TextSource(str(folder / "text.jsonl")).rows(chat_tokenizer(), FIRST + CONTINUED, pieces)[:, :FIRST]
    teacher, hybrid = (load_model(str(folder / name), "float32") for name in ("teacher", "hybrid"))
    end = chat_tokenizer().eos_token_id
    greedy = {"do_sample": False, "max_new_tokens": CONTINUED, "min_new_tokens": CONTINUED, "pad_token_id": 0}

    def answers(model):
        return [model.generate(row[None], eos_token_id=end, **greedy)[0, FIRST:].tolist() for row in ids]

    own, of_hybrid = answers(teacher), answers(hybrid)
    with attending(teacher, comparison.ROUNDED["int3"].attend):
        rounded = answers(teacher)
    for name, said in (("hybrid", of_hybrid), ("int3 cache", rounded)):
        equal = [common_prefix(*pair) for pair in zip(said, own, strict=True)]
        assert 0 < sum(equal) < pieces * CONTINUED
        assert found[name]["tokens"] == pytest.approx(sum(equal) / pieces / CONTINUED)
        assert found[name]["whole"] == equal.count(CONTINUED) / pieces
    assert found["eviction, as hybrid"] is None
    report = (tmp_path / "compare.md").read_text()
    assert f"| text ({pieces}) |" in report
    assert f"| hybrid | {found['hybrid']['tokens']:.0%}, {found['hybrid']['whole']:.0%} |" in report

    code, said, errors = compare(folder, tmp_path, "--continuations", "1000", "--json", "--beside", "[]")
    assert code == 0, errors
    found = {row["name"]: row["going_on"]["text"]["pieces"] for row in json.loads(said)["methods"]}
    assert found["teacher"] == found["hybrid"] < 1000


def test_refusals(folder, tmp_path):
    for hybrids, words_of_it in ((("teacher",), "not a hybrid"), (("hybrid", "hybrid"), "named twice")):
        code, _, errors = compare(folder, tmp_path, hybrids=hybrids)
        assert code == 1
        assert words_of_it in errors
    code, _, errors = compare(folder, tmp_path, "--length", "40")
    assert code == 1
    assert "at least twice" in errors
    code, _, errors = compare(folder, tmp_path, "--quik")
    assert code == 1
    assert "did you mean --quick?" in errors


def test_a_quick_comparison_keeps_what_is_named():
    quick = comparison.sized(CompareOptions(teacher="t", quick=True, rows=5))
    assert (quick.length, quick.rows, quick.speed) == (2048, 5, (512, 4096))
    assert comparison.sized(CompareOptions(teacher="t")) == CompareOptions(teacher="t")


@pytest.mark.parametrize("typed, read", [("32", (32,)), ("32,64", (32, 64)), ("[32, 64]", (32, 64)), ("[]", ())])
def test_a_list_is_typed_with_commas_or_as_in_yaml(typed, read):
    options, _ = COMPARE.parser("compare").from_command_line(["t", "--speed", typed, "--text", "mine.jsonl,a:b:c"])
    assert options.speed == read
    assert options.text == ("mine.jsonl", "a:b:c")


def test_the_installed_command_knows_it(capsys):
    main(["--help"])
    said = capsys.readouterr().out
    assert "convert-to-hybrid compare " in said
    assert "needs the installed command" not in said
    main(["compare", "--help"])
    said = capsys.readouterr().out
    assert "default: shipped,python-docs,python-code" in said
    assert all(flag in said for flag in COMPARE.flags)
    assert "HYBRID..." in said
    assert all(option.help.endswith(".") for option in documented(COMPARE.options))


def test_the_demo_says_what_was_won_and_what_it_cost():
    report = {
        "cache_bytes": {"4k": {"teacher": 1000, "hybrid": 80}},
        "break_even": {"16 bits": 1517},
        "parameters": {"teacher": 1000, "hybrid": 1015},
        "recall": {"teacher": 0.5, "hybrid": 0.25},
        "decode_tokens_per_second": {"teacher": 10.0, "hybrid": 15.0},
        "kl_nats_per_token": 0.0131,
        "held_out_tokens": 1024,
    }
    said = saved_and_paid(report)
    for part in ("8% of", "1,517 tokens", "0.013 nats", "1,024", "50% to 25%", "1.5% more weights", "1.5 times"):
        assert part in said, part
    assert "never less memory" in saved_and_paid(report | {"break_even": {"16 bits": None}})


def test_a_window_is_a_mask(model):
    """Attention of all layers with the mask of a window and sinks, given to transformers' own attention."""
    ids, window = random_ids(2, 40), 6
    t, j = torch.arange(40)[:, None], torch.arange(40)
    seen = (j <= t) & ((j < SINKS) | (t - j < window))
    mask = torch.zeros(1, 1, 40, 40).masked_fill(~seen, -torch.inf)
    own = reader(model)
    windowed = read_with(model, own, OtherCache(window=window).attend)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask.expand(2, -1, -1, -1)).logits
        torch.testing.assert_close(windowed.head(windowed.states(ids)), expected, rtol=1e-4, atol=1e-4)
        assert (own.head(own.states(ids)) - expected).abs().max() > 1e-2, "the model is itself again, and sees more"
        everything = read_with(model, own, OtherCache(window=40).attend)
        torch.testing.assert_close(everything.states(ids), own.states(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounding_errs_by_half_a_step_at_most(bits):
    keys = torch.randn(2, 3, 2 * GROUP + 5, 64, generator=torch.Generator().manual_seed(0)) * 3 + 1
    by_channel, by_token = round_groups(keys, bits, -2), round_groups(keys, bits, -1)
    assert torch.equal(by_channel[:, :, 2 * GROUP :], keys[:, :, 2 * GROUP :]), "an open group is whole"
    for group, rounded in ((keys[0, 1, GROUP : 2 * GROUP, 7], by_channel[0, 1, GROUP : 2 * GROUP, 7]),
                           (keys[1, 2, 3, GROUP:], by_token[1, 2, 3, GROUP:])):  # fmt: skip
        step = (group.max() - group.min()) / (2**bits - 1)
        assert (group - rounded).abs().max() <= step / 2 + 2e-3 * group.abs().max()  # float16 has 11 bits
        assert len(rounded.unique()) <= 2**bits
        assert (group - rounded).abs().max() > step / 8


def test_a_token_is_rounded_once_enough_others_follow():
    """Attention to a rounded cache, one query at a time."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, 100, 32, generator=generator) for heads in (4, 2, 2))
    mask = torch.full((100, 100), -1e9).triu(1)[None, None]
    cache = OtherCache(bits=2, whole=20)
    found = cache.attend(Call(0, query, key, value, mask, lambda q, k: q @ k.transpose(-1, -2)))
    rounded_key, rounded_value = round_groups(key, 2, -2), round_groups(value, 2, -1)
    for t in (10, 50, 51, 83, 99):
        first = 0 if t < 51 else 32 if t < 83 else 64  # 32 tokens and 20 more are there from position 51 on
        for head in range(4):
            k, v = (
                torch.cat([r[0, head // 2, :first], w[0, head // 2, first : t + 1]])
                for r, w in ((rounded_key, key), (rounded_value, value))
            )
            expected = (query[0, head, t] @ k.T).softmax(-1) @ v
            torch.testing.assert_close(found[0, head, t], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", [OtherCache(4), OtherCache(window=9), OtherCache(8, window=40)])
def test_decoding_sees_what_one_pass_sees(model, cache):
    ids = random_ids(1, 90)
    with torch.no_grad(), attending(model, cache.attend):
        whole = model(ids).logits
        held = DynamicCache(config=model.config)
        parts = [model(part, **{CACHE_NAME: held}).logits for part in (ids[:, :70], *ids[:, 70:].split(1, 1))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-3)


def test_bytes(model):
    shapes = layer_shapes(model)
    with torch.no_grad():
        held = cache_of(model(random_ids(1, 50)))
    numbers = sum(t.numel() for layer in held.layers for t in (layer.keys, layer.values))
    assert OtherCache().nbytes(shapes, 50) == 2 * numbers
    wide = [LayerShape(heads=3, key_dim=64, value_dim=64, limit=None)] * 2
    shares = {bits: OtherCache(bits).nbytes(wide, 2**20) / OtherCache().nbytes(wide, 2**20) for bits in (8, 4, 2)}
    assert shares == pytest.approx({8: 9 / 16, 4: 5 / 16, 2: 3 / 16}, rel=1e-3), "32 codes and two numbers of float16"
    assert OtherCache(window=60).nbytes(wide, 10**6) == OtherCache().nbytes(wide, 64)
    limited = [LayerShape(heads=3, key_dim=64, value_dim=64, limit=100), wide[0]]
    assert OtherCache().nbytes(limited, 1000) == OtherCache().nbytes(wide[:1], 1100)
    budget = OtherCache().nbytes(wide, 700)
    assert window_of_bytes(wide, budget).window == 700 - SINKS
    assert 1.7 < window_of_bytes(wide, budget, 8).window / 700 < 16 / 9
    assert pairs_of_bytes(wide, budget, False, 4096) == 700 * 6
    moments = 6 * (1 + 64 + 64 + 64 * 64) * 2
    assert pairs_of_bytes(wide, budget, True, 4096) == (budget - moments) // 256
    assert kept_bytes(limited, 50, True, 4096) == OtherCache().nbytes(limited[:1], 100) + 50 * 256 + moments // 2
    assert kept_bytes(wide, 10**6, False, 20) == OtherCache().nbytes(wide, 20)
    assert window_of_bytes(wide, 100) is None
    assert pairs_of_bytes(wide, 1000, True, 4096) is None


def test_scores_are_the_largest_weights_of_a_second_reading(model):
    tokenizer, context = chat_tokenizer(), random_ids(1, 30)[0]
    found = reading_scores(model, reader(model), layer_shapes(model), tokenizer, context)
    told = tokenizer(REPEAT, add_special_tokens=False, return_tensors="pt").input_ids[0]
    twice = torch.cat([context, told, context])[None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(twice, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    for layer, expected in zip(found, weights, strict=True):
        again = expected[0, :, 30 + len(told) :, :30].amax(1)
        torch.testing.assert_close(layer, again.view(2, 2, 30).amax(1), rtol=1e-3, atol=1e-5)


def test_the_highest_scores_are_kept():
    scores = [torch.tensor([[5.0, 1.0, 2.0], [9.0, 0.0, 8.0]]), torch.tensor([[3.0, 7.0, 4.0]])]
    kept = keep_highest(scores, 4)
    assert [layer.tolist() for layer in kept] == [[[True, False, False], [True, False, True]], [[False, True, False]]]
    assert all(layer.all() for layer in keep_highest(scores, 100))
    assert keep_highest([None, *scores], 4)[0] is None


@pytest.mark.parametrize("name", TEACHERS)
def test_any_teacher_takes_another_cache(name):
    """A cache that holds everything changes nothing, a smaller one does."""
    model, ids = make_teacher(name), random_ids(1, 80)
    own, shapes, tokenizer = reader(model), layer_shapes(model), chat_tokenizer()
    scores_of = partial(reading_scores, model, own, shapes, tokenizer)
    readers = [[read_with(model, own, OtherCache(window=width).attend) for width in (80, 3)]]
    if any(shape.limit is None for shape in shapes):
        readers.append([read_after(model, own, scores_of, [40], pairs, False) for pairs in (10**6, 8)])
    with torch.no_grad():
        expected = own.states(ids)
        for whole, smaller in readers:
            torch.testing.assert_close(whole.states(ids), expected, rtol=1e-3, atol=1e-4)
            assert (smaller.states(ids) - expected).abs().max() > 1e-3


def test_what_follows_a_context_sees_what_is_kept_of_it(model):
    """A cache of transformers from which the rest is deleted, after a prompt was read with all of it."""
    ids, ends = random_ids(1, 60), (20, 40)
    generator = torch.Generator().manual_seed(0)
    kept = {
        end: [torch.rand(2, end, generator=generator).argsort(-1) < 8 for _ in range(4)] for end in ends
    }  # eight of each head, so that the cache stays a tensor
    with torch.no_grad():
        with attending(model, Eviction(kept, moments=False).attend):
            both = model(ids.expand(2, -1)).logits
        whole = model(ids).logits
        torch.testing.assert_close(both[:1], whole, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(both[1:, :20], whole[:, :20], rtol=1e-4, atol=1e-4)
        for end, stop in zip(ends, (40, 60), strict=True):
            held = DynamicCache(config=model.config)
            model(ids[:, :end], **{CACHE_NAME: held})
            for layer, keep in zip(held.layers, kept[end], strict=True):
                layer.keys, layer.values = (t[:, keep].view(1, 2, 8, -1) for t in (layer.keys, layer.values))
            length = stop - end
            mask = torch.full((length, 8 + length), -torch.inf).triu(9)[None, None]
            expected = model(ids[:, end:stop], **{CACHE_NAME: held}, attention_mask=mask,
                             position_ids=torch.arange(end, stop)[None]).logits  # fmt: skip
            torch.testing.assert_close(both[1:, end:stop], expected, rtol=1e-4, atol=1e-4)


def test_nothing_is_lost_where_all_pairs_are_kept(model):
    own, ids = reader(model), random_ids(1, 60)
    scores = [torch.rand(2, 30) for _ in range(4)]
    for moments in (False, True):
        everything = read_after(model, own, lambda context: scores, [30], 4 * 2 * 30, moments)
        less = read_after(model, own, lambda context: scores, [30], 4 * 2 * 5, moments)
        with torch.no_grad():
            torch.testing.assert_close(everything.states(ids), own.states(ids), rtol=1e-3, atol=1e-3)
            assert (less.states(ids) - own.states(ids)).abs().max() > 1e-2


def test_moments_are_exact_to_first_order():
    """The error of what is read of similar keys falls with the square of their distance."""
    generator = torch.Generator().manual_seed(0)
    mean, spread = torch.randn(1, 2, 1, 8, generator=generator), torch.randn(1, 2, 50, 8, generator=generator)
    query, value = (torch.randn(1, 2, n, 8, generator=generator) for n in (5, 50))
    evicted = torch.rand(2, 50, generator=generator) < 0.6

    def score(q, k):
        return q @ k.transpose(-1, -2) * 0.5

    def errors(distance):
        key = mean + distance * spread
        mass, read = read_moments(query, key, value, evicted, score)
        scores = score(query, key).masked_fill(~evicted[None, :, None], -torch.inf)
        exact = scores.logsumexp(-1, keepdim=True), scores.softmax(-1) @ value
        return [(a - b).abs().max().item() for a, b in zip((mass, read), exact, strict=True)]

    assert max(errors(0.0)) < 1e-5
    for near, far in zip(errors(0.05), errors(0.1), strict=True):
        assert 3 < far / near < 5


def test_code_is_a_text():
    rows = list(TextSource(PYTHON_CODE).documents())
    assert len(rows) > 3
    assert all("def " in text for text in rows)
