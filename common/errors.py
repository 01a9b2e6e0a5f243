"""The ways in which a command ends early, other than by a bug."""

LONGEST = 2000  # characters of a message


def first_line(message: object, otherwise: str = "no message") -> str:
    return (str(message).strip() or otherwise).splitlines()[0]


class _OneLine(Exception):
    """A message quotes names and values of files, so control characters become spaces, and a long message loses its middle."""

    def __init__(self, message: str, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared  # every process of the job ends with this error, so the first alone shows it

    def __str__(self) -> str:
        text = "".join(letter if letter.isprintable() else " " for letter in super().__str__())
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


class UsageError(_OneLine, ValueError):
    """The input is wrong. Shown as one line that names the problem and the fix; exit code 2."""


class RunError(_OneLine, RuntimeError):
    """The input was fine but the run could not finish (out of memory, loss not finite, ...). One line; exit code 1."""


class OutOfMemory(RunError):
    """Memory ran out."""
