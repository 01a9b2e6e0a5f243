"""The ways in which a command ends early, other than by a bug."""


class UsageError(ValueError):
    """The input is wrong. Shown as one line that names the problem and the fix; exit code 2."""


class RunError(RuntimeError):
    """The input was fine but the run could not finish (out of memory, loss not finite, ...). One line; exit code 1."""


class OutOfMemory(RunError):
    """Memory ran out."""
