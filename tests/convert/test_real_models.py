"""Published files of real models, made small, through conversion, generation, training and export."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from convert import convert
from convert.checkpoint.tokenizer import differing_text
from convert.formats.export import export_checkpoint
from convert.options import ExportOptions, OutputOptions
from recipes import dpo, seqkd, sft
from recipes.training.chat_format import faithful_answers, pairs, questions
from recipes.training.forms import read_rows
from tests.helpers.data_forms import FORMS, FORMS_OF_SOME_TEMPLATES, rows_of
from tests.helpers.real_models import (
    CODE_SPLIT,
    REAL_MODELS,
    VOCABULARY,
    RealModel,
    small_config,
    small_generation,
    small_ids,
)
from tests.helpers.tiny_chat import common_arguments, template_of

pytestmark = pytest.mark.slow
EVERY_FORM = FORMS | FORMS_OF_SOME_TEMPLATES
OF_MESSAGES = ("messages", "ShareGPT")
"""The forms that SFT refuses without a chat template."""
MERGES = "h e,t he,i n,a n,o n,e r,r e,Ġ t,Ġt he,1 2,12 3,Ċ Ċ,i t,o u,d e,de f".split(",")
CHAT = [{"role": "user", "content": "2 + 2 = 4?\n\n  Yes, 1234"}, {"role": "assistant", "content": "Yes, 100 %"}]
IN_A_CLEAN_PROCESS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache
torch.manual_seed(0)
folder, scratch = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
assert not any(name.split(".")[0] in ("convert", "modeling_llamba", "recipes") for name in sys.modules)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
tokenizer.padding_side = "left"
batch = tokenizer(["the rain in Spain", "on the other hand, 1234 of them"], return_tensors="pt", padding=True)
batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
one = {name: t[1:] for name, t in batch.items()}
more = dict(max_new_tokens=6, min_new_tokens=6, max_length=None)
greedy = dict(do_sample=False, temperature=None, top_p=None, top_k=None, repetition_penalty=None, **more)
said = model.generate(**one, **greedy)
together = model.generate(**batch, **greedy)[1:]
assert torch.equal(said, together), (said, together)
for ways in (
    dict(prompt_lookup_num_tokens=2), dict(assistant_model=model), dict(use_cache=False),
    dict(cache_implementation="static"),
):
    if model._is_stateful and {"prompt_lookup_num_tokens", "assistant_model"} & set(ways):
        try:
            model.generate(**one, **greedy | ways)
        except ValueError as error:  # a state of the teacher's cannot be taken back
            assert "stateful" in str(error), error
            continue
    assert torch.equal(model.generate(**one, **greedy | ways), said), ways
model.generate(**batch, **more)
model.generate(**batch, **more, do_sample=True, num_return_sequences=2)
model.generate(**batch, **more, do_sample=False, num_beams=3, num_return_sequences=2)
model.generate(**batch, **more, do_sample=False, num_beams=2, length_penalty=0.5, no_repeat_ngram_size=2)
model.save_pretrained(scratch)
tokenizer.save_pretrained(scratch)
again = AutoModelForCausalLM.from_pretrained(scratch, trust_remote_code=True).eval()
assert torch.equal(again.generate(**one, **greedy), said)
text = "def f(x):\\n    return 1234.5\\n\\n\\n  # hello"
assert AutoTokenizer.from_pretrained(scratch, trust_remote_code=True)(text).input_ids == tokenizer(text).input_ids
"""


def tokenizer_json(model: RealModel, bos: int | None) -> Tokenizer:
    """A byte-level tokenizer whose first and last 16 ids are special tokens."""
    words = [*(f"<special_{i}>" for i in range(15)), "<unk>"] + sorted(pre_tokenizers.ByteLevel.alphabet())
    words += ["<|im_start|>", "<|im_end|>", *("".join(merge.split()) for merge in MERGES)]
    words += [f"<plain_{i}>" for i in range(VOCABULARY - 16 - len(words))]
    words += [f"<special_{i}>" for i in range(VOCABULARY - 16, VOCABULARY)]
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    split = pre_tokenizers.Split(Regex(CODE_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [word for word in words if word.startswith(("<special", "<|im_"))]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    if model.bos and bos is not None:
        first = f"<special_{bos}>"
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, bos)])
    return tokenizer


@pytest.fixture(scope="module", params=REAL_MODELS)
def folder(request, tmp_path_factory) -> Path:
    """The folder of a small model with published settings."""
    model, folder = REAL_MODELS[request.param], tmp_path_factory.mktemp("real") / request.param
    raw = small_config(model)
    kind = {key: value for key, value in raw.items() if key != "model_type"}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(raw["model_type"], **kind)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw | {"torch_dtype": "float32"}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if (generation := small_generation(model)) is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    ids = small_ids(model.config | model.generation)
    end = raw.get("eos_token_id") or (generation or {}).get("eos_token_id") or VOCABULARY - 1
    end = end[0] if isinstance(end, list) else end
    names = {"bos_token": raw.get("bos_token_id"), "eos_token": end, "unk_token": end}
    if model.pad:
        pad = raw.get("pad_token_id") or model.generation.get("pad_token_id")
        names["pad_token"] = end if pad is None else ids.get(pad, pad)
    settings = {name: f"<special_{number}>" for name, number in names.items() if number is not None}
    settings |= {"tokenizer_class": model.tokenizer_class, "model_max_length": raw["max_position_embeddings"]}
    if model.template is not None:
        settings["chat_template"] = model.template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer_json(model, raw.get("bos_token_id")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def hybrid(folder, tmp_path_factory) -> Path:
    """The default conversion, of less text and a shorter context, but for Gemma 4, whose windows take more at 512."""
    output = tmp_path_factory.mktemp("hybrids") / folder.name
    context = 32768 if folder.name.startswith("gemma-4") else 512
    convert(str(folder), output, tokens=4096, context=context, cache=0.4, alignment={"sequence_length": 256})
    return output


@torch.no_grad()
def test_every_layer_kept_is_the_teacher(folder, tmp_path):
    convert(str(folder), tmp_path / "out", attention_layers="all", align="none")
    teacher, kept = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder, tmp_path / "out"))
    ids = torch.randint(16, 272, (2, 80), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kept(ids).logits, teacher(ids).logits, rtol=1e-4, atol=1e-4)
    greedy = dict(max_new_tokens=8, do_sample=False, temperature=None, top_p=None, top_k=None)
    assert torch.equal(kept.generate(ids, **greedy), teacher.generate(ids, **greedy))
    sampled = ("temperature", "top_p", "top_k") if teacher.generation_config.do_sample else ()  # ignored otherwise
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", *sampled):
        assert getattr(kept.generation_config, name) == getattr(teacher.generation_config, name), name


def test_text_and_chats_have_the_teachers_ids(folder, hybrid):
    teacher, ours = (AutoTokenizer.from_pretrained(path) for path in (folder, hybrid))
    assert differing_text(ours, teacher) is None
    if teacher.chat_template is not None:
        assert ours.apply_chat_template(CHAT) == teacher.apply_chat_template(CHAT)


def test_the_default_is_a_hybrid_with_a_state(hybrid):
    config = AutoConfig.from_pretrained(hybrid)
    assert "hybrid" in config.layer_types
    assert config.mixer != "none"
    assert config.use_cache


def test_it_generates_and_saves_in_a_clean_process(hybrid, tmp_path):
    command = [sys.executable, "-c", IN_A_CLEAN_PROCESS, str(hybrid), str(tmp_path / "again")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def rows(row: dict, folder: Path) -> Path:
    """A folder of a row, four times in each split."""
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    return folder


def has_template(folder: Path) -> bool:
    return "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())


def reasoned(folder: Path) -> dict[str, dict]:
    """Rows whose answer begins with reasoning; texts for a model without a chat template."""

    def part(role: str, text: str):
        return [{"role": role, "content": text}] if has_template(folder) else text

    asked = {"prompt": part("user", "What is on the other hand?")}
    answer = part("assistant", "<think>\nthe rain\n</think>\n\nit is on it")
    return {
        "sft": asked | {"completion": answer},
        "dpo": asked | {"chosen": answer, "rejected": part("assistant", "no")},
    }


@pytest.mark.parametrize("form", FORMS)
def test_data_of_each_form_is_read(form, folder):
    """With the model's own tokenizer and template: all of a row is trained on, or the row is named."""
    row, tokenizer = FORMS[form], AutoTokenizer.from_pretrained(folder)
    kind, prepare = ("pairs", pairs) if "chosen" in row else ("answers", faithful_answers)
    if form in OF_MESSAGES and not has_template(folder):
        with pytest.raises(ValueError, match="no chat template for messages"):
            prepare(read_rows(rows_of(row), kind), tokenizer)
        return
    found = prepare(read_rows(rows_of(row), kind), tokenizer)[0]
    said = tokenizer.decode(found["input_ids"]) if "input_ids" in found else json.dumps(found)
    for text in ("Why?", "Because.", "No idea.")[: 2 + (kind == "pairs")]:
        assert said.count(text) == 1, (text, said)
    assert "Why?" in str(questions(read_rows(rows_of(row), "questions"), tokenizer)[0])


@pytest.fixture(scope="module")
def calling(hybrid, tmp_path_factory) -> Path:
    """The hybrid with a template that renders reasoning, functions and calls of them."""
    folder = shutil.copytree(hybrid, tmp_path_factory.mktemp("calling") / hybrid.name)
    (folder / "chat_template.jinja").write_text(template_of("qwen3"))
    return folder


def trained(recipe, row: dict, hybrid: Path, folder: Path, work: Path, *more: str) -> None:
    """Train the hybrid for a step, and check what is written."""
    arguments = common_arguments(hybrid, folder, rows(row, work / "data"), work / "out", "--max_steps", "1", *more)
    recipe.main(arguments)
    ours, teacher = (AutoTokenizer.from_pretrained(path) for path in (work / "out", folder))
    assert differing_text(ours, teacher) is None
    AutoModelForCausalLM.from_pretrained(work / "out")


@pytest.mark.parametrize("recipe", ["sft", "lora", "dpo"])
def test_it_trains(recipe, folder, hybrid, tmp_path):
    more = ["--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj"] if recipe == "lora" else []
    row = reasoned(folder)[recipe.replace("lora", "sft")]
    trained(dpo if recipe == "dpo" else sft, row, hybrid, folder, tmp_path, *more)


@pytest.mark.parametrize("form", FORMS)
def test_it_trains_on_users_data(form, folder, hybrid, tmp_path):
    row = FORMS[form]
    recipe = dpo if "chosen" in row else sft
    if form in OF_MESSAGES and not has_template(folder):
        with pytest.raises(ValueError, match="no chat template for messages"):
            trained(recipe, row, hybrid, folder, tmp_path)
        return
    trained(recipe, row, hybrid, folder, tmp_path)


@pytest.mark.parametrize("form", FORMS_OF_SOME_TEMPLATES)
def test_it_trains_on_what_its_template_renders(form, folder, hybrid, calling, tmp_path):
    """Refused by number with its own template, which renders texts alone or refuses more, and trained with another."""
    row = FORMS_OF_SOME_TEMPLATES[form]
    recipe = dpo if "chosen" in row else sft
    refused = "^Row 0 .*does not fit the chat template|The chat template leaves out|no chat template|more than texts"
    with pytest.raises(ValueError, match=refused):
        trained(recipe, row, hybrid, folder, tmp_path / "own")
    trained(recipe, row, calling, folder, tmp_path / "calling")


@pytest.mark.parametrize("form", EVERY_FORM)
def test_it_answers_users_questions(form, folder, hybrid, calling, tmp_path):
    """SeqKD, with the hybrid as the teacher."""
    row = EVERY_FORM[form]
    teacher = calling if form in FORMS_OF_SOME_TEMPLATES else hybrid
    data, out = rows(row, tmp_path / "data"), str(tmp_path / "out")
    asked = ["--teacher_model_name_or_path", str(teacher), "--dataset_name", str(data), "--output_dir", out]
    try:
        report = seqkd.main([*asked, "--max_new_tokens", "3", "--truncated", "keep"])
    except ValueError as error:  # of three random tokens some are no text
        assert "No answer is left" in str(error), error
        return
    assert report["rows"]["train"] == 1


@pytest.mark.parametrize("form", [name for name, row in EVERY_FORM.items() if "chosen" in row])
def test_its_body_is_a_reward_models(form, hybrid, calling, tmp_path):
    """TRL's trainer, with preferences as the recipes read them."""
    tokenizer = AutoTokenizer.from_pretrained(calling if form in FORMS_OF_SOME_TEMPLATES else hybrid)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    model = AutoModelForSequenceClassification.from_pretrained(hybrid, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    found = pairs(read_rows(rows_of(*[EVERY_FORM[form]] * 2), "pairs"), tokenizer)
    arguments = RewardConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, report_to="none", bf16=False,
        use_cpu=True, save_strategy="no", gradient_checkpointing=False,
    )  # fmt: skip
    trainer = RewardTrainer(model=model, args=arguments, train_dataset=found, processing_class=tokenizer)
    before = model.score.weight.detach().clone()
    assert trainer.train().training_loss > 0
    assert not torch.equal(model.score.weight, before)


def test_it_is_exported(folder, tmp_path):
    """Where an architecture of transformers can hold it; else the refusal names why."""
    try:
        convert(str(folder), tmp_path / "made", export_ready=True, align="none", attention_layers=0.5)
    except ValueError as error:
        assert "cannot" in str(error) or "hold" in str(error), error
        return
    partial = "partial_rotary_factor" in REAL_MODELS[folder.name].config
    made, out = str(tmp_path / "made"), OutputOptions(folder=str(tmp_path / "out"))
    export_checkpoint(
        ExportOptions(model=made, to="bamba" if partial else "granitemoehybrid", output=out),
        lambda plan: None,
        lambda what, done, total: None,
    )
    ours, native = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("made", "out"))
    ids = torch.randint(16, 272, (1, 40))
    torch.testing.assert_close(native(ids).logits, ours(ids).logits, rtol=1e-3, atol=1e-3)
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", folder)]
    assert differing_text(*tokenizers) is None
