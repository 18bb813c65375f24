"""The demo converts as the command does by default, in a folder of its own."""

import pytest

from convert.options import make_options
from recipes import demo


class Stopped(Exception):
    pass


def test_the_demo_removes_its_work_folder(tmp_path, monkeypatch):
    """A work folder that an option names stays; so the demo must name none, not even the default's."""
    asked = []

    def convert(options, *args):
        asked.append(options)
        raise Stopped

    monkeypatch.setattr(demo, "run", convert)
    monkeypatch.setattr(demo, "embedded_teacher", lambda: tmp_path / "teacher.gguf")
    with pytest.raises(Stopped):
        demo.main(tmp_path / "hybrid")
    (options,) = asked
    assert options.alignment.work_dir is None
    assert options == make_options(str(tmp_path / "teacher.gguf"), str(tmp_path / "hybrid"), overwrite=True)
