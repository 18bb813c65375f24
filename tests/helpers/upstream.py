"""Names of torch and transformers that the code in a checkpoint imports."""

import ast
from collections import defaultdict

from modeling_llamba import LlambaConfig
from modeling_llamba.ship_code import code_files
from modeling_phimamba import PhiMambaConfig


def upstream_page() -> str:
    """docs/upstream.md."""
    found = defaultdict(lambda: defaultdict(set))
    for config_class in (LlambaConfig, PhiMambaConfig):
        for file, text in code_files(config_class).items():
            for node in ast.walk(ast.parse(text)):
                module = node.module if isinstance(node, ast.ImportFrom) and node.level == 0 else ""
                if module.startswith(("torch", "transformers")):
                    found[module][file] |= {alias.name for alias in node.names}
    lines = [
        "# Names of torch and transformers that a checkpoint's code imports",
        "",
        "Made by `upstream_page()` of tests/helpers/upstream.py; a test compares them. Of other families' modules,",
        "every model imports Phi's (`rotary.py`) and Gemma 2's (`attention.py`); files named `experts*` and",
        "`recurrent.py` import more, in a model that has such layers. Used by attribute, and so not in the table:",
        "`torch._dynamo.mark_static_address` (`hybrid_cache.py`) and `torch._dynamo.config` (`flex.py`).",
        "",
        "| module | names | files |",
        "|---|---|---|",
    ]
    for module, files in sorted(found.items()):
        names = ", ".join(f"`{name}`" for name in sorted(set().union(*files.values())))
        lines.append(f"| `{module}` | {names} | {', '.join(sorted(files))} |")
    return "\n".join([*lines, ""])
