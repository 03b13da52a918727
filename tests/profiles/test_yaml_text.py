"""Strict YAML: the meaning of scalars, and refusals."""

import os
from pathlib import Path

import pytest

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.yaml_text import MAX_BYTES, parse, read_mapping, shorten


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0),
        ("2.5E-1", 0.25),
        (".5", 0.5),
        ("-7", -7),
        ("012", 12),  # decimal, not octal as in YAML 1.1
        ("190:20:30", "190:20:30"),  # not a number of base 60 as in YAML 1.1
        ("yes", "yes"),
        ("no", "no"),
        ("off", "off"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("2026-01-01", "2026-01-01"),
        ("3g", "3g"),
        ("'3'", "3"),
        ("[1, [a, {b: 2.0}]]", [1, ["a", {"b": 2.0}]]),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    found = parse(text, "x")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2", "x, line 4: the key b.c is given twice: keep one of them."),
        ("a: .nan", "x, line 1: a is .nan, but a finite number is needed."),
        ("a: [1, -.inf]", "x, line 1: a.1 is -.inf, but a finite number is needed."),
        ("a: 1e999", "x, line 1: a is 1e999, but a finite number is needed."),
        ("a: 9223372036854775808", "but a number below 2^63 is needed"),
        ("a: " + "9" * 6000, "but a number below 2^63 is needed"),
        ("1: 2", "x, line 1: the top has the key 1, but keys are text: quote it."),
        ("[1]: 2", "but keys are text"),
        ("a: !!python/object:os.system x", "has the tag"),
        ("a: !!binary aGk=", "has the tag"),
        ("a: !!set {b}", "has the tag"),
        ("a: !!int four", "x is not valid YAML"),
        ("a: &b [1]\nc: *b", "an alias (*name) is not allowed: write the value out (line 2)"),
        ("a: &b [*b]", "an alias (*name) is not allowed"),
        ("a: [1", "x is not valid YAML"),
        ("a: b: c", "x is not valid YAML"),
        ("a: 1\n---\nb: 2", "x is not valid YAML"),
        ("\t- a", "x is not valid YAML"),
        ('"\\UFFFFFFFF"', "x is not valid YAML"),
        ("a\x00b", "x is not valid YAML"),
        ("[" * 50_000, "x is nested too deeply"),
        ("{a: " * 50_000, "x is nested too deeply"),
    ],
)
def test_refused(text: str, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(text, "x")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bomb_of_aliases_is_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    with pytest.raises(BadInput, match="alias"):
        parse("\n".join(lines), "x")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def sentence(path: Path) -> str:
        with pytest.raises(BadInput) as caught:
            read_mapping(path)
        return str(caught.value)

    file = tmp_path / "a.yaml"
    assert sentence(file) == f"{file} does not exist: give the path of a YAML file."
    assert sentence(tmp_path) == f"{tmp_path} is a folder, but the path of a YAML file is needed."
    file.write_bytes(b"")
    assert sentence(file) == f"{file} is empty: a mapping of keys to values is needed."
    file.write_bytes(b"# only a comment\n")
    assert "is empty" in sentence(file)
    file.write_bytes(b"- 1\n- 2\n")
    assert sentence(file) == f"{file} has a list of 2 at the top, but a mapping (key: value) is needed."
    file.write_bytes(b"a: \xff\xfe")
    assert sentence(file) == f"{file} is not UTF-8 text (byte 3): save it as UTF-8."
    file.write_bytes(b"a" * (MAX_BYTES + 1))
    assert "larger than 256 KiB" in sentence(file)
    assert "cannot be read" in sentence(Path("a\x00b"))
    assert "cannot be read" in sentence(tmp_path / ("n" * 5000))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1")
    file.chmod(0)
    with pytest.raises(BadInput, match="cannot be read: Permission denied"):
        read_mapping(file)


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_mapping(file) == {"a": 1}


def test_found_values_are_shown_short_and_on_one_line() -> None:
    assert shorten("x" * 500) == '"' + "x" * 57 + '..."'
    assert shorten("a\nb") == '"a?b"'
    assert shorten([1, 2]) == "a list of 2"
    assert shorten({"a": 1}) == "a mapping with the key a"
    assert shorten(True) == "true"
    assert shorten(None) == "null"
