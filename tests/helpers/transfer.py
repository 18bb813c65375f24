"""Options of import and export, flat."""

import os
from typing import Any

from convert.options import ExportOptions, ImportOptions
from tests.helpers.command import parser_of


def importing(model: str | os.PathLike, output: str | os.PathLike = "-", **options: Any) -> ImportOptions:
    """Options of an import."""
    return parser_of("import").from_values({"model": str(model), "output": {"folder": str(output)}, **options})


def exporting(model: str | os.PathLike, output: str | os.PathLike = "-", **options: Any) -> ExportOptions:
    """Options of an export."""
    return parser_of("export").from_values({"model": str(model), "output": {"folder": str(output)}, **options})
