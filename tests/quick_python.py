"""A `python` for tests that start many scripts: each is a fork of one process, which has imported PyTorch already.

`python quick_python.py SOCKET` is that process. `write(path, socket)` writes the program.
"""

import contextlib
import importlib
import json
import os
import runpy
import socket
import sys
from pathlib import Path

# A variable that is read at the start, or when PyTorch or Triton are imported, starts an interpreter of its own, as does all
# but a script and -c.
CLIENT = """#!{python} -IS
import json, os, socket, sys

own = any(name.startswith(("PYTHONPATH", "TORCH", "TRITON")) for name in os.environ)
if own or not (sys.argv[1].endswith(".py") or sys.argv[1] == "-c"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(request)
    sys.exit(int(server.recv(8) or 1))
"""


def write(path: Path, address: Path) -> None:
    path.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    path.chmod(0o755)


def _run(arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments[2:]] if arguments[0] == "-c" else arguments
    sys.path[0] = "" if arguments[0] == "-c" else str(Path(arguments[0]).resolve().parent)
    if arguments[0] == "-c":
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(os.path.abspath(arguments[0]), run_name="__main__")  # where processes that it spawns find it


def _answer(client: socket.socket) -> None:
    size, descriptors, *_ = socket.recv_fds(client, 4, 3)
    request = client.makefile("rb").read(int.from_bytes(size, "big"))
    if child := os.fork():
        for descriptor in descriptors:
            os.close(descriptor)
        client.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255).encode())
        os._exit(0)
    client.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    arguments, folder, environment = json.loads(request)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _run(arguments)


if __name__ == "__main__":
    for module in ("torch._dynamo", "torch._inductor.config", "pandas", "matplotlib.figure"):
        importlib.import_module(module)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(sys.argv[1])
        server.listen()
        print("ready", flush=True)
        while True:
            client, _ = server.accept()
            if not os.fork():
                server.close()
                _answer(client)
                break
            client.close()
            with contextlib.suppress(ChildProcessError):  # there is none left
                while any(os.waitpid(-1, os.WNOHANG)):
                    pass
