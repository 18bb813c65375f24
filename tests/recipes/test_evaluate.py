"""The evaluation as it is typed, on tiny models, and its figures against plain computations."""

import contextlib
import hashlib
import io
import json
import math
import random
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import lm_eval.tasks
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from lm_eval.tasks import TaskManager
from tokenizers import processors
from transformers import AutoModelForCausalLM

from convert.checkpoint.card import KL_ROW, NOT_MEASURED, RECALL_ROW
from convert.checkpoint.pictures import KL
from convert.fit.text import documents
from recipes import evaluate as evaluation
from recipes.evaluation.generation import INSTRUCTIONS, PROMPTS, common_prefix, judge, repetition
from recipes.evaluation.metrics import by_position, edges, figures, half_width, per_token, reader
from recipes.evaluation.recall import hits, questions, relative_recall, scores
from recipes.evaluation.speed import speed
from recipes.evaluation.tasks import relative_score
from recipes.evaluation.tasks import side_by_side as task_rows
from recipes.evaluation.texts import TextSource
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import make_teacher, random_ids
from tests.helpers.tiny_chat import chat_tokenizer, save_chat_teacher, save_hybrid, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher, its hybrid, one of other words, a text, and a task with its data."""
    folder = tmp_path_factory.mktemp("evaluation")
    teacher = save_chat_teacher(folder / "teacher")
    save_hybrid(teacher, folder / "hybrid")
    save_chat_teacher(folder / "other", "llama-mha-tied")
    description = json.loads((folder / "other/tokenizer.json").read_text())
    vocabulary = description["model"]["vocab"]
    vocabulary["another"] = vocabulary.pop("w9")
    (folder / "other/tokenizer.json").write_text(json.dumps(description))
    rng = random.Random(0)
    lines = [json.dumps({"text": words(rng, 60, 90)}) for _ in range(40)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    (folder / "empty.jsonl").write_text("")
    (folder / "tasks").mkdir()
    rows = [{"q": words(rng, 3, 6), "choices": ["w7", "w8", "w9 w10"], "answer": i % 3} for i in range(8)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{answer}}",
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}]}
    lost = {"dataset_kwargs": {"data_files": {"test": str(folder / "gone.jsonl")}}}
    for name, task in (("tiny_choice", common | choice), ("lost_choice", common | choice | lost)):
        (folder / f"tasks/{name}.yaml").write_text(yaml.safe_dump({"task": name} | task))
    poor = "task: poor_choice\ninclude: tiny_choice.yaml\nprocess_docs: !function poor.documents\n"
    (folder / "tasks/poor_choice.yaml").write_text(poor)
    (folder / "tasks/poor.py").write_text("import no_such_package\n\ndocuments = no_such_package.documents\n")
    return folder


def evaluate(folder, *arguments, model="hybrid", teacher="teacher"):
    """The exit code of the command, what it printed, and its errors with line breaks undone."""
    named = () if teacher is None else ("--teacher", folder / teacher if teacher != "none" else teacher)
    quick = ("--text", folder / "text.jsonl", "--lengths", "64", "--sequences", 2)
    small = ("--depths", "0.2", "0.8", "--max-new-tokens", 4, "--speed-tokens", 2)
    command = [str(a) for a in (folder / model, *named, *quick, *small, *arguments)]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            evaluation.main(command)
        except SystemExit as stopped:
            code = stopped.code
    return SimpleNamespace(exit_code=code, stdout=out.getvalue(), stderr=" ".join(err.getvalue().split()))


def test_everything_at_once(folder, tmp_path):
    """All parts, offline; the same command again computes nothing; the card takes the figures."""
    card = ModelCard.load(folder / "hybrid/README.md")
    arguments = ("--output", tmp_path / "e", "--tasks", "tiny_choice", "--include-path", folder / "tasks", "--json")
    done = evaluate(folder, *arguments, "--update-card")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "e/evaluation.json").read_text())
    (text,) = found["text"]
    assert (text["name"], text["length"], text["sequences"]) == ("text", 64, 2)
    assert text["kl"] > 0
    assert [row["stop"] for row in text["by_position"]] == [16, 32, 64]
    assert {row["probe"] for row in found["recall"]} == {"copy", "associative", "needle", "passkey"}
    assert all(0 <= row[who] <= 1 for row in found["recall"] for who in ("model", "teacher"))
    assert found["generation"]["instructions"]["count"] == len(INSTRUCTIONS)
    assert len(found["generation"]["answers"]) == len(PROMPTS)
    (task,) = found["tasks"]
    assert task["chance"] == pytest.approx(1 / 3)
    assert task["chance_from"] == "choices"
    assert task["documents"] == 8
    assert [row["which"] for row in found["speed"]] == ["model", "teacher"]
    assert found["speed"][0]["cache_bytes"] != found["speed"][1]["cache_bytes"]
    report = (tmp_path / "e/evaluation.md").read_text()
    assert all(f"## {part}" in report for part in ("Text", "Recall", "Generation", "Tasks", "Speed"))
    assert f"{text['kl']:.3f}" in report

    after = ModelCard.load(folder / "hybrid/README.md")
    values = {(r.dataset_type, r.metric_type): r.metric_value for r in after.data.eval_results}
    assert values["text", "kl"] == pytest.approx(text["kl"], abs=1e-6)
    assert values["tiny_choice", "acc"] == pytest.approx(task["model"], abs=1e-6)
    assert "### Recall" in after.text
    assert str(folder) not in after.text
    rows = [line for line in card.text.strip().splitlines() if NOT_MEASURED not in line]
    assert set(rows) < set(after.text.splitlines())
    assert NOT_MEASURED not in after.text
    assert f"| {KL_ROW} | {text['kl']:.3f} ± " in after.text
    share = relative_recall(found["recall"])  # of a tiny random teacher mostly None
    assert f"| {RECALL_ROW} | {'the teacher recalls nothing' if share is None else f'{share:.0%}'} |" in after.text
    assert f"({KL})" in after.text
    assert (folder / "hybrid" / KL).stat().st_size > 1000

    def fail(*arguments, **options):
        raise AssertionError("computed again")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_model", "prompt_tokenizer", "run_task"):
            patch.setattr(evaluation, name, fail)
        again = evaluate(folder, *arguments, "--update-card")
        assert again.exit_code == 0
        assert json.loads(again.stdout) == found
    assert ModelCard.load(folder / "hybrid/README.md").content == after.content, "written twice, the card is the same"


def test_an_interrupted_run_goes_on(folder, tmp_path, monkeypatch):
    arguments = ("--output", tmp_path / "e", "--parts", "text", "generation")
    whole = evaluate(folder, "--output", tmp_path / "whole", "--parts", "text", "generation", "--json")
    monkeypatch.setattr(evaluation, "judge", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    broken = evaluate(folder, *arguments)
    assert broken.exit_code == 130
    assert "goes on from here" in broken.stderr
    assert not (tmp_path / "e/evaluation.json").exists()
    assert len(list((tmp_path / "e/parts").iterdir())) == 3
    monkeypatch.undo()
    monkeypatch.setattr(evaluation, "per_token", None)  # what is done is not done again
    done = evaluate(folder, *arguments, "--json")
    first, second = json.loads(whole.stdout), json.loads(done.stdout)
    assert (first["text"], first["generation"]) == (second["text"], second["generation"])


def test_results_of_other_settings_are_never_mixed(folder, tmp_path):
    def run(*arguments, **named):
        done = evaluate(folder, "--output", tmp_path / "e", "--json", *arguments, **named)
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    run("--parts", "text")
    added = run("--parts", "speed", "text", "--lengths", 32, "--batch-size", 1)
    assert [row["length"] for row in added["text"]] == [64, 32], "a length more adds to what is there"
    assert "speed" in added
    assert "recall" not in added
    fewer = run("--parts", "text", "--lengths", 32, "--sequences", 1)
    assert [(row["length"], row["sequences"]) for row in fewer["text"]] == [(32, 1)]
    assert "speed" in fewer
    other = run("--parts", "text", "--lengths", 32, model="teacher")
    assert other["text"][0]["kl"] == pytest.approx(0, abs=1e-6)
    assert "speed" not in other
    for damaged in (tmp_path / "e/parts").glob("text*"):
        damaged.write_text("{")
    refused = evaluate(folder, "--output", tmp_path / "e", "--parts", "text", "--lengths", 32)
    assert refused.exit_code == 1
    assert "is damaged" in refused.stderr


def test_a_run_that_failed_can_be_put_right(folder, tmp_path):
    """What a mistaken command left stands in nobody's way."""
    arguments = ("--output", tmp_path / "e", "--parts", "text")
    early = evaluate(folder, *arguments, "--seed", 3, "--lengths", 90000)
    late = evaluate(folder, *arguments, "--text", folder / "missing.jsonl")
    assert early.exit_code == late.exit_code == 1
    done = evaluate(folder, *arguments, "--json")
    assert done.exit_code == 0
    assert len(json.loads(done.stdout)["text"]) == 1


def test_without_a_teacher(folder, tmp_path):
    parts = ("--output", tmp_path / "e", "--parts", "text", "recall", "generation", "speed", "--limit", 1, "--json")
    done = evaluate(folder, *parts, teacher="none")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["teacher"] is None
    assert found["text"][0]["kl"] is None
    assert found["text"][0]["perplexity"] > 1
    assert found["text"][0]["sequences"] == 1
    assert found["text"][0]["perplexity_interval"] is None
    assert all(row["teacher"] is None for row in found["recall"])
    assert found["generation"]["greedy_agreement"] is None
    assert found["generation"]["prompts"] == 1
    assert [row["which"] for row in found["speed"]] == ["model"]
    assert "| 0 | 16 | – |" in (tmp_path / "e/evaluation.md").read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--parts", "tex"), "--parts takes some of"),
        (("--parts", "tasks"), "--tasks names none"),
        (("--tasks", "tiny_choice", "--parts", "text"), "--parts leaves them out"),
        (("--tasks", "no_such_task"), "There is no task no_such_task"),
        (("--tasks", "lost_choice", "--include-path", "{}/tasks", "--parts", "tasks"), "lost_choice cannot be run"),
        (
            ("--tasks", "poor_choice", "--include-path", "{}/tasks", "--parts", "tasks"),
            "poor_choice cannot be run: No module named 'no_such_package'",
        ),
        (("--tasks", "tiny_choice", "--include-path", "{}/nothing"), "is not a folder"),
        (("--tasks", "tiny_choice", "--chance", "0.5"), "TASK=NUMBER"),
        (("--chance", "tiny_choice=1.5"), "from 0 to below 1"),
        (("--lengths", "0"), "--lengths must be 8 or more"),
        (("--sequences", "0"), "--sequences must be 1 or more"),
        (("--tasks", "ruler", "--ruler-lengths", "512"), "--ruler-lengths must be 1024 or more"),
        (("--recall-lengths", "16"), "--recall-lengths must be 64 or more"),
        (("--depths", "1.5"), "from 0 to 1"),
        (("--contexts", "0"), "must be 1 or more"),
        (("--text", "{}/empty.jsonl"), "is empty"),
        (("--text", "{}/missing.jsonl"), "cannot be read as text"),
        (("--lengths", "90000"), "use a longer text"),
        (("--teacher", "{}/other"), "another vocabulary"),
        (("--teacher", "{}/missing"), "does not exist"),
        (("--output", "{}/text.jsonl"), "is a file"),
        (("--output", "{}/tasks"), "something else than an evaluation"),
        (("--device", "cuda"), "no CUDA device"),
    ],
)
def test_bad_input_is_one_line(folder, tmp_path, monkeypatch, arguments, message):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    # lm-eval's own tasks are thousands of files, which take half a minute to list
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(TaskManager, include_defaults=False))
    done = evaluate(folder, "--output", tmp_path / "e", *(a.format(folder) for a in arguments))
    assert done.exit_code == 1, done.stderr
    assert message in done.stderr, done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr


def test_a_missing_model_or_teacher_is_one_line(folder, tmp_path, capsys):
    missing = evaluate(folder, model="missing")
    assert missing.exit_code == 1
    assert "does not exist" in missing.stderr
    with pytest.raises(SystemExit):
        evaluation.main(["--json"])
    assert "Name the model to measure first" in capsys.readouterr().err
    unrecorded = evaluate(folder, model="teacher", teacher=None)
    assert unrecorded.exit_code == 1
    assert "--teacher none" in unrecorded.stderr
    local = evaluate(folder, teacher=None)  # a local teacher's path is not recorded whole
    assert local.exit_code == 1
    assert "say where it is" in local.stderr
    with pytest.raises(ValueError, match="--update-card"):
        evaluation.Options("org/name", teacher="none", update_card=True)
    many = evaluate(folder, "--lengths", "many")
    assert many.exit_code == 2
    assert "invalid int value" in many.stderr


def naive(model, teacher, ids):
    """KL, nats and agreement of every token, a sequence at a time, in float64."""
    p, q = (
        torch.cat([m(row[None], use_cache=False).logits.double().log_softmax(-1) for row in ids])
        for m in (teacher, model)
    )
    following = ids[:, 1:, None]
    nats, teacher_nats = (-t[:, :-1].gather(-1, following).squeeze(-1) for t in (q, p))
    return (p.exp() * (p - q)).sum(-1), nats, teacher_nats, (p.argmax(-1) == q.argmax(-1)).double()


@torch.no_grad()
def test_figures_are_the_plain_ones():
    model, teacher, ids = make_hybrid(dtype=torch.float32), make_teacher("llama-gqa"), random_ids(5, 300)
    found = per_token(reader(model), reader(teacher), ids, batch_size=2)
    kl, nats, teacher_nats, agrees = naive(model, teacher, ids)
    torch.testing.assert_close(found.kl.double(), kl, rtol=1e-4, atol=1e-5)
    whole = figures(found)
    assert whole["kl"] == pytest.approx(kl.mean().item(), rel=1e-5)
    assert whole["kl_interval"] == pytest.approx(1.96 * kl.mean(1).std().item() / math.sqrt(5), rel=1e-4)
    assert whole["perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-5)
    assert whole["teacher_perplexity"] == pytest.approx(math.exp(teacher_nats.mean()), rel=1e-5)
    assert whole["perplexity_ratio"] == pytest.approx(math.exp((nats - teacher_nats).mean()), rel=1e-5)
    assert whole["agreement"] == pytest.approx(agrees.mean().item(), abs=1e-9)
    late = by_position(found)[-1]
    assert (late["start"], late["stop"]) == (256, 300)
    assert late["kl"] == pytest.approx(kl[:, 256:].mean().item(), rel=1e-5)
    assert late["perplexity"] == pytest.approx(math.exp(nats[:, 256:].mean()), rel=1e-5)
    assert late["agreement"] == pytest.approx(agrees[:, 256:].mean().item(), abs=1e-9)
    alone = per_token(reader(model), None, ids, 5)
    torch.testing.assert_close(alone.nats, found.nats, rtol=1e-4, atol=1e-5)
    assert figures(alone)["kl"] is None
    assert by_position(alone)[0]["teacher_perplexity"] is None
    same = figures(per_token(reader(teacher), reader(teacher), ids, 5))
    assert same["kl"] < 1e-6
    assert same["agreement"] == 1
    assert same["perplexity_ratio"] == pytest.approx(1)


MEMORY = """
import resource, torch
from convert.fit.divergence import kl_of_hidden
from convert.memory import keep_free_memory
from recipes.evaluation.metrics import Reader, per_token

keep_free_memory()
weight = torch.randn(20_000, 8)
reader = Reader(lambda ids: torch.randn(*ids.shape, 8), lambda states: states @ weight.T)
for length in (1024, 4096):
    per_token(reader, reader, torch.randint(100, (1, length)), 1)
    states = torch.randn(2, length, 8)
    kl_of_hidden(*states, reader.head)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_long_text_takes_as_much_memory_as_a_short_one():
    said = subprocess.run([sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True).stdout
    short, long = map(int, said.split())
    assert long < 1.15 * short


def test_logits_that_are_no_numbers_are_an_error():
    model = make_hybrid(dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf
    with pytest.raises(ValueError, match="not finite"):
        per_token(reader(model), None, random_ids(1, 20), 1)


def test_more_tokens_than_a_model_was_made_for_are_warned_of(folder, tmp_path):
    arguments = ("--output", tmp_path / "e", "--parts", "speed", "--contexts", 300, "--limit", 1)
    assert "made for 256 tokens, and 300 are asked for" in evaluate(folder, *arguments, teacher="none").stderr


def test_positions_are_powers_of_two():
    assert edges(8) == [0, 8]
    assert edges(16) == [0, 16]
    assert edges(100) == [0, 16, 32, 64, 100]
    assert half_width(torch.tensor([1.0])) is None
    assert half_width(torch.zeros(3)) == 0


def test_a_model_that_scales_its_logits_is_read_whole():
    """Body and head would give other logits than the model's own."""
    from transformers import GraniteConfig, GraniteForCausalLM

    from tests.helpers.teachers import TINY

    model = GraniteForCausalLM(GraniteConfig(**TINY, logits_scaling=4.0)).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_()
        ids = random_ids(2, 20)
        read = reader(model)
        torch.testing.assert_close(read.head(read.states(ids)), model(ids).logits)


class Copier(torch.nn.Module):
    """Says what followed its last token where that stood before; or always something else."""

    def __init__(self, vocabulary: int, right: bool):
        super().__init__()
        self.config, self.device = SimpleNamespace(vocab_size=vocabulary), torch.device("cpu")
        self.right, self.base_model = right, None

    def get_output_embeddings(self):
        return None

    def forward(self, ids, use_cache=False):
        logits = torch.zeros(*ids.shape, self.config.vocab_size)
        for b, row in enumerate(ids.tolist()):
            for t, token in enumerate(row):
                before = [s for s in range(t) if row[s] == token]
                said = row[before[-1] + 1] if before else 0
                logits[b, t, said if self.right else (row[t + 1 : t + 2] or [0])[0] - 1] = 9
        return SimpleNamespace(logits=logits)


def test_probes_begin_as_the_tokenizer_begins_a_text():
    first = chat_tokenizer().convert_tokens_to_ids("w9")
    tokenizer = chat_tokenizer()
    template = processors.TemplateProcessing(single="w9 $A", special_tokens=[("w9", first)])
    tokenizer.backend_tokenizer.post_processor = template
    prose = torch.full((2, 66), 320)
    prose[:, 0] = first
    model = Copier(400, right=True)
    for question in questions(prose, tokenizer, 400, [0.0, 1.0], seed=0):
        ids, answers = question.probe
        assert (ids[:, 0] == first).all()
        assert not answers[:, 0].any()
        if question.name != "passkey":
            said = hits(reader(model), question.probe, 2, torch.device("cpu"))
            assert all(row["model"] == 1 for row in scores(question, said)), question.name


@pytest.mark.parametrize("right", [True, False])
def test_probes_tell_a_model_that_copies_from_one_that_does_not(right):
    model, tokenizer = Copier(400, right), chat_tokenizer()
    prose = torch.randint(320, 400, (3, 64), generator=torch.Generator().manual_seed(1))  # unlike the random tokens
    asked = questions(prose, tokenizer, 400, [0.0, 0.5, 1.0], seed=0)
    found = {}
    for question in asked:
        said = hits(reader(model), question.probe, 2, torch.device("cpu"))
        assert not said[~question.probe.answers].any()
        for row in scores(question, said):
            found[row["probe"], row["distance"]] = row["model"]
            assert row["samples"] <= 3
            assert row["model_error"] in (0.0, None)
    assert {key: value for key, value in found.items() if key[0] != "passkey"} == {
        key: float(right) for key in found if key[0] != "passkey"
    }
    assert {distance for probe, distance in found if probe == "needle"} == {56, 32, 8}
    assert found["copy", 32] == float(right)
    assert found["associative", None] == float(right)
    assert {distance for probe, distance in found if probe == "associative"} <= {None, 2, 4, 8, 16, 32, 64}


def test_distances_of_associative_recall():
    """Against a search in each row, and half right is half right."""
    question = next(
        q for q in questions(torch.zeros(2, 64).long(), chat_tokenizer(), 400, [], 3) if q.distance is None
    )
    ids, answers = question.probe
    expected = {}
    for b, row in enumerate(ids.tolist()):
        for t in answers[b].nonzero().flatten().tolist():
            distance = t - (row.index(row[t - 1]) + 1)
            expected.setdefault(2 ** math.ceil(math.log2(distance)), []).append((b, t))
    found = torch.zeros_like(answers)
    upper = max(expected)
    for b, t in expected[upper]:
        found[b, t] = True
    rows = {row["distance"]: row for row in scores(question, found)}
    assert rows.keys() == {None, *expected}
    assert rows[upper]["model"] == 1
    assert all(row["model"] == 0 for distance, row in rows.items() if distance not in (None, upper))
    shares = [found[b].sum().item() / answers[b].sum().item() for b in range(2)]
    assert rows[None]["model"] == pytest.approx(sum(shares) / 2)
    assert rows[None]["model_error"] == pytest.approx(abs(shares[0] - shares[1]) / 2)


def test_a_passkey_counts_only_whole():
    question = questions(torch.zeros(2, 64).long(), chat_tokenizer(), 128, [0.5], 0)[-1]
    assert question.name == "passkey"
    assert question.whole
    assert question.probe.ids.shape == (2, 64)
    assert question.probe.answers[:, -1].all()
    partly = question._replace(probe=question.probe._replace(answers=torch.ones(2, 64, dtype=torch.bool)))
    found = torch.ones(2, 64, dtype=torch.bool)
    found[0, 3] = False
    assert scores(partly, found)[0]["model"] == 0.5


def test_relative_score_and_its_error():
    """Against many samples of documents, whose scores of both models depend on each other."""
    generator = torch.Generator().manual_seed(0)
    ratios, errors, n = [], [], 400
    for _ in range(400):
        hard = torch.rand(n, generator=generator)
        s, t = (
            (hard + torch.rand(n, generator=generator) * spread < level).double()
            for spread, level in ((0.3, 0.5), (0.3, 0.7))
        )
        ratio, error = relative_score(s.tolist(), t.tolist(), 0.25)
        ratios.append(ratio)
        errors.append(error)
    ratios, errors = torch.tensor(ratios), torch.tensor(errors)
    assert ratios.mean().item() == pytest.approx((0.35 - 0.25) / (0.55 - 0.25), abs=0.01)
    assert errors.mean().item() == pytest.approx(ratios.std().item(), rel=0.1)
    covered = ((ratios - ratios.mean()).abs() < 1.96 * errors).double().mean().item()
    assert 0.92 < covered < 0.98
    assert relative_score([1, 0] * 50, [1, 0] * 50, 0.25) == (1.0, 0.0)
    assert relative_score([1, 1, 0, 1], [0, 1, 0, 0], 0.25) is None, "a teacher at chance is nothing to divide by"
    ratio, _ = relative_score([1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.5, 0.25, 0.25])
    assert ratio == pytest.approx((2 - 1) / (3 - 1))


def test_chance_is_said_where_it_comes_from():
    def result(values):
        metrics = {
            "acc": {"value": sum(values) / len(values), "better": True, "values": values},
            "exact_match": {"value": sum(values) / len(values), "better": True, "values": values},
            "perplexity": {"value": 12.0, "better": False, "values": None},
        }
        return {"t": {"documents": len(values), "chance": 0.5, "chances": [0.5] * len(values), "metrics": metrics}}

    ours, theirs = result([1.0, 0.0, 1.0, 1.0] * 20), result([1.0, 1.0, 1.0, 1.0] * 20)
    rows = {row["metric"]: row for row in task_rows(ours, theirs, {})}
    assert (rows["acc"]["chance"], rows["acc"]["chance_from"]) == (0.5, "choices")
    assert rows["acc"]["relative"] == pytest.approx(0.5)
    assert rows["exact_match"]["relative"] == pytest.approx(0.75)
    assert rows["exact_match"]["chance_from"] == "assumed"
    assert rows["perplexity"]["relative"] is None
    assert rows["perplexity"]["teacher"] == 12
    given = task_rows(ours, theirs, {"t": 0.6})[0]
    assert given["chance_from"] == "given"
    assert given["relative"] == pytest.approx((0.75 - 0.6) / 0.4)
    assert task_rows(ours, None, {})[0]["relative"] is None


def test_recall_relative_to_the_teacher():
    rows = [
        {"probe": "copy", "distance": 32, "model": 0.5, "teacher": 1.0},
        {"probe": "associative", "distance": None, "model": 0.25, "teacher": 0.5},
        {"probe": "associative", "distance": 2, "model": 0.0, "teacher": 0.9},
    ]
    assert relative_recall(rows) == pytest.approx(0.5)
    assert relative_recall([]) is None
    assert relative_recall([rows[0] | {"teacher": 0.0}]) is None


def test_greedy_agreement_and_repetition():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1], [1, 2]) == 1
    assert repetition([1, 2, 3, 4, 5, 6]) == 0
    assert repetition([1] * 10) == pytest.approx(6 / 7)
    comma = "Write one sentence about birds without any comma."
    found = judge([PROMPTS[0], comma], [[5, 6, 7, 8], [9] * 8], [[5, 6, 1, 8], [9] * 8], chat_tokenizer(), 4)
    assert found["greedy_agreement"] == pytest.approx((0.5 + 1) / 2)
    assert found["repetition"] == pytest.approx((0 + 4 / 5) / 2)
    assert found["tokens_alike"] == 8
    assert found["cut_off"] == 0
    assert found["equal_answers"] == 0.5
    assert found["length_ratio"] == 1
    longer = judge([comma], [[5, 6, 7, 8]], [[5, 6, 2]], chat_tokenizer(), 4)
    assert longer["cut_off"] == 1
    assert longer["equal_answers"] == 0
    assert longer["length_ratio"] == pytest.approx(4 / 3)
    assert found["instructions"] == {"model": 1.0, "teacher": 1.0, "count": 1}
    assert found["answers"][0]["model_followed"] is None
    assert found["answers"][1]["model"] == " ".join(["w9"] * 8)


FOLLOWED = (
    "ROME.", "a bicycle has two wheels.", "Green.", "Flour and water", " ".join(["tree"] * 45), "Dogs bark. Dogs run.",
    "It tells the time.", "Here:\n- apple\n- pear\n- plum", "1. cat\n2. dog\n3. cow", "Oslo, Rome, Paris, Lima, Cairo",
    "The river ran over the Stone.", "Birds sing.", "In short, a place to learn.", "They sing. The end.",
    '```json\n{"name": "Ann", "age": 3}\n```', '"Hello, reader."', "1 2 3 4 5", "Yes.",
)  # fmt: skip
BROKEN = (
    "Rome.", "A bicycle", "It is green", "Flour, water, salt, yeast and sugar", "tree", "Dogs bark.",
    "It ticks. It tocks.", "- apple\n- pear", "1. cat\n2. dog", "Oslo, Rome", "The river.", "Birds, all", "A school",
    "The end. No", '{"name": "Ann"}', 'Hello "you"', "1, 2, 3, 4, 5", "yes, no",
)  # fmt: skip


def test_every_rule_tells_a_followed_instruction_from_a_broken_one():
    for (prompt, followed), good, bad in zip(INSTRUCTIONS.items(), FOLLOWED, BROKEN, strict=True):
        assert followed(good) is True, (prompt, good)
        assert followed(bad) is False, (prompt, bad)
        assert followed("") is False, (prompt, bad)


def test_texts():
    shipped = TextSource("shipped").rows(chat_tokenizer(), 32, 2)
    assert shipped.shape == (2, 32)
    assert TextSource("shipped").label == "shipped"
    everything = list(documents("default"))
    held_out = list(TextSource("shipped").documents())
    assert hashlib.sha256("\n".join(held_out).encode()).hexdigest()[:16] == "1802f3c11f85adb1"
    assert not set(held_out) & set(everything[: -len(held_out)])
    code = list(TextSource("python-code").documents())
    assert not any(source.startswith(text[:200]) for source in code for text in everything)
    longest = next(TextSource("python-docs").documents())
    assert len(longest) > 20_000
    with pytest.raises(ValueError, match="needs? "):
        TextSource("shipped").rows(chat_tokenizer(), 10_000_000, 1)


def test_speed_counts_the_cache(folder):
    hybrid = AutoModelForCausalLM.from_pretrained(folder / "hybrid")
    rows = speed({"model": hybrid}, batch=2, context=16, new_tokens=2, repeats=1)
    (twice,) = speed({"model": hybrid}, batch=2, context=32, new_tokens=2, repeats=1)
    assert rows[0]["decode_tokens_per_second"] == pytest.approx(2 / rows[0]["seconds_per_token"])
    kv = 2 * 2 * 16 * hybrid.config.num_key_value_heads * hybrid.config.head_dim * 4
    layers = hybrid.config.layer_types.count("full_attention")
    assert twice["cache_bytes"] - rows[0]["cache_bytes"] == layers * kv
