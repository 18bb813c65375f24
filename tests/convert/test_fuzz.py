"""Mutated configurations, indexes, headers, tensors, tokenizers, settings, options, work folders and imports.

Each ends in a model whose logits are finite (in float64 where mixers were mapped and nothing was fitted) and, with all
layers kept, the teacher's as transformers loads it, or in one line; nothing else changes on disk, and no code of the
input runs. The tokenizer of a hybrid is its teacher's, and where the teacher generates by its settings, so does the
hybrid. HYBRID_FUZZ_SEED and HYBRID_FUZZ_MUTANTS choose others.
"""

import contextlib
import copy
import hashlib
import json
import os
import random
import shutil
import signal
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from convert.checkpoint.tokenizer import differing_text
from convert.options import ConversionOptions, documented
from tests.helpers.command import run_as_is
from tests.helpers.published import FORMATS, write
from tests.helpers.teachers import TEACHERS, make_teacher, random_ids
from tests.helpers.tokenizers import TEMPLATE, tokenizer

SEED = int(os.environ.get("HYBRID_FUZZ_SEED", random.SystemRandom().randrange(2**31)))
MUTANTS = int(os.environ.get("HYBRID_FUZZ_MUTANTS", 2400))
PARTS = 8
KINDS = (
    "config", "bytes", "index", "header", "tensors", "tokenizer", "generation", "card", "options", "work folder",
    "import",
)  # fmt: skip
EVIL = "import pathlib\npathlib.Path({!r}).write_text('ran')\n"
VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -4, 0.25, 1e9, 10**9, 2**31, 2**63, 10**30, 1e-300, float("nan"),
    float("inf"), "", "x", "silu", "gelu", "\x1b[31m", "default", "static", [], [0], [1, 2], {}, {"rope_type": "yarn"},
    {"rope_type": "linear", "factor": 2.0}, ["full_attention"], ["sliding_attention"] * 2, "float16", "bfloat16",
)  # fmt: skip
SETTINGS = {
    "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.05, "max_length": 4096,
    "bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0, "transformers_version": "4.45.0",
}  # fmt: skip
"""Of generation, as Llama 3.1 and Qwen 2.5 publish them."""
MORE_SETTINGS = (
    "num_beams", "num_beam_groups", "penalty_alpha", "min_new_tokens", "suppress_tokens", "bad_words_ids", "max_time",
    "forced_eos_token_id", "cache_implementation", "cache_config", "use_cache", "typical_p", "no_repeat_ngram_size",
    "sequence_bias", "stop_strings", "watermarking_config", "assistant_early_exit", "prompt_lookup_num_tokens",
    "return_dict_in_generate", "output_attentions", "guidance_scale", "early_stopping", "diversity_penalty",
    "num_return_sequences", "max_new_tokens", "compile_config", "token_healing", "dola_layers", "renormalize_logits",
)  # fmt: skip


def test_a_few_mutants(tmp_path):
    hunt(tmp_path, random.Random(SEED), 33)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_mutants(part, tmp_path):
    hunt(tmp_path, random.Random(SEED + 1 + part), -(-MUTANTS // PARTS))


def hunt(folder, rng, count):
    print(f"HYBRID_FUZZ_SEED={SEED}")
    herd, found, ends = Herd(folder, rng), [], {0: 0, 1: 0}
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        place = folder / "mutant"
        place.mkdir()
        state = rng.getstate()
        try:
            with at_most(60):
                ends[herd.try_one(kind, place)] += 1
        except Exception as error:  # all of them are gathered, with what is needed to see one again
            found.append(f"{number} ({kind}): {herd.said}: {type(error).__name__}: {str(error)[:600]}")
            kept = os.environ.get("HYBRID_FUZZ_KEEP")
            if kept:
                shutil.copytree(place, f"{kept}/{os.getpid()}-{number}", symlinks=True)
        assert rng.getstate() != state
        shutil.rmtree(place)
    print(f"{count} mutants: {ends[0]} models, {ends[1]} refusals, {len(found)} faults")
    assert not found, f"seed {SEED}: {len(found)} of {count}\n" + "\n".join(found)


@contextlib.contextmanager
def at_most(seconds):
    """Of this process's own time: on a busy machine anything takes a minute."""

    def give_up(*_):
        raise RuntimeError(f"took more than {seconds} seconds of CPU time")

    previous = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def snapshot(folder):
    """A hash of every file, and every folder and link, below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        plain = path.is_file() and not path.is_symlink()
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if plain else str(path.is_symlink())
    return found


class Herd:
    """Whole teachers, one mutation at a time of a copy, and what has to be so afterwards."""

    def __init__(self, folder, rng):
        self.rng, self.said, self.options = rng, "", documented(ConversionOptions)
        self.teachers, names = [], rng.sample(sorted(TEACHERS), 5)
        for name in names:
            self.teachers.append(folder / "herd" / name)
            make_teacher(name, layers=2).save_pretrained(self.teachers[-1])
            tokenizer(begins=rng.random() < 0.5).save_pretrained(self.teachers[-1])
            settings = self.teachers[-1] / "tokenizer_config.json"
            settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
            (self.teachers[-1] / "generation_config.json").write_text(json.dumps(SETTINGS))

    def try_one(self, kind, place):
        self.said = kind
        teacher, out = place / "teacher", place / "out"
        arguments = ["--align", "none", "--attention-layers", self.rng.choice(["all", "all", "all", "0.5", "none"])]
        if kind == "import":
            self.published(teacher)
            command, arguments = ["import"], []
        else:
            shutil.copytree(self.rng.choice(self.teachers), teacher)
            (teacher / "evil.py").write_text(EVIL.format(str(place / "ran")))
            command = []
            if kind == "options":
                arguments = self.some_options()
            elif kind == "work folder":
                arguments = self.some_work(place, out)
            else:
                {"config": self.config, "bytes": self.bytes, "index": self.index, "header": self.header,
                 "tensors": self.tensors, "tokenizer": self.tokenizer, "generation": self.generation,
                 "card": self.card}[kind](teacher)  # fmt: skip
        before = snapshot(place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = run_as_is(*command, teacher, out, *arguments)
        after = snapshot(place)
        made = {name: now for name, now in after.items() if before.get(name) != now}
        lost = before.keys() - after.keys()
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert "ran" not in after, "code of the input ran"
        if done.returncode == 0:
            if "--dry-run" not in arguments:
                swept = (".out.partial-", "out", "nowhere")  # where the last is what OUT was a link to
                assert all(name.startswith(swept) for name in {*made, *lost}), (made.keys(), lost)
                assert not any(name.endswith("thesis") for name in lost), lost
                self.side_files_load(out)
                kept = not command and "all" in arguments
                ours = self.logits(out, unaligned="--align" in arguments and not kept)
                if kept:
                    self.compare(ours, teacher)
                else:
                    assert ours.isfinite().all(), "the hybrid's logits are not finite"
                if kind in ("tokenizer", "generation"):
                    self.compare_text(out, teacher)
                    self.compare_generation(out, teacher)
            return 0
        assert done.returncode == 1, (done.returncode, done.stderr[-600:])
        assert len(errors) == 1, (done.returncode, done.stderr[-600:])
        assert "Traceback" not in done.stderr, done.stderr
        assert "\x1b" not in done.stderr, done.stderr
        assert not errors[0].startswith("error: unexpected"), errors[0]
        assert len(errors[0]) < 1500, errors[0]
        assert not lost, (errors[0], made.keys(), lost)
        assert all(name.startswith("out.work") for name in made), (errors[0], made.keys(), lost)
        return 1

    def side_files_load(self, out):
        if (out / "tokenizer_config.json").is_file():
            AutoTokenizer.from_pretrained(out)("w5 w9")
        if (out / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(out).validate()

    @torch.no_grad()
    def logits(self, out, unaligned):
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        ids = random_ids(1, 12) % min(model.config.vocab_size, 96)
        logits = model(ids).logits
        if unaligned and not logits.isfinite().all():
            # what softmax bounds, a mixer that nothing is fitted to does not: weights that are all a thousand times
            # too large, which are a mutation here, take it beyond float32, and not beyond float64
            model.double().set_experts_implementation("eager")
            logits = model(ids).logits
        return logits

    @torch.no_grad()
    def compare(self, ours, teacher):
        theirs = loaded(AutoModelForCausalLM, teacher, dtype=torch.float32)
        if theirs is None:  # over what does not concern us, such as an index's metadata
            assert ours.isfinite().all()
            return
        expected = theirs(random_ids(1, 12) % min(theirs.config.vocab_size, 96)).logits
        if not expected.isfinite().all():  # a teacher's own mixer goes beyond float32 as well
            assert not ours.isfinite().all()
            return
        # a window as wide as the context is read as none, and beyond the context both say something
        known = min(theirs.config.get_text_config().max_position_embeddings, ours.shape[1])
        size = expected.abs().max().clamp(min=1)
        torch.testing.assert_close(ours[:, :known] / size, expected[:, :known] / size, rtol=1e-3, atol=1e-3)

    def compare_text(self, out, teacher):
        theirs = loaded(AutoTokenizer, teacher)
        if theirs is None:
            assert not any((out / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
            return
        ours = AutoTokenizer.from_pretrained(out)
        assert differing_text(ours, theirs) is None
        assert ours.special_tokens_map == theirs.special_tokens_map
        chats = []
        for each in (ours, theirs):
            try:
                chats.append(each.apply_chat_template([{"role": "user", "content": "w5 w6"}], tokenize=False))
            except Exception as error:  # a template is a program, which may raise what it likes
                chats.append(str(error))
        assert chats[0] == chats[1]

    @torch.no_grad()
    def compare_generation(self, out, teacher):
        """With the same seed all layers kept say the same; a hybrid, some of whose layers differ, says something."""
        theirs, ids = loaded(AutoModelForCausalLM, teacher, dtype=torch.float32), random_ids(2, 9) % 96
        said = []
        for model in (theirs, AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)):
            torch.manual_seed(0)
            try:
                text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)
            except Exception as error:  # settings under which the teacher does not generate, either
                if model is theirs:
                    return
                raise AssertionError(f"the teacher generates and the hybrid does not: {error}") from error
            said.append(getattr(text, "sequences", text))
        beyond = model.config.max_position_embeddings < ids.shape[1] + 4
        if not beyond and not {"hybrid", "linear_attention"} & set(model.config.layer_types):
            assert torch.equal(*said)

    # -- mutations

    def value(self, old):
        rng = self.rng
        if rng.random() < 0.5 and isinstance(old, int | float) and not isinstance(old, bool):
            return rng.choice([old * 2, old + 1, old - 1, -old, old / 2, old * 1e6, old * 10**12, str(old), [old]])
        return copy.deepcopy(rng.choice(VALUES))  # which the next mutation may change

    def mutate(self, values):
        """Change one to three entries of a JSON object, wherever they are."""
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            inner = values
            while True:
                places = range(len(inner)) if isinstance(inner, list) else list(inner)
                name = self.rng.choice(places) if inner else "new"
                if inner and isinstance(inner[name], dict | list) and inner[name] and self.rng.random() < 0.8:
                    inner = inner[name]
                    continue
                break
            change = self.rng.random()
            if change < 0.15 and inner:
                inner.pop(name)
            elif isinstance(inner, list):
                inner[name] = self.value(inner[name])
                name = "an entry"
            elif change < 0.25:
                other = self.rng.choice(list(TEACHERS.values()))[1].to_dict()
                name = self.rng.choice(sorted(other))
                inner[name] = other[name]
            elif change < 0.3:
                inner["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
            else:
                inner[name] = self.value(inner.get(name))
            self.said += f" {name}={str(inner.get(name, 'gone') if isinstance(inner, dict) else inner)[:40]}"
        return values

    def edit(self, path):
        values = json.loads(path.read_text())
        text = json.dumps(self.mutate(values))
        path.write_text(text.replace("1e-300", "1e400") if self.rng.random() < 0.2 else text)

    def corrupt(self, path, start=0, stop=None):
        """Change, cut or insert bytes of a file."""
        content = bytearray(path.read_bytes())
        stop = min(stop or len(content), len(content))
        for _ in range(self.rng.choice([1, 2, 8])):
            at = self.rng.randrange(start, max(stop, start + 1))
            how = self.rng.randrange(4)
            if how == 0:
                del content[at:]
            elif how == 1:
                content[at:at] = bytes(self.rng.randrange(256) for _ in range(self.rng.choice([1, 8, 100])))
            else:
                content[at : at + 1] = bytes([self.rng.randrange(256)])
        self.said += f" {path.name}"
        path.write_bytes(content)

    def config(self, teacher):
        self.edit(teacher / "config.json")

    def bytes(self, teacher):
        names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
        path = teacher / self.rng.choice(names)
        self.corrupt(path, 0, 4000)

    def index(self, teacher):
        weights = load_file(teacher / "model.safetensors")
        (teacher / "model.safetensors").unlink()
        names, shards = sorted(weights), {}
        for i in range(3):
            file = f"model-{i + 1:05d}-of-00003.safetensors"
            save_file({n: weights[n] for n in names[i::3]}, teacher / file, metadata={"format": "pt"})
            shards |= dict.fromkeys(names[i::3], file)
        path = teacher / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": shards}))
        how = self.rng.random()
        if how < 0.3:
            self.corrupt(path)
        elif how < 0.8:
            self.edit(path)
        else:
            target = self.rng.choice(["../herd", "/etc/passwd", "config.json", "model-[1].safetensors", "loop"])
            (teacher / "loop").symlink_to("loop")
            self.said += f" {target}"
            path.write_text(json.dumps({"weight_map": shards | {self.rng.choice(names): target}}))

    def header(self, teacher):
        path = teacher / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        how = self.rng.random()
        if how < 0.6:
            entry = header[self.rng.choice([name for name in header if name != "__metadata__"])]
            field = self.rng.choice(["dtype", "shape", "data_offsets"])
            entry[field] = self.rng.choice([
                "F64", "F16", "BF16", "I64", "F8_E4M3", "C64", "U32", "BOOL", [], [0], [2**62], [-1, 4], [4, 4],
                [0, 8], [0, 10**15], None, {}, list(reversed(entry[field])),
            ])  # fmt: skip
            self.said += f" {field}={entry[field]}"
        elif how < 0.8:
            name = self.rng.choice(list(header))
            header[self.rng.choice(["x", "\x1b[2J", "../x", "a" * 5000, "model.layers.9.x"])] = header.pop(name)
            self.said += f" {name} renamed"
        else:
            self.mutate(header)
        encoded = json.dumps(header).encode()
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])

    def tensors(self, teacher):
        path = teacher / "model.safetensors"
        weights = load_file(path)
        name = self.rng.choice(sorted(weights))
        odd_one, how = weights[name], self.rng.randrange(9)
        if how == 0:
            weights.pop(name)
        elif how == 1:
            weights[name].view(-1)[self.rng.randrange(weights[name].numel())] = self.rng.choice(
                [float("nan"), float("inf"), 3e38, 9e10, 1e-40]
            )
        elif how == 2:
            kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
            weights[name] = weights[name].to(self.rng.choice(kinds))
        elif how == 3:
            weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
        elif how == 4:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        elif how == 5:
            weights = {key: (tensor * 1e3).half() for key, tensor in weights.items()}
        elif how == 6:
            weights[name] = weights[name][..., :-1].contiguous()
        elif how == 7:
            weights[self.rng.choice(["model.norm.bias", f"{name}.extra", "lm_head.bias"])] = torch.ones(3)
        self.said += f" {name} ({how})"
        path.unlink()
        if self.rng.random() < 0.3:
            odd = self.rng.choice([None, None, "sparse", "meta", "hook", "list"])
            extra = {
                "sparse": lambda: odd_one.to_sparse(), "meta": lambda: odd_one.to("meta"),
                "hook": lambda: Hook(str(teacher.parent / "ran")), "list": lambda: [1, 2],
            }  # fmt: skip
            self.said += f" .bin {odd}"
            torch.save(weights | ({} if odd is None else {name: extra[odd]()}), teacher / "pytorch_model.bin")
        else:
            save_file(weights, path, metadata={"format": "pt"})

    def card(self, teacher):
        heads = ["---\nlicense: mit\n---\n", "---\n- [\n---\n", "---\nlicense: [1]\n---\n"]
        (teacher / "README.md").write_text(self.rng.choice(heads))

    def tokenizer(self, teacher):
        path = teacher / self.rng.choice(["tokenizer.json", "tokenizer_config.json"])
        self.said += f" {path.name}"
        how = self.rng.random()
        if how < 0.2:
            self.corrupt(path)
        elif how < 0.25:
            path.unlink()
        elif how < 0.35:  # parts that published tokenizers have, and some that none has
            values = json.loads(path.read_text())
            values |= self.rng.choice(
                [
                    {"normalizer": {"type": self.rng.choice(["NFC", "Lowercase", "Strip", "None"])}},
                    {"post_processor": {"type": "ByteLevel"}},
                    {"truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}},
                    {"padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 0, "pad_token": "w0"}},
                    {"tokenizer_class": self.rng.choice(["LlamaTokenizer", "GPT2Tokenizer", "NoTokenizer", 3])},
                    {"add_bos_token": True}, {"add_prefix_space": True}, {"legacy": False}, {"model_max_length": 1},
                    {"chat_template": self.rng.choice(["{{ raise_exception('no') }}", "{% for", "", [], {"a": "b"}])},
                    {"extra_special_tokens": self.rng.choice([{"image": "w9"}, ["w9"], {"image": 4}])},
                    {"added_tokens_decoder": {self.rng.choice(["5", "500", "x"]): {"content": "w9"}}},
                ]
            )  # fmt: skip
            path.write_text(json.dumps(values))
            self.said += f" {list(values)[-1]}"
        else:
            self.edit(path)

    def generation(self, teacher):
        path = teacher / "generation_config.json"
        how = self.rng.random()
        if how < 0.1:
            self.corrupt(path)
        elif how < 0.15:
            path.unlink()
        elif how < 0.5:
            name = self.rng.choice(MORE_SETTINGS)
            values = json.loads(path.read_text()) | {name: self.rng.choice(VALUES)}
            path.write_text(json.dumps(values))
            self.said += f" {name}={values[name]}"
        else:
            self.edit(path)

    def some_options(self):
        arguments = [] if self.rng.random() < 0.5 else ["--dry-run"]
        for option in self.rng.sample(self.options, self.rng.choice([1, 1, 2, 3])):
            if option.name.startswith(("output.push", "output.private", "model", "output.folder")):
                continue
            choices = option.kind.split(" or ")
            near = [
                "0",
                "1",
                "-1",
                "2",
                "1e400",
                "1e11",
                "nan",
                "0.5",
                "true",
                "x",
                "[0]",
                "\x1b[1m",
                "",
                "none",
                "all",
            ]
            value = self.rng.choice([*choices, *near, *near])
            arguments += [f"--{option.name}={value}"]
        self.said += f" {arguments}"
        if not any("method" in argument for argument in arguments):
            arguments += ["--align", "none"]
        return [*arguments, "--alignment.text", "sampled", "--tokens", "3072", "--alignment.sequence_length", "64",
                "--alignment.fit.refine_steps=1"] if "--align" not in arguments else arguments  # fmt: skip

    def some_work(self, place, out):
        """OUT, its neighbours and its work folder in any state, before a short alignment."""
        aligned = "--text sampled --tokens 640 --alignment.sequence_length 64 --alignment.fit.refine_steps=0".split()
        aligned += ["--mixer.initial_decay=0.5", "--attention-layers", "1"]
        if self.rng.random() < 0.5:
            text = "import json"
            with contextlib.suppress(SystemExit):
                broken = [*aligned, "--mixer", "mamba2", "--dtype", "float16"]
                weights = load_file(place / "teacher" / "model.safetensors")
                original = {name: tensor.clone() for name, tensor in weights.items()}
                weights["model.embed_tokens.weight"][0, 0] = 1e6  # does not fit, once the fits are there
                save_file(weights, place / "teacher" / "model.safetensors", metadata={"format": "pt"})
                run_as_is(place / "teacher", out, *broken)
                save_file(original, place / "teacher" / "model.safetensors", metadata={"format": "pt"})
            files = [path for path in (place / "out.work").rglob("*") if path.is_file()]
            for path in self.rng.sample(files, min(len(files), 2)):
                self.corrupt(path) if path.stat().st_size else path.write_text(text)
            return [*aligned, "--mixer", "mamba2"]
        for name in ("out", "out.work", ".out.partial-00000000", ".out.replaced-00000000", ".out.lock"):
            how = self.rng.randrange(6)
            path = place / name
            self.said += f" {name}:{how}"
            if how == 0:
                path.write_text("mine")
            elif how == 1:
                path.mkdir()
                (path / "thesis").write_text("mine")
            elif how == 2:
                path.mkdir()
                (path / ".convert-to-hybrid").write_text(
                    self.rng.choice(["", "{}", '{"files": ["../../x", 3]}', "[1]"])
                )
                (path / "thesis").write_text("mine")
            elif how == 3:
                path.symlink_to(self.rng.choice([name, "teacher", "nowhere"]))
        flags = self.rng.choice([[], ["--overwrite"]])
        return [*self.rng.choice([aligned, ["--align", "none"]]), *flags]

    def published(self, folder):
        name = self.rng.choice(sorted(FORMATS))
        config, tensors, mamba_config = FORMATS[name]()
        self.said += f" {name}"
        for values in (config, mamba_config):  # made anew by each call, so that no other test sees a mutation
            if values is not None and self.rng.random() < 0.7:
                self.mutate(values)
        if self.rng.random() < 0.2:
            tensors.pop(self.rng.choice(sorted(tensors)))
        write(folder, config, tensors, mamba_config=mamba_config)


def loaded(auto, teacher, **options):
    """What transformers loads from a mutated folder, or None where it stumbles over that."""
    try:
        return auto.from_pretrained(teacher, trust_remote_code=False, **options)
    except Exception:
        return None


class Hook:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)
