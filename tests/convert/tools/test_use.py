"""inspect, env and generate, as they are typed."""

import io
import json
import shutil
import tarfile

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from convert import convert
from convert.checkpoint.load import function_tools
from convert.cli import main
from convert.plan import break_even_in_words
from convert.teachers.teacher import recorded_teacher
from convert.tools import env
from convert.tools.chat import Conversation, shared_beginning
from convert.tools.env import environment
from convert.tools.inspect import inspect_model
from modeling_llamba import LlambaForCausalLM
from modeling_llamba.kernels.c import c_library
from tests.helpers.before import BEFORE
from tests.helpers.command import check_one_line_error
from tests.helpers.command import run_as_is as use
from tests.helpers.hybrids import make_hybrid, tiny_config
from tests.helpers.teachers import TINY, random_ids
from tests.helpers.tiny_chat import REASONING, TOOLS, parsing_tokenizer, save_chat_teacher, save_hybrid
from tests.helpers.tokenizers import tokenizer


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A teacher with a tokenizer, a hybrid made from it, and one of unknown origin."""
    folder = tmp_path_factory.mktemp("use")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder / "teacher")
    tokenizer().save_pretrained(folder / "teacher")
    convert(str(folder / "teacher"), folder / "hybrid", align="none", window=8, attention_layers=0.25)
    make_hybrid(pattern="hybrid", dtype=torch.float32).save_pretrained(folder / "found")
    return folder


def test_inspect_says_what_the_model_is(checkpoints):
    report = inspect_model(str(checkpoints / "hybrid"))
    model = LlambaForCausalLM.from_pretrained(checkpoints / "hybrid")
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    assert sorted(report["layer_map"]) == sorted("AHHH")
    assert len(report["attention_layers"]) == 1
    held = {"tokens": 8, "sinks": 4, "block": 4, "salient": 0, "state": True, "planes": 2, "rank": 0}
    assert report["window"] == held
    assert report["mixer"] is None
    assert report["provenance"]["teacher"] == "teacher"
    assert report["provenance"]["align"] == "none"
    done = use("inspect", checkpoints / "hybrid", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == report | {"model": str(checkpoints / "hybrid")}
    done = use("inspect", checkpoints / "hybrid")
    assert report["layer_map"] in done.stdout
    assert "131072" not in done.stdout
    assert "128k" in done.stdout
    assert "A attention, H hybrid" in done.stdout
    assert "{" not in done.stdout


def test_inspected_cache_is_the_caches_own(checkpoints):
    """All attention: keys and values of every layer."""
    sizes = inspect_model(str(checkpoints / "found"))["cache_bytes"]["4k"]
    assert sizes["all_attention"] == 2 * 2 * 4096 * 2 * 8 * 2
    cache = LlambaForCausalLM.from_pretrained(checkpoints / "found")(random_ids(1, 9), use_cache=True).cache
    states = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    held = sum(2 * layer.conv_states[0].numel() + 4 * layer.recurrent_states[0].numel() for layer in states)
    assert sizes["this_model"] == sizes["all_attention"] // 2 + held


@pytest.mark.parametrize("positions, longest", [(131072, "128k"), (262144, "256k")])
def test_inspect_shows_the_sizes_of_the_plan(checkpoints, tmp_path, positions, longest):
    """Those of a teacher that was made for long texts included."""
    model = LlamaConfig(**TINY | {"max_position_embeddings": positions})
    LlamaForCausalLM(model).save_pretrained(tmp_path / "teacher")
    plan = convert(str(tmp_path / "teacher"), tmp_path / "hybrid", align="none", attention_layers=0.5)
    sizes = inspect_model(str(tmp_path / "hybrid"))["cache_bytes"]
    assert list(sizes)[-1] == longest
    planned = plan.summary()["cache_bytes"]
    assert {name: (size["all_attention"], size["this_model"]) for name, size in sizes.items()} == {
        name: (size["teacher"], size["hybrid"]) for name, size in planned.items()
    }


@pytest.mark.parametrize("name", ["bare", "org/name"])
def test_a_repository_of_the_hub_is_found_by_every_command(checkpoints, tmp_path, monkeypatch, name):
    """One without an organisation, such as gpt2, too; here both lie in the cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for source, repository in (("teacher", name), ("hybrid", f"{name}-hybrid")):
        folder = tmp_path / f"models--{repository.replace('/', '--')}"
        shutil.copytree(checkpoints / source, folder / "snapshots" / "0123")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0123")
    assert convert(name, tmp_path / "out", align="none", attention_layers=0.5).teacher.name == name
    report = use("inspect", f"{name}-hybrid", "--json")
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["provenance"]["teacher"] == "teacher"
    answer = use("generate", f"{name}-hybrid", "--prompt", "w5", "--max-new-tokens", "2", "--teacher", name)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("options", [{"window": 32}, {"attention_layers": 0.5}])
def test_inspect_and_the_card_say_from_where_on_memory_is_saved_as_the_plan_does(checkpoints, tmp_path, options):
    plan = convert(str(checkpoints / "teacher"), tmp_path / "hybrid", align="none", **options)
    expected = plan.summary()["break_even"]
    report = inspect_model(str(tmp_path / "hybrid"))
    assert report["break_even"] == expected
    assert expected["16 bits"] is None or expected["16 bits"] < (expected["8 bits"] or 2**30)
    card = (tmp_path / "hybrid/README.md").read_text()
    shown = " ".join(use("inspect", tmp_path / "hybrid").stdout.split())
    for words in (break_even_in_words(expected), str(plan.placement.bits)):
        assert words in card
        assert words in shown


def test_inspect_notices_weights_cut_short(checkpoints, tmp_path):
    shutil.copytree(checkpoints / "hybrid", tmp_path / "cut")
    whole = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    done = use("inspect", tmp_path / "cut")
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_inspect_prints_no_escape_sequence(tmp_path):
    config = tiny_config()
    config.conversion = {"teacher": "a\x1b[31mb"}
    config.save_pretrained(tmp_path / "out\x1b[31m")
    done = use("inspect", tmp_path / "out\x1b[31m")
    assert done.returncode == 0
    assert "a\N{REPLACEMENT CHARACTER}[31mb" in done.stdout
    assert "\x1b" not in done.stdout


def test_inspect_reads_the_alignment(checkpoints, tmp_path):
    folder = tmp_path / "aligned"
    shutil.copytree(checkpoints / "hybrid", folder)
    figures = {"0": {"mapped": 9.0, "solved": 0.4, "refined": 0.2}, "2": {"mapped": 8.0, "solved": 0.6}}
    (folder / "alignment.json").write_text(json.dumps({"text": "x", "tokens": 7, "held_out_error": figures}))
    done = use("inspect", folder)
    assert "held-out error 0.400 on average, most in layer 2 (0.600)" in " ".join(done.stdout.split())
    (folder / "alignment.json").write_text("{")
    assert use("inspect", folder).returncode == 1


@pytest.mark.parametrize("command", [["inspect"], ["generate", "--prompt", "w5"], ["export", "out", "--to", "bamba"]])
def test_a_hybrid_of_an_older_format_is_refused_in_one_line(command, tmp_path):
    with tarfile.open(BEFORE) as archive:
        archive.extractall(tmp_path, filter="data")
    tokenizer().save_pretrained(tmp_path / "llamba")
    done = use(command[0], tmp_path / "llamba", *(tmp_path / part if part == "out" else part for part in command[1:]))
    check_one_line_error(done, "has format 1", "Load it with the code that it carries (trust_remote_code=True")
    assert not (tmp_path / "out").exists()


def test_env_says_which_code_runs_and_why():
    report = environment()
    assert torch.__version__.startswith(report["versions"]["torch"])
    assert report["versions"]["transformers"]
    scan = report["backends"]["SSD scan (discrete_mamba2, mamba2)"]
    kernels = ("fla", "fla-core"), ("mamba_ssm", "mamba-ssm")
    usable = [name for name, package in kernels if report["kernels"].get(package, {"problem": "?"})["problem"] is None]
    assert scan["runs"] == (usable[0] if torch.cuda.is_available() and usable else "torch")
    assert scan["why"]
    assert json.loads(use("env", "--json").stdout) == report
    assert "SSD scan" in use("env").stdout


def test_env_says_what_computes_few_bits_on_a_cpu(monkeypatch, tmp_path):
    part = "few bits and one token on a CPU"
    found = environment()["backends"][part]
    assert found["runs"] == "C"
    assert found["why"].startswith("compiled at first use into")
    monkeypatch.setattr(env, "LIBRARY_FOLDER", tmp_path)  # which the library does not lie in
    assert environment()["backends"][part]["why"].startswith(f"compiled anew by each process, since {tmp_path}")
    problems = []
    monkeypatch.setattr(c_library, "PROBLEMS", problems)
    monkeypatch.setattr(env, "PROBLEMS", problems)
    monkeypatch.setattr(env, "library", c_library.library.__wrapped__)
    monkeypatch.setattr(c_library, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(c_library, "compilers", list)
    found = environment()["backends"][part]
    assert found == {"runs": "torch", "why": "there is no C compiler; install gcc"}
    monkeypatch.setenv(c_library.COMPILE_VARIABLE, "off")
    assert environment()["backends"][part] == {"runs": "torch", "why": "HYBRID_COMPILE_C=off forbids it"}


def test_env_heeds_the_variable(monkeypatch):
    monkeypatch.setenv("HYBRID_BACKEND", "torch")
    assert environment()["backends"]["SSD scan (discrete_mamba2, mamba2)"]["runs"] == "torch"
    monkeypatch.setenv("HYBRID_BACKEND", "chalk")
    scan = environment()["backends"]["SSD scan (discrete_mamba2, mamba2)"]
    assert scan["runs"] == "nothing"
    assert "chalk" in scan["why"]


def test_env_says_where_fla_does_not_train(monkeypatch):
    kernels = {package: {"version": "1", "problem": None} for package in env.KERNELS}
    monkeypatch.setattr(env, "fla_gradient_problem", lambda: "upgrade triton")
    scan = env._backends(kernels, cuda=True)["SSD scan (discrete_mamba2, mamba2)"]
    assert scan["runs"] == "fla"
    assert "torch where a gradient is wanted (upgrade triton)" in scan["why"]


def test_a_device_that_is_not_there(checkpoints):
    done = use("generate", checkpoints / "hybrid", "--prompt", "w5", "--device", "gpu")
    assert done.returncode == 1
    assert "--device gpu" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_kernel_is_told_from_an_absent_one(monkeypatch, tmp_path):
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm/__init__.py").write_text("raise ImportError('undefined symbol: x')")
    (tmp_path / "mamba_ssm-9.dist-info").mkdir()
    (tmp_path / "mamba_ssm-9.dist-info/METADATA").write_text("Name: mamba-ssm\nVersion: 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    report = environment()
    assert report["kernels"]["mamba-ssm"] == {"version": "9", "problem": "ImportError: undefined symbol: x"}
    assert report["kernels"]["causal-conv1d"]["problem"] in (None, "not installed")


def test_generate_says_what_the_model_says(checkpoints):
    options = ("--prompt", "w5 w6 w7", "--max-new-tokens", "9")
    done = use("generate", checkpoints / "hybrid", *options)
    assert done.returncode == 0, done.stderr
    words = AutoTokenizer.from_pretrained(checkpoints / "hybrid")
    model = LlambaForCausalLM.from_pretrained(checkpoints / "hybrid")
    inputs = words("w5 w6 w7", return_tensors="pt")
    ids = model.generate(inputs["input_ids"], max_new_tokens=9, do_sample=False)[0]
    expected = words.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert done.stdout.split() == expected.split()
    assert "tokens per second" in done.stderr
    beside = use("generate", checkpoints / "hybrid", *options, "--teacher", checkpoints / "teacher")
    assert beside.returncode == 0
    assert "hybrid (llamba)" in beside.stdout
    assert "teacher (llama)" in beside.stdout
    assert done.stdout.strip() in beside.stdout
    sampled = ("generate", checkpoints / "hybrid", *options, "--temperature", "2")
    first, second = (use(*sampled, "--seed", seed).stdout for seed in (1, 2))
    assert first != second


def test_the_recorded_teacher(smollm2_gguf):
    assert recorded_teacher({"teacher": "org/name", "teacher_revision": "abc"}, "--teacher") == ("org/name", "abc")
    embedded = {"teacher": smollm2_gguf.name, "teacher_revision": None}
    assert recorded_teacher(embedded, "--teacher") == (str(smollm2_gguf), None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("inspect", "{}/nothing"), "does not exist"),
        (("inspect", "{}"), "no config.json"),
        (("inspect", "{}/teacher"), "not a hybrid"),
        (("generate", "{}/hybrid", "--prompt", " "), "The prompt is empty"),
        (("generate", "{}/found", "--prompt", "a"), "no tokenizer"),
        (("generate", "{}/hybrid", "--prompt", "a", "--dtype", "int3"), "dtype must be auto or float32"),
        (("generate", "{}/hybrid", "--prompt", "a", "--teacher", "recorded"), "was a local path"),
        (("generate", "{}/hybrid", "--prompt", "a", "--teacher", "{}/none"), "does not exist"),
    ],
)
def test_bad_input_is_one_line(checkpoints, arguments, message):
    done = use(*(argument.format(checkpoints) for argument in arguments))
    check_one_line_error(done, message)
    assert len(done.stderr.strip().splitlines()) == 1


def test_damaged_weights_are_one_line(checkpoints, tmp_path):
    shutil.copytree(checkpoints / "hybrid", tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = use("generate", tmp_path / "damaged", "--prompt", "a")
    assert done.returncode == 1
    assert "damaged" in done.stderr.splitlines()[-1]


def test_no_teacher_recorded(checkpoints):
    with pytest.raises(ValueError, match="records no teacher; name one: --teacher"):
        recorded_teacher(None, "--teacher")
    tokenizer().save_pretrained(checkpoints / "found")
    done = use("generate", checkpoints / "found", "--prompt", "w3", "--teacher", "recorded")
    assert done.returncode == 1
    assert "records no teacher" in done.stderr


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A hybrid with a chat template, a window of four, kept heads and a state."""
    folder = tmp_path_factory.mktemp("chat")
    teacher = save_chat_teacher(folder / "teacher")
    return save_hybrid(teacher, folder / "hybrid", attention_layers=0.25, window=4, attention_heads="1:0,1:1")


def talking(folder, template=None, **options):
    """A conversation, and a function that takes a turn and returns how many tokens were read before the answer.

    Each answer has to be the one that the whole conversation gives when it is read anew.
    """
    model, tokenizer = LlambaForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    conversation, read = Conversation(model, tokenizer, **options), []
    model.model.embed_tokens.register_forward_hook(lambda module, ids, out: read.append(ids[0].shape[1]))

    def turn(say, *arguments) -> int:
        read.clear()
        answer = say(*arguments, LIMIT, 0.0)
        count = sum(read)
        turns = conversation.messages[:-1]
        anew = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = model.generate(**anew, do_sample=False, max_new_tokens=LIMIT)[0]
        assert answer == tokenizer.decode(ids[anew["input_ids"].shape[1] :], skip_special_tokens=True)
        assert conversation.held == ids[:-1].tolist()
        return count - (len(ids) - 1 - anew["input_ids"].shape[1])

    return conversation, turn


def tokens_of(conversation, messages):
    return conversation.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


LIMIT = 9
LINES = ("w9 w10 w11", "w12 w9", "w40", "w41 w42 w43 w44 w45")


def test_a_conversation_reads_nothing_twice_and_answers_as_if_it_had(chatting):
    """The question with w4, w6 and w5; the last token of the answer before it, and its end where it was cut off."""
    conversation, turn = talking(chatting)
    for number, said in enumerate(LINES):
        assert turn(conversation.answer, said) - len(said.split()) in ((4, 5) if number else (3,))


def test_a_turn_that_is_taken_back_is_all_that_is_read(chatting):
    """Again: the last token before the answer. Another question: itself, and the two tokens around it."""
    conversation, turn = talking(chatting)
    for said in LINES:
        turn(conversation.answer, said)
        before = conversation.messages[:-2]
        for other in ("w50 w51", "w52 w51"):
            assert turn(conversation.answer_again, None) == 1
            assert turn(conversation.answer_again, other) == 4
        assert turn(conversation.answer_again, said) == len(said.split()) + 2
        assert conversation.messages[:-2] == before


def test_a_template_that_drops_reasoning_reads_from_the_answer_on(chatting):
    conversation, turn = talking(chatting, REASONING)
    for said in LINES:
        held = conversation.held
        count = turn(conversation.answer, said)
        asked = tokens_of(conversation, conversation.messages[:-1])
        assert count == len(asked) - shared_beginning(asked, held)
        assert turn(conversation.answer_again, "w50") == 3
        assert turn(conversation.answer_again, said) == len(said.split()) + 2


def test_a_turn_that_fails_is_no_turn(chatting):
    """The next answer is that of a conversation in which nothing failed, though the cache had read on."""

    def fail(piece):
        raise OSError("closed")

    conversation, turn = talking(chatting)
    turn(conversation.answer, LINES[0])
    before = list(conversation.messages)
    for take_turn in (conversation.answer, conversation.answer_again):
        with pytest.raises(OSError, match="closed"):
            take_turn("w50 w51", LIMIT, 0.0, fail)
        assert conversation.messages == before
    turn(conversation.answer, LINES[1])
    other, turn = talking(chatting)
    for said in LINES[:2]:
        turn(other.answer, said)
    assert conversation.messages == other.messages


def test_turns_further_back_than_checkpoints_are_read_anew(chatting):
    conversation, turn = talking(chatting, checkpoints=2)
    for said in LINES:
        turn(conversation.answer, said)
    del conversation.messages[4:]
    assert turn(conversation.answer, "w60") > 15
    conversation, turn = talking(chatting, checkpoints=0)
    assert turn(conversation.answer, "w9 w10") == turn(conversation.answer_again, None) == 5


def test_chat_takes_turns_back(chatting, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("/retry\n/edit w9\nw9 w10\n/retry\n/edit w12 w13\n/edit\nw12\n"))
    main(["chat", str(chatting), "--max-new-tokens", "3"])
    done = capsys.readouterr()
    first, again, other, further = done.out.splitlines()
    assert first == again
    assert done.err.count("Nothing to retry or edit yet.") == 2
    assert done.err.count("/edit is no command as it stands here") == 1
    monkeypatch.setattr("sys.stdin", io.StringIO("w12 w13\nw12\n"))
    main(["chat", str(chatting), "--max-new-tokens", "3"])
    assert capsys.readouterr().out.splitlines() == [other, further]


def test_chat_answers_every_line_until_the_input_ends(chatting, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("w9 w10\n/quit\n/retry w9\n/w9/w10\n"))
    main(["chat", str(chatting), "--max-new-tokens", "3"])
    done = capsys.readouterr()
    assert len(done.out.splitlines()) == 2
    for command in ("/quit", "/retry"):
        assert f"{command} is no command as it stands here" in done.err


FUNCTIONS = [{"name": "w30", "description": "Waits.", "parameters": {"type": "object", "properties": {}}}]


def test_a_conversation_with_functions(chatting, tmp_path, monkeypatch, capsys):
    """Each turn is what the template makes of the functions and all messages, a function's result among them."""
    model, tokenizer = LlambaForCausalLM.from_pretrained(chatting).eval(), AutoTokenizer.from_pretrained(chatting)
    tokenizer.chat_template = TOOLS
    tools = [{"type": "function", "function": FUNCTIONS[0]}]
    conversation = Conversation(model, tokenizer, tools=tools)
    for said, role in (("w9 w10", "user"), ("w11", "tool"), ("w12", "tool"), ("w13", "user")):
        answer = conversation.answer(said, LIMIT, 0.0, role=role)
        turns = conversation.messages[:-1]
        assert turns[-1] == {"role": role, "content": said}
        asked = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
        anew = tokenizer.apply_chat_template(turns, tools, **asked)
        assert anew["input_ids"][0, :2].tolist() == [8, 30]
        ids = model.generate(**anew, do_sample=False, max_new_tokens=LIMIT)[0]
        assert answer == tokenizer.decode(ids[anew["input_ids"].shape[1] :], skip_special_tokens=True)
        if role == "tool":
            assert conversation.answer_again(None, LIMIT, 0.0) == answer

    folder = shutil.copytree(chatting, tmp_path / "calls")
    tokenizer.save_pretrained(folder)
    (tmp_path / "tools.json").write_text(json.dumps(FUNCTIONS))
    monkeypatch.setattr("sys.stdin", io.StringIO("w9 w10\n/result w11\n/result\n"))
    main(["chat", str(folder), "--max-new-tokens", str(LIMIT), "--tools", str(tmp_path / "tools.json")])
    done = capsys.readouterr()
    assert done.out.splitlines() == [turn["content"] for turn in conversation.messages[1:4:2]]
    assert "/result is no command as it stands here" in done.err


@pytest.mark.parametrize(
    "family, said",
    [
        (
            "gptoss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.w30<|channel|>commentary json"
            '<|message|>{"w31": "w32"}<|call|>',
        ),
        ("gemma4", '<|tool_call>call:w30{w31:<|"|>w32<|"|>}<tool_call|>'),
        ("lfm2_2_5", '<|tool_call_start|>[w30(w31="w32")]<|tool_call_end|>'),
        ("qwen3", '<tool_call>\n{"name": "w30", "arguments": {"w31": "w32"}}\n</tool_call>'),
    ],
)
def test_a_call_goes_to_the_template_as_one(family, said, chatting, monkeypatch):
    """Where the tokenizer can tell it from the text; its result and the turns after it follow."""
    model = LlambaForCausalLM.from_pretrained(chatting).eval()
    conversation = Conversation(model, parsing_tokenizer(family), tools=function_tools(FUNCTIONS))
    monkeypatch.setattr(conversation, "_with_marks", lambda ids: said)
    conversation.answer("w9 w10", LIMIT, 0.0)
    called = conversation.messages[-1]
    assert [call["function"] for call in called["tool_calls"]] == [{"name": "w30", "arguments": {"w31": "w32"}}]
    turns = [*conversation.messages, {"role": "tool", "content": "w11"}]
    rendered = conversation.tokenizer.apply_chat_template(turns, conversation.tools, tokenize=False)
    assert "w32" in rendered
    assert "w11" in rendered
    monkeypatch.undo()
    conversation.answer("w11", LIMIT, 0.0, role="tool")
    assert conversation.messages[1:3] == [called, {"role": "tool", "content": "w11"}]


def test_a_result_that_the_template_leaves_out_is_refused_and_the_chat_goes_on(
    chatting, tmp_path, monkeypatch, capsys
):
    """As Gemma 4's does after a call that it was not given as one."""
    folder = shutil.copytree(chatting, tmp_path / "calls")
    template = TOOLS.replace("in messages %}", "in messages if m['role'] != 'tool' %}")
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = template
    loaded.save_pretrained(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("w9 w10\n/result w11 w12\nw13\n"))
    main(["chat", str(folder), "--max-new-tokens", "3"])
    done = capsys.readouterr()
    assert len(done.out.splitlines()) == 2
    assert done.err.count("leaves out the result here") == 1


@pytest.mark.parametrize(
    "content, message",
    [
        (json.dumps(FUNCTIONS), "does not tell it of the functions"),
        (json.dumps(FUNCTIONS[0]), "must hold a JSON list of functions"),
        ("[{}]", "must hold a JSON list of functions"),
        (None, "cannot be read"),
    ],
)
def test_functions_that_cannot_be_told_of(content, message, chatting, tmp_path):
    if content is not None:
        (tmp_path / "tools.json").write_text(content)
    check_one_line_error(use("chat", chatting, "--tools", tmp_path / "tools.json"), message)


def test_chat_wants_a_chat_template(checkpoints):
    done = use("chat", checkpoints / "hybrid")
    check_one_line_error(done, "no chat template; continue a text with")


@pytest.mark.parametrize("arguments", [["chat"], ["generate", "--prompt", "w9"]])
def test_a_broken_chat_template_is_one_line(arguments, chatting, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w9\n"))
    shutil.copytree(chatting, tmp_path / "hybrid")
    (tmp_path / "hybrid" / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}")
    done = use(arguments[0], tmp_path / "hybrid", *arguments[1:])
    check_one_line_error(done, "chat template is broken", "generate --raw")
