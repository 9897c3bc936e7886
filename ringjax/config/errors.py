"""Mistakes of the user: shown as a message, without a traceback."""

from collections.abc import Sequence


class UserError(Exception):
    """Something the user can put right: the message says what was required, given, and what to change.

    The command line prints it without a traceback.

    Attributes:
      status: that it exits with.
    """

    status = 1


class ConfigError(UserError):
    """The settings are wrong. Carries every problem found, not only the first; exit status 2.

    Attributes:
      problems: one line each, as `configs/x.yaml:12: model.haeds: unknown key; did you mean model.heads?`.
    """

    status = 2

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)
