"""Words and phrases of earlier versions that have a plain replacement do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("profiles", "models", "emulator", "flower", "analysis", "api", "cli")
#: a pattern, and what to write instead
REPLACED = {
    r"crew|shelf|bench": "what is inside",
    r"dilation|dilated": "time scale",
    r"seasoned|is_unborn|fruitless|someone_came|starved": "has_run_before, has_no_checkpoint, failed_in_a_row",
    r"lent|lending": "a client's memory is its own",
    r"rubbish": "invalid message",
    r"gone on with|carries? .{0,20}out anew": "continue, resume, start again",
    r"came to nothing|comes to nothing": "failed, wasted",
    r"beyond its bar": "out of tolerance",
    r"stands above": "see its output above",
    r"times less": "speed-up",
    r"mend": "fix",
}
#: these read the old key and the old column
OLD_NAMES = ("profiles/older.py", "emulator/records/tables.py")


@pytest.mark.parametrize("words", REPLACED)
def test_words_that_have_a_plain_replacement(words: str) -> None:
    pattern = re.compile(rf"(?<![a-z-])(?:{words})(?![a-z])", re.IGNORECASE)
    code = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    found = []
    for path in [*code, *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        name = path.relative_to(ROOT).as_posix()
        if name not in OLD_NAMES:
            lines = enumerate(path.read_text().splitlines(), 1)
            found += [f"{name}:{number}: {line.strip()}" for number, line in lines if pattern.search(line)]
    assert not found, f"write instead: {REPLACED[words]}\n" + "\n".join(found)
