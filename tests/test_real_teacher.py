"""SmolLM2-135M-Instruct, for real: GGUF and safetensors, all attention and half."""

import inspect
import json
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from convert import convert
from convert.checkpoint.load import prompt_tokenizer
from convert.fit.divergence import kl_of_logits
from convert.fit.probes import copy_probe
from convert.teachers.teacher import gguf_tokenizer
from modeling_llamba import LlambaForCausalLM
from recipes.demo import HELD_OUT, MAX_NEW_TOKENS, PROMPTS
from recipes.evaluation.load_elsewhere import ProjectNotInstalled, answer, run_elsewhere


@pytest.fixture(scope="module")
def teacher(smollm2_gguf):
    return AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def half(tmp_path_factory, smollm2_gguf):
    """The real teacher as a hybrid of half attention, half mixers."""
    folder = tmp_path_factory.mktemp("smollm2") / "half"
    convert(str(smollm2_gguf), folder, attention_layers=0.5, align="none")
    return folder


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf):
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@torch.no_grad()
@pytest.mark.slow  # tiny teachers: tests/convert/test_window.py
def test_all_attention_is_the_teacher_in_a_process_that_cannot_import_the_project(
    teacher, tokenizer, smollm2_gguf, tmp_path
):
    convert(str(smollm2_gguf), tmp_path / "hybrid", attention_layers="all", align="none")
    results = run_elsewhere(str(tmp_path / "hybrid"), PROMPTS, HELD_OUT.read_text(), 512, MAX_NEW_TOKENS)
    assert results["class"].startswith("transformers_modules")
    ids = tokenizer(HELD_OUT.read_text(), return_tensors="pt").input_ids[:, :512]
    logits = teacher(ids).logits[0]
    torch.testing.assert_close(results["logits"][:128], logits[:128], rtol=1e-4, atol=1e-4)
    assert kl_of_logits(logits, results["logits"]).abs().max() < 1e-4
    assert results["answers"] == [answer(teacher, tokenizer, prompt, MAX_NEW_TOKENS) for prompt in PROMPTS]
    assert "Paris" in results["answers"][0]


@torch.no_grad()
@pytest.mark.slow  # tiny teachers: tests/convert/io/test_gguf.py
def test_gguf_and_safetensors_teachers_give_the_same_hybrid(teacher, half, tmp_path):
    """The GGUF path reads, permutes and renames on its own; transformers' loading is the judge."""
    plain = {k: v for k, v in teacher.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    with torch.device("meta"):
        copy = LlamaForCausalLM(LlamaConfig(**plain))
    copy.load_state_dict(teacher.state_dict(), assign=True)
    copy.tie_weights()
    copy.save_pretrained(tmp_path / "teacher", max_shard_size="200MB")
    convert(str(tmp_path / "teacher"), tmp_path / "hybrid", attention_layers=0.5, align="none")
    a, b = (load_file(folder / "model.safetensors") for folder in (half, tmp_path / "hybrid"))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_prompts_leave_the_tokenizer_of_a_conversion_as_it_is(smollm2_gguf):
    """A GGUF file's is kept, since it takes seconds to read; what pads prompts once set it in that for all."""
    kept = gguf_tokenizer(smollm2_gguf.parent, smollm2_gguf.name)
    before = kept.padding_side
    assert prompt_tokenizer(str(smollm2_gguf)).padding_side == "left" != before
    assert gguf_tokenizer(smollm2_gguf.parent, smollm2_gguf.name).padding_side == before


LEFT_PADDED = """
import sys, torch
sys.path[:] = [p for p in sys.path if p]
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).double().eval()
prompts = ["The ferry", "In winter, when the wind comes round to the north,", "My grandmother was born on", "A"]
batch = tokenizer(prompts, return_tensors="pt", padding=True)
together = model.generate(**batch, max_new_tokens=16, do_sample=False)[:, batch.input_ids.shape[1]:]
for prompt, row in zip(prompts, together):
    one = tokenizer(prompt, return_tensors="pt")
    alone = model.generate(**one, max_new_tokens=16, do_sample=False)[0, one.input_ids.shape[1]:]
    assert torch.equal(alone, row[: len(alone)]), prompt
print(type(model).__module__)
"""


@pytest.mark.slow  # tiny models: padding in tests/modeling, a folder's own code in the test above
def test_half_attention_generates_left_padded_without_this_project(half, tmp_path):
    blocker = f"import sys\n{inspect.getsource(ProjectNotInstalled)}\nsys.meta_path.insert(0, ProjectNotInstalled())\n"
    done = subprocess.run([sys.executable, "-I", "-c", blocker + LEFT_PADDED, str(half)],
                          capture_output=True, text=True, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("transformers_modules")


@pytest.mark.slow  # a tiny model: tests/recipes/test_evaluate.py
def test_lm_eval_runs_on_the_folder(half, tmp_path):
    """`lm_eval --model hf` with no wrapper, on a task from a local file."""
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"q": f"Question {i}?", "choices": ["yes", "no"], "answer": i % 2}) for i in range(4))
    )
    task = {
        "task": "tiny_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(task))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", "tiny_choice", "--device", "cpu",
               "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--batch_size", "2",
               "--model_args", f"pretrained={half},trust_remote_code=True,dtype=float32"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "out").rglob("results*.json")
    assert 0 <= json.loads(results.read_text())["results"]["tiny_choice"]["acc,none"] <= 1


@pytest.mark.slow  # tiny teachers: tests/convert/fit/test_closed_form.py
@pytest.mark.parametrize("layers, tokens, steps", [((12,), 2560, 0), ((12, 24, 27), 5120, 8)])
@torch.no_grad()
def test_closed_form_makes_it_a_language_model(layers, tokens, steps, teacher, tokenizer, smollm2_gguf, tmp_path):
    """Layers replaced and fitted on a few thousand tokens of the text that ships; judged on other text.

    Mapped alone, half of the layers cost 16 nats; fitted, little, and the model still copies.
    """
    kept = [layer for layer in range(30) if layer not in layers]
    convert(
        str(smollm2_gguf), tmp_path / "hybrid", attention_layers=kept, tokens=tokens,
        sequence_length=256, refine_steps=steps,
    )  # fmt: skip
    student = LlambaForCausalLM.from_pretrained(tmp_path / "hybrid")
    ids = tokenizer(HELD_OUT.read_text(), return_tensors="pt").input_ids[:, :256]
    probe = copy_probe(range(1000, 40000), 2, 64, seed=3)
    kl = kl_of_logits(teacher(ids).logits, student(ids).logits).mean().item()
    predicted = student(probe.ids).logits.argmax(-1)[:, :-1][probe.answers[:, 1:]]
    copied = (predicted == probe.ids[probe.answers]).float().mean().item()
    assert kl < 0.15, (kl, copied)
    assert copied > 0.3, (kl, copied)
    errors = json.loads((tmp_path / "hybrid" / "alignment.json").read_text())["held_out_error"]
    assert all(fit["refined"] < fit["mapped"] for fit in errors.values())
