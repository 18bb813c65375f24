"""The version that a conversion records, and that decides whether kept fits are used again."""

import shutil

from convert.io import version


def test_every_source_that_computes_changes_the_version(tmp_path, monkeypatch):
    root = version.Path(version.__file__).parents[2]
    for package in version.PACKAGES:
        shutil.copytree(root / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(version, "__file__", str(tmp_path / "convert" / "io" / "version.py"))
    of_sources = version._hash_of_sources.__wrapped__
    assert of_sources() == version._hash_of_sources()
    for name in ("convert/plan.py", "modeling_llamba/kernels/c/rows.c", "modeling_llamba/kernels/c/layer.h"):
        before = of_sources()
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        assert of_sources() != before, name
