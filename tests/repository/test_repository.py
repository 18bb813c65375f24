"""Rules of the tree: imports, what ships."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers.dynamic_module_utils import get_relative_import_files

from convert.checkpoint.code import NEEDED
from modeling_llamba import LlambaConfig
from modeling_llamba.ship_code import code_files
from modeling_phimamba import PhiMambaConfig
from tests.helpers.hybrids import make_hybrid

ROOT = Path(__file__).parents[2]
RANKS = {"modeling_llamba": 0, "modeling_phimamba": 1, "convert": 2, "recipes": 3, "tests": 4}
MODELING = {"modeling_llamba": LlambaConfig, "modeling_phimamba": PhiMambaConfig}


def imports(path):
    """(module, level, inside try) of every import in a file."""
    guarded = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(
            "ImportError" in ast.unparse(h.type or ast.Name("")) for h in node.handlers
        ):
            guarded |= {id(child) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, 0, id(node) in guarded, node
        elif isinstance(node, ast.ImportFrom):
            yield node.module, node.level, id(node) in guarded, node


def test_cards_name_the_transformers_that_this_project_takes():
    assert f'"{NEEDED}",' in (ROOT / "pyproject.toml").read_text()


def test_shared_files_have_one_owner():
    def files(package):
        found = [path.name for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
        assert len(found) == len(set(found)), "two files have one name, and ship into one folder"
        return set(found)

    assert files("modeling_phimamba") == {"configuration_phimamba.py", "modeling_phimamba.py"}
    of_package = {"registration.py", "naive.py"}  # the last is what tests compare with
    # faster operations are in the installed package alone
    for folder in ("c", "triton"):
        of_package |= {path.name for path in (ROOT / "modeling_llamba" / "kernels" / folder).glob("*.py")}
    of_package.add("operators.py")
    of_llamba = {"mlp.py", "experts.py", "experts_beside_mlp.py", "experts_clamped.py"}
    shared = files("modeling_llamba") - {*of_package, *of_llamba, "configuration_llamba.py", "modeling_llamba.py"}
    for package, config_class in MODELING.items():
        assert set(code_files(config_class)) == shared | files(package) - of_package, "a file does not ship"


def test_a_plain_hybrid_loads_no_other_familys_files(tmp_path):
    """Of transformers, so that nothing that is renamed there can break it."""
    make_hybrid(pattern="beside-only").save_pretrained(tmp_path)
    assert not {"mixers.py", "ssd.py", "recurrent.py", "experts.py"} & {path.name for path in tmp_path.iterdir()}
    others = ("gemma4", "gpt_oss", "qwen3_moe", "qwen3_next", "lfm2", "olmo_hybrid", "granitemoehybrid")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({[f"transformers.models.{name}.modeling_{name}" for name in others]}))
from transformers import AutoModelForCausalLM
import torch
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
print(model(torch.arange(3, 40)[None], labels=torch.arange(3, 40)[None]).loss.item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


@pytest.mark.parametrize("package", RANKS)
def test_imports_point_down_only(package):
    for path in (ROOT / package).rglob("*.py"):
        for module, level, _, _ in imports(path):
            top = (module or "").split(".")[0]
            if level == 0 and top in RANKS and top != package:
                assert RANKS[top] < RANKS[package], f"{path.relative_to(ROOT)} imports {module}"


def test_no_test_file_imports_another():
    """What several of them need lies in `tests/helpers`, a file for each concept."""
    for path in (ROOT / "tests").rglob("*.py"):
        for module, _, _, node in imports(path):
            parts = [*(module or "").split("."), *(alias.name for alias in node.names)]
            files = [part for part in parts if part.startswith("test_") and list(ROOT.glob(f"tests/**/{part}.py"))]
            assert not files, f"{path.relative_to(ROOT)}:{node.lineno} imports {files[0]}"


def test_tests_mirror_the_folders_of_convert():
    folders = {path.name for path in (ROOT / "tests" / "convert").iterdir() if (path / "__init__.py").exists()}
    assert folders == {path.name for path in (ROOT / "convert").iterdir() if (path / "__init__.py").exists()}


# folders and single files of `convert`, each of which imports only from those before it
ORDER = (
    "errors",
    "memory",
    "options",
    "io",
    "hybrids",
    "teachers",
    "layout",
    "resolve",
    "plan",
    "checkpoint",
    "fit",
    "scores",
    "train",
    "train.distillation",
    "train.mohawk",
    "formats",
    "dry_run",
    "pipeline",
    "tools",
    "cli",
)


def part_of(module):
    """The folder or file of `convert` that a module belongs to; None for the package itself."""
    name = module.removeprefix("convert").removeprefix(".")
    return max((part for part in ORDER if f"{name}.".startswith(f"{part}.")), key=len, default=None)


def imported_parts(path):
    """(part, line) of every import from another part of `convert`, those inside functions and for types included."""
    package = path.relative_to(ROOT).parent.parts
    for module, level, _, node in imports(path):
        above = package[: len(package) - level + 1] if level else ()
        base = ".".join([*above, *([module] if module else [])])
        if base.split(".")[0] == "convert":
            names = [base] if isinstance(node, ast.Import) else [f"{base}.{alias.name}" for alias in node.names]
            yield from ((part_of(name), node.lineno) for name in names)


def test_folders_of_convert_have_an_order():
    top = {path.stem for path in (ROOT / "convert").glob("*.py")} - {"__init__"}
    folders = {
        str(path.parent.relative_to(ROOT / "convert")).replace("/", ".")
        for path in (ROOT / "convert").rglob("*/__init__.py")
    }
    assert top | folders == set(ORDER)
    seen = set()
    for path in sorted((ROOT / "convert").rglob("*.py")):
        own = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        for part, line in imported_parts(path) if own else ():
            if part not in (own, None):
                seen.add((own, part))
                where = f"{path.relative_to(ROOT)}:{line}"
                assert ORDER.index(part) < ORDER.index(own), f"{where}: {part} comes after {own}"
    assert {("scores", "fit"), ("plan", "layout"), ("dry_run", "formats")} <= seen  # it is not blind


@pytest.mark.parametrize("package", MODELING)
def test_shipped_code_is_flat_and_self_contained(package, tmp_path):
    for name, content in code_files(MODELING[package]).items():
        (tmp_path / name).write_text(content)
    shipped = {path.name for path in tmp_path.iterdir()}
    for path in tmp_path.iterdir():
        relative = set()
        for module, level, guarded, node in imports(path):
            where = f"{path.name}:{node.lineno}"
            if level:
                assert level == 1, f"{where}: only `from .file import name`"
                assert module, f"{where}: only `from .file import name`"
                assert "." not in module, f"{where}: only `from .file import name`"
                assert f"{module}.py" in shipped, where
                relative.add(module)
            else:
                top = module.split(".")[0]
                assert guarded or top in ("torch", "transformers") or top in sys.stdlib_module_names, where
        # transformers' scanner reads text: a docstring line that looks like an import is one to it
        assert set(re.findall(r"^\s*from\s+\.(\S+)\s+import", path.read_text(), re.M)) == relative
    for part in ("configuration", "modeling"):  # from either, transformers finds every file
        start = tmp_path / f"{part}_{package.removeprefix('modeling_')}.py"
        assert {start.name} | {Path(p).name for p in get_relative_import_files(start)} == shipped


@pytest.mark.parametrize("package", ["modeling_llamba", "modeling_phimamba", "convert", "recipes"])
def test_no_file_leads_back_to_itself(package):
    """By imports from one file to the next; in convert and recipes those inside functions count, too.

    In the models a configuration names its model's file inside a function, and a backend is found when asked for.
    """
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / package).rglob("*.py")}

    def imported(name):
        found = set()
        tree = ast.parse(files[name].read_text())
        for node in tree.body if package in MODELING else ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                above = name.split(".")[: -node.level] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        return found & files.keys()

    leads_to = {name: imported(name) for name in files}
    assert any(leads_to.values())
    left = dict(leads_to)
    while last := [name for name, others in left.items() if not others & left.keys()]:
        for name in last:
            del left[name]
    assert not left, f"a circle among {sorted(left)}"


def module_path(module):
    """The file of a module of this repository, or None."""
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def reachable(module):
    """Every module of `convert` that importing one leads to, imports inside functions included.

    `convert/__init__` is left out: it imports the pipeline only when a user asks for it.
    """
    found, todo = set(), [module]
    while todo:
        name = todo.pop()
        path = module_path(name) if name.startswith("convert.") else None
        if path is None or name in found:
            continue
        found.add(name)
        parent = name.rpartition(".")[0]
        package = (name if path.name == "__init__.py" else parent).split(".")
        todo.append(parent)  # a package is imported before its modules
        for imported, level, _, node in imports(path):
            above = package[: len(package) - level + 1] if level else []
            base = ".".join([*above, *([imported] if imported else [])])
            todo += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found


@pytest.mark.parametrize("module", ["import_", "export"])
def test_import_and_export_need_neither_alignment_nor_the_conversion(module):
    modules = reachable(f"convert.formats.{module}")
    assert {"convert.formats.transfer", "convert.io.writer", "convert.teachers.qwen2"} <= modules
    unwanted = ("convert.fit", "convert.pipeline", "convert.plan")
    assert not [name for name in modules if name.startswith(unwanted)]
    assert "convert.fit.closed_form" in reachable("convert.pipeline")  # the graph is not blind


def test_models_and_tokenizers_are_loaded_in_one_place():
    """All that loads one says in the same words why it does not load, and refuses random weights."""
    elsewhere = {
        "convert/checkpoint/card.py",  # what a card tells its readers
        "convert/checkpoint/tokenizer.py",  # asks whether files make a tokenizer
        "recipes/evaluation/load_elsewhere.py",  # runs where this project is not installed
    }
    found = {
        kind: {
            str(path.relative_to(ROOT))
            for package in ("convert", "recipes")
            for path in (ROOT / package).rglob("*.py")
            if f"{kind}.from_pretrained(" in path.read_text()
        }
        - elsewhere
        for kind in ("AutoModelForCausalLM", "AutoTokenizer")
    }
    places = {"AutoModelForCausalLM": "convert/checkpoint/load.py", "AutoTokenizer": "convert/teachers/teacher.py"}
    assert found == {kind: {place} for kind, place in places.items()}


def test_one_file_of_the_models_asks_for_a_version_of_transformers():
    files = [path for folder in ("modeling_llamba", "modeling_phimamba") for path in (ROOT / folder).rglob("*.py")]
    asking = {path.name for path in files if re.search(r"transformers\.__version__|numbers_of\(", path.read_text())}
    assert asking == {"compatibility.py"}


def test_family_tables_hold_no_tensor_code():
    for path in (ROOT / "convert" / "teachers").glob("*.py"):
        if path.name in ("teacher.py", "weights.py", "planes.py"):
            continue
        assert not {module.split(".")[0] for module, level, _, _ in imports(path) if not level} & {
            "torch",
            "transformers",
        }


def test_options_of_a_conversion_are_read_until_they_are_resolved():
    readers = {path.stem for path in (ROOT / "convert").rglob("*.py") if "ConversionOptions" in path.read_text()}
    assert readers == {"__init__", "cli", "options", "dry_run", "pipeline", "resolve"}


def test_packages_are_listed_by_name():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    present = {
        str(p.parent.relative_to(ROOT)).replace("/", ".")
        for package in RANKS
        if package != "tests"
        for p in (ROOT / package).rglob("__init__.py")
    }
    assert listed == present - {"recipes.benchmarks", "recipes.studies"}
    assert project["project"]["scripts"] == {"convert-to-hybrid": "convert_to_hybrid:main"}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert re.fullmatch(r"\d+\.\d+\.\d+", pins["torch"]), "pip finds the CPU wheel of an exact version only"


def test_readme_commands_exist(tmp_path):
    """Every command, option, YAML file and `make` target in the README, the guides and CONTRIBUTING is real."""
    import dataclasses

    from recipes.cli import INSTALLED
    from recipes.evaluate import Options

    evaluation = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Options)}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    code = "\n".join(re.findall(r"`[^`\n]+`|```.*?```", text, re.S))
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    mentioned = set(re.findall(r"\bmake ([a-z0-9-]+)", code))
    assert mentioned, mentioned - targets
    assert mentioned <= targets, mentioned - targets
    read = set()
    examples = dict(re.findall(r"```yaml\n# (\w+\.yaml)\n(.*?)```", text, re.S))
    for line in re.findall(r"(?:^|`)(convert-to-hybrid [^`\n]+|torchrun .+ -m convert\.cli [^`\n]+)", text, re.M):
        words = shlex.split(re.sub(r".*convert(-to-hybrid|\.cli) ", "", line), comments=True)
        name = words.pop(0) if words[0] in INSTALLED else "convert"
        if "--config" in words:
            place = words.index("--config") + 1
            path = tmp_path / words[place]
            path.write_text(examples.get(words[place], "{}"))  # the file of a page that does not show it is the user's
            words[place] = str(path)
        if not {"--help", "--set"} & set(words) and len(words) >= len(INSTALLED[name].positionals):
            INSTALLED[name].parser(name).from_command_line(words)
            read.add(name)
    assert read == set(INSTALLED), set(INSTALLED) - read
    modules = re.findall(r"python -m (recipes[.\w]+)([^`\n#]*)", text)
    assert {module for module, _ in modules} >= {"recipes.sft", "recipes.evaluate"}
    for module, arguments in modules:
        assert module_path(module) is not None, module
        if module == "recipes.evaluate":
            assert set(re.findall(r"--[a-z-]+", arguments)) <= evaluation, arguments
    for config in re.findall(r"recipes/configs/[\w/.]*\.yaml", text):
        assert (ROOT / config).is_file(), config


def test_workflow_and_hooks_are_valid_yaml():
    for path in (ROOT / ".github/workflows/ci.yml", ROOT / ".pre-commit-config.yaml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict)


FRAGMENT = re.compile(
    r"(What|Whether|Which|Where|Of|As|The same|Who|Whoever|How|That|These|Those|It|They|Everything|Their|Its|Some|Both"
    r"|With|Without|In|At|Before|After|For|From|By|On|If|Also|Like|Not|Only|Until|Beside|Beyond|Then|Here|And|Or|But)\b"
)
PERSONS = re.compile(r"\b(nobody|whoever|sees|wants?|(is|are|was|were|be) told|remembers?)\b")


def docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        for statement in node.body if isinstance(getattr(node, "body", None), list) else ():
            if isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str):
                yield statement.lineno, " ".join(statement.value.value.split())


def test_docstrings_are_complete_alone():
    """They begin with a verb or a noun of the field, and no tensor is a person."""
    packages = [package for package in RANKS if package != "tests"]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        for line, text in docstrings(path)
        if FRAGMENT.match(text) or PERSONS.search(text)
    ]
    assert not found, found
    assert FRAGMENT.match("What came of some steps.")
    assert not FRAGMENT.match("Ofter than that.")


def letters_of(text):
    """(letter, meaning) of every entry of a legend such as "Shapes: B batch (requests), L length."."""
    legend = re.search(r"Shapes: (.+?)\.(\s|$)", text)
    return [tuple(entry.split(" ", 1)) for entry in re.sub(r" \(.*?\)", "", legend[1]).split(", ")] if legend else []


def test_a_shape_letter_has_one_meaning():
    section = (ROOT / "CONTRIBUTING.md").read_text().split("### Shape letters")[1].split("##")[0]
    cells = [cell.strip() for line in section.splitlines() if line.startswith("|") for cell in line.split("|")[1:-1]]
    known = dict(zip(cells[::2], cells[1::2], strict=True))
    used = {}
    for package in ("modeling_llamba", "modeling_phimamba", "convert", "recipes"):
        for path in (ROOT / package).rglob("*.py"):
            for _, text in docstrings(path):
                for letter, meaning in letters_of(text):
                    used[letter] = path
                    assert known.get(letter) == meaning, f"{path.relative_to(ROOT)}: {letter} {meaning}"
    assert {*"BLDHKPNESTX"} <= used.keys()  # it is not blind
    assert letters_of("Shapes: B batch (requests), D head dim. More.") == [("B", "batch"), ("D", "head dim")]
    assert known["D"] != "head dim"


def letters_used(text):
    """The letters in shapes of a docstring, such as (B, L, 3 H' P)."""
    shapes = [shape.split(",") for shape in re.findall(r"\(([\w',./ +*>=-]+,[\w',./ +*>=-]*)\)", text)]
    shapes = [shape for shape in shapes if not any(re.search(r"[a-z]{2,} [a-z]", size) for size in shape)]  # no prose
    return {letter for shape in shapes for size in shape for letter in re.findall(r"\b[A-Z]\b'?", size)}


def test_a_file_lists_the_letters_of_its_shapes():
    """B, L and D need no list where there are no others; a prime on a letter without one means a part."""
    listing = 0
    for package in ("modeling_llamba", "modeling_phimamba", "convert", "recipes"):
        for path in (ROOT / package).rglob("*.py"):
            texts = [text for _, text in docstrings(path)]
            listed = {letter for text in texts for letter, _ in letters_of(text)}
            used = {letter for text in texts for letter in letters_used(text)}
            unlisted = {letter for letter in used - listed if letter.rstrip("'") not in listed}
            assert unlisted <= (set() if listed else {*"BLD", "L'"}), f"{path.relative_to(ROOT)}: {unlisted}"
            listing += bool(used & listed)
    assert listing > 30  # it is not blind
    assert letters_used("Rows (B, L', 3 H' P) of heads (C, the last) and (x, >= K - 1).") == {*"BPK", "L'", "H'"}
