"""Serves traces to Perfetto: a click on a link, here or in TensorBoard's text, opens one at https://ui.perfetto.dev.

    python -m common.serve_traces pytorch_profiles
    python -m common.serve_traces ../results/h200/traces

It serves until Ctrl-C, to this machine only. Perfetto's page takes traces of this machine from 127.0.0.1:9001 alone. Chrome asks
whether the page may reach this machine. Safari forbids it, so open the file with "Open trace file" there.
"""

import shutil
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

from common import cli
from common.errors import UsageError

PAGE, PORT = "https://ui.perfetto.dev", 9001


def link(name: str) -> str:
    """The address that opens a served trace."""
    return f"{PAGE}/#!/?url=http://127.0.0.1:{PORT}/{quote(name)}"


def find(paths: list[Path]) -> dict[str, Path]:
    """Traces by name: the files, and in folders trace_*.json, newest first, or else *.json.gz. UsageError: there are none."""
    found: dict[str, Path] = {}
    for path in paths:
        files = [path] if path.is_file() else sorted(path.glob("*trace_*.json"), reverse=True) or sorted(path.glob("*.json.gz"))
        if not files:
            raise UsageError(f"{path} is no trace and holds no trace_*.json: make one with --profile-dir {path}")
        found |= {file.name: file for file in files}
    return found


def server(traces: Mapping[str, Path], port: int = PORT) -> ThreadingHTTPServer:
    """Serves these files under their names, and nothing else. UsageError: the port is in use."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = traces.get(unquote(self.path.partition("?")[0].lstrip("/")))
            if not path or not path.is_file():
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", PAGE)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            with path.open("rb") as file:
                shutil.copyfileobj(file, self.wfile)

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UsageError(f"port {port} of this machine: {error.strerror}: end the other program that serves traces") from error


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("paths", type=Path, nargs="*", default=[Path("pytorch_profiles")], metavar="DIR|FILE",
                        help="traces, or folders of them (default: pytorch_profiles)")  # fmt: skip
    traces = find(parser.parse_args().paths)
    with server(traces) as serving:
        print(*map(link, traces), "serving until Ctrl-C", sep="\n", flush=True)
        serving.serve_forever()


if __name__ == "__main__":
    cli.command(main)
