"""A JSON object whose entries are read by kind: a missing or wrong one is an error that names its file and place."""

import json
from dataclasses import dataclass
from typing import Any

KINDS = {
    int: "a whole number above 0",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}


@dataclass(frozen=True)
class Section:
    """An object in a JSON file."""

    values: dict[str, Any]
    file: str
    path: str = ""
    """Where in the file, with the dot at its end."""

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """An entry; the default where it is absent or null.

        Raises:
            ValueError: it is of another kind.
        """
        value = self.values.get(name)
        return default if value is None else self._checked(name, kind)

    def need(self, name: str, kind: type) -> Any:
        """An entry that has to be there.

        Raises:
            ValueError: it is absent, null or of another kind.
        """
        if name not in self.values:
            raise ValueError(f"{self.file} has no {self.path}{name}.")
        return self._checked(name, kind)

    def section(self, name: str) -> "Section":
        """An object inside; empty where it is absent or null.

        Raises:
            ValueError: it is something else.
        """
        return Section(self.get(name, dict, {}), self.file, f"{self.path}{name}.")

    def need_section(self, name: str) -> "Section":
        """An object inside that has to be there.

        Raises:
            ValueError: it is absent, null or something else.
        """
        return Section(self.need(name, dict), self.file, f"{self.path}{name}.")

    def sections(self, name: str) -> list["Section"]:
        """The objects in a list; none where it is absent or null.

        Raises:
            ValueError: it is something else, or something else is in it.
        """
        numbered = Section(
            {f"{name}[{i}]": value for i, value in enumerate(self.get(name, list, []))}, self.file, self.path
        )
        return [numbered.need_section(entry) for entry in numbered.values]

    def _checked(self, name: str, kind: type) -> Any:
        value = self.values[name]
        fits = {
            int: type(value) is int and value > 0,
            float: type(value) in (int, float),
        }.get(kind, isinstance(value, kind))
        if not fits:
            shown = json.dumps(value)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise ValueError(f"{self.file}: {self.path}{name} must be {KINDS[kind]}, not {shown}.")
        return value
