"""Errors that a user can mend: shown as one sentence, with exit code 2 on the command line."""

__all__ = ["UserError"]


class UserError(Exception):
    """Bad input; the message is one sentence that names the argument, the value seen and what is allowed."""
