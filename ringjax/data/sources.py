"""Where documents come from: files on this machine, each with a name that stays the same from run to run."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ringjax.config import DataConfig, UserError

# Installed packages, tests, byte code and build files are not the library. `encodings` and `_sysconfigdata` are
# tables that programs wrote: nothing to learn there, and the second one names the build machine's folders.
_STDLIB_SKIPPED_FOLDERS = (
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "config-*",
)  # fmt: skip
_STDLIB_SKIPPED_FILES = ("_sysconfigdata*",)


class DataError(UserError):
    """The corpus cannot be used: it is missing, unreadable, not text, empty or too small."""


@dataclass(frozen=True)
class Document:
    """A text that is read when asked for.

    Attributes:
      name: its path relative to the corpus, with forward slashes; decides on which side of the split it falls.
      path: the file.
    """

    name: str
    path: Path

    def read(self) -> str:
        """Return the text.

        Raises:
          DataError: the file cannot be read, or is not UTF-8.
        """
        content = self._read_bytes()
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path} must be UTF-8 text, but byte {error.start} (0x{content[error.start]:02x}) is not "
                f"({error.reason}); convert the file, or leave it out"
            ) from error

    def is_utf8(self) -> bool:
        """Whether the file decodes as UTF-8."""
        try:
            self._read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            return False
        return True

    def _read_bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            reason = "a link that leads nowhere" if self.path.is_symlink() else error.strerror
            raise DataError(f"cannot read {self.path}: {reason}; remove it or put it right") from error


def find_documents(config: DataConfig) -> list[Document]:
    """Return the documents of a corpus, sorted by name; no two have the same name.

    Source "stdlib" is the `.py` files of this Python's standard library, without tests, installed packages and
    generated tables. Source "text" is the file `data.path`, or the files of the folder `data.path` whose path
    relative to it matches `data.pattern`; links to folders are not followed.

    Args:
      config: the data section; `source`, `path` and `pattern` are read.

    Returns:
      At least one document; what is in them has not been checked.

    Raises:
      DataError: the path is missing or cannot be read, or no file matches.
    """
    return _stdlib_documents() if config.source == "stdlib" else _text_documents(config)


def _stdlib_documents() -> list[Document]:
    """The standard library's sources; the few that are not UTF-8 on purpose are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = [
        Document(name, root / name)
        for name in _walk(root, _STDLIB_SKIPPED_FOLDERS)
        if name.endswith(".py") and not _matches_any(name.rpartition("/")[2], _STDLIB_SKIPPED_FILES)
    ]
    documents = [document for document in documents if document.is_utf8()]
    if not documents:
        raise DataError(
            f"data.source=stdlib needs the sources of Python's standard library, but there is no .py file in "
            f"{root}; use a Python that has them, or data.source=text with data.path"
        )
    return documents


def _text_documents(config: DataConfig) -> list[Document]:
    """The file or folder that `data.path` names."""
    if not config.path:
        raise DataError("data.source=text needs data.path, a UTF-8 file or a folder of them; it is not set")
    try:
        root = Path(config.path).expanduser()
        root.stat()
    except RuntimeError as error:  # ~name of nobody
        raise DataError(f"data.path={config.path}: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read data.path={config.path}: {error.strerror}") from error
    if root.is_file():
        return [Document(root.name, root)]
    if not root.is_dir():
        raise DataError(
            f"data.path must be a regular file or a folder, {config.path} is neither; write its text to a file"
        )
    pattern = config.pattern.split("/")
    documents = [Document(name, root / name) for name in _walk(root) if _matches(name.split("/"), pattern)]
    if not documents:
        raise DataError(
            f"no file in data.path={config.path} matches data.pattern={config.pattern}; the pattern is relative to "
            "that folder, and ** stands for any number of folders"
        )
    return documents


def _walk(root: Path, skipped_folders: Sequence[str] = ()) -> list[str]:
    """Names of the files below a folder, sorted."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read folder {error.filename}: {error.strerror}") from error

    def names() -> Iterator[str]:
        for folder, subfolders, files in os.walk(root, onerror=refuse):
            subfolders[:] = [name for name in subfolders if not _matches_any(name, skipped_folders)]
            for path in (Path(folder, name) for name in files):
                if path.is_file() or path.is_symlink():  # a link to nothing is reported when it is read
                    yield path.relative_to(root).as_posix()

    return sorted(names())


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches a glob, part by part. pathlib's own globs differ between Python versions."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skip:], pattern[1:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
