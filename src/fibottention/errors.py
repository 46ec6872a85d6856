"""Errors that a user can mend: shown as one sentence, with exit code 2 on the command line."""

__all__ = ["DivergedError", "UserError"]


class UserError(Exception):
    """Bad input; the message is one sentence that names the argument, the value seen and what is allowed."""

    def __init__(self, message: str) -> None:
        # A DataLoader worker's error arrives with the worker's traceback as its text: keep its last line.
        if "Original Traceback" in message:
            message = message.rsplit("UserError: ", 1)[-1].strip()
        super().__init__(message)


class DivergedError(UserError):
    """The loss of a training run became infinite or no number."""
