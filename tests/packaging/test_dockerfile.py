"""The Dockerfile's syntax, as far as it can be checked without a container engine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTRUCTIONS = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its arguments, continued lines joined as the builder does."""
    text = "\n".join(line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n", "", text)
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word, rest) for word, rest in found]


def test_every_line_is_an_instruction_that_we_use() -> None:
    found = instructions()
    assert {word for word, _ in found} == INSTRUCTIONS
    assert found[0][0] == "FROM"
    for word, rest in found:
        if word in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(part, str) for part in json.loads(rest))
    assert ("ENTRYPOINT", '["fleetbed"]') in found


def test_commands_are_valid_shell() -> None:
    for word, rest in instructions():
        if word == "RUN":
            checked = subprocess.run(["sh", "-n", "-c", rest], capture_output=True, text=True)
            assert checked.returncode == 0, checked.stderr


def test_it_says_that_it_is_unverified() -> None:
    assert "Unverified" in (ROOT / "Dockerfile").read_text()
