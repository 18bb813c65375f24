"""SmolLM2-135M-Instruct, for real: GGUF and safetensors, all attention and half."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from convert import convert
from recipes.demo import HELD_OUT, elsewhere, kl_per_token
from recipes.load_elsewhere import ProjectNotInstalled


@pytest.fixture(scope="module")
def teacher(smollm2_gguf):
    return AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2_attention):
    return AutoTokenizer.from_pretrained(smollm2_attention)


@torch.no_grad()
def test_all_attention_equals_the_teacher(teacher, tokenizer, smollm2_attention):
    hybrid = AutoModelForCausalLM.from_pretrained(smollm2_attention).eval()
    ids = tokenizer(HELD_OUT.read_text(), return_tensors="pt").input_ids[:, :128]
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids).logits, rtol=1e-4, atol=1e-4)
    chat = [{"role": "user", "content": "What is the capital of France, and why do people visit it?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options = dict(max_new_tokens=64, do_sample=False)
    assert torch.equal(hybrid.generate(**inputs, **options), teacher.generate(**inputs, **options))


@torch.no_grad()
def test_gguf_and_safetensors_teachers_give_the_same_hybrid(teacher, smollm2_hybrid, tmp_path):
    """The GGUF path reads, permutes and renames on its own; transformers' loading is the judge."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    plain = {k: v for k, v in teacher.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    copy = LlamaForCausalLM(LlamaConfig(**plain))
    copy.load_state_dict(teacher.state_dict())
    copy.save_pretrained(tmp_path / "teacher", max_shard_size="200MB")
    convert(str(tmp_path / "teacher"), tmp_path / "hybrid", align="none")
    a, b = (load_file(folder / "model.safetensors") for folder in (smollm2_hybrid, tmp_path / "hybrid"))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


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


def test_half_attention_generates_left_padded_without_this_project(smollm2_hybrid, tmp_path):
    import inspect

    blocker = f"import sys\n{inspect.getsource(ProjectNotInstalled)}\nsys.meta_path.insert(0, ProjectNotInstalled())\n"
    done = subprocess.run([sys.executable, "-I", "-c", blocker + LEFT_PADDED, str(smollm2_hybrid)],
                          capture_output=True, text=True, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("transformers_modules")


def test_demo_process_cannot_import_the_project(smollm2_attention, teacher, tokenizer):
    results = elsewhere(smollm2_attention, HELD_OUT.read_text())
    assert results["class"].startswith("transformers_modules") and len(results["answers"]) == 2
    ids = tokenizer(HELD_OUT.read_text(), return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        kl = kl_per_token(teacher(ids).logits[0], results["logits"])
    assert kl.abs().max() < 1e-4 and "Paris" in results["answers"][0]


def test_lm_eval_runs_on_the_folder(smollm2_hybrid, tmp_path):
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
    import yaml

    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(task))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", "tiny_choice", "--device", "cpu",
               "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--batch_size", "2",
               "--model_args", f"pretrained={smollm2_hybrid},trust_remote_code=True,dtype=float32"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "out").rglob("results*.json")
    assert 0 <= json.loads(results.read_text())["results"]["tiny_choice"]["acc,none"] <= 1


def test_closed_form_makes_it_a_language_model(teacher, tokenizer, smollm2_gguf, tmp_path):
    """Three layers replaced and fitted on a few thousand tokens of the text that ships; judged on other text.

    Mapped alone they cost nats (another test's hybrid: 16); fitted, little, and the model still copies.
    """
    import yaml

    from convert.alignment.probes import copy_probe
    from modeling_llamba import LlambaForCausalLM

    kept = ",".join(str(i) for i in range(30) if i not in (12, 24, 27))
    align = tmp_path / "align.yaml"
    align.write_text(yaml.safe_dump({"sequence_length": 256, "fit": {"refine_steps": 8}}))
    convert(
        str(smollm2_gguf), tmp_path / "hybrid", attention_layers=kept, tokens=5120, low_memory=True,
        align_config=str(align),
    )  # fmt: skip
    student = LlambaForCausalLM.from_pretrained(tmp_path / "hybrid")
    ids = tokenizer(HELD_OUT.read_text(), return_tensors="pt").input_ids[:, :256]
    probe = copy_probe(range(1000, 40000), 2, 64, seed=3)
    with torch.no_grad():
        kl = kl_per_token(teacher(ids).logits[0], student(ids).logits[0]).mean().item()
        predicted = student(probe.ids).logits.argmax(-1)[:, :-1][probe.answers[:, 1:]]
    copied = (predicted == probe.ids[probe.answers]).float().mean().item()
    assert kl < 0.15 and copied > 0.3, (kl, copied)
