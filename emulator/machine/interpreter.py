"""Commands that run one of our own modules in another process, by this interpreter.

`python -m` and `python -c` put the current folder first on `sys.path`, so a `statistics.py` beside the user's YAML
would be imported in place of Python's own. Python 3.11 has `-P` against that, but 3.10 does not, so the first
statement removes the folder again. The user's PYTHONPATH stays.
"""

from __future__ import annotations

import sys

_LEAVE_CURRENT_FOLDER = "import sys; sys.path[:1] == [''] and sys.path.pop(0)"


def command(statements: str, *arguments: object) -> list[str]:
    """The command that runs these statements with these arguments."""
    return [sys.executable, "-c", f"{_LEAVE_CURRENT_FOLDER}; {statements}", *map(str, arguments)]


def module_command(module: str, *arguments: object, function: str = "main") -> list[str]:
    """The command that calls a module's main function."""
    return command(f"from {module} import {function}; {function}()", *arguments)
