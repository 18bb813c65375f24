"""A folder that keeps the finished cells of an evaluation, so that an interrupted one goes on.

DIR/settings.json says what was measured how, DIR/parts/*.json hold the cells, DIR/evaluation.json all results.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convert.alignment.fit import write_beside

SETTINGS, PARTS, RESULTS, REPORT = "settings.json", "parts", "evaluation.json", "evaluation.md"
COMMON = "common"
# each value of these has cells of its own, so that other values add to what is there
ADDITIVE = ("texts", "lengths", "recall_lengths", "contexts", "speed_batches")


class EvaluationFolder:
    """The folder, claimed for these settings.

    Args:
        settings: by part, and under `common` what holds for all; only parts that will run are in it.
        overwrite: drop what another evaluation left here.

    Raises:
        ValueError: the folder holds an evaluation with other settings, or something else.
    """

    def __init__(self, path: Path, settings: dict[str, dict[str, Any]], overwrite: bool = False):
        self.path = path
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; --output takes a folder.")
        known = self._known()
        if overwrite:
            shutil.rmtree(path / PARTS, ignore_errors=True)
            for name in (SETTINGS, RESULTS, REPORT):
                (path / name).unlink(missing_ok=True)
            known = {}
        settings = json.loads(json.dumps(settings))
        for part in sorted(known.keys() & settings.keys()):
            if not self._has_cells(part):
                continue
            fixed = settings[part].keys() - set(ADDITIVE)
            different = sorted(key for key in fixed if settings[part][key] != known[part].get(key))
            if different:
                raise ValueError(
                    f"{path} holds an evaluation with other settings ({part}: {', '.join(different)}); choose another "
                    "--output, or --overwrite it."
                )
        (path / PARTS).mkdir(parents=True, exist_ok=True)
        self._write(SETTINGS, known | settings)

    def _known(self) -> dict[str, Any]:
        if not self.path.exists() or not any(self.path.iterdir()):
            return {}
        if not (self.path / SETTINGS).is_file():
            raise ValueError(f"{self.path} holds something else than an evaluation; choose another --output.")
        return self.read(SETTINGS)

    def _has_cells(self, part: str) -> bool:
        """Whether something depends on these settings: a run may have ended before its first cell."""
        pattern = "*.json" if part == COMMON else f"{part}*.json"
        return any((self.path / PARTS).glob(pattern))

    def read(self, name: str) -> Any:
        """A JSON file of the folder.

        Raises:
            ValueError: it is damaged.
        """
        try:
            return json.loads((self.path / name).read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path / name} is damaged; delete it, or --overwrite the evaluation.") from error

    def _write(self, name: str, content: Any) -> None:
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        write_beside(self.path / name, lambda partial: partial.write_text(text))

    def cell(self, name: str, compute: Callable[[], Any]) -> Any:
        """What `compute` returns, from the folder where it was computed before; `name` begins with its part's."""
        file = f"{PARTS}/{re.sub(r'[^A-Za-z0-9.=-]+', '_', name)}.json"
        if not (self.path / file).is_file():
            self._write(file, compute())
        return self.read(file)

    def results(self) -> dict[str, Any]:
        """Those of earlier runs in this folder."""
        return self.read(RESULTS) if (self.path / RESULTS).is_file() else {}

    def finish(self, results: dict[str, Any], report: str) -> None:
        """Write evaluation.json and evaluation.md."""
        self._write(RESULTS, results)
        write_beside(self.path / REPORT, lambda partial: partial.write_text(report))
