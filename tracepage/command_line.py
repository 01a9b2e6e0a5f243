"""How a command reads its flags and ends: one line for a wrong flag or file, and an exit code that
says why.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tracepage.errors import RunError, UsageError


def require(packages: Sequence[str], advice: str) -> None:
    """Ends the program with exit code 2 and one line if this Python lacks one of the packages that
    it imports.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"error: {', '.join(missing)} is not installed in this Python ({sys.executable}): "
            f"{advice}",
            file=sys.stderr,
        )
        sys.exit(2)


def refuse(message: str) -> NoReturn:
    raise UsageError(f"{message} (--help lists the flags)")


def parse(
    parser: argparse.ArgumentParser, flags: Sequence[str] | None = None
) -> argparse.Namespace:
    """The arguments of the command line, or of other flags. UsageError: they are wrong. No flag may
    be abbreviated.
    """
    arguments, unknown = parse_known(parser, flags)
    return refuse(f"unrecognized arguments: {' '.join(unknown)}") if unknown else arguments


def parse_known(
    parser: argparse.ArgumentParser, flags: Sequence[str] | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """The same, and what the parser does not know."""
    parser.error = refuse  # type: ignore[method-assign]
    parser.allow_abbrev = False
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser.parse_known_args(flags)


def make_printable() -> None:
    """Letters that stdout cannot show become question marks, and a stream that is closed goes
    nowhere: neither ends a command.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif name == "stdout" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_error(error: UsageError | RunError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)


def exit_code(
    main: Callable[[], int | None],
    show_error: Callable[[UsageError | RunError], None] = print_error,
) -> int:
    """Runs a command's main function and returns its exit code.

    0: completed; 1: the run failed; 2: the input is wrong; 128 + n: stopped by signal n; 141: the
    reader of our output (head, less) has left.
    """
    make_printable()
    try:
        code = main() or 0
        sys.stdout.flush()
        return code
    except UsageError as error:
        show_error(error)
        return 2
    except RunError as error:
        show_error(error)
        return 1
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        name = signal.Signals(number).name
        print("interrupted" if number == signal.SIGINT else f"stopped by {name}", file=sys.stderr)
        return 128 + number
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # Python flushes stdout once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        print(f"error: {file}{error.strerror or error}", file=sys.stderr)
        return 2 if isinstance(error, PermissionError) else 1
