"""The ways in which a command ends early, other than by a bug."""


def first_line(message: object, otherwise: str = "no message") -> str:
    return (str(message).strip() or otherwise).splitlines()[0]


class _OneLine(Exception):
    """A message that quotes names and values of files becomes one line."""

    def __init__(self, message: str, shared: bool = False) -> None:
        super().__init__(" ".join(message.split()))
        # every process of the job ends with this error, so the first alone shows it
        self.shared = shared


class UsageError(_OneLine, ValueError):
    """The input is wrong. Shown as one line that names the problem and the fix; exit code 2."""


class RunError(_OneLine, RuntimeError):
    """The input was fine but the run could not finish (out of memory, loss not finite, ...). One
    line; exit code 1.
    """
