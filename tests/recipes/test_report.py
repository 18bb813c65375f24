"""The report: what it reads, that the page loads nothing and says everything in words, too, and what it refuses."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from typer.testing import CliRunner

from convert import convert
from recipes import mixer_matrices, report
from recipes.mixer_matrices import parse_students, pool
from recipes.report_data import read_runs
from recipes.report_drawing import Line, number, spread_out, to_svg, tokens
from recipes.report_figures import lines_figure, strip
from tests.modeling.test_training import tokenizer
from tests.recipes.report_runs import HOSTILE, write_runs
from tests.teachers import make_teacher

VOID = {"meta", "img", "input", "br", "link", "hr"}


class Page(HTMLParser):
    """Elements with their attributes, text by element, and whether everything that opens closes."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text, self.ids = [], [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"{tag} closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data

    def all(self, tag):
        return [attrs for name, attrs, _ in self.elements if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher, a text, runs of every kind, and matrices of two stages."""
    root = tmp_path_factory.mktemp("report")
    make_teacher("llama-gqa").save_pretrained(root / "teacher")
    tokenizer().save_pretrained(root / "teacher")
    lines = [" ".join(f"w{30 + (i * j) % 69}" for i in range(100)) for j in range(1, 10)]
    (root / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    (root / "runs").mkdir()
    write_runs(root / "runs", root / "teacher")
    result = matrices(root, f"{HOSTILE.replace('/', '')}={root / 'runs' / 'hybrid'}", str(root / "runs" / "other"))
    assert result.exit_code == 0, result.output
    return root


def matrices(root, *students, output="runs/matrices", **options):
    command = [*students, "--teacher", str(root / "teacher"), "--text", str(root / "text.jsonl"), "--quiet",
               "--output", str(root / output), "--length", "24", "--pixels", "12", "--sequences", "2"]  # fmt: skip
    return CliRunner().invoke(mixer_matrices.app, command + [str(x) for pair in options.items() for x in pair])


@pytest.fixture(scope="module")
def made(folder):
    """The report on all of them, under a hostile title."""
    result = CliRunner().invoke(
        report.app, [str(folder / "runs"), "--output", str(folder / "out"), "--title", HOSTILE]
    )
    assert result.exit_code == 0, result.output
    return folder / "out", result.output


@pytest.fixture(scope="module")
def page(made):
    text = (made[0] / "report.html").read_text()
    return Page(text), text


def test_every_kind_is_read(folder):
    runs, left_out = read_runs([folder / "runs"])
    kinds = {kind for run in runs for kind in run.parts}
    assert kinds == {
        "hybrid", "alignment", "training", "evaluation", "layer_scores", "head_scores", "ladder", "window_ladder",
        "pipeline", "bench", "approximation", "swap", "matrices", "logs",
    }  # fmt: skip
    assert left_out == []
    finished = next(run.folder for run in runs if "hybrid" in run.parts)
    kept = finished.with_name(f"{finished.name}.work") / "0123"
    kept.mkdir(parents=True)
    (kept / "scores.json").write_text('{"|0": {"kl": 1.0, "recall": 0.0}}')
    again, left_out = read_runs([folder / "runs"])
    shutil.rmtree(kept.parent)
    assert [run.folder for run in again] == [run.folder for run in runs] and left_out == []
    log = next(run.get("logs") for run in runs if "logs" in run.parts)
    assert list(log) == ["closed form + stage 3 0.5"] and len(log["closed form + stage 3 0.5"]) == 3, "the last one"


def test_page_loads_nothing(page):
    parsed, text = page
    for tag, attrs, _ in parsed.elements:
        for name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:image/png;base64,")), (tag, name, value)
    assert not parsed.all("script") and not parsed.all("link") and not parsed.all("iframe")
    style = parsed.text["style"]
    assert "@import" not in style and "url(" not in style
    assert not re.search(r"url\((?!#)", text), "clips refer to the page alone"


def test_page_is_whole(page, made):
    parsed, text = page
    assert not parsed.open, "every element is closed"
    assert len(parsed.ids) == len(set(parsed.ids)), "ids of one figure do not meet another's"
    used = {
        found for found in re.findall(r'url\(#([^)]+)\)|(?:href|for)="#?([^"]+)"', text) for found in found if found
    }
    assert {name for name in used if not name.startswith("data:")} <= set(parsed.ids)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    figures = [attrs["id"].removeprefix("figure-") for attrs in parsed.all("figure")]
    for name in ("layers-layers", "heads", "matrix-distance-scaled", "distance", "training-kl-tokens", "share-kl",
                 "bytes-2", "evaluated-share", "speed-decode-hybrid", "scan", "tasks-hybrid", "approximation",
                 "recall-passkey-hybrid", "position-kl", "kl-by-tokens"):  # fmt: skip
        assert name in figures, (name, figures)
    for name in figures:
        assert (made[0] / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_everything_is_said_in_words(page):
    parsed, _ = page
    plots = parsed.all("svg")
    assert len(plots) == len(parsed.all("figure"))
    for attrs in plots:
        assert attrs["role"] == "img" and len(attrs["aria-label"]) > 20
    images = parsed.all("img")
    assert len(images) == 3 * 4, "a strip per layer that a stage replaced, and head"
    for attrs in images:
        assert re.match(r"Layer \d, head \d: teacher, .* at distance", attrs["alt"]), attrs["alt"]
    inside = [tag for tag, _, above in parsed.elements if tag == "table" and "figure" in above]
    assert len(inside) == len(parsed.all("figure")), "every picture has its numbers beside it"
    assert len(parsed.all("figcaption")) == len(parsed.all("figure"))


def test_hostile_names_are_text(page):
    parsed, text = page
    assert "<script" not in text and HOSTILE in parsed.text["title"] and HOSTILE in parsed.text["h1"]
    assert text.count("&lt;script&gt;") > 5
    assert "$x_" in parsed.text["th"], "no mathematics is read into a name"


def test_figures_follow_the_theme(page):
    _, text = page
    body = text[text.index("<body>") :]
    assert "var(--blue)" in body
    assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{3,6}", body), "no colour that stays when the page turns dark"
    assert "font-family" not in body, "the page's font in every figure"


def test_figures_hold_the_numbers(page, made):
    """What is drawn and tabled is what was in the files."""
    _, text = page
    evaluated = text[text.index('id="evaluation"') :]
    assert "0.300 ± 0.030" in evaluated and "arc_easy" in evaluated and "0.800 ± 0.039" in evaluated
    assert "commit abc1234" in evaluated
    told = json.loads((made[0].parent / "runs" / "matrices" / "matrices.json").read_text())
    assert all(number(x) in text for stage in told["stages"] for row in stage["beyond_first"].values() for x in row)


def test_terminal_says_what_is_there(made):
    _, output = made
    assert "1.22×" in output and "the teacher's perplexity" in output and "MAMA" in output.replace(" ", "")
    assert "done" in output


def test_alone_and_as_json(folder):
    """One run without anything else: the rest is listed with the command that writes it."""
    arguments = [str(folder / "runs" / "heads"), "--output", str(folder / "alone"), "--json", "--quiet"]
    result = CliRunner().invoke(report.app, arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["sections"] == {"heads": ["heads", "heads-kept"]}
    commands = " ".join(told["missing"].values())
    for command in ("recipes.evaluate", "recipes.mixer_matrices", "recipes.layer_scores", "make bench"):
        assert command in commands
    assert "head_scores" not in commands
    text = (folder / "alone" / "report.html").read_text()
    assert "Not measured" in text and "recipes.mixer_matrices" in text


def test_matrices_are_the_mixers(folder):
    """Distances and pictures, worked out again from the models."""
    from recipes.attention_matrices import Place, Sampler, best_scale, open_teacher

    told = json.loads((folder / "runs" / "matrices" / "matrices.json").read_text())
    arrays = np.load(folder / "runs" / "matrices" / "matrices.npz", allow_pickle=False)
    assert told["layers"] == [0, 1, 2] and [s["layers"] for s in told["stages"]] == [[0, 2], [0, 1, 2]]
    places = [Place(str(folder / "text.jsonl"), sequence, 2, 3) for sequence in (0, 1)]
    sampler = Sampler(open_teacher(str(folder / "teacher")), places, 24)
    exact, (_, mixed) = sampler.attention(), sampler.student(folder / "runs" / "other")
    for name, matrix in (("relative", mixed), ("scaled", best_scale(exact, mixed))):
        away = ((matrix - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))).mean().item()
        assert told["stages"][1][name]["2"][3] == pytest.approx(away, rel=1e-4)
    assert told["stages"][1]["scaled"]["2"][3] <= min(1, told["stages"][1]["relative"]["2"][3])
    np.testing.assert_allclose(arrays["teacher"][2, 3], pool(exact[:1], 12)[0].numpy(), atol=1e-3)
    np.testing.assert_allclose(arrays["teacher"][2, 3].sum(1), 1, atol=5e-3)
    target, matrix = exact[..., 1:], mixed[..., 1:]
    scale = (target * matrix).sum((1, 2)) / matrix.square().sum((1, 2))
    away = ((scale[:, None, None] * matrix - target).norm(dim=(1, 2)) / target.norm(dim=(1, 2))).mean().item()
    assert told["stages"][1]["beyond_first"]["2"][3] == pytest.approx(away, rel=1e-4)
    np.testing.assert_allclose(arrays["stage_1"][2, 3], pool(scale[0] * mixed[:1], 12)[0].numpy(), atol=2e-3)


def test_strip_shows_sign_and_size():
    matrix = np.array([[1.0, 0.0], [-0.25, 9.0]])
    image = strip([matrix, None, matrix])
    assert image.shape == (2, 2 * 3 + 2, 4)
    assert image[0, 1, 3] == 0 and image[0, 0, 3] == image[1, 1, 3] == 1 and 0.4 < image[1, 0, 3] < 0.6
    assert image[1, 0, 2] > image[1, 0, 0] and image[0, 0, 0] > image[0, 0, 2], "blue below zero, orange above"
    assert not image[:, 3:5].any(), "a stage that kept the layer shows nothing"


def test_labels_do_not_overlap():
    places = spread_out([10.0, 10.5, 11.0, 90.0], [10.0] * 4, 5.0, 95.0)
    assert all(b - a >= 9.99 for a, b in zip(places, places[1:], strict=False))
    assert places[0] >= 5 and places[-1] <= 95


def test_numbers_and_odd_curves():
    assert [number(x) for x in (None, 0, 0.25, 12345, 1e-7, 3.14159)] == [
        "–",
        "0",
        "0.250",
        "12,345",
        "1.0e-07",
        "3.14",
    ]
    assert [tokens(x) for x in (512, 1536, 131072, 30720, 50000)] == ["512", "1,536", "128k", "30k", "50k"]
    for y in ([0.0, 0.0], [1.0, float("nan")], [-1.0, 5.0], [1e-9, 1e9]):
        svg = to_svg(
            lines_figure([Line("a", [1, 2], y), Line("b" * 90, [2], [1.0])], "x", "y", log_y=True), "n", "alt"
        )
        assert svg.startswith('<svg class="plot"') and "…" in svg


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda run: None, "does not exist"),
        (lambda run: run.mkdir(), "is empty"),
        (lambda run: run.write_text("x"), "is a file"),
        (lambda run: (run.mkdir(), (run / "notes.txt").write_text("x")), "no known kind"),
        (lambda run: (run.mkdir(), (run / "results.json").write_text('{"other": 1}')), "no known kind"),
        (lambda run: (run.mkdir(), (run / "config.json").write_text('{"model_type": "llama"}')), "no known kind"),
        (lambda run: (run.mkdir(), (run / "scores.json").write_text('{"scores": ')), "not valid JSON"),
        (lambda run: (run.mkdir(), (run / "scores.json").write_bytes(b"\xff\xfe")), "not valid JSON"),
        (lambda run: (run.mkdir(), (run / "evaluation.json").write_text('{"model": "m", "text": [{"kl": 1}]}')),
         "does not hold what"),
        (lambda run: (run.mkdir(), (run / "swap.json").write_text('{"rows": {}, "layers": []}')),
         "does not hold what"),
        (lambda run: (run.mkdir(), (run / "matrices.json").write_text(
            '{"stages": [{"name": "a", "layers": [0]}], "layers": [0], "heads": 1, "pixels": 4}')), "matrices.npz"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path, folder, prepare, message):
    prepare(tmp_path / "run")
    arguments = [str(folder / "runs" / "heads"), str(tmp_path / "run"), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(report.app, arguments)
    assert result.exit_code == 1 and message in result.output and "run" in result.output
    assert "Traceback" not in result.output and len(result.output.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_output_is_kept(tmp_path, folder, monkeypatch):
    def run(*more):
        return CliRunner().invoke(
            report.app, [str(folder / "runs" / "heads"), "--output", str(tmp_path / "out"), "--quiet", *more]
        )

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert "holds no report" in run("--overwrite").output and (tmp_path / "out" / "mine.txt").is_file()
    (tmp_path / "out" / "mine.txt").unlink()
    assert run().exit_code == 0
    again = run()
    assert again.exit_code == 1 and "--overwrite" in again.output
    (tmp_path / "out" / "old.png").write_text("of an earlier report")

    def broken(report, folder):
        raise OSError("the disk")

    with monkeypatch.context() as patch:
        patch.setattr("recipes.report_page.write_files", broken)
        assert run("--overwrite").exit_code == 1
    assert (tmp_path / "out" / "old.png").is_file(), "an interrupted report leaves the old one"
    assert run("--overwrite").exit_code == 0 and not (tmp_path / "out" / "old.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_matrices_refuse(folder, tmp_path):
    convert(str(folder / "teacher"), tmp_path / "kept", attention_ratio=1.0, align="none")
    hybrid = str(folder / "runs" / "hybrid")
    for students, options, message in (
        (["nowhere"], {}, "no config.json"),
        ([str(tmp_path / "kept")], {}, "nothing to compare"),
        ([hybrid, hybrid], {}, "NAME=FOLDER"),
        ([hybrid], {"--pixels": 7}, "must divide"),
        ([hybrid], {"--sequences": 0}, "--sequences"),
        ([hybrid], {"--text": "nowhere/t.jsonl"}, "t.jsonl"),
        ([hybrid], {}, "--overwrite"),
    ):
        output = "runs/matrices" if message == "--overwrite" else "none"
        result = matrices(folder, *students, output=output, **options)
        assert result.exit_code == 1 and message in result.output, result.output
        assert len(result.output.strip().splitlines()) == 1 and not (folder / "none").exists()


def test_student_names(tmp_path):
    (tmp_path / "a=b").mkdir()
    named = parse_students([str(tmp_path / "a=b"), "mapped=x/y", "x/z"])
    assert list(named) == ["a=b", "mapped", "z"] and str(named["mapped"]) == "x/y"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed (apt-get install chromium)")
def test_a_browser_shows_it(made, tmp_path):
    """Nothing reaches beyond a phone's width, and every section is there, as the browser lays it out."""
    output, _ = made
    page = (output / "report.html").read_text()
    probe = "<script>document.title = document.documentElement.scrollWidth + ' ' + innerWidth</script></body>"
    (tmp_path / "page.html").write_text(page.replace("</body>", probe))
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,900", "--dump-dom",
        f"file://{tmp_path / 'page.html'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    wide, window = map(int, re.search(r"<title>(\d+) (\d+)</title>", done.stdout).groups())
    assert wide <= window, "the page scrolls sideways on a phone"
