"""Which files are documents, and what is said of those that cannot be."""

import os
from pathlib import Path

import pytest

from ringjax.config import DataConfig, UserError
from ringjax.data import DataError, find_documents


def text(path, **settings):
    return DataConfig(source="text", path=str(path), **settings)


def names(config):
    return [document.name for document in find_documents(config)]


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.txt", "c.md", "deep/er/d.txt", "deep/e.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"text of {name}\n", encoding="utf-8")
    return tmp_path


def test_the_standard_library_is_a_real_corpus():
    documents = find_documents(DataConfig())
    found = [document.name for document in documents]
    assert found == sorted(set(found))
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= set(found)
    assert sum(len(document.read()) for document in documents) > 1_000_000
    folders = {part for name in found for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__", "encodings"}
    assert not any(name.startswith("_sysconfigdata") for name in found)


def test_a_file_is_one_document(folder):
    (document,) = find_documents(text(folder / "a.txt"))
    assert (document.name, document.read()) == ("a.txt", "text of a.txt\n")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.txt", ["a.txt", "b.txt", "deep/e.txt", "deep/er/d.txt"]),
        ("*.txt", ["a.txt", "b.txt"]),
        ("*/*.txt", ["deep/e.txt"]),
        ("deep/**/*.txt", ["deep/e.txt", "deep/er/d.txt"]),
        ("**", ["a.txt", "b.txt", "c.md", "deep/e.txt", "deep/er/d.txt"]),
        ("[ab].*", ["a.txt", "b.txt"]),
    ],
)
def test_a_pattern_picks_files_of_a_folder(folder, pattern, expected):
    assert names(text(folder, pattern=pattern)) == expected


def test_home_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert names(text("~/deep", pattern="*.txt")) == ["e.txt"]


def test_a_loop_of_links_ends(folder):
    (folder / "deep" / "loop").symlink_to(folder, target_is_directory=True)
    assert names(text(folder)) == ["a.txt", "b.txt", "deep/e.txt", "deep/er/d.txt"]


def test_line_ends_are_kept(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    assert find_documents(text(tmp_path))[0].read() == "one\r\ntwo\n"


def refused(config):
    """The message with which a corpus is refused, in finding it or in reading it."""
    with pytest.raises(DataError) as caught:
        [document.read() for document in find_documents(config)]
    assert isinstance(caught.value, UserError)
    return str(caught.value)


def test_a_missing_path_is_named(tmp_path):
    assert "nowhere.txt: No such file" in refused(text(tmp_path / "nowhere.txt"))
    assert "data.path" in refused(DataConfig(source="text"))
    assert "~no-such-user-here/x" in refused(text("~no-such-user-here/x"))


def test_a_pattern_without_a_match_is_named(folder):
    assert "data.pattern=*.rst" in refused(text(folder, pattern="*.rst"))
    assert "relative to that folder" in refused(text(folder, pattern=f"{folder}/*.txt"))
    assert "data.pattern=../*" in refused(text(folder / "deep", pattern="../*"))


def test_text_that_is_not_utf8_is_named_with_the_byte(folder):
    (folder / "b.txt").write_bytes("naïve".encode("latin-1"))
    message = refused(text(folder))
    assert "b.txt" in message
    assert "byte 2 (0xef)" in message


def test_a_file_that_cannot_be_read_is_named(folder, monkeypatch):
    def read_bytes(path):
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return b"text"

    # The superuser may read everything, so file modes would not do here.
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert "b.txt: Permission denied; remove it" in refused(text(folder))


def test_a_folder_that_cannot_be_read_is_named(folder, monkeypatch):
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert refused(text(folder)).endswith("deep: Permission denied")


def test_links_to_nothing_and_to_themselves_are_named(folder):
    (folder / "b.txt").unlink()
    (folder / "b.txt").symlink_to("gone.txt")
    assert "b.txt: a link that leads nowhere; remove it" in refused(text(folder))
    (folder / "a.txt").unlink()
    (folder / "a.txt").symlink_to("a.txt")
    assert "a.txt: " in refused(text(folder))


def test_a_pipe_is_refused_and_not_waited_for(folder):
    os.mkfifo(folder / "pipe.txt")
    assert "neither" in refused(text(folder / "pipe.txt"))
    assert "pipe.txt" not in names(text(folder))
